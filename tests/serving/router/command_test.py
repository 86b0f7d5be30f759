"""The command route: a process without jax, which finishes its answers on SIGTERM."""

import asyncio
import contextlib
import signal
import sys
import unittest

import aiohttp
from absl.testing import absltest

from glm5_jax import config
from glm5_jax.serving.router import command
from tests import environment
from tests.processes import launch
from tests.serving.router import light

BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
# Runs the command, and fails where it has imported jax.
PROGRAM = """
import runpy, sys
runpy.run_module("glm5_jax.route", run_name="__main__", alter_sys=True)
"""
CHECK = """
import atexit, os, sys
atexit.register(lambda: "jax" in sys.modules and os._exit(99))
"""


class CommandTest(absltest.TestCase, unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        asyncio.get_running_loop().set_debug(False)  # slow

    async def test_sigterm_finishes_the_answers_under_way(self):
        one = light.Light("a")
        port = launch.free_port()
        url = f"http://127.0.0.1:{port}"
        async with one.serving() as replica, aiohttp.ClientSession(url) as http:
            flags = [f"--replicas={replica}", f"--port={port}", "--max_wait=60"]
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                CHECK + PROGRAM,
                *flags,
                env={**launch.environ(1), "GLM5_JAX_REPLICA_KEY": light.KEY},
            )
            await self.until_open(http)
            one.is_open.clear()
            async with http.post("/v1/chat/completions", json=BODY) as found:
                self.assertEqual(found.status, 200)
                text = await found.content.readany()
                child.send_signal(signal.SIGTERM)
                await self.until_closed(port)
                one.is_open.set()
                text += await found.content.read()
            self.assertIn(b"[DONE]", text)
            self.assertEqual(await child.wait(), 0)
            self.assertEqual(one.keys, {f"Bearer {light.KEY}"})

    async def until_open(self, http):
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get("/health"):
                        return
                await asyncio.sleep(0.05)

    async def until_closed(self, port):
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionRefusedError):
                while True:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    await asyncio.sleep(0.02)

    def test_bad_settings(self):
        with self.assertRaisesRegex(config.InputError, "--api_key must be set"):
            command.Settings(host="0.0.0.0")
        with self.assertRaisesRegex(config.InputError, "must look like http://"):
            command.route(["localhost:8000"], command.Settings(port=0))


if __name__ == "__main__":
    environment.main()
