"""Episodes: the solution is paid, nothing and cheats are not, and tools answer."""

import asyncio
import os
import pathlib
import tempfile
import unittest
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.environments import proofs, protocol, tool_calls
from glm5_jax.environments.worlds.swe import (
    attempts,
    records,
    statements,
    tools,
    trials,
    world,
)
from tests import environment
from tests.environments.worlds.swe import packages


def taskset():
    return world.Swe(f"swe:{packages.folder().path}")


def play(swe, record, turns, max_turns=9):
    """Returns the step results of an episode."""

    async def episode():
        played = world.Environment(swe, max_turns)
        try:
            await played.reset(swe.task_of(record))
            return [await played.step(turn) for turn in turns]
        finally:
            await played.close()

    return asyncio.run(episode())


def shell(command):
    return tool_calls.turn("shell", command=command)


SUBMIT = tool_calls.turn("submit")


@unittest.skipIf(packages.MISSING, packages.MISSING)
class EpisodeTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.world = taskset()
        self.record = next(iter(self.world.by_id.values()))

    def score(self, *turns):
        result = play(self.world, self.record, [*turns, SUBMIT])[-1]
        self.assertTrue(result.terminated)
        return result.reward.total, result.info.get("problem", "")

    def test_solutions_are_paid_and_nothing_is_not(self):
        self.assertGreater(len(self.world.by_id), 2)
        for record in self.world.by_id.values():
            turns = attempts.right(self.world.folder, record)
            self.assertEqual(play(self.world, record, turns)[-1].reward.total, 1.0)
        self.assertEqual(self.score(), (0.0, ""))

    def test_tasks_are_proven(self):
        """The solution, nothing, cheats and a search of the sandbox for the secrets."""
        task = self.world.task_of(self.record)
        proof = asyncio.run(proofs.prove(self.world, task, num_repeats=2))
        self.assertEmpty(proof.failures)
        self.assertGreater(proof.num_episodes, 6)

    def test_what_an_agent_could_read_is_found(self):
        task = self.world.task_of(self.record)

        async def look():
            played = self.world.environment()
            await played.reset(task)
            text = packages.SOURCE.replace("'", "'\\''")
            command = f"mkdir /tmp/x; printf %s '{text}' > /tmp/x/counts.py"
            await played.step(shell(command))
            try:
                return await self.world.leaks(played, task)
            finally:
                await played.close()

        self.assertEqual(asyncio.run(look()), ["/tmp/x/counts.py"])

    @parameterized.named_parameters(
        ("exit", "import os; os._exit(0)", "ended early"),
        ("system_exit", "raise SystemExit(0)", "ended early"),
        ("runner", "import unittest; unittest.TestCase.run = print", "was changed"),
        (
            "assertions",
            "import unittest; unittest.TestCase.assertEqual = lambda *a: None",
            "was changed",
        ),
        (
            "log",
            "print('test_below (tests.test_counts.ClampTest.test_below) ... ok')",
            "",
        ),
        ("fork", "import os; os.fork()", ""),
    )
    def test_tricks_of_the_source_are_named(self, code, problem):
        total, told = self.score(shell(f'echo "{code}" >> counts.py'))
        self.assertEqual(total, 0.0)
        self.assertIn(problem, told)

    def test_files_that_come_and_go_spoil_no_score(self):
        """By a process in the background, and in a listing that the agent forges."""
        loop = "while :; do for i in {1..40}; do echo $RANDOM > t$i; done; rm t*; done"
        spoils = (
            f"( {loop} ) > /dev/null 2>&1 &",
            "function /usr/bin/find { echo; }; cd() { printf '%064d  ./no\\n' 1; }",
        )
        right = attempts.right(self.world.folder, self.record)
        for spoil in spoils:
            turns = [*right[:-1], shell(spoil), SUBMIT]
            last = play(self.world, self.record, turns)[-1]
            self.assertEqual(last.reward.total, 1.0)

    def test_files_that_steer_a_run_are_not_taken(self):
        steer = "import unittest; unittest.TestCase.run = print"
        names = (
            "sitecustomize.py",
            "unittest.py",
            "conftest.py",
            "tests/test_counts.py",
        )
        for name in names:
            done = shell(f'mkdir -p tests; echo "{steer}" > {name}')
            self.assertEqual(self.score(done), (0.0, ""), name)

    @parameterized.named_parameters(
        (
            "deep_folders",
            "d=$(printf 'd%.0s' {1..200}); for i in {1..20}; do mkdir $d; cd $d; done; "
            "cp /work/repo/counts.py $(printf 'e%.0s' {1..45})",
        ),
        (
            "form_feed",
            "s=$(sha256sum counts.py | cut -c1-64); d=$(printf 'x\\f')\"$s  .\"; "
            'mkdir -p "$d/counts.py"; cp counts.py "$d/counts.py/y"',
        ),
        ("no_utf_8", "cp counts.py $(printf '\\xff%.0s' {1..200})"),
        ("a_file_for_a_folder", "rm -rf tests; cp counts.py tests"),
    )
    def test_no_name_of_a_file_dodges_the_score(self, command):
        self.assertEqual(self.score(shell(command)), (0.0, ""))

    def test_a_sandbox_without_its_own_folder_is_refused(self):
        with mock.patch.dict(os.environ, GLM5_JAX_SANDBOX="rlimits"):
            with self.assertRaisesRegex(config.InputError, "rlimits.*install bubblewr"):
                play(self.world, self.record, [SUBMIT])
            with self.assertRaisesRegex(config.InputError, "folder /work"):
                asyncio.run(trials.run({}, self.record.recipe))

    def test_edited_tests_do_not_spoil_a_solution(self):
        spoil = shell("mkdir tests; echo 'import nothing' > tests/test_counts.py")
        turns = [spoil, *attempts.right(self.world.folder, self.record)]
        self.assertEqual(play(self.world, self.record, turns)[-1].reward.total, 1.0)

    def test_the_agent_sees_neither_tests_nor_the_runner(self):
        look = "find / -name '*test_counts*' -o -name 'guarded_run*' 2>/dev/null; true"
        (result,) = play(self.world, self.record, [shell(look)])
        self.assertEqual(result.messages[0]["content"], "(no output)")
        text = self.record.problem_statement
        self.assertEmpty(statements.leaks(text, self.record))

    def test_tools(self):
        turns = [
            tool_calls.turn("view", path="counts.py", start=1, end=2),
            tool_calls.turn("view", path="."),
            shell("cd /tmp; x=1"),
            shell("pwd; echo $x; false"),
            tool_calls.turn("edit", path="counts.py", old="return", new=""),
            tool_calls.turn("edit", path="new.py", old="", new="a 'b'\n"),
            tool_calls.turn("view", path="new.py"),
        ]
        results = play(self.world, self.record, turns)
        told = [result.messages[0]["content"] for result in results]
        self.assertStartsWith(told[0], '1\t"""Counts things."""\n2\t\n')
        self.assertEqual(told[1], "counts.py\n")
        self.assertEqual(told[3], "/tmp\n1\n[exit code 1]")
        self.assertIn("it must be once", told[4])
        self.assertEqual(told[6], "1\ta 'b'\n2\t")

    def test_a_new_shell_begins_in_the_package_too(self):
        ends = [shell("cd /; exit 1"), shell("pwd"), shell("cd /; sleep 9")]
        with mock.patch.object(tools, "_SECONDS", 0.5):
            results = play(self.world, self.record, [*ends, shell("pwd")])
        told = [result.messages[0]["content"] for result in results]
        self.assertEqual([told[1], told[3]], [tools.HOME, tools.HOME])

    @parameterized.named_parameters(
        ("unknown", "fly", {}, "there is no tool 'fly'"),
        ("missing", "shell", {}, "shell needs command"),
        ("type", "view", {"path": 1}, "path must be of type string"),
        ("more", "submit", {"now": "x"}, "no argument 'now'"),
    )
    def test_wrong_calls_are_told_and_the_episode_continues(self, name, args, told):
        turns = [tool_calls.turn(name, **args), SUBMIT]
        first, last = play(self.world, self.record, turns)
        self.assertIn(told, first.messages[0]["content"])
        self.assertIsNone(first.reward)
        self.assertIsNotNone(last.reward)

    def test_a_file_that_cannot_be_read_is_told(self):
        close = shell("chmod 0 counts.py")
        view = tool_calls.turn("view", path="counts.py")
        _, said = play(self.world, self.record, [close, view])
        self.assertIn("could not be read", said.messages[0]["content"])

    def test_an_episode_is_cut_after_its_turns(self):
        results = play(self.world, self.record, [shell("true")] * 2, max_turns=2)
        self.assertTrue(results[-1].truncated)
        self.assertEqual(results[-1].reward.total, 0.0)


