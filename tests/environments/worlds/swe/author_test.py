"""Recipes that a model finds behind an endpoint, where no rule finds one.

A real server on a socket speaks chat completions; its answers are scripted, in place of
a model alone.
"""

import asyncio
import json
import pathlib
import tempfile
import unittest

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.environments import endpoint
from glm5_jax.environments.worlds.swe import command, mine, records, trials, world
from glm5_jax.environments.worlds.swe.author import answers, find
from tests import environment
from tests.environments.chat_server import Server
from tests.environments.worlds.swe import packages

# Its tests have names that no rule knows, and import what a build would have made.
FILES = {
    "counts.py": b"from _made import LEAST\n" + packages.SOURCE.encode(),
    "checks/verify.py": packages.TESTS.encode(),
    "README": b"Run `make` before the checks.\n",
}
RECIPE = {
    "language": "python",
    "runner": "unittest",
    "files": ["checks/verify.py"],
    "setup": "echo LEAST = 1 > _made.py",
}
# Programs that print TAP; the canary does as they do.
TAP = """from counts import clamp
for number, x in enumerate((0, 2, 4), 1):
    print("ok" if clamp(x, 1, 3) in (1, 2, 3) else "not ok", number)
"""
CANARY = f"""import sys
from counts import clamp
sys.exit(clamp({answers.VALUE}, 0, 9) != 1)
"""
BY_COMMAND = {
    "language": "python",
    "runner": "command",
    "files": ["checks/tap.py"],
    "command": "PYTHONPATH=. /usr/bin/python3 $file",
    "canary": CANARY,
}


def said(answer):
    return f"So:\n```json\n{json.dumps(answer)}\n```"


def scripted(*texts):
    """Returns a script: one answer after another, the last again and again."""
    return lambda messages, number: texts[min(number, len(texts)) - 1]


class AnswerTest(parameterized.TestCase):
    def test_a_recipe_has_what_a_rule_would_say(self):
        recipe = answers.read(said(RECIPE), FILES).recipe
        self.assertEqual((recipe.parser, recipe.roots), ("unittest", (".",)))
        self.assertIn("*conftest.py", recipe.guards)
        self.assertEqual(recipe.setup, RECIPE["setup"])
        self.assertEqual(
            answers.read(said({"read": ["a", "b"]}), FILES).read, ("a", "b")
        )

    @parameterized.parameters(
        ("I do not know.", "no JSON"),
        (said([]), "no JSON object"),
        (said({**RECIPE, "install": "x"}), "unknown keys: install"),
        (said({**RECIPE, "language": "cobol"}), "language must be one of"),
        (said({**RECIPE, "runner": "junit"}), "runner must be one of"),
        (said({**RECIPE, "files": ["checks/none.py"]}), "has no checks/none.py"),
        (said({**RECIPE, "files": []}), "names no file"),
        (said({**RECIPE, "files": "checks/verify.py"}), "must be a list of texts"),
        (said({**RECIPE, "roots": ["lib"]}), "has no folder lib"),
        (said({**RECIPE, "parser": "tap"}), "has no parser 'tap'"),
        (said({**RECIPE, "command": "true"}), "and no other, needs a command"),
        (said({**RECIPE, "runner": "perl"}), "the canary has no @VALUE@"),
        (said({**RECIPE, "setup": "x" * 20_001}), "more than 20000 characters"),
    )
    def test_what_cannot_be_tried_is_told(self, text, reason):
        with self.assertRaisesRegex(ValueError, reason):
            answers.read(text, FILES)

    def test_a_model_is_told_what_steers_a_package(self):
        files = {**FILES, **{f"src/{i}.py": b"" for i in range(500)}}
        _, asked = answers.first("counts", files, "no tests", "x" * 9000 + "the end")
        for told in (
            "before the checks",
            "checks/verify.py",
            "and 103 more",
            "the end",
        ):
            self.assertIn(told, asked["content"])
        self.assertLess(len(asked["content"]), 20_000)


