"""Proving tasks: what fails, by the commands that people give."""

import asyncio
import contextlib
import dataclasses
import io
import json
import mmap
import os
import pathlib
import signal
import subprocess
import sys
import threading
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import play, proofs, protocol, sandbox, validate
from glm5_jax.environments.sandbox import processes
from glm5_jax.environments.tasks import ladder
from tests import environment, forked

RIGHT = "yes"


class Taskset:
    """One task, whose answer is "yes"; subclasses break it."""

    name = "one"

    def task(self, split, seed, index):
        said = ({"role": "user", "content": "say yes"},)
        return protocol.Task(f"one/{index}", said, RIGHT)

    def environment(self):
        return ladder.SingleTurn(ladder.exact)

    def demonstration(self, task):
        return None

    def attempts(self, task):
        says = ({"role": "assistant", "content": text} for text in (RIGHT, "no"))
        right, wrong = says
        return proofs.Attempts((right,), ((wrong,),))


class Generous(Taskset):
    """Pays everyone."""

    def environment(self):
        return ladder.SingleTurn(lambda right, said: 1.0)


class Endless(Taskset):
    """Its environment never ends an episode."""

    def environment(self):
        inner = ladder.SingleTurn(ladder.exact)
        again = protocol.StepResult(
            ({"role": "tool", "content": ""},), None, False, False
        )
        inner.step = mock.AsyncMock(return_value=again)
        return inner


class Broken(Taskset):
    """Its environment raises."""

    def environment(self):
        inner = ladder.SingleTurn(ladder.exact)
        inner.step = mock.AsyncMock(side_effect=OSError("gone"))
        return inner


class Moody(Taskset):
    """Pays the solution all but the third time."""

    count = 0

    def environment(self):
        def score(right, said):
            Moody.count += said == right
            return float(said == right and Moody.count != 3)

        return ladder.SingleTurn(score)


class Halved(Taskset):
    """Pays half for a part, which it names; `earned` is what it pays."""

    earned = 0.5

    def size(self, split):
        return 3

    def environment(self):
        paid = {RIGHT: 1.0, "ye": self.earned}
        return ladder.SingleTurn(lambda right, said: paid.get(said, 0.0))

    def attempts(self, task):
        part = ({"role": "assistant", "content": "ye"},)
        whole = super().attempts(task)
        return dataclasses.replace(whole, partial=((part, 0.5),))


class Mean(Halved):
    """Pays less for the part than it says."""

    earned = 0.25


class Counted(Taskset):
    """Counts the tasks that are played; the answer of its second task is wrong."""

    played = 0

    def size(self, split):
        return 3 if split == "train" else 2

    def task(self, split, seed, index):
        task = super().task(split, seed, index)
        return dataclasses.replace(
            task, id=f"{split}/{index}", answer="ja" if index == 1 else RIGHT
        )

    async def leaks(self, environment, task):
        type(self).played += 1  # once a proof
        return ()

    def source_of(self, task):
        return f"{task.id.partition('/')[0]} tasks"


class Heavy(Taskset):
    """Its environment starts a process that takes memory until somebody has looked."""

    looks = 0  # at the memory of all processes

    def environment(self):
        inner = super().environment()
        reset = inner.reset

        async def heavy(task):
            code = "x = bytearray(64_000_000); print(flush=True); input()"
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-c", code, **pipes
            )
            await child.stdout.readline()
            looks = Heavy.looks
            while Heavy.looks == looks:
                await asyncio.sleep(0.01)
            await child.communicate(b"\n")
            return await reset(task)

        inner.reset = heavy
        return inner


class Leaky(Taskset):
    """Its tests can be read."""

    async def leaks(self, environment, task):
        return [f"/tests of {task.id}"]


class Blind(Taskset):
    """Fails where it should look."""

    async def leaks(self, environment, task):
        raise OSError("gone")


class Silent(Taskset):
    """Knows no solution."""

    def attempts(self, task):
        return None


class Stuck(Taskset):
    """One of its calls never returns."""

    def __init__(self, call):
        self.call = call

    def environment(self):
        inner = super().environment()
        if self.call != "leaks":
            setattr(inner, self.call, self.wait)
        return inner

    async def leaks(self, environment, task):
        if self.call == "leaks":
            await self.wait()
        return []

    async def wait(self, *args):
        await asyncio.sleep(1000)


