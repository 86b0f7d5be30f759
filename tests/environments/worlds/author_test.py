"""Tasks written behind an endpoint: drafted, built, proven, mended or dropped.

A real server on a socket speaks chat completions; its answers are scripted, in place of
a model alone.
"""

import contextlib
import dataclasses
import json
import pathlib
import tempfile
import unittest
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import endpoint, proofs
from glm5_jax.environments.sandbox import bubblewrap
from glm5_jax.environments.worlds.terminal.author import answers, run, steps
from tests import environment, forked
from tests.environments.chat_server import Server

MISSING = bubblewrap.missing()
GOOD = {
    "instruction": "Write the number of lines of names.txt into count.txt.",
    "files": {"names.txt": "basil\nsage\nthyme\n"},
    "setup": "sort -r -o names.txt names.txt",
    "solution": "wc -l < names.txt > count.txt",
    "checks": [{"command": "cat count.txt", "stdout": "3"}],
    "wrong": ["wc -w < names.txt > other.txt", "echo 4 > count.txt"],
}
OTHER = {**GOOD, "instruction": "Count the names of names.txt in count.txt."}
OTHER_WRONG = {**OTHER, "checks": [{"command": "cat count.txt", "stdout": "4"}]}
LENIENT = {
    **GOOD,
    "instruction": "Count the lines.",
    "checks": [{"command": "ls names.txt", "stdout": "names.txt"}],
}


def said(draft):
    return f"Here it is.\n```json\n{json.dumps(draft, indent=1)}\n```\nDone."


def by_topic(scripts):
    """Returns a script: the answers of a topic, the last of them again and again."""
    counts = dict.fromkeys(scripts, 0)

    def answer(messages, number):
        del number
        topic = next(t for t in scripts if t in messages[1]["content"])
        counts[topic] += 1
        texts = scripts[topic]
        return texts[min(counts[topic], len(texts)) - 1]

    return answer


@contextlib.contextmanager
def folder():
    """A folder that those who run boxes may read."""
    with tempfile.TemporaryDirectory() as name:
        yield pathlib.Path(name)


def proved_once():
    """Patches `proofs.prove`, which plays tasks that differ in their names once."""
    prove, found = proofs.prove, {}

    async def once(world, task, num_repeats):
        (read,) = world.by_id.values()
        key = num_repeats, repr((read.instruction, read.build, read.workdir))
        key += (repr((read.solution, read.tests, read.wrong)),)
        if key not in found:
            found[key] = await prove(world, task, num_repeats)
        return dataclasses.replace(found[key], task=task.id)

    return mock.patch.object(proofs, "prove", once)


SETTINGS = run.Settings(num_tasks=3, num_refinements=2, num_repeats=1, num_at_once=3)


@unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
class RunTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.enterClassContext(proved_once())

    def make(self, script, topics, out, settings=SETTINGS):
        with Server(script) as server:
            ask = endpoint.ask(server.url, "author", waits=(0.01,))
            return run.run(ask, topics, out, settings), server.asked

    def test_a_right_one_a_mended_one_and_one_that_never_is(self):
        script = by_topic(
            {
                "lines": [said(GOOD)],
                "names": [said(OTHER_WRONG), said(OTHER)],
                "files": [said(LENIENT)],
            }
        )
        with folder() as out:
            told, asked = self.make(script, "lines,names,files", out)
            self.assertEqual(
                {key: told[key] for key in told if key not in ("folder", "failures")},
                {
                    "tried": 3,
                    "kept": 2,
                    "kept_after_refinements": {"0": 1, "1": 1},
                    "never_proven": 1,
                    "requests": 1 + 2 + 3,
                },
            )
            # The draft that was mended pays its second wrong attempt and not its
            # solution; the one that never is pays everyone, three times.
            kinds = {"the solution": 1, "doing nothing": 3}
            kinds |= {f"wrong attempt {n}": 3 + (n == 2) for n in range(1, 8)}
            self.assertEqual(told["failures"], kinds)
            made = environments.make(f"harbor:{told['folder']}")
            self.assertEqual([*made.by_id], ["0000_lines", "0001_names"])
            # What was left of the tasks that failed is gone.
            names = {path.name for path in (out / run.TASKS).iterdir()}
            self.assertEqual(names, set(made.by_id))
            self._check_refinement(asked)

    def _check_refinement(self, asked):
        """The second request about names has the draft and what was wrong with it."""
        about = [
            body for _, body, _ in asked if "names" in body["messages"][1]["content"]
        ]
        roles = [message["role"] for message in about[1]["messages"]]
        self.assertEqual(roles, ["system", "user", "assistant", "user"])
        told = about[1]["messages"][-1]["content"]
        self.assertIn("the solution, run 1 earns 0.0 instead of 1", told)
        self.assertIn("check 1 fails: it must print 4, and prints 3", told)

    def test_an_interrupted_run_resumes(self):
        """The endpoint breaks down after the first task, and is there again later."""

        def breaks(messages, number):
            del messages
            return said(GOOD) if number == 1 else (400, b"no more")

        with folder() as out:
            with self.assertRaisesRegex(config.InputError, "answers 400: no more"):
                one = dataclasses.replace(SETTINGS, num_at_once=1)
                self.make(breaks, "lines,names", out, one)
            made = out / run.TASKS / "0001_names"  # but not in the log
            (made / "wrong").mkdir(parents=True)
            script = by_topic({"lines": [said(OTHER)], "names": [said(OTHER)]})
            two = run.Settings(num_tasks=2, num_repeats=1, num_refinements=0)
            told, asked = self.make(script, "lines,names", out, two)
            again, none = self.make(script, "lines,names", out, two)
            self.assertTrue((made / "task.toml").exists())
        self.assertEqual((told["tried"], told["kept"]), (2, 2))
        self.assertLen(asked, 1)
        self.assertEqual((again, none), (told, []))

    def test_a_repeated_task_is_given_back(self):
        script = by_topic({"lines": [said(GOOD)]})
        two = run.Settings(num_tasks=2, num_repeats=1, num_refinements=1, num_at_once=1)
        with folder() as out:
            told, asked = self.make(script, "lines", out, two)
        self.assertEqual((told["kept"], told["never_proven"]), (1, 1))
        self.assertIn(steps.REPEATED, asked[-1][1]["messages"][-1]["content"])

    def test_a_refinement_that_the_endpoint_refuses_ends_its_topic_alone(self):
        script = by_topic(
            {"names": [said(OTHER_WRONG), (413, b"too long")], "lines": [said(GOOD)]}
        )
        two = run.Settings(num_tasks=2, num_repeats=1, num_at_once=1)
        with folder() as out:
            told, asked = self.make(script, "names,lines", out, two)
        self.assertEqual((told["kept"], told["never_proven"]), (1, 1))
        self.assertEqual((told["requests"], len(asked)), (3, 3))
        self.assertEqual(told["failures"]["the endpoint refuses"], 1)

    @parameterized.named_parameters(
        ("no_json", "I cannot.", "the draft is no JSON"),
        ("network", said({**GOOD, "solution": "curl x.y > count.txt"}), "the network"),
        ("setup", said({**GOOD, "setup": "false"}), "the Dockerfile's RUN bash"),
    )  # fmt: skip
    def test_what_is_wrong_with_a_draft_is_given_back(self, text, told):
        script = by_topic({"lines": [text, said(GOOD)]})
        one = run.Settings(num_tasks=1, num_repeats=1, num_refinements=1)
        with folder() as out:
            figures, asked = self.make(script, "lines", out, one)
        self.assertEqual(figures["kept_after_refinements"], {"1": 1})
        self.assertIn(told, asked[1][1]["messages"][-1]["content"])

    def test_a_busy_endpoint_is_asked_again(self):
        def busy(messages, number):
            del messages
            return (503, b"busy") if number == 1 else said(GOOD)

        one = run.Settings(num_tasks=1, num_repeats=1)
        with folder() as out:
            told, asked = self.make(busy, "lines", out, one)
        self.assertEqual((told["kept"], len(asked)), (1, 2))

    def test_the_command(self):
        with Server(by_topic({"lines": [said(GOOD)]})) as server, folder() as out:
            words = (
                f"--base_url={server.url} --model=author --out={out} --num_tasks=1 "
                "--api_key=k --num_repeats=1 --temperature=0.5 --max_tokens=900"
            )
            done = forked.run("environments", "draft", "lines", *words.split())
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(json.loads(done.stdout)["kept"], 1)
        ((path, body, headers),) = server.asked
        self.assertEqual(path, "/v1/chat/completions")
        self.assertEqual((body["model"], body["temperature"]), ("author", 0.5))
        self.assertEqual(body["max_tokens"], 900)
        self.assertNotIn("tools", body)
        self.assertEqual(headers["Authorization"], "Bearer k")


class AnswersTest(parameterized.TestCase):
    def test_the_last_block_is_read(self):
        text = f"```json\n{{}}\n```\nno, this:\n{said(GOOD)}"
        self.assertEqual(answers.read(text).instruction, GOOD["instruction"])
        self.assertEqual(answers.read(json.dumps(GOOD)).files, GOOD["files"])

    @parameterized.named_parameters(
        ("list", [], "no JSON object"),
        ("unknown", {**GOOD, "tests": ""}, "unknown keys: tests"),
        ("no_instruction", {**GOOD, "instruction": " "}, "instruction must be a text"),
        ("outside", {**GOOD, "files": {"../a": ""}}, "'../a' is not below /work"),
        ("absolute", {**GOOD, "files": {"/etc/a": ""}}, "is not below /work"),
        ("no_file", {**GOOD, "files": {"a": 1}}, "a must be a text"),
        ("no_checks", {**GOOD, "checks": []}, "a list of 1 to 16"),
        ("half_check", {**GOOD, "checks": [{"command": "ls"}]}, "check 1 needs"),
        ("one_wrong", {**GOOD, "wrong": ["ls"]}, "2 commands or more"),
        ("solved", {**GOOD, "wrong": ["ls", GOOD["solution"]]}, "or the solution"),
    )
    def test_what_is_no_draft(self, draft, told):
        with self.assertRaisesRegex(ValueError, told):
            answers.read(said(draft))


class InputTest(parameterized.TestCase):
    def test_settings(self):
        with self.assertRaisesRegex(config.InputError, "num_refinements"):
            run.Settings(num_refinements=-1)
        with self.assertRaisesRegex(config.InputError, "num_tasks"):
            run.Settings(num_tasks=0)

    @parameterized.parameters(
        (("draft", "a", "--out=x"), "--base_url"),
        (("draft", "a", "--base_url=http://127.0.0.1:1/v1", "--model=m"), "--out"),
        (("draft", ",", "--base_url=x", "--model=m", "--out=x"), "no topic"),
    )
    def test_the_command(self, words, told):
        done = forked.run("environments", *words)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(told, done.stderr)


if __name__ == "__main__":
    environment.main()