@unittest.skipIf(packages.MISSING, packages.MISSING)
class MineTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        name = self.enterContext(tempfile.TemporaryDirectory())
        self.folder = records.Folder(pathlib.Path(name) / "tasks")
        self.source = pathlib.Path(name) / "counts"
        for path, content in FILES.items():
            (self.source / path).parent.mkdir(parents=True, exist_ok=True)
            (self.source / path).write_bytes(content)

    def mine(self, *texts, refinements=3):
        """Returns what the command says last, and what the model was asked."""
        with Server(scripted(*texts)) as server:
            ask = endpoint.ask(server.url, "author")

            def author(folder):
                return find.Author(ask, folder, refinements)

            path = str(self.folder.path)
            *_, last = command.run(str(self.source), path, 1, 0, author=author)
        return json.loads(last), [body["messages"] for _, body, _ in server.asked]

    def test_what_a_model_finds_is_tried_mended_and_mined(self):
        *_, last = command.run(str(self.source), str(self.folder.path), 1, 0)
        none = {"packages": 1, "found": 0, "share": 0.0}
        self.assertEqual(json.loads(last)["recipes"], {"by_rules": none})
        wrong = {**RECIPE, "setup": ""}
        texts = (said({"read": ["counts.py"]}), said(wrong), said(RECIPE))
        told, asked = self.mine(*texts)
        self.assertEqual(
            told["recipes"],
            {
                "by_rules": none,
                "by_model": {"packages": 1, "found": 1, "share": 1.0, "requests": 3},
            },
        )
        self.assertEqual(told["packages"], {"tests run (python), by a model": 1})
        self.assertIn("no tests that a rule finds", asked[0][-1]["content"])
        self.assertIn("def clamp", asked[1][-1]["content"])
        self.assertIn("No module named '_made'", asked[2][-1]["content"])
        (record,) = self.folder.records()
        tests = self.folder.hidden_tree(record)
        self.assertEqual([*tests], RECIPE["files"])
        solved = {**self.folder.solved_tree(record), **tests}
        trial = asyncio.run(trials.run(solved, record.recipe))
        self.assertLen(trial.passed(), 4)
        task = world.Swe(f"swe:{self.folder.path}").task_of(record)
        self.assertIn(RECIPE["setup"], task.messages[0]["content"])
        again, none_asked = self.mine("never")
        self.assertEqual((again, none_asked), (told, []))

    def test_what_never_works_is_told_and_not_asked_again(self):
        bad = {**RECIPE, "setup": "echo broken; false"}
        told, asked = self.mine("no", said(bad), refinements=1)
        self.assertEqual(told["recipes"]["by_model"]["found"], 0)
        self.assertEqual(told["packages"], {"the run ended early": 1})
        self.assertLen(asked, 2)
        (entry,) = find.asked(self.folder.path).values()
        self.assertStartsWith(entry["failures"][0], "the answer is no JSON")
        self.assertEqual(self.mine("never"), (told, []))

    def test_a_command_is_taken_with_a_canary_that_can_pass(self):
        files = {"counts.py": packages.SOURCE.encode(), "checks/tap.py": TAP.encode()}
        package = packages.package(files=files)
        self.folder.path.mkdir()
        weak = {**BY_COMMAND, "canary": f"1 / 0  # {answers.VALUE}"}
        readings = [said({"read": ["none"]})] * 4
        script = scripted(*readings, said(weak), said(BY_COMMAND))
        with Server(script) as server:
            author = find.Author(endpoint.ask(server.url, "author"), self.folder)
            failed = mine.Failed("no tests that a rule finds")
            found = asyncio.run(author.find(package, failed, 4.0))
            again = asyncio.run(author.find(package, failed, 4.0))
        self.assertEqual(again.recipe, found.recipe)
        self.assertLen(server.asked, 6)  # not once more
        asked = [body["messages"][-1]["content"] for _, body, _ in server.asked]
        self.assertIn("(no file)", asked[1])
        self.assertIn("No more can be read", asked[4])
        self.assertIn("its canary does not pass where it must", asked[5])
        self.assertLen(found.passing, 4)  # the program, and its three lines
        self.assertEqual(found.outcome(), "tests run (python), by a model")
        self.assertNotIn(answers.VALUE, found.recipe.canary)

    def test_a_setup_for_programs_runs_before_them(self):
        files = {"counts.py": packages.SOURCE.encode(), "checks/tap.py": TAP.encode()}
        recipe = answers.read(said(BY_COMMAND), files).recipe
        early = "the run ended early"
        wrong = "touch made; false", "touch made; echo 'print(1)' >> checks/tap.py"
        for setup, problem in (("touch made", ""), *((text, early) for text in wrong)):
            fields = {"setup": setup, "command": f"test -e made && {recipe.command}"}
            canary = recipe.canary.replace(answers.VALUE, "2")
            made = records.recipe_of(vars(recipe) | fields | {"canary": canary})
            self.assertEqual(asyncio.run(trials.run(files, made)).problem, problem)

    def test_a_refusal_of_the_first_request_ends_the_run(self):
        with self.assertRaisesRegex(config.InputError, "answers 400"):
            self.mine((400, b"no such model"))


if __name__ == "__main__":
    environment.main()