def failures(taskset):
    proof = asyncio.run(proofs.prove(taskset, taskset.task("train", 0, 0), 4))
    return proof.failures


class ProveTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("whole", Taskset, ()),
        (
            "generous",
            Generous,
            (
                "wrong attempt 1 earns 1.0 instead of 0",
                "doing nothing earns 1.0 instead of 0",
            ),
        ),
        ("moody", Moody, ("the solution, run 3 earns 0.0 instead of 1",)),
        ("halved", Halved, ()),
        ("mean", Mean, ("partial attempt 1 earns 0.25 instead of 0.5",)),
        ("leaky", Leaky, ("an agent can read /tests of one/0",)),
        ("blind", Blind, ("nobody could look for leaks: OSError: gone",)),
        ("silent", Silent, ("the taskset knows no right turns",)),
    )
    def test_failures(self, taskset, wanted):
        self.assertEqual(failures(taskset()), wanted)

    @parameterized.parameters("reset", "step", "close", "leaks")
    def test_no_call_holds_up_a_proof(self, call):
        with mock.patch.object(proofs, "_CALL_SECONDS", 0.02):
            told = failures(Stuck(call))
        late = " earns no reward: a call takes too long instead of "
        names = [failure.partition(late) for failure in told if late in failure]
        wanted = [] if call == "leaks" else ["the solution, run 1", "wrong attempt 1"]
        self.assertEqual([name for name, *_ in names][:2], wanted)
        if call != "step":  # nobody looks for leaks by steps
            self.assertStartsWith(told[-1], "nobody could look for leaks: TimeoutError")

    @parameterized.parameters(
        (Endless, "no reward: the episode goes on"),
        (Broken, "no reward: OSError: gone"),
    )
    def test_episodes_without_a_reward(self, taskset, reason):
        found = failures(taskset())
        self.assertEqual(found[0], f"the solution, run 1 earns {reason} instead of 1")
        self.assertLen(found, 3)

    def test_figures_count_by_kind_and_tag(self):
        done = [
            proofs.Proof("a", "x", (), 5, 1.0),
            proofs.Proof("b", "x", ("doing nothing earns 1.0 instead of 0",), 5, 3.0),
            proofs.Proof(
                "c", "", ("the solution, run 7 earns 0 instead of 1",), 5, 2.0
            ),
        ]
        self.assertEqual(
            proofs.summarize(done),
            {
                "tasks": 3,
                "proven": 1,
                "proven_by_tag": {"untagged": "0 of 1", "x": "1 of 2"},
                "episodes": 15,
                "failures": {"doing nothing": 1, "the solution": 1},
                "seconds_a_task_median": 2.0,
                "seconds_a_task_most": 3.0,
                "megabytes_most": 0.0,
            },
        )

    def test_figures_of_sources(self):
        bad = ("doing nothing earns 1.0 instead of 0",)
        done = [
            proofs.Proof("a", "", (), 5, 1.0, "npm:x", 7.5),
            proofs.Proof("b", "", bad, 5, 3.0, "npm:x", 9.5),
            proofs.Proof("c", "", (), 5, 8.0, "npm:x", 2.0),
            proofs.Proof("d", "", (), 5, 2.0, "debian:y", 1.0),
        ]
        figures = proofs.summarize(done)
        self.assertEqual(figures["megabytes_most"], 9.5)
        names = ("tasks", "proven", "seconds_a_task_median", "megabytes_most")
        rows = {"debian:y": (1, 1, 2.0, 1.0), "npm:x": (3, 2, 3.0, 9.5)}
        self.assertEqual(
            figures["by_source"],
            {key: dict(zip(names, row, strict=True)) for key, row in rows.items()},
        )

    @parameterized.parameters(
        "reverse:3-6",
        "calculator:2",
        "countdown:3",
        "gcd",
        "chain_sum",
        "arithmetic",
        "reverse_dense",
        "2*calculator_untold:2+gcd",
    )
    def test_the_tasks_that_come_with_the_package(self, name):
        settings = validate.Settings(num_tasks=6, num_repeats=2)
        figures = validate.validate(name, settings, None)
        self.assertEqual((figures["proven"], figures["failures"]), (6, {}))

    def test_a_list_of_tasks_is_proven_once(self):
        settings = validate.Settings(num_tasks=9, num_repeats=1)
        name = "tests.environments.proofs_test:Halved"
        self.assertEqual(validate.validate(name, settings, None)["tasks"], 3)


class ResumeTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.out = pathlib.Path(self.create_tempdir().full_path) / "proofs.jsonl"

    def validate(self, **changes):
        """Returns the counts of all tasks, and of those that this run played."""
        given = {"num_tasks": 9, "split": validate.ALL, "num_repeats": 2, **changes}
        Counted.played = 0
        name = f"{__name__}:Counted"
        figures = validate.validate(name, validate.Settings(**given), self.out)
        return (figures["tasks"], figures["proven"]), Counted.played

    def test_a_finished_run_is_not_played_again(self):
        counts, played = self.validate()
        self.assertEqual(counts, (5, 3))  # of both splits; two answers are wrong
        self.assertEqual(played, 5)
        lines = self.out.read_text()
        self.assertEqual(self.validate(), (counts, 0))
        self.assertEqual(self.out.read_text(), lines)
        self.assertEqual(self.validate(num_tasks=2, split="train"), ((2, 1), 0))
        self.assertEqual(self.validate(num_tasks=2)[0][0], 4)  # of each split

    def test_an_interrupted_run_plays_what_is_left(self):
        counts, _ = self.validate(num_at_once=1)
        first, second, *_ = self.out.read_text().splitlines(keepends=True)
        self.out.write_text(first + second[:20])  # it ended within a line
        self.assertEqual(self.validate(num_at_once=1), (counts, 4))
        kept = [json.loads(line) for line in self.out.read_text().splitlines()]
        ids = [line["task"] for line in kept]
        self.assertLen(ids, 5)
        self.assertEqual(json.loads(first), kept[0])
        self.assertEqual(sorted(ids)[:2], ["held_out/0", "held_out/1"])

    def test_other_settings_are_played(self):
        self.validate(split="train")
        self.assertEqual(self.validate(split="train", num_repeats=3), ((3, 2), 3))
        figures = validate.validate(
            f"{__name__}:Counted",
            validate.Settings(num_tasks=9, split=validate.ALL, num_repeats=3),
            self.out,
        )
        self.assertEqual(figures["by_source"]["held_out tasks"]["tasks"], 2)

    def test_tasks_of_agents_are_left_out_of_a_mixture(self):
        """A program cannot be told its turns."""
        agents = "tests.environments.mixture_test:Agents"
        settings = validate.Settings(num_tasks=6, num_repeats=1)
        with self.assertLogs(level="WARNING") as logs:
            figures = validate.validate(f"gcd+2*{agents}", settings, self.out)
        self.assertIn("4 of 6 tasks are left out", logs.output[0])
        self.assertEqual((figures["tasks"], figures["proven"]), (2, 2))
        self.assertEqual([*figures["proven_by_tag"]], ["gcd"])
        few = validate.Settings(num_tasks=1)
        for name, message in (
            (agents, "is played by programs"),
            (f"2*{agents}+gcd", "first --num_tasks=1 .* raise"),
        ):
            with self.assertRaisesRegex(config.InputError, message):
                validate.validate(name, few, None)

    def test_the_sandbox_stands_in_the_figures_and_each_proof(self):
        told = mock.patch.object(sandbox, "describe", return_value="rlimits; no bwrap")
        with told:
            figures = validate.validate(
                f"{__name__}:Counted", validate.Settings(num_tasks=2), self.out
            )
        lines = [json.loads(line) for line in self.out.read_text().splitlines()]
        self.assertEqual(
            [figures["sandbox"], *(line["sandbox"] for line in lines)],
            ["rlimits; no bwrap"] * (1 + len(lines)),
        )
        self.assertNotEmpty(lines)

    def test_memory_of_processes_is_seen(self):
        """A child of 64 MB, which the environment starts for a moment.

        One of as much that was there before does not count.
        """
        code = "x = bytearray(200_000_000); print(flush=True); input()"
        other = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        other.stdout.readline()
        self.addCleanup(other.communicate)
        look = processes.resident_bytes

        def looked(pid):
            Heavy.looks += 1
            return look(pid)

        with mock.patch.object(processes, "resident_bytes", looked):
            figures = validate.validate(
                f"{__name__}:Heavy", validate.Settings(num_tasks=1, num_repeats=1), None
            )
        self.assertBetween(figures["megabytes_most"], 64, 200)

    def test_memory_of_its_own_is_seen(self):
        """What judges in this process, such as an index, has no process to look at."""
        settings = validate.Settings(num_tasks=1, num_repeats=1)
        figures = validate.validate("gcd", settings, None)
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        now = pages * mmap.PAGESIZE / 1e6  # the kernel counts it a little late
        self.assertBetween(figures["own_megabytes_most"], 0.9 * now, 2**16)


