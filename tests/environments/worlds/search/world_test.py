"""Episodes of the search world: its questions are solved by reading alone."""

import asyncio
import json
import pathlib
import re
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from glm5_jax import config, environments
from glm5_jax.environments import proofs, protocol, sandbox
from glm5_jax.environments.worlds.search import articles, questions, tools, world
from glm5_jax.environments.worlds.search import index as index_lib
from tests.environments import episodes
from tests.environments.worlds.search import collection

NUM_TASKS = 6
_STEP = re.compile(
    r'refers to an article filed under "([^"]+)"(?: that mentions the year (\d+))? \('
)


def setUpModule():
    global TASKSET, GRAPH
    with tempfile.TemporaryDirectory() as folder:
        name = collection.write(pathlib.Path(folder) / "own.jsonl")
        TASKSET = environments.make(f"search:{name}")
        GRAPH = articles.read(str(name))


def call(**arguments):
    """Returns a turn with a call, as call(open={"page": "C"})."""
    ((name, given),) = arguments.items()
    calls = [{"id": "7", "function": {"name": name, "arguments": given}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def said(text):
    return {"role": "assistant", "content": text}


def play(task, *turns):
    """Returns the results of turns."""

    async def run():
        made = TASKSET.environment()
        try:
            await made.reset(task)
            return [await made.step(turn) for turn in turns]
        finally:
            await made.close()

    return asyncio.run(run())


def text_of(task, turn):
    return play(task, turn)[0].messages[0]["content"]


def solve(ask, question):
    """Returns all answers to a question, found by its words and by tools alone."""
    described = re.search(r'\("\?"\): "(.*?)" It refers', question, re.DOTALL)[1]
    titles = [hit.split(":")[0] for hit in ask("search", described).splitlines()]
    own = re.sub(r"\[of which is said: .*?\]", "", described)
    words = set(re.findall(r"\w+", own.casefold()))

    def shared(title):
        page = ask("open", title).split("\n\n")[1].split(". ")[0]
        return len(words & set(re.findall(r"\w+", page.casefold())))

    places = {max(titles, key=shared)}
    for tag, year in _STEP.findall(question):
        found = set()
        for title in places:
            for name in re.findall(r"\{([^{}]+)\}", ask("open", title)):
                page = ask("open", name)
                head, _, body = page.partition("\n\n")
                names, filed = head.split("\nFiled under: ")
                is_here = tag in filed.split(", ")
                if is_here and (not year or re.search(rf"\b{year}\b", body)):
                    found.add(names.split("; ")[0])
        places = found
    return places


class WorldTest(parameterized.TestCase):
    def test_a_reader_finds_one_answer(self):
        """It has nothing but the question's words and the results of calls."""
        arguments = {"search": "query", "open": "page"}
        for index in range(NUM_TASKS):
            task = TASKSET.task("train", 0, index)

            def ask(tool, text, task=task):
                return text_of(task, call(**{tool: {arguments[tool]: text}}))

            found = solve(ask, task.messages[-1]["content"])
            self.assertLen(found, 1)
            self.assertEqual(play(task, said(*found))[0].reward.total, 1.0)

    def test_tasks_are_proven(self):
        for index in range(3):
            task = TASKSET.task("held_out", 1, index)
            proof = asyncio.run(proofs.prove(TASKSET, task, 2))
            self.assertEqual(proof.failures, ())

    def test_tasks_repeat_and_splits_share_no_answer(self):
        answers = {}
        for split in ("train", "held_out"):
            tasks = [TASKSET.task(split, 3, index) for index in range(12)]
            again = TASKSET.task(split, 3, 11)
            self.assertEqual(tasks[-1], again)
            answers[split] = {task.answer["question"].path[-1] for task in tasks}
            self.assertGreater(len(answers[split]), 6)
        self.assertEmpty(answers["train"] & answers["held_out"])

    def test_a_leak_is_seen(self):
        task = TASKSET.task("train", 0, 0)
        (name, *_) = task.answer["names"]

        async def leaks(content):
            made = TASKSET.environment()
            shown = [{"role": "user", "content": content}]
            object.__setattr__(task, "messages", tuple(shown))
            try:
                await made.reset(task)
                return await TASKSET.leaks(made, task)
            finally:
                await made.close()

        self.assertEqual(asyncio.run(leaks("nothing")), [])
        self.assertLen(asyncio.run(leaks(f"it is {name.upper()}, of course")), 1)

    @parameterized.named_parameters(
        ("title", "{}", 1.0),
        ("case_and_blanks", "  {} \n", 1.0),
        ("emphasis", "**{}**.", 1.0),
        ("label", "Answer: {}", 1.0),
        ("thought", "<think>perhaps x</think>{}", 1.0),
        ("two", "{} or Kalomi 3", 0.0),
        ("nothing", "", 0.0),
    )
    def test_answers(self, form, expected):
        task = TASKSET.task("train", 0, 1)
        done = play(task, said(form.format(task.answer["names"][0])))[0]
        self.assertEqual((done.reward.total, done.terminated), (expected, True))

    def test_marks_that_tell_two_articles_apart_are_part_of_the_answer(self):
        records = [
            {"title": "Axiom*", "text": "A dialect."},
            {"title": "Axiom", "text": "A language."},
        ]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "two.jsonl"
            path.write_text("".join(f"{json.dumps(x)}\n" for x in records))
            taskset = environments.make(f"search:{path}")
        question = questions.Question((1, 0), "?", ())
        task = protocol.Task("two", (), {"question": question, "names": ["Axiom*"]})
        rewards = {
            answer: episodes.play(taskset, task, answer)[0].reward.total
            for answer in ("Axiom", "Axiom*", '"axiom*".', "**Axiom**")
        }
        expected = {"Axiom": 0.0, "Axiom*": 1.0, '"axiom*".': 0.0, "**Axiom**": 0.0}
        self.assertEqual(rewards, expected)

    def test_tools(self):
        task = TASKSET.task("train", 0, 0)
        title = collection.records()[0]["title"]
        searched, opened, lines, none, wrong = play(
            task,
            call(search={"query": title}),
            call(open={"page": title.upper()}),
            call(find={"text": "SEE ALSO"}),
            call(find={"text": "qqq"}),
            call(open={"page": f"{title} ii"}),
        )
        self.assertStartsWith(searched.messages[0]["content"], f"{title}: ")
        self.assertEqual(searched.messages[0]["tool_call_id"], "7")
        self.assertStartsWith(opened.messages[0]["content"], f"{title}\nFiled under: ")
        self.assertRegex(lines.messages[0]["content"], r"^3: See also: \{.*\}\.$")
        self.assertEqual(none.messages[0]["content"], "No line contains it.")
        self.assertIn(f"Perhaps: {title}", wrong.messages[0]["content"])

    @parameterized.named_parameters(
        ("tool", call(fly={}), "no tool 'fly'"),
        ("argument", call(open={"title": "a"}), "open needs page"),
        ("type", call(open={"page": 1}), "must be of type string"),
        ("shape", {"role": "assistant", "tool_calls": [7]}, "a tool call must be"),
        ("order", call(find={"text": "a"}), "open an article first"),
    )
    def test_wrong_calls_get_a_message(self, turn, told):
        task = TASKSET.task("train", 0, 0)
        wrong, right = play(task, turn, said(task.answer["names"][0]))
        self.assertIn(told, wrong.messages[0]["content"])
        self.assertFalse(wrong.terminated or wrong.truncated)
        self.assertEqual(right.reward.total, 1.0)

    def test_turns_and_calls_are_bounded(self):
        task = TASKSET.task("train", 0, 0)
        turn = call(find={"text": "a"})
        many = {**turn, "tool_calls": turn["tool_calls"] * 9}
        results = play(task, many, *[turn] * (world.MAX_TURNS - 1))
        contents = [m["content"] for m in results[0].messages]
        self.assertEqual([c.startswith("error: a turn") for c in contents].index(1), 8)
        self.assertFalse(results[-2].truncated)
        self.assertTrue(results[-1].truncated)
        self.assertEqual(results[-1].reward.total, 0.0)

    def test_python_runs_in_the_sandbox(self):
        if sandbox.describe() != "bubblewrap":
            self.skipTest("needs the package bubblewrap")
        task = TASKSET.task("train", 0, 0)
        code = "open('a', 'w').write('1'); print(6 * 7); import nothing"
        again = "print(open('a').read()); open('/etc/passwd')"
        first, second = play(
            task, call(python={"code": code}), call(python={"code": again})
        )
        self.assertRegex(first.messages[0]["content"], r"^42\n(.*\n)+ModuleNotFound")
        self.assertRegex(second.messages[0]["content"], r"^1\n(.*\n)+FileNotFound")

    def test_the_collection_is_no_file_of_the_sandbox(self):
        """A dictionary below /usr, which every box sees: one of the machine's."""
        if sandbox.describe() != "bubblewrap":
            self.skipTest("needs the package bubblewrap")
        path = next(pathlib.Path("/usr/share").glob("perl5/**/*.pm"))
        task, found = TASKSET.task("train", 0, 0), index_lib.Index(GRAPH)
        code = f"print(len(open('{path}').read()))"

        async def look(hidden):
            made = world.Environment(GRAPH, tools.Tools(GRAPH, found, hidden))
            try:
                await made.reset(task)
                said = await made.step(call(python={"code": code}))
                leaks = await TASKSET.leaks(made, task)
            finally:
                await made.close()
            return said.messages[0]["content"], leaks

        size = str(len(path.read_text()))
        with mock.patch.object(TASKSET, "places", (path,)):
            leak = f"the collection in {path}"
            self.assertEqual(asyncio.run(look(())), (size, [leak]))
            self.assertEqual(asyncio.run(look((path,))), ("0", []))
            told, leaks = asyncio.run(look((path.parent,)))
        self.assertIn("FileNotFoundError", told)
        self.assertEmpty(leaks)

    @parameterized.parameters("foldoc:1", "foldoc:5", "foldoc:3-2", "foldoc:12")
    def test_wrong_sizes_are_named(self, name):
        with self.assertRaisesRegex(config.InputError, "from 2 to 4"):
            environments.make(f"search:{name}")

    def test_foldoc(self):
        if not articles.FOLDOC.with_suffix(".index").is_file():
            self.skipTest("needs the package dict-foldoc")
        taskset = environments.make("search:foldoc:2")
        task = taskset.task("train", 0, 0)
        self.assertEqual(asyncio.run(proofs.prove(taskset, task, 1)).failures, ())
        read = call(python={"code": f"open('{articles.FOLDOC}.dict.dz')"})
        result = episodes.play(taskset, task, read)[0].messages[0]["content"]
        self.assertIn("FileNotFoundError", result)


if __name__ == "__main__":
    absltest.main()
