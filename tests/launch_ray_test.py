"""Servers on a Ray cluster of several nodes, all of them on this machine."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from unittest import mock

import pytest
from absl.testing import absltest

from glm5_jax.http_server import listening
from tests import environment
from tests.processes import launch

MODEL = pathlib.Path(__file__).parent / "golden" / "chat_model"
SIZES = ("--capacity=64", "--config.model.max_position_embeddings=64", "--num_slots=1")
SECONDS = 240
KEY = "outer"
VARIABLES = {
    "GLM5_JAX_API_KEY": KEY,
    # Else Ray ends workers when others use the machine's memory.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.mark.slow
class RayServeTest(absltest.TestCase):
    """Two minutes, of which most goes to starting Ray and the servers."""

    def setUp(self):
        super().setUp()
        try:
            from ray import cluster_utils
        except ImportError:
            self.skipTest('Ray is not installed: pip install "glm5_jax[ray]"')
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
        with contextlib.closing(listening.bind("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        flags = ["--replicas=2", "--each=room=1", f"--port={port}", "--"]
        self.job = subprocess.Popen(
            [
                *(sys.executable, launch.ROOT / "launch" / "ray_serve.py"),
                *(*flags, f"--checkpoint={MODEL}", *SIZES),
            ],
            env={**os.environ, "RAY_ADDRESS": self.cluster.address},
        )
        self.addCleanup(self.job.wait, 60)
        self.addCleanup(self.job.terminate)

    def ask(self, path, **fields):
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        body = json.dumps(fields).encode() if fields else None
        request = urllib.request.Request(self.url + path, body, headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as found:
            return json.load(found)

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

    def complete(self, user):
        body = {"prompt": "a", "max_tokens": 4, "user": user}
        return self.ask("/v1/completions", **body)["usage"]["completion_tokens"]

    def test_a_replica_of_a_lost_node_comes_back_on_another(self):
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


if __name__ == "__main__":
    environment.main()
