"""Servers on a Ray cluster of several nodes, all of them on this machine.

They answer clients, and sample for a run of asynchronous reinforcement learning.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest
import urllib.error
import urllib.request
from unittest import mock

import pytest
from absl.testing import absltest

from glm5_jax.rl.actors import fleet
from glm5_jax.training.reporting import metrics
from tests import environment
from tests.processes import launch

MODEL = pathlib.Path(__file__).parent / "golden" / "chat_model"
SIZES = ("--capacity=64", "--config.model.max_position_embeddings=64", "--num_slots=1")
SECONDS = 600  # on a machine under load
NUM_STEPS = 40
KEY = "outer"
TRAINER = str(launch.ROOT / "launch" / "ray_job.py"), "--nodes=1", "--each=CPU=1", "--"
VARIABLES = {
    "GLM5_JAX_API_KEY": KEY,
    # Else Ray ends workers when others use the machine's memory.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 starves them on a machine under load
}


class RayTest(absltest.TestCase):
    """A cluster with room for two servers, and launch/ray_serve.py on it."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if importlib.util.find_spec("ray") is None:
            raise unittest.SkipTest('Ray is not installed: pip install "glm5_jax[ray]"')

    def setUp(self):
        super().setUp()
        from ray import cluster_utils

        home = self.create_tempdir().full_path  # Ray writes a token there
        variables = {**launch.environ(1), **VARIABLES, "HOME": home}
        self.enter_context(mock.patch.dict(os.environ, variables))
        size = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
        self.cluster = cluster_utils.Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, **size}
        )
        self.addCleanup(self.cluster.shutdown)
        del size["include_dashboard"]
        self.room = {"num_cpus": 1, "resources": {"room": 1}, **size}
        self.nodes = [self.cluster.add_node(**self.room) for _ in range(2)]

    def serve(self, *arguments):
        """Starts the job with these arguments of the servers."""
        port = launch.free_port()
        self.url = f"http://127.0.0.1:{port}"
        flags = ["--replicas=2", "--each=room=1", f"--port={port}", "--"]
        script = launch.ROOT / "launch" / "ray_serve.py"
        self.job = subprocess.Popen(
            [sys.executable, script, *flags, *arguments],
            env={**os.environ, "RAY_ADDRESS": self.cluster.address},
        )
        self.addCleanup(self.job.wait, 60)
        self.addCleanup(self.job.terminate)

    def ask(self, path, **fields):
        return json.loads(self.read(path, **fields))

    def read(self, path, **fields):
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        body = json.dumps(fields).encode() if fields else None
        request = urllib.request.Request(self.url + path, body, headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as found:
            return found.read()

    def wait_for(self, number):
        """Waits until this many replicas are in service; returns their addresses."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.URLError):
                told = self.ask("/replicas")["replicas"]
                ready = {one["url"] for one in told if one["state"] == "ready"}
                if len(ready) == number:
                    return ready
            self.assertIsNone(self.job.poll())
            time.sleep(0.2)
        raise AssertionError(self.ask("/replicas"))

    def versions(self):
        """Returns the versions of the weights that the servers tell of."""
        told = fleet._VERSION.findall(self.read("/metrics").decode())
        return [int(float(version)) for version in told]

    def complete(self, user):
        body = {"prompt": "a", "max_tokens": 4, "user": user}
        return self.ask("/v1/completions", **body)["usage"]["completion_tokens"]


@pytest.mark.slow
class RayServeTest(RayTest):
    """Two minutes, of which most goes to starting Ray and the servers."""

    def test_a_replica_of_a_lost_node_comes_back_on_another(self):
        self.serve(f"--checkpoint={MODEL}", *SIZES)
        before = self.wait_for(2)
        self.assertEqual([self.complete(str(i)) for i in range(6)], [4] * 6)
        self.cluster.remove_node(self.nodes[0], allow_graceful=False)
        self.assertEqual([self.complete(str(i)) for i in range(6)], [4] * 6)
        (left,) = self.wait_for(1)
        self.assertIn(left, before)
        self.cluster.add_node(**self.room)
        after = self.wait_for(2)
        self.assertIn(left, after)
        self.assertNotEqual(before, after)
        self.assertEqual([self.complete(str(i)) for i in range(6)], [4] * 6)
        self.job.send_signal(signal.SIGTERM)
        self.assertEqual(self.job.wait(120), 0)


@pytest.mark.slow
class RayLearnTest(RayTest):
    """A short configs/small_async_reverse.py from a short SFT; six minutes."""

    def setUp(self):
        self.root = pathlib.Path(self.create_tempdir().full_path)
        sft = ("data.source=tasks:reverse:2-3", "stop_at=0.3", "sample_tokens=0")
        self.require_end("sft", self.train("sft", *sft))
        super().setUp()

    def train(self, name, *flags, command=("-m", "glm5_jax.train"), **variables):
        """Starts a run of a small model on words of two or three letters."""
        settings = (
            *("model.num_hidden_layers=2", "model.num_nextn_predict_layers=0"),
            *("rl.environment=reverse:2-3", "rl.num_eval_tasks=64", *flags),
        )
        command = [sys.executable, *command]
        command += [f"--config={launch.ROOT}/configs/small_{name}_reverse.py"]
        command += [f"--workdir={self.root / name}"]
        log = (self.root / f"{name}.log").open("wb")
        self.addCleanup(log.close)
        child = subprocess.Popen(
            [*command, *(f"--config.{setting}" for setting in settings)],
            cwd=launch.ROOT,
            # Compiled as for users: these runs are not over in a few steps.
            env={
                **launch.environ(1),
                **VARIABLES,
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
                **variables,
            },
            stdout=log,
            stderr=log,
        )
        self.addCleanup(child.wait)
        self.addCleanup(child.kill)
        return child

    def require_end(self, name, child):
        code = child.wait(2 * SECONDS)
        self.assertEqual(code, 0, (self.root / f"{name}.log").read_text()[-4000:])

    def records(self, name):
        path = self.root / name / "metrics.jsonl"
        return metrics.read(path) if path.exists() else []

    def test_a_replica_is_lost_and_placed_again_while_the_model_learns(self):
        """Ray places the trainer as well."""
        start, store = self.root / "sft", self.root / "weights"
        store.mkdir()
        self.serve(
            f"--checkpoint={start}",
            f"--weights_root={store}",
            "--num_slots=16",
            "--capacity=32",
        )
        before = self.wait_for(2)
        child = self.train(
            "async",
            f"init_from={start}",
            f"num_steps={NUM_STEPS}",
            "eval_every=0",
            "rl.num_engines=0",
            f"rl.servers={self.url}",
            f"rl.weights_store={store}",
            "rl.prompts_per_step=8",
            "rl.slots=16",
            command=TRAINER,
            RAY_ADDRESS=self.cluster.address,
        )
        deadline = time.monotonic() + SECONDS
        while len(self.records("async")) < 3:
            self.assertIsNone(child.poll())
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.2)
        lost = min(before)
        os.kill(_server_at(lost), signal.SIGKILL)
        self.require_end("async", child)
        after = self.wait_for(2)
        self.assertNotIn(lost, after)
        self.assertLen(before & after, 1)
        # By a push or apart, the new one got what the other has through the router,
        # which alone has the servers' key.
        self.assertEqual(self.versions(), [NUM_STEPS] * 2)

        records = self.records("async")
        steps = [*range(1, NUM_STEPS + 1)]
        self.assertEqual([r["step"] for r in records], steps)
        self.assertLessEqual(max(r["rollout/staleness_max"] for r in records), 2)
        self.assertLess(max(r["rl/logprob_gap"] for r in records), 1e-5)
        summary = json.loads((self.root / "async" / "summary.json").read_text())
        success = records[0]["rollout/start_success"], summary["eval/success"]
        print(f"held-out success {success[0]:.1%} to {success[1]:.1%}")  # noqa: T201
        self.assertGreater(success[1], success[0])
        self.job.send_signal(signal.SIGTERM)
        self.assertEqual(self.job.wait(120), 0)


def _server_at(url):
    """Returns the process that serves at an address."""
    wanted = {b"glm5_jax.serve", f"--port={url.rpartition(':')[2]}".encode()}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if wanted <= {*words}:
                return int(folder.name)
    raise AssertionError(f"no process serves at {url}")


if __name__ == "__main__":
    environment.main()
