"""The training command in several real processes equals that in one."""

import json
import os
import pathlib
import shutil
import signal
import sys
import time

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax import command_line
from glm5_jax.checkpoint import manager, step_folder
from glm5_jax.config import files
from glm5_jax.training.reporting import metrics
from glm5_jax.training.run import health, signals
from tests import environment, runs
from tests.processes import launch

# The same partitioned program; only the order in which gloo adds may differ.
LOSS_RTOL = 1e-6
PARAMS_ATOL = 1e-5
SECONDS_TO_NOTICE = 20
MESHES = {
    "data": ["--config.mesh.data=8"],
    "mixed": [f"--config.mesh.{axis}=2" for axis in ("data", "fsdp", "expert")],
}
# Part of a config file: the gradient of the fifth batch is not finite.
SPOIL = """
import numpy as np
from glm5_jax.training.feeds import corpus

plain = corpus.Corpus.next

def next_batch(feed, params, position):
    batch, seen = plain(feed, params, position)
    if position == 4:
        batch = {**batch, "loss_mask": np.full_like(batch["loss_mask"], np.nan)}
    return batch, seen

corpus.Corpus.next = next_batch
"""


def losses(workdir):
    records = metrics.read(workdir / "metrics.jsonl")
    return {r["step"]: r["train/loss"] for r in records}


