"""A replica is killed under load: real processes, real sockets."""

import asyncio
import collections
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import unittest
from typing import ClassVar
from unittest import mock

import aiohttp
import pytest
from absl.testing import absltest, parameterized

from glm5_jax import config
from glm5_jax.serving.router import app, command, health, local, pool
from tests import environment
from tests.processes import launch
from tests.rl import virtual_time
from tests.serving.router import light

NUM_STREAMS, NUM_WHOLE = 36, 24
NUM_BEGUN = 3  # streams that have text at the replica that is killed then
NO_LIMIT = aiohttp.ClientTimeout(total=None)
CHECKS = health.Checks(seconds=0.1)
MODEL = pathlib.Path(__file__).parents[2] / "golden" / "chat_model"
# 600 tokens of a tiny model take a while, also on an idle machine.
SERVE = ("-m", "glm5_jax.serve", f"--checkpoint={MODEL}", "--num_slots=8")
SIZES = ("--capacity=1024", "--config.model.max_position_embeddings=1024")


# Other tests of this process have started jax, which must not be forked; these
# processes become other programs at once.
@pytest.mark.filterwarnings("ignore:os.fork")
class KillTest(absltest.TestCase, unittest.IsolatedAsyncioTestCase):
    arguments = (sys.executable, "-m", "tests.serving.router.light")
    stream: ClassVar = {"max_tokens": 40, "pause": 0.02}
    whole: ClassVar = {"pause": 0.5}
    checks = CHECKS
    seconds = 60  # for the processes to start

    async def asyncSetUp(self):
        asyncio.get_running_loop().set_debug(False)  # slow
        stack = contextlib.AsyncExitStack()
        self.addAsyncCleanup(stack.aclose)
        folder = pathlib.Path(self.create_tempdir().full_path)
        self.servers = local.Servers(
            self.arguments, [launch.environ(1)] * 3, [set()] * 3, folder
        )
        options = app.Options(checks=self.checks)
        started = light.routing_to([], options)
        self.begun = collections.Counter()  # streams with text, by replica
        self.url, self.router = await stack.enter_async_context(started)
        await stack.enter_async_context(self.servers.beside(self.router, self.fail))
        await self.until_ready(3)
        self.http = await stack.enter_async_context(
            aiohttp.ClientSession(self.url, timeout=NO_LIMIT)
        )

    async def until_ready(self, number):
        pool = self.router.pool
        await light.until(lambda: len(pool.ready()) == number, self.seconds)

    async def ask_stream(self, index):
        """Returns the pieces of text, and what ended them."""
        body = {"messages": [{"role": "user", "content": f"{index}"}], "stream": True}
        body |= {"user": f"{index}", "ignore_eos": True, **self.stream}
        pieces = []
        async with self.http.post("/v1/chat/completions", json=body) as found:
            self.assertEqual(found.status, 200, await self.text_of(found))
            async for line in found.content:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    return pieces, "done"
                fields = json.loads(data) if data else {}
                if "error" in fields:
                    return pieces, fields["error"]["message"]
                for choice in fields.get("choices", ()):
                    if choice["delta"].get("content") or choice["finish_reason"]:
                        self.begun[found.headers["X-Replica"]] += not pieces
                        pieces.append(choice["delta"].get("content"))
        return pieces, "nothing"

    async def text_of(self, found):
        """Returns the text of an error."""
        return "" if found.status == 200 else await found.text()

    async def ask_whole(self, index):
        body = {"token_ids": [index], "sampling_params": {"max_tokens": 8}}
        body |= {"user": f"whole {index}", **self.whole}
        async with self.http.post("/inference/v1/generate", json=body) as found:
            return found.status, await found.text()

    async def test_nothing_is_lost_that_had_no_byte(self):
        """Streams that had one end with an error, and the next requests succeed."""
        streams = [asyncio.create_task(self.ask_stream(i)) for i in range(NUM_STREAMS)]
        wholes = [asyncio.create_task(self.ask_whole(i)) for i in range(NUM_WHOLE)]
        pool = self.router.pool
        await light.until(
            lambda: any(n >= NUM_BEGUN for n in self.begun.values()), self.seconds
        )
        ((url, _),) = self.begun.most_common(1)
        number = [*pool.replicas].index(url)
        killed = self.servers.processes[number]
        killed.kill()
        for status, text in await asyncio.gather(*wholes):
            self.assertEqual(status, 200, text)
        ended = await asyncio.gather(*streams)
        broken = [pieces for pieces, end in ended if "was lost" in end]
        done = [pieces for pieces, end in ended if end == "done"]
        self.assertLen(broken + done, NUM_STREAMS)
        self.assertBetween(len(broken), 1, NUM_STREAMS / 2)  # about a third
        self.assertTrue(all(broken))  # each had text before
        self.check(done)
        self.assertNotEmpty([1 for r in pool.replicas.values() if r.answered["broken"]])
        again = await asyncio.gather(*map(self.ask_whole, range(9)))
        self.assertEqual({status for status, _ in again}, {200})
        await self.until_ready(3)  # it has been started again
        self.assertNotEqual(self.servers.processes[number].pid, killed.pid)

    def check(self, done):
        """Every stream that ended well has all its tokens, from one replica."""
        for *tokens, _ in done:
            names = {piece.partition("-")[0] for piece in tokens}
            self.assertLen(names, 1)
            self.assertLen(tokens, self.stream["max_tokens"])


