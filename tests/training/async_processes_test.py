"""Stage async_rl with servers of their own: it learns, and outlives a server."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
from absl.testing import parameterized

from benchmarks import chaos
from glm5_jax.rl import episode_files
from glm5_jax.training.reporting import metrics
from tests import environment, runs

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 300  # for a run, most of them to compile
NUM_STEPS = 60  # so that a run lasts longer than a server takes to die
VARIABLES = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


KEY = {"GLM5_JAX_API_KEY": "secret"}


def server_of(start, root):
    """Returns the flags of servers that begin with a run's weights."""
    flags = f"--checkpoint={start}", f"--weights_root={root}", "--num_replicas=1"
    return *flags, "--num_slots=8", "--capacity=256"


def command(workdir, **changes):
    """Returns a run of a tiny model, whose servers start from its own weights."""
    settings = {
        "stage": "async_rl",
        "num_steps": 4,
        "eval_every": 0,
        "checkpoint_every": 2,
        "optim.warmup_steps": 0,
        "model.num_hidden_layers": 1,
        "model.first_k_dense_replace": 1,
        "model.num_nextn_predict_layers": 0,
        "model.attention": "dense",
        "rl.environment": "tests.rl.lottery:Lottery",
        "rl.prompts_per_step": 2,
        "rl.group_size": 4,
        "rl.max_new_tokens": 6,
        "rl.max_turns": 1,
        "rl.slots": 8,
        "rl.num_eval_tasks": 8,
        "rl.min_start_success": 0.0,
        "rl.max_start_success": 1.0,
        "rl.dynamic_sampling": False,
        "rl.min_used_groups": 0.0,
        "rl.max_staleness": 2,
        "rl.canary_every": 0,  # chance pays, whatever is asked
        "rl.num_engines": 1,
    } | changes
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    config = ROOT / "configs" / "small_rl_reverse.py"
    return [
        *(sys.executable, "-m", "glm5_jax.train", f"--config={config}"),
        *(f"--workdir={workdir}", *flags),
    ]