class CommandTest(parameterized.TestCase):
    def test_validate(self):
        out = pathlib.Path(self.create_tempdir().full_path) / "proofs.jsonl"
        done = forked.run(
            "environments", "validate", "gcd", "--num_tasks=3", f"--out={out}"
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["proven"], 3)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        self.assertEqual(
            {x["task"] for x in lines}, {f"gcd/train/0/{i}" for i in range(3)}
        )
        name = "tests.environments.proofs_test:Generous"
        done = forked.run("environments", "validate", name, "--num_tasks=1")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("one/0: wrong attempt 1 earns 1.0", done.stderr)

    @parameterized.parameters(
        ((), "Give an action and a name"),
        (("prove", "gcd"), "got prove gcd"),
        (("validate", "gcd", "more"), "'more' belongs to no flag"),
        (("validate", "gcd", "--num_tasks=0"), "num_tasks"),
        (("validate", "gcd", "--split=dev"), "--split must be"),
        (("play", "gcd", "--split=all"), "--split=all is for validate"),
        (("play", "nothing"), "nothing"),
    )
    def test_wrong_input(self, arguments, message):
        done = forked.run("environments", *arguments)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(message, done.stderr)

    def test_play(self):
        lines = "/calc 3*4\n12\n"
        out = io.StringIO()
        with (
            mock.patch.object(sys, "stdin", io.StringIO(lines)),
            contextlib.redirect_stdout(out),
        ):
            total = play.play("calculator:2", "train", 0, 0)
            self.assertIsNone(play.play("gcd", "train", 0, 0))  # no line is left
        self.assertIn("/calc (expression): Integer arithmetic.", out.getvalue())
        self.assertIn("[tool] 12", out.getvalue())
        self.assertIn(f"[reward] {total} ", out.getvalue())

    def test_play_takes_the_tasks_of_a_mixture_that_no_program_plays(self):
        name = "gcd+tests.environments.mixture_test:Agents"
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(play.play(name, "", 0, 0, shows_solution=True), 1.0)
            with self.assertRaisesRegex(config.InputError, "1/gcd.* 'agents' .*--ind"):
                play.play(name, "", 0, 1)

    def test_ctrl_c_does_not_wait_for_a_line(self):
        line = threading.Event()
        self.addCleanup(line.set)

        def next_line():
            os.kill(os.getpid(), signal.SIGINT)
            line.wait(2)
            has_waited.append(True)
            return ""

        has_waited = []
        self.enter_context(mock.patch.object(play, "_next_line", next_line))
        self.enter_context(mock.patch.object(play, "_say"))
        with self.assertRaises(KeyboardInterrupt):
            play.play("gcd", "train", 0, 0)
        self.assertEmpty(has_waited)

    def test_lines_become_turns(self):
        tools = environments.make("calculator:2").task("train", 0, 0).tools
        turn = play.turn_of('/calc {"expression": "1 + 1"}', tools)
        (call,) = turn["tool_calls"]
        self.assertEqual(
            call["function"], {"name": "calc", "arguments": {"expression": "1 + 1"}}
        )
        self.assertEqual(play.turn_of("text", tools)["content"], "text")
        with self.assertRaisesRegex(config.InputError, "no tool 'run'"):
            play.turn_of("/run 1", tools)


if __name__ == "__main__":
    environment.main()
