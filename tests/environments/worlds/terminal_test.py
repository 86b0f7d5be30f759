"""Terminal tasks: every family is proven, and what agents try is judged rightly."""

import asyncio
import os
import tempfile
import unittest
from unittest import mock

import pytest
from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import proofs, tool_calls, validate
from glm5_jax.environments.sandbox import bubblewrap
from glm5_jax.environments.worlds.terminal import families, world
from glm5_jax.environments.worlds.terminal.draft import Draft, Family, answer
from tests import environment
from tests.environments import episodes

MISSING = bubblewrap.missing()
NAMES = [name for name, family in families.ALL.items() if not world.missing(family)]


def shell(command):
    return tool_calls.turn("shell", command=command)


def play(taskset, task, *turns):
    """Returns the results of the turns until the episode ends."""

    async def episode():
        env = taskset.environment()
        try:
            await env.reset(task)
            results = []
            for turn in turns:
                results.append(await env.step(turn))
            return results
        finally:
            await env.close()

    return asyncio.run(episode())


def simple(rng):
    """A task that asks for a number, which its check computes anew."""
    return Draft(
        instruction="Write 7 into answer.txt.",
        setup="git init -q . 2>/dev/null; echo kept > set.txt",
        solution="echo 7 > answer.txt",
        wrong=("echo 8 > answer.txt",),
        expects=(*answer("7"), *answer("7")),
    )


@unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
class FamiliesTest(parameterized.TestCase):
    @parameterized.parameters(*NAMES)
    def test_a_task_is_proven(self, name):
        terminal = environments.make(f"terminal:{name}")
        task = terminal.task("held_out", 3, 0)
        self.assertGreaterEqual(len(world.draft(*task.answer).wrong), 3)
        proof = asyncio.run(proofs.prove(terminal, task, num_repeats=1))
        self.assertEqual(proof.failures, ())

    @pytest.mark.slow  # two minutes
    def test_two_hundred_tasks_are_proven_and_leave_nothing(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        os.chmod(folder, 0o755)
        self.enterContext(mock.patch.object(tempfile, "tempdir", folder))
        settings = validate.Settings(num_tasks=200, num_at_once=4)
        figures = validate.validate("terminal", settings, None)
        self.assertEqual((figures["proven"], figures["failures"]), (200, {}))
        self.assertEmpty(os.listdir(folder))


class TasksTest(parameterized.TestCase):
    def test_families_come_in_turn_and_splits_share_no_task(self):
        terminal = environments.make("terminal")
        count = len(terminal.families)
        self.assertGreaterEqual(count, 12)
        train, held_out = (
            [terminal.task(split, seed, i) for seed in (0, 1) for i in range(3 * count)]
            for split in ("train", "held_out")
        )
        self.assertEqual([task.tag for task in train[:count]], terminal.families)
        ids = {task.id for task in train}
        self.assertLen(ids, len(train))
        self.assertEmpty(ids & {task.id for task in held_out})
        again = environments.make("terminal").task("train", 1, 5)
        self.assertEqual(again, train[3 * count + 5])

    def test_what_is_held_out_is_never_asked_in_training(self):
        """Though different seeds ask the same, as times of a crontab are few."""
        terminal = environments.make("terminal:cron_line")
        train, held_out = (
            [terminal.task(split, 0, i) for i in range(600)]
            for split in ("train", "held_out")
        )
        asked = {task.messages[0]["content"] for task in train}
        self.assertLess(len(asked), 600)
        self.assertLen({task.id for task in train}, 600)
        self.assertLen({task.problem for task in train}, len(asked))
        others = {task.messages[0]["content"] for task in held_out}
        self.assertEmpty(asked & others)

    def test_unknown_or_unusable_families_are_refused(self):
        with self.assertRaisesRegex(config.InputError, "no family 'vim'.*git_merge"):
            environments.make("terminal:vim")
        needs = Family(simple, ("a_program_of_nobody",))
        with (
            mock.patch.dict(families.ALL, {"new": needs}),
            self.assertRaisesRegex(config.InputError, "needs a_program_of_nobody"),
        ):
            environments.make("terminal:new")


@unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
class EpisodeTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        patch = mock.patch.dict(families.ALL, {"simple": Family(simple)})
        self.enterContext(patch)
        self.addCleanup(world.draft.cache_clear)
        self.terminal = environments.make("terminal:simple")
        # Every seed gives the same task, so one split has none.
        with self.assertRaisesRegex(config.InputError, "no task in held_out"):
            self.terminal.task("held_out", 0, 0)
        self.task = self.terminal.task("train", 0, 0)

    def play(self, *turns):
        return play(self.terminal, self.task, *turns)

    def test_a_shell_answers_and_submit_ends(self):
        first, second, last = self.play(
            shell("cat set.txt; cd /tmp; x=1; false"),
            shell("echo $x $PWD"),
            tool_calls.turn("submit"),
        )
        self.assertEqual(first.messages[0]["content"], "kept\n[exit code 1]")
        self.assertEqual(second.messages[0]["content"], "1 /tmp")
        self.assertTrue(last.terminated)
        self.assertEqual((last.reward.total, last.reward.parts), (0.0, {"checks": 0.0}))

    def test_checks_run_where_the_agent_was_without_a_sandbox_too(self):
        with mock.patch.dict(os.environ, GLM5_JAX_SANDBOX="rlimits"):
            for text, reward in (("7", 1.0), ("8", 0.0)):
                write = shell(f"cd /tmp; echo {text} > $OLDPWD/answer.txt")
                last = self.play(write, tool_calls.turn("submit"))[-1]
                self.assertEqual(last.reward.total, reward)

    def test_a_turn_without_calls_ends_the_episode_too(self):
        _, last = self.play(
            shell("echo 7 > /work/answer.txt"), {"role": "assistant", "content": "done"}
        )
        self.assertTrue(last.terminated)
        self.assertEqual(last.reward.total, 1.0)

    @parameterized.parameters(
        ({"name": "vim", "arguments": {}}, "no tool 'vim'; use shell, submit"),
        ({"name": "shell", "arguments": {}}, "shell needs command"),
        (
            {"name": "shell", "arguments": {"command": 1}},
            "must be of type string",
        ),
        (
            {"name": "shell", "arguments": {"command": "ls", "cwd": "/"}},
            "shell has no argument 'cwd'",
        ),
        ({"name": "shell", "arguments": "{"}, "a tool call must be"),
        ({"name": "shell", "arguments": {"command": "a\0b"}}, "zero bytes"),
        ({"name": "shell", "arguments": {"command": "\ud800"}}, "half characters"),
    )
    def test_a_wrong_call_is_answered(self, function, message):
        call = {"id": "c1", "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        (result,) = self.play(turn)
        (said,) = result.messages
        self.assertEqual((said["role"], said["tool_call_id"]), ("tool", "c1"))
        self.assertIn(message, said["content"])
        self.assertFalse(result.terminated)

    def test_turns_and_calls_are_bounded(self):
        turns = [shell("echo 7 > answer.txt")] * world.MAX_TURNS
        *_, last = self.play(*turns)
        self.assertTrue(last.truncated)
        self.assertEqual(last.reward.total, 1.0)
        many = shell("echo a")
        many["tool_calls"] = many["tool_calls"] * 20
        (result,) = self.play(many)
        said = [message["content"] for message in result.messages]
        self.assertEqual(said[:8], ["a"] * 8)
        self.assertEqual(said[8:], ["error: a turn has at most 8 calls."] * 12)

    @parameterized.parameters(
        # Has the right answer written by a process that outlives its shell.
        "(setsid sh -c 'sleep 20; echo 7 > answer.txt') & echo 8 > answer.txt",
        # Programs of its own in place of those of the check.
        "printf '#!/bin/sh\\necho 7\\n' > cat; chmod +x cat; PATH=/work:$PATH",
        "cat() { echo 7; }; export -f cat; alias cat='echo 7'",
        "echo 'cat() { echo 7; }' > .bashrc; cp .bashrc .profile; BASH_ENV=.bashrc",
        "exec 1>&-; echo done 0 >&0; kill -9 $$",
        # Answers the checks in the place of the shell that is to run them.
        "printf 'done 0\\n' >&11; while read -r line <&10; do echo 7;"
        " printf 'done 0\\n' >&11; done",
    )
    def test_tricks_earn_nothing(self, trick):
        *_, last = self.play(shell(trick), tool_calls.turn("submit"))
        self.assertEqual(last.reward.total, 0.0)

    def test_a_file_that_only_one_check_sees_earns_nothing(self):
        fifo = "mkfifo answer.txt; (echo 7 > answer.txt) &"
        score = world.Episode._score

        async def hurried(env, **how):
            episodes.hurry(env.box, 1.0)
            return await score(env, **how)

        with mock.patch.object(world.Episode, "_score", hurried):
            *_, last = self.play(shell(fifo), tool_calls.turn("submit"))
        self.assertEqual(last.reward.total, 0.0)

    def test_leaks_are_found(self):
        async def look(write):
            env = self.terminal.environment()
            try:
                await env.reset(self.task)
                await env.box.write("notes", write)
                return await self.terminal.leaks(env, self.task)
            finally:
                await env.close()

        made = world.draft(*self.task.answer)
        hidden = made.expects[0].__class__("sha256sum 'a b' | cut -c1-9", "1")
        made.__dict__["expects"] = (hidden,)
        self.assertEqual(asyncio.run(look(b"nothing")), [])
        text = f"run {hidden.command} later".encode()
        self.assertEqual(asyncio.run(look(text)), ["check 1"])

    def test_a_search_for_leaks_that_takes_too_long_is_no_search(self):
        async def look():
            env = self.terminal.environment()
            try:
                await env.reset(self.task)
                await env.box.run("grep() { sleep 100; }")
                episodes.hurry(env.box, 1.0)
                return await self.terminal.leaks(env, self.task)
            finally:
                await env.close()

        made = world.draft(*self.task.answer)
        hidden = made.expects[0].__class__("sha256sum 'a b' | cut -c1-9", "1")
        made.__dict__["expects"] = (hidden,)
        with self.assertRaises(TimeoutError):
            asyncio.run(look())


if __name__ == "__main__":
    environment.main()