class ProcessesTest(runs.FolderTest):
    def trained(self, workdir, flags=(), variables=(), **changes):
        """Returns the process of a run, which ends with the test."""
        with (self.root / f"{workdir.name}.log").open("wb") as log:
            child = subprocess.Popen(
                [*command(workdir, **changes), *flags],
                cwd=ROOT,
                env={**os.environ, **VARIABLES, **dict(variables)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.addCleanup(child.wait)
        self.addCleanup(child.kill)
        return child

    def run_to_the_end(
        self, workdir, meanwhile=lambda child: None, flags=(), variables=(), **changes
    ):
        child = self.trained(workdir, flags, variables, **changes)
        meanwhile(child)
        code = child.wait(SECONDS)
        log = (self.root / f"{workdir.name}.log").read_text()
        self.assertEqual(code, 0, log[-4000:])
        # jax has threads by then, so a fork may hang; its warning is all that tells.
        self.assertNotIn("os.fork()", log)
        return metrics.read(workdir / "metrics.jsonl")

    def test_one_command_starts_all_of_it(self):
        workdir = self.root / "whole"
        records = self.run_to_the_end(workdir)
        self.assertEqual([r["step"] for r in records], [1, 2, 3, 4])
        for record in records:
            self.assertBetween(record["rollout/staleness_max"], 0, 2)
            ledger = {k: v for k, v in record.items() if k.startswith("groups/")}
            begun = ledger.pop("groups/begun")
            self.assertEqual(begun, sum(ledger.values()))
            self.assertLess(record["rl/logprob_gap"], 1e-5)
        self.assertGreater(sum(r["rl/trained_tokens"] for r in records), 0)
        summary = json.loads((workdir / "summary.json").read_text())
        self.assertIn("eval/success", summary)

    @parameterized.parameters("same", "fp8")
    @pytest.mark.slow  # 40 s
    def test_a_server_without_staleness_draws_the_tokens_of_the_synchronous_stage(
        self, weights
    ):
        """It computes them in other batches, so sums differ in their last digits."""
        changes = {"rl.max_staleness": 0, "num_steps": 6}
        changes |= {"rl.rollout_weights": weights, "rl.max_logprob_gap": 1.0}
        kinds = {
            "server": {},
            "synchronous": {"stage": "rl", "rl.num_engines": 0},
        }
        drawn, learnt = {}, {}
        for name, more in kinds.items():
            workdir = self.root / f"{name}_{weights}"
            records = self.run_to_the_end(workdir, **changes, **more)
            learnt[name] = [r["train/grad_norm"] for r in records]
            drawn[name] = [
                (episode.task.id, [sample.tokens for sample in episode.samples])
                for step in episode_files.read_whole(workdir, range(1, 7))
                for group in step.groups
                for episode in group
            ]
        self.assertLen(drawn["server"], 6 * 2 * 4)
        self.assertEqual(drawn["server"], drawn["synchronous"])
        self.assertGreater(min(learnt["server"]), 0.1)
        is_rounded = [r["rl/logprob_gap"] > 1e-4 for r in records]
        self.assertEqual(is_rounded, [weights != "same"] * 6)
        np.testing.assert_allclose(learnt["server"], learnt["synchronous"], rtol=1e-5)

    @pytest.mark.slow
    def test_servers_of_others_sample_for_a_run_of_one_process_and_one_of_two(self):
        start, store = self.root / "start", self.root / "weights"
        quick = {"rl.num_engines": 0, "num_steps": 1}
        self.run_to_the_end(start, **quick)
        store.mkdir()
        servers, url = self.started("serve", *server_of(start, store))
        self.wait_for(f"{url}/health")
        changes = {
            "init_from": start,
            "rl.num_engines": 0,
            "rl.servers": url,
            "rl.weights_store": store,
        }
        changes |= {"mesh.data": 2, "rl.max_staleness": 0, "sample_tokens": 0}
        played, learnt = {}, {}
        for name, flags in (("one", []), ("two", ["--simulate_processes=2"])):
            records = self.run_to_the_end(
                self.root / name,
                flags=flags,
                variables={**KEY, "JAX_NUM_CPU_DEVICES": "2"},
                num_steps=3,
                **changes,
            )
            self.assertEqual([r["step"] for r in records], [1, 2, 3])
            for record in records:
                self.assertEqual(record["rollout/staleness_max"], 0)
                self.assertLess(record["rl/logprob_gap"], 1e-5)
            played[name] = [
                (r["rollout/reward"], r.get("eval/success")) for r in records
            ]
            learnt[name] = [r["train/grad_norm"] for r in records]
            kept = episode_files.numbers(self.root / name)
            self.assertEqual(kept, [1, 2, 3])
        self.assertIsNone(servers.poll())
        self.assertEqual(played["one"], played["two"])
        np.testing.assert_allclose(learnt["one"], learnt["two"], rtol=1e-5)
        self.assertEmpty([*store.glob("shared_episodes*")])
        self.assertLessEqual(len([*store.iterdir()]), 6)  # old versions are deleted

    @pytest.mark.slow  # 40 s
    def test_a_trainer_of_two_processes_learns_its_kept_steps_again(self):
        """All of it is killed some steps after a checkpoint; the servers stay."""
        start, store = self.root / "start_two", self.root / "weights_two"
        self.run_to_the_end(start, **{"rl.num_engines": 0, "num_steps": 1})
        store.mkdir()
        _, url = self.started("serve", *server_of(start, store))
        self.wait_for(f"{url}/health")
        every, num_steps = 8, 24
        changes = {
            "init_from": start,
            "rl.environment": "tests.rl.lottery:Slow",
            "rl.num_engines": 0,
            "rl.servers": url,
            "rl.weights_store": store,
            "mesh.data": 2,
            "num_steps": num_steps,
            "checkpoint_every": every,
            "sample_tokens": 0,
        }
        flags = ["--simulate_processes=2"]
        variables = {**KEY, "JAX_NUM_CPU_DEVICES": "2"}
        workdir = self.root / "two_killed"
        child = self.trained(workdir, flags, variables, **changes)
        runs.wait_for_steps(workdir, child, every + 4)
        children = chaos.children_of(child.pid)
        child.kill()
        child.wait()
        self.assertEmpty(chaos.wait_for_end(children))
        before = metrics.read(workdir / "metrics.jsonl")
        kept = episode_files.numbers(workdir)
        self.assertBetween(kept[-1], every + 4, num_steps - 1)
        files = [episode_files.path_of(workdir, n).read_bytes() for n in kept]

        records = self.run_to_the_end(
            workdir, flags=flags, variables=variables, **changes
        )
        self.assertEqual([r["step"] for r in records], [*range(1, num_steps + 1)])
        log = (workdir / "logs" / "process_0.log").read_text()
        (first,) = re.findall(r"Resumes from step (\d+)", log)
        again = [n for n in kept if n > int(first)]
        said = re.findall(r"Step (\d+) learns again", log)
        self.assertEqual([*map(int, said)], again)
        for name in ("train/loss", "train/grad_norm", "groups/begun"):
            old, new = (
                [r[name] for r in some[: kept[-1]]] for some in (before, records)
            )
            self.assertEqual(new[: len(old)], old)  # bit for bit
        left = [episode_files.path_of(workdir, n).read_bytes() for n in kept]
        self.assertEqual(left, files)
        steps = episode_files.read_whole(workdir, range(1, num_steps + 1))
        learnt = [group[0].group for step in steps for group in step.groups]
        self.assertLen(set(learnt), 2 * num_steps)
        self.assertLess(max(r["rl/logprob_gap"] for r in records), 1e-5)
        self.assertLessEqual(max(r["rollout/staleness_max"] for r in records), 2)
        ledger = {k: v for k, v in records[-1].items() if k.startswith("groups/")}
        self.assertEqual(ledger.pop("groups/begun"), sum(ledger.values()))
        self.assertNotIn("groups/dropped_stale", ledger)

    @pytest.mark.slow
    def test_servers_without_a_shared_folder_evaluate_beside_at_one_version(self):
        start, store = self.root / "start_apart", self.root / "weights_apart"
        self.run_to_the_end(start, **{"rl.num_engines": 0, "num_steps": 1})
        store.mkdir()
        _, far = self.started("serve_weights", f"--weights_store={store}")
        empty = self.root / "empty"
        empty.mkdir()
        flags = [*server_of(start, empty), f"--weights_url={far}"]
        urls = [self.started("serve", *flags)[1] for _ in range(2)]
        for url in urls:
            self.wait_for(f"{url}/health")
        records = self.run_to_the_end(
            self.root / "apart",
            variables=KEY,
            **{
                "num_steps": 12,
                "eval_every": 3,
                "rl.environment": "tests.rl.lottery:Patient",
                "rl.step_timeout_seconds": 300.0,  # to wait for the evaluation
                "init_from": start,
                "rl.num_engines": 0,
                "rl.servers": urls[0],
                "rl.eval_servers": urls[1],
                "rl.evaluates_beside": True,
                "rl.weights_store": store,
                "sample_tokens": 0,
            },
        )
        self.assertEqual([r["step"] for r in records], [*range(1, 13)])
        self.assertLess(max(r["rl/logprob_gap"] for r in records), 1e-5)
        beside = [r for r in records if "eval/version" in r]
        for record in beside:
            self.assertIn(record["eval/version"], (3, 6, 9))
            self.assertEqual(record["eval/version_last"], record["eval/version"])
            self.assertEqual(record["eval/version_share"], 1.0)
            self.assertGreater(record["eval/tasks"], 0)
        self.assertNotEmpty(beside)
        self.assertIn("eval/success", records[-1])
        self.assertEmpty([*empty.iterdir()])

    def started(self, name, *flags):
        """Returns a command's process, which ends with the test, and its URL."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with (self.root / f"{name}_{port}.log").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", f"glm5_jax.{name}", f"--port={port}", *flags],
                env={**os.environ, **VARIABLES, **KEY},
                stdout=log,
                stderr=log,
            )
        self.addCleanup(child.wait)
        self.addCleanup(child.terminate)
        return child, f"http://127.0.0.1:{port}"

    def wait_for(self, url):
        """Waits until a server answers."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except OSError:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.5)

    @pytest.mark.slow
    def test_a_killed_server_starts_again_with_the_present_weights(self):
        workdir = self.root / "killed"

        def kill(child):
            deadline = time.monotonic() + SECONDS
            path = workdir / "metrics.jsonl"
            while not (path.exists() and metrics.read(path)):
                self.assertLess(time.monotonic(), deadline)
                self.assertIsNone(child.poll())
                time.sleep(0.2)
            (server,) = chaos.children_of(child.pid, "--num_replicas=0")
            os.kill(server, signal.SIGKILL)

        records = self.run_to_the_end(workdir, kill, num_steps=NUM_STEPS)
        self.assertEqual([r["step"] for r in records], [*range(1, NUM_STEPS + 1)])
        last = records[-1]
        self.assertGreater(last["groups/restarted"], 0)
        # It told no older version: it got the present one from the push that was under
        # way as it was killed, or apart.
        self.assertNotIn("groups/dropped_stale", last)
        self.assertLessEqual(max(r["rollout/staleness_max"] for r in records), 2)


if __name__ == "__main__":
    environment.main()