@unittest.skipIf(packages.MISSING, packages.MISSING)
class TasksetTest(parameterized.TestCase):
    def test_tasks_are_deterministic_and_the_splits_are_apart(self):
        swe = taskset()
        self.assertIsInstance(swe.environment(), protocol.Environment)
        ids = {}
        for split in ("train", "held_out"):
            size = swe.size(split)
            tasks = [swe.task(split, 0, i) for i in range(size)]
            self.assertEqual(tasks, [swe.task(split, 0, i) for i in range(size)])
            ids[split] = {task.id for task in tasks}
            self.assertLen(ids[split], size)
        self.assertEmpty(ids["train"] & ids["held_out"])
        self.assertEqual(ids["train"] | ids["held_out"], set(swe.by_id))

    def test_demonstrations_are_checked_conversations(self):
        swe = taskset()
        task = swe.task("train", 0, 0)
        turns = swe.demonstration(task)
        (call,) = turns[-1]["tool_calls"]
        self.assertEqual(tool_calls.read(call, tools.SCHEMAS), ("submit", {}))

    def test_a_folder_without_tasks_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(config.InputError, "environments mine"):
                world.Swe(f"swe:{folder}")
            pathlib.Path(folder, records.TASKS).write_text("{}\n")
            with self.assertRaisesRegex(config.InputError, "no task of this version"):
                world.Swe(f"swe:{folder}")


if __name__ == "__main__":
    environment.main()