@pytest.mark.slow
class ServeKillTest(KillTest):
    """The same with servers of a model: a minute, of which most goes to compiling."""

    arguments = (sys.executable, *SERVE, *SIZES)
    stream: ClassVar = {
        "max_tokens": 600,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    whole: ClassVar = {}
    seconds = 300

    async def asyncSetUp(self):
        await super().asyncSetUp()
        # The first answers wait for programs.
        await asyncio.gather(*map(self.ask_whole, range(12)))

    def check(self, done):
        self.assertTrue(all(done))


@pytest.mark.filterwarnings("ignore:os.fork")
class StoppedTest(KillTest):
    """A process is stopped: it is there, its sockets too, and it answers nothing."""

    checks = health.Checks(seconds=0.1, max_seconds=0.5, lost_seconds=0.5)
    test_nothing_is_lost_that_had_no_byte = None

    async def test_a_process_that_is_stopped_is_ended_and_its_requests_are_answered(
        self,
    ):
        self.enterContext(mock.patch.object(local, "_HUNG_SECONDS", 2.0))
        wholes = [asyncio.create_task(self.ask_whole(i)) for i in range(NUM_WHOLE)]
        replica = next(iter(self.router.pool.replicas.values()))
        await light.until(lambda: replica.load, self.seconds)
        stopped = self.servers.processes[0]
        stopped.send_signal(signal.SIGSTOP)
        for status, text in await asyncio.gather(*wholes):
            self.assertEqual(status, 200, text)
        await light.until(lambda: stopped.poll() is not None, self.seconds)
        self.assertEqual(stopped.returncode, -signal.SIGKILL)
        await self.until_ready(3)  # it has been started again
        self.assertNotEqual(self.servers.processes[0].pid, stopped.pid)


@pytest.mark.filterwarnings("ignore:os.fork")
class HangTest(parameterized.TestCase):
    """A process that goes on and does not answer, under a virtual clock."""

    @parameterized.named_parameters(
        # Seconds at which its state changes; then those at which it must be ended.
        ("hangs", [(0, "joining"), (300, "ready"), (310, "down")], [430]),
        (
            "recovers",
            [(0, "ready"), (10, "down"), (129, "ready"), (140, "down")],
            [260],
        ),
        ("starts_slowly", [(0, "joining"), (5, "down")], []),
        ("has_other_weights", [(0, "ready"), (10, "unfit")], []),
    )
    def test_a_server_that_hangs_is_ended(self, changes, ends):
        replica, ended = pool.Replica("http://a:1"), []
        child = mock.Mock(spec=subprocess.Popen)

        async def main():
            loop = asyncio.get_running_loop()

            def poll():
                states = [state for when, state in changes if when <= loop.time()]
                replica.state = pool.State(states[-1])
                return 9 if ended or loop.time() > 1000 else None

            child.poll.side_effect = poll
            child.kill.side_effect = lambda: ended.append(round(loop.time()))
            return await local._watched(child, replica)

        was_ready, _ = virtual_time.run(main())
        self.assertEqual(ended, ends)
        self.assertEqual(was_ready, any(state == "ready" for _, state in changes))


class WrongInputTest(absltest.TestCase):
    def test_servers_that_refuse_their_input_end_all(self):
        """Starting them again would not help."""
        text = "import sys; print('error: no such folder'); sys.exit(2)"
        folder = pathlib.Path(self.create_tempdir().full_path)
        arguments = [sys.executable, "-c", text]
        servers = local.Servers(arguments, [{**os.environ}], [set()], folder)
        settings = command.Settings(port=0)
        command.route([], settings, servers.beside)
        self.assertEqual(servers.failure, "error: no such folder")

    def test_servers_that_answer_know_those_that_read_prompts(self):
        text = "import sys; print(sys.argv[1:]); sys.exit(2)"
        folder = pathlib.Path(self.create_tempdir().full_path)
        servers = local.Servers(
            [sys.executable, "-c", text], [{**os.environ}] * 3, [set()] * 3, folder, 1
        )
        command.route([], command.Settings(port=0), servers.beside)
        ports = servers._ports
        self.assertLen({*ports}, 3)
        prefill = f"--prefill_servers=http://127.0.0.1:{ports[2]}"
        for index, flag in enumerate((prefill, prefill, "--prefill_servers=")):
            log = (folder / f"replica_{index}.log").read_text()
            if log:  # it had time to start
                self.assertEqual(log, f"{[f'--port={ports[index]}', flag]}\n")
        self.assertIn("--prefill_servers", servers.failure)

    @pytest.mark.slow
    def test_the_command_shows_their_message(self):
        flags = ["--checkpoint=/nowhere", "--num_replicas=2", "--port=0"]
        done = subprocess.run(
            [sys.executable, "-m", "glm5_jax.serve", *flags],
            env=launch.environ(1),
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("/nowhere", done.stderr.splitlines()[-1])


class SharesTest(absltest.TestCase):
    def test_cores(self):
        shares = local.cores_of(2)
        self.assertLen(shares, 2)
        self.assertEmpty(shares[0] & shares[1])
        self.assertEqual(len(shares[0]), len(os.sched_getaffinity(0)) // 2)
        self.assertEqual(local.cores_of(999), [set()] * 999)

    def test_gpus(self):
        devices = pathlib.Path(self.create_tempdir().full_path)
        self.assertEqual(local.gpus_of(2, {}, devices), [{}, {}])
        for name in (*map(str, range(10)), "ctl", "-uvm"):
            (devices / f"nvidia{name}").touch()
        name = "CUDA_VISIBLE_DEVICES"
        self.assertEqual(
            local.gpus_of(2, {}, devices), [{name: "0,1,2,3,4"}, {name: "5,6,7,8,9"}]
        )
        self.assertEqual(
            local.gpus_of(2, {name: "4, 6"}, devices), [{name: "4"}, {name: "6"}]
        )
        with self.assertRaisesRegex(config.InputError, "must divide the 10 GPUs"):
            local.gpus_of(3, {}, devices)
        self.assertEqual(local.gpus_of(3, {"JAX_PLATFORMS": "cpu"}, devices), [{}] * 3)
        (devices / "accel0").touch()
        with self.assertRaisesRegex(config.InputError, "this machine has TPUs"):
            local.gpus_of(2, {}, devices)


if __name__ == "__main__":
    environment.main()
