"""A service as a taskset: everything that takes a taskset takes its address."""

import asyncio
import concurrent.futures
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from glm5_jax import config, environments
from glm5_jax.environments import play, proofs, protocol, validate
from glm5_jax.environments.service import remote, through
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import held_out
from tests import environment
from tests.data import templates_test
from tests.environments import episodes
from tests.environments.service import played
from tests.rl import scripted

TEMPLATE = templates_test.template(clear=False)
SETTINGS = episodes_lib.Settings(max_new_tokens=16, max_turns=3, num_concurrent=4)
# A second try comes soon.
AGAIN_SOON = mock.patch.object(remote, "_AGAIN_SECONDS", 0.02)


def collect(taskset, answer, indices=range(4), **how):
    """Plays episodes by RL's own code, with a scripted engine."""
    jobs = [
        episodes_lib.Job(taskset.task("train", 0, i), i, request_id=3 * i)
        for i in indices
    ]
    engine = scripted.ScriptedEngine(answer, capacity=4096)
    return scripted.collect(engine, taskset, TEMPLATE, jobs, SETTINGS, **how)


class RemoteTest(parameterized.TestCase):
    def serve(self, taskset=None, **settings):
        server = played.Server(taskset or played.Talk(), **settings)
        self.addCleanup(server.stop)
        return server

    def test_tasks_are_those_of_the_service(self):
        own = environments.make("calculator:2")
        there = environments.make(self.serve(own).url)
        self.assertEqual(there.splits, [*protocol.splits(own)])
        for split in there.splits:
            for index in (0, 31, 32, 70):
                task, wanted = there.task(split, 3, index), own.task(split, 3, index)
                for name in ("id", "messages", "tools", "tag", "pays_when_cut"):
                    self.assertEqual(
                        json.dumps(getattr(task, name)),
                        json.dumps(getattr(wanted, name)),
                    )
                self.assertNotIn(str(wanted.answer), str(task.answer))
                self.assertIsNone(there.demonstration(task))

    def test_a_service_is_proven_by_the_taskset_that_it_serves(self):
        server = self.serve(environments.make("calculator:2"))
        settings = validate.Settings(num_tasks=3, num_repeats=2, through=server.url)
        figures = validate.validate("calculator:2", settings, None)
        self.assertEqual((figures["tasks"], figures["proven"]), (3, 3))
        self.assertEqual(server.episodes.num_begun, figures["episodes"])
        self.assertEmpty(server.episodes)
        with self.assertRaisesRegex(config.InputError, "another task than gcd"):
            validate.validate("gcd", settings, None)
        with self.assertRaisesRegex(config.InputError, "tells no solutions.*--through"):
            validate.validate(server.url, validate.Settings(), None)

    def test_a_proof_through_a_service_has_its_source(self):
        class Sourced(played.Talk):
            def source_of(self, task):
                return f"source of {task.id}"

        both = through.Through(Sourced(), remote.Remote(self.serve(Sourced()).url))
        task = both.task("train", 0, 0)
        self.assertEqual(proofs.source_of(both, task), "source of train/0/0")
        self.assertEqual(proofs.source_of(played.Talk(), task), "")

    def test_it_is_played_by_hand(self):
        server = self.serve(environments.make("reverse:3"))
        said = environments.make("reverse:3").task("train", 0, 0)
        line = f"{said.answer}\n"
        self.enter_context(mock.patch.object(play, "_next_line", return_value=line))
        self.enter_context(mock.patch.object(play, "_say"))
        self.assertEqual(play.play(server.url, "", 0, 0), 1.0)

    def test_it_is_mixed_wrapped_and_shortened(self):
        own = environments.make("gcd:2")
        url = self.serve(own).url
        mixture = environments.make(f"2*{url}+reverse:3")
        tagged = [mixture.task("train", 0, i).tag for i in range(6)]
        self.assertEqual(tagged.count(url), 4)
        for name in (url, f"{url}+reverse:3", f"context:5:{url}", f"python:{url}"):
            taskset = environments.make(name)
            task = taskset.task("train", 0, 0)
            right = str(own.task("train", 0, 0).answer)
            for said, paid in ((right, 1.0), ("no", 0.0)):
                (result,) = episodes.play(taskset, task, said)
                self.assertEqual(result.reward.total, paid, name)

    def test_rl_plays_it_as_any_other(self):
        taskset = played.Talk()
        server = self.serve(taskset)
        there = environments.make(server.url)

        def answer(request):
            said = ("crash", played.SECRET, "a", "no reward")[request.id // 3]
            if said == "a" and request.id % 3:
                said = "end"
            return templates_test.ids_of(f"</think>{said}<|user|>")

        crash, right, two, unpaid = collect(there, answer)
        label = protocol.Label
        self.assertEqual((crash.label, crash.reward), (label.ENV_ERROR, None))
        self.assertIn("KeyError", crash.reason)
        self.assertEqual((right.label, right.reward.total), (label.OK, 1.0))
        self.assertEqual(right.reward.parts, {"correct": 1.0, "brevity": 0.5})
        self.assertEqual((two.label, two.reward.total, two.num_turns), (label.OK, 0, 2))
        self.assertEqual(unpaid.label, label.REWARD_ERROR)
        for one in (crash, right, two, unpaid):
            self.assertEqual(one.close_error, "")
        played.until(lambda: taskset.num_open == 0)
        self.assertEmpty(server.episodes)

    def test_equal_held_out_tasks_are_asked_once(self):
        there = environments.make(self.serve(played.Twice()).url)
        found = [task.messages for task in held_out.tasks(there, 20)]
        own = [task.messages for task in held_out.tasks(played.Twice(), 20)]
        self.assertEqual(found, own)
        self.assertLen({str(said) for said in own}, 20)

    @AGAIN_SOON
    def test_an_episode_waits_for_its_place(self):
        server = self.serve(max_episodes=1)
        there = environments.make(server.url)
        path = server.begin()

        async def wait():
            waiting = there.environment()
            begun = asyncio.create_task(waiting.reset(there.task("train", 0, 0)))
            while server.episodes.num_refused < 2:
                self.assertFalse(begun.done())
                await asyncio.sleep(0.01)
            await asyncio.to_thread(server.ask, "DELETE", path)
            await begun
            await waiting.close()

        asyncio.run(wait())

    @AGAIN_SOON
    def test_a_begin_that_was_sent_is_not_sent_again(self):
        """Else each try may begin an episode that nobody ends."""
        paths = []

        class Broken(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                paths.append(self.path)

            def log_message(self, *what):
                pass

        async def begin(url):
            episode = remote.Episode(url)
            try:
                await episode.reset(protocol.Task("a", (), {"index": 0}))
            finally:
                await episode.close()

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken) as other:
            threading.Thread(target=other.serve_forever, args=(0.05,)).start()
            try:
                with (
                    mock.patch.object(remote, "_FULL_SECONDS", 0.3),
                    self.assertRaisesRegex(remote.ServiceError, "does not answer"),
                ):
                    asyncio.run(begin(f"http://127.0.0.1:{other.server_port}"))
            finally:
                other.shutdown()
        self.assertEqual(paths, ["/v1/episodes"])

    def test_what_a_service_lacks_is_told_before_the_limit_of_a_call(self):
        """Else an episode that cannot begin would only be late."""
        tries = 2 * remote._CONNECT_SECONDS + 2 * remote._AGAIN_SECONDS
        longest = remote._FULL_SECONDS + tries
        self.assertLess(longest, config.RLConfig().step_timeout_seconds)

    @parameterized.parameters(
        ("http://127.0.0.1:1", "no service .* does not answer.*serve NAME"),
        ("http://", "must be http://HOST:PORT"),
        ("http://me:key@127.0.0.1:8010", "a key comes from"),
        ("http://127.0.0.1:x", "must be http://HOST:PORT"),
        ("https://127.0.0.1:8010/?a=b", "must be http://HOST:PORT"),
        ("http://127..0.0.1:8010", "must be http://HOST:PORT"),
        ("http://127.0.0.1:1/ä", "must be http://HOST:PORT"),
    )
    @AGAIN_SOON
    def test_wrong_addresses_are_one_message(self, name, message):
        with self.assertRaisesRegex(config.InputError, message) as caught:
            environments.make(name)
        self.assertLen(str(caught.exception).splitlines(), 1)

    def test_a_server_of_something_else_is_noticed(self):
        class Hello(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"[1, 2]")

            def log_message(self, *what):
                pass

        with http.server.HTTPServer(("127.0.0.1", 0), Hello) as other:
            threading.Thread(target=other.handle_request).start()
            with self.assertRaisesRegex(config.InputError, "is no service"):
                environments.make(f"http://127.0.0.1:{other.server_port}")


class OwnProcess:
    """A service of the command line, in a process of its own."""

    def __init__(self, *flags):
        words = [sys.executable, "-m", "glm5_jax.environments", "serve", "calculator:2"]
        self.process = subprocess.Popen(
            [*words, "--port=0", *flags],  # any that is free when it binds
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for line in self.process.stderr:
            if found := re.search(r"Serving calculator:2 at (http:.*:(\d+))$", line):
                self.url, self.port = found[1], int(found[2])
                return
        raise AssertionError("the service did not start")

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


# These processes become other programs at once.
@pytest.mark.filterwarnings("ignore:os.fork")
class EndTest(absltest.TestCase):
    @AGAIN_SOON
    def test_a_killed_service_spoils_episodes_and_no_run(self):
        """Then a new one at the same address plays those that follow."""
        server = OwnProcess()
        self.addCleanup(server.end)
        there = environments.make(f"{server.url}+gcd:2")

        def answer(request):
            if request.id == 0 and server.process.poll() is None:
                server.process.kill()  # while the model speaks its first turn
                server.process.wait()
            return templates_test.ids_of("</think>1<|user|>")

        # Of the others some may not have begun yet: they do not wait here.
        with mock.patch.object(remote, "_FULL_SECONDS", 0.1):
            found = collect(there, answer)
        label = protocol.Label
        self.assertEqual(
            [one.label for one in found],
            [label.ENV_ERROR, label.OK, label.ENV_ERROR, label.OK],
        )
        self.assertRegex(found[0].reason, "does not answer|disconnected")
        # An episode that cannot begin, and tasks that were not fetched yet, wait.
        with mock.patch.object(remote, "_FULL_SECONDS", 0.1):
            (spoilt,) = collect(there, answer, [0])
        self.assertEqual(spoilt.label, label.ENV_ERROR)
        with (
            mock.patch.object(remote, "_PATIENCE_SECONDS", 0.1),
            self.assertRaisesRegex(config.InputError, "^http://.* told no tasks"),
        ):
            there.task("train", 5, 0)
        with concurrent.futures.ThreadPoolExecutor() as threads:
            coming = threads.submit(there.task, "train", 5, 0)
            beginning = threads.submit(collect, there, answer, [0])
            time.sleep(0.5)
            self.assertFalse(coming.done() or beginning.done())
            again = played.Server(environments.make("calculator:2"), server.port)
            self.addCleanup(again.stop)
            self.assertIn("messages", vars(coming.result()))
            self.assertEqual(beginning.result()[0].label, label.OK)
        found = collect(there, answer, [0, 10_000])
        self.assertEqual([one.label for one in found], [label.OK, label.OK])

    def test_sigterm_lets_episodes_end(self):
        server = OwnProcess("--drain_seconds=20")
        self.addCleanup(server.end)
        taskset = environments.make("calculator:2")
        there = remote.Remote(server.url)
        both = through.Through(taskset, there)
        task = both.task("train", 0, 0)
        attempts = proofs.attempts_of(taskset, task)

        async def play_on():
            under_way, late = both.environment(), both.environment()
            await under_way.reset(task)
            server.process.send_signal(signal.SIGTERM)
            while played.ask(server.port, "GET", "/health")[0] == 200:
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.4)  # beyond the end of a server without episodes
            with (
                mock.patch.object(remote, "_FULL_SECONDS", 0.0),
                self.assertRaisesRegex(remote.ServiceError, "about to end"),
            ):
                await late.reset(task)
            for turn in attempts.right:
                last = await under_way.step(turn)
            await under_way.close()
            await late.close()
            return last

        self.assertEqual(asyncio.run(play_on()).reward.total, 1.0)
        self.assertEqual(server.process.wait(20), 0)


if __name__ == "__main__":
    environment.main()
