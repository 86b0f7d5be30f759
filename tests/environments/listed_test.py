"""Lists of tasks: those that failed their proof are not served, but proven again."""

import dataclasses
import json
import pathlib

from absl.testing import parameterized

from glm5_jax.environments import listed, proofs, protocol, validate
from glm5_jax.environments.harbor import world as harbor
from glm5_jax.environments.tasks import ladder
from glm5_jax.environments.worlds.swe import records
from glm5_jax.environments.worlds.swe import world as swe
from glm5_jax.environments.worlds.swe.chain import stored
from glm5_jax.environments.worlds.swe.chain import world as chain_world
from tests import environment

FOLDER = pathlib.Path()  # set by tests, as a taskset of a module is made without one
BAD = ("doing nothing earns 1.0 instead of 0",)


class Own(listed.Listed[str]):
    """Ten tasks, whose answers are their names; `wrong` has another one."""

    wrong = "3"

    def __init__(self):
        names = {str(i): str(i) for i in range(10)}
        super().__init__("own", names, 5, "add tasks", proofs=FOLDER / listed.PROOFS)

    def task_of(self, made_of):
        said = ({"role": "user", "content": made_of},)
        return protocol.Task(made_of, said, "no" if made_of == self.wrong else made_of)

    def environment(self):
        return ladder.SingleTurn(ladder.exact)

    def attempts(self, task):
        return proofs.Attempts(({"role": "assistant", "content": task.id},))

    def demonstration(self, task):
        return None


def ids(taskset):
    """Returns the tasks of both splits in the order of seed 0."""
    return [
        taskset.task(split, 0, index).id
        for split in protocol.SPLITS
        for index in range(taskset.size(split))
    ]


class ListedTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        global FOLDER
        FOLDER = pathlib.Path(self.create_tempdir().full_path)

    def prove(self, *found):
        """Appends proofs of (task, failures)."""
        with (FOLDER / listed.PROOFS).open("a", encoding="utf-8") as file:
            for task, failures in found:
                entry = {"task": task, "tag": "", "failures": failures, "key": "x"}
                file.write(json.dumps(entry) + "\n")

    def test_a_task_that_failed_is_left_out_with_a_line_in_the_log(self):
        before = ids(Own())
        self.assertLen(before, 10)
        self.prove(("4", ()), ("7", BAD))
        made = Own()
        with self.assertLogs("absl", "WARNING") as logged:
            served = ids(made)
        self.assertEqual(served, [name for name in before if name != "7"])
        (line,) = logged.output
        self.assertIn("1 of 10 tasks failed their proof", line)
        self.assertIn("8 have none", line)

    def test_the_last_line_of_a_task_counts_and_half_a_line_does_not(self):
        self.prove(("7", BAD), ("2", ()), ("7", ()), ("2", BAD))
        with (FOLDER / listed.PROOFS).open("a", encoding="utf-8") as file:
            file.write('{"task": "4", "failures": ["x')
        self.assertEqual({*map(str, range(10))} - {*ids(Own())}, {"2"})

    def test_validate_keeps_its_proofs_there_and_plays_what_failed_again(self):
        settings = validate.Settings(num_tasks=10, split=validate.ALL, num_repeats=1)
        name = f"{__name__}:Own"
        figures = validate.validate(name, settings, None)
        self.assertEqual((figures["tasks"], figures["proven"]), (10, 9))
        self.assertNotIn(Own.wrong, ids(Own()))
        self.assertLen(ids(Own()), 9)
        again = validate.validate(name, settings, None)  # from its own lines
        self.assertEqual((again["tasks"], again["proven"]), (10, 9))
        lines = (FOLDER / listed.PROOFS).read_text().splitlines()
        self.assertLen(lines, 10)

    def test_the_worlds_of_folders_leave_out_what_failed(self):
        """Two tasks, or chains, or folders of Harbor's; one of each failed."""
        recipe = records.Recipe(language="x", runner="x", parser="x", files=())
        record = records.Record(
            **dict.fromkeys(("repo", "version", "kind", "tree", "tests"), "x"),
            **dict.fromkeys(("source", "patch", "problem_statement"), "x"),
            **dict.fromkeys(("hidden", "FAIL_TO_PASS", "PASS_TO_PASS"), ()),
            instance_id="",
            changed={},
            recipe=recipe,
        )
        folder = records.Folder(FOLDER)
        for name in "ab":
            one = dataclasses.replace(record, instance_id=f"one_{name}")
            folder.add(one)
            chain = stored.Chain(chain_id=f"chain_{name}", repo=name, links=(one,))
            stored.add(folder, chain)
            for path, text in {
                "task.toml": "",
                "instruction.md": "Say yes.",
                "environment/Dockerfile": "FROM debian\nWORKDIR /app\n",
                "solution/solve.sh": "true",
                "tests/test.sh": "true",
            }.items():
                file = FOLDER / f"harbor_{name}" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
        worlds = [
            swe.Swe(f"swe:{FOLDER}"),
            chain_world.SweChain(f"swe_chain:{FOLDER}"),
            harbor.Harbor(f"harbor:{FOLDER}"),
            harbor.Harbor(f"harbor:{FOLDER}/harbor_b"),
        ]
        self.prove(("one_b", BAD), ("chain_b", BAD), ("harbor_b", BAD))
        found = [sum(map(one.size, protocol.SPLITS)) for one in worlds]
        self.assertEqual(found, [1, 1, 1, 0])


if __name__ == "__main__":
    environment.main()