@pytest.mark.slow
class TrainTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.config = launch.write_config(cls.root)

    def train(self, name, *flags, code=0, config=None):
        workdir = self.root / name
        got, output = launch.train(config or self.config, workdir, *flags)
        self.assertEqual(got, code, output)
        return workdir

    def params(self, workdir):
        config = files.load(str(self.config))
        return runs.params_of(workdir, command_line.resolve(config).model)

    def assert_same_run(self, got, want):
        ours, theirs = losses(got), losses(want)
        self.assertEqual(ours.keys(), theirs.keys())
        for step, loss in theirs.items():
            np.testing.assert_allclose(ours[step], loss, rtol=LOSS_RTOL)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=PARAMS_ATOL),
            self.params(got),
            self.params(want),
        )
        bits = [
            metrics.read(run / "metrics.jsonl")[-1]["eval/bits_per_byte"]
            for run in (got, want)
        ]
        np.testing.assert_allclose(*bits, rtol=LOSS_RTOL)

    @parameterized.parameters(*MESHES)
    def test_two_agree_with_one(self, name):
        one = self.train(f"{name}1", "--simulate_processes=1", *MESHES[name])
        two = self.train(f"{name}2", "--simulate_processes=2", *MESHES[name])
        self.assert_same_run(two, one)
        self.assertIn("8 x ", (two / "summary.json").read_text())
        names = {path.name for path in (two / "logs").iterdir()}
        self.assertEqual(names, {"process_0.log", "process_1.log"})
        lines = (two / "hosts.jsonl").read_text().splitlines()
        for line in map(json.loads, lines):  # step seconds of every process
            self.assertLen(line["step_seconds"], 2)
            self.assertLessEqual(max(line["own_seconds"]), max(line["step_seconds"]))
        self.assertIn("hosts/slowest", (two / "metrics.jsonl").read_text())

    def test_one_then_two_then_four_are_one_run(self):
        flags = ["--config.optim.schedule=constant", *MESHES["data"]]
        ends = {1: "--config.num_steps=2", 2: "--config.num_steps=4"}
        ends[4] = "--config.num_steps=6"
        whole = self.train("whole", "--simulate_processes=1", ends[4], *flags)
        for count, end in ends.items():
            grown = self.train("grown", f"--simulate_processes={count}", end, *flags)
        self.assert_same_run(grown, whole)

    def test_two_roll_back_as_one_does(self):
        spoilt = self.root / "spoilt.py"
        spoilt.write_text(self.config.read_text() + SPOIL)
        flags = ["--config.health.max_skipped_in_a_row=1", *MESHES["data"]]
        flags += ["--config.health.on_not_finite=roll_back"]
        one, two = (
            self.train(f"spoilt{n}", f"--simulate_processes={n}", *flags, config=spoilt)
            for n in (1, 2)
        )
        self.assert_same_run(two, one)
        for workdir in (one, two):
            records = metrics.read(workdir / "metrics.jsonl")
            counts = [record.get(health.ROLLBACKS, 0) for record in records]
            self.assertEqual(counts, [0, 0, 0, 0, 1])
            metadata = manager.read_metadata(workdir)
            self.assertEqual((metadata["step"], metadata["position"]), (5, 6))

    def two(self, name, *flags, checkpoint_every=0):
        """Starts two processes of a long run, and waits for its first steps.

        $HOST is a folder of each one's own.
        """
        workdir = self.root / name
        command = [sys.executable, "-m", "glm5_jax.train", *flags, *MESHES["mixed"]]
        command += [f"--config={self.config}", f"--workdir={workdir}"]
        command += ["--config.num_steps=4000"]
        command += [f"--config.checkpoint_every={checkpoint_every}"]
        address = f"127.0.0.1:{launch.free_port()}"
        children = [
            launch.start(
                command,
                JAX_COORDINATOR_ADDRESS=address,
                JAX_NUM_PROCESSES=2,
                JAX_PROCESS_ID=number,
                HOST=self.root / f"host{number}",
            )
            for number in range(2)
        ]
        for child in children:
            self.addCleanup(child.stdout.close)
            self.addCleanup(child.wait)
            self.addCleanup(child.kill)  # the last clean-up runs first
        runs.wait_for_steps(workdir, children[0])
        return workdir, children

    @parameterized.parameters("SIGTERM", "SIGINT")
    def test_on_a_signal_both_save_the_same_step_and_the_run_resumes(self, name):
        """Resumes with one process on the same devices, to the same end."""
        workdir, children = self.two(name)
        os.kill(children[1].pid, getattr(signal, name))
        for child in children:
            code, output = launch.finish(child)
            self.assertEqual(code, signals.EXIT_TERMINATED, output)
        step = int(step_folder.find(workdir).name)
        self.assertEqual(max(losses(workdir)), step)
        more = f"--config.num_steps={step + 3}"
        got, output = launch.train(
            self.config, workdir, more, "--simulate_processes=1", *MESHES["mixed"]
        )
        self.assertEqual(got, 0, output)
        self.assertEqual([*losses(workdir)], [*range(1, step + 4)])

    @parameterized.parameters("SIGTERM", "SIGINT")
    def test_a_simulation_forwards_the_signal(self, name):
        workdir = self.root / f"simulated_{name}"
        flags = ["--config.num_steps=4000", "--simulate_processes=2"]
        child = launch.train(self.config, workdir, *flags, *MESHES["data"], wait=False)
        runs.wait_for_steps(workdir, child)
        os.kill(child.pid, getattr(signal, name))
        code, output = launch.finish(child)
        self.assertEqual(code, signals.EXIT_TERMINATED, output)
        self.assertEqual(max(losses(workdir)), int(step_folder.find(workdir).name))

    @parameterized.parameters("SIGKILL", "SIGSTOP")
    def test_one_dies_or_hangs_and_the_other_notices(self, name):
        flags = ["--heartbeat_seconds=10", "--config.health.watchdog_seconds=8"]
        workdir, children = self.two(name, *flags)
        began = time.monotonic()
        os.kill(children[1].pid, getattr(signal, name))
        code, output = launch.finish(children[0], timeout=60)
        self.assertLess(time.monotonic() - began, SECONDS_TO_NOTICE)
        self.assertNotIn(code, (0, signals.EXIT_TERMINATED), output)
        self.assertEmpty([*(workdir / "checkpoints").iterdir()])

    def copied(self, number):
        """Returns the newest step of which a host has a copy."""
        paths = self.root.glob(f"host{number}/*/*/[0-9]*.shards")
        try:
            found = [*paths]
        except FileNotFoundError:  # an older copy is being deleted: look again
            return self.copied(number)
        steps = [int(path.parent.name.partition("-")[0]) for path in found]
        return max(steps, default=0)

    def test_a_lost_slice_costs_the_steps_since_the_last_copy(self):
        """A slice is lost with its host; the other goes on alone, from its copy."""
        flags = ["--config.host_copy_every=1", "--config.host_copy_folder=$HOST"]
        workdir, children = self.two("lost", *flags, checkpoint_every=3)
        while self.copied(0) < 4:
            time.sleep(0.1)
        os.kill(children[1].pid, signal.SIGKILL)
        children[0].kill()
        shutil.rmtree(self.root / "host1")
        saved = step_folder.absolute(workdir) / "checkpoints"
        for number in step_folder.numbers(saved)[1:]:
            shutil.rmtree(saved / str(number))
        copied = self.copied(0)
        command = [sys.executable, "-m", "glm5_jax.train", f"--config={self.config}"]
        command += [f"--workdir={workdir}", f"--config.num_steps={copied + 3}", *flags]
        command += [f"--config.mesh.{axis}=2" for axis in ("fsdp", "expert")]
        child = launch.start(command, HOST=self.root / "host0")
        code, output = launch.finish(child)
        self.assertEqual(code, 0, output)
        self.assertIn(f"had a copy of step {copied} ", output)
        self.assertEqual([*losses(workdir)], [*range(1, copied + 4)])

    def test_other_configs_are_refused_by_all_within_seconds(self):
        command = [sys.executable, "-m", "glm5_jax.train", f"--config={self.config}"]
        command += [f"--workdir={self.root / 'other'}"]
        began = time.monotonic()
        results = launch.together([command, [*command, "--config.seed=7"]])
        self.assertLess(time.monotonic() - began, 60)
        for code, output in results:
            self.assertEqual(code, 2, output)
            self.assertIn("seed: 0 there, 7 here", output)

    def test_failure_in_a_simulation_ends_it(self):
        """If a process is killed, the others end, and the message names its number."""
        workdir = self.root / "killed"
        flags = ["--config.num_steps=4000", "--simulate_processes=2"]
        child = launch.train(self.config, workdir, *flags, *MESHES["data"], wait=False)
        runs.wait_for_steps(workdir, child)
        victim = next(
            int(path.parent.name)
            for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
            if b"--process_id=1" in read_or_nothing(path)
            and str(workdir).encode() in read_or_nothing(path)
        )
        os.kill(victim, signal.SIGKILL)
        code, output = launch.finish(child, timeout=120)
        self.assertEqual(code, 128 + signal.SIGKILL, output)
        self.assertIn("process 1 ended with code -9", output)


def read_or_nothing(path):
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


if __name__ == "__main__":
    environment.main()
