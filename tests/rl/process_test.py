"""An orchestrator behind HTTP, before a server that answers by a script."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging as std_logging
import os
import pathlib
import subprocess
import sys
import threading
import time
from unittest import mock

import aiohttp
from absl.testing import absltest, parameterized
from aiohttp import web

from glm5_jax import environments
from glm5_jax.config import DataConfig, RLConfig, TrainConfig
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.rl import held_out, trajectories
from glm5_jax.rl.actors import fleet, lag, process, remote
from glm5_jax.rl.actors import orchestrator as orchestrator_lib
from tests.rl import monitor_test, remote_test

TOKENIZER = tokenizer_lib.named("byte_chat")
UPDATE = {"update_info": {"path": "v0"}}
PACKAGE = str(pathlib.Path(process.__file__).parents[2])
END = TOKENIZER.special_ids["<|user|>"]
SAID = [*b"ab", END]
CONFIG = TrainConfig(
    stage="async_rl",
    data=DataConfig(tokenizer="byte_chat", enable_thinking=False),
    rl=RLConfig(
        environment="reverse_dense:2-3",
        prompts_per_step=2,
        group_size=3,
        max_new_tokens=8,
        max_turns=1,
        slots=4,
        num_eval_tasks=4,
        max_staleness=1,
        num_engines=1,
        dynamic_sampling=False,
    ),
)


@dataclasses.dataclass
class Server:
    """A server of scripted answers that is its own router."""

    version: int = 0
    requests: list = dataclasses.field(default_factory=list)
    updates: list = dataclasses.field(default_factory=list)

    key: str | None = None

    async def models(self, request):
        self.key = request.headers.get("Authorization")
        return web.json_response({"data": [{"max_model_len": 64}]})

    async def metrics(self, request):
        return web.Response(text=f"glm5_jax_weights_version {self.version}\n")

    async def generate(self, request):
        self.requests.append(await request.json())
        choice = {
            "token_ids": SAID,
            "logprobs": {"content": [{"logprob": -0.5} for _ in SAID]},
            "finish_reason": "stop",
            "weight_versions": [self.version] * len(SAID),
            "cache_versions": [self.version] * len(SAID),
        }
        return web.json_response({"choices": [choice]})

    async def update(self, request):
        body = await request.json()
        self.updates.append((request.path, body))
        self.version = body.get("weight_version", self.version)
        return web.json_response({})

    async def replicas(self, request):
        return web.json_response({"replicas": [{"url": "u", "state": "ready"}]})

    def routes(self):
        paths = (fleet.START, fleet.UPDATE, fleet.FINISH)
        return [
            ("GET", remote.MODELS, self.models),
            ("POST", remote.GENERATE, self.generate),
            ("GET", fleet.METRICS, self.metrics),
            ("GET", fleet.REPLICAS, self.replicas),
            *(("POST", path, self.update) for path in paths),
        ]


@contextlib.asynccontextmanager
async def orchestrating(server, config=CONFIG):
    """Yields what posts a body to the orchestrator: (status, answer)."""
    async with remote_test.served(*server.routes()) as (url, session):
        runner = web.AppRunner(process.Process(config, url).app())
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]

            async def ask(path, method="POST", **body):
                address = f"http://{host}:{port}{path}"
                limit = aiohttp.ClientTimeout(60)
                async with session.request(
                    method, address, json=body, timeout=limit
                ) as answer:
                    return answer.status, await answer.json()

            yield ask
        finally:
            await runner.cleanup()
            running = [task.get_coro().cr_code for task in asyncio.all_tasks()]
            ours = [code for code in running if code.co_filename.startswith(PACKAGE)]
            assert not ours, "an orchestrator leaves no task behind"


def episodes(answer):
    """Those that ended since the last step, of an answer to /take."""
    *_, ended, _ = trajectories.unpack(answer["played"])
    return ended


def ids(answer):
    """The tasks of a step."""
    *groups, _, _ = trajectories.unpack(answer["played"])
    return [group[0].task.id for group in groups]


# Opens a run's tasks and tokenizer, as `orchestrate` does before it listens.
WITHOUT_JAX = """
import sys
from glm5_jax import config, orchestrate
from glm5_jax.rl.actors import process
made = config.TrainConfig(
    stage="async_rl",
    data=config.DataConfig(tokenizer="byte_chat"),
    rl=config.RLConfig(environment="calculator", max_new_tokens=8),
)
process.Process(made, "http://a:1").app()
print(*sorted(name for name in sys.modules if name.split(".")[0] in sys.argv[1:]))
"""


class ProcessTest(parameterized.TestCase):
    def test_jax_is_not_imported(self):
        """It could take an accelerator, which trainer and servers need."""
        command = [sys.executable, "-c", WITHOUT_JAX, "jax", "jaxlib", "flax"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        self.assertEqual(done.stdout.split(), [])

    def test_a_step(self):
        server = Server()

        async def run():
            async with orchestrating(server) as ask:
                found = [await ask("/status", "GET"), await ask("/memory", version=0)]
                found.append(await ask("/take", version=0))
                await ask("/publish", folder="i0-v3", version=3)
                found += [
                    await ask("/start", groups={}, journal=None),
                    await ask("/start", groups={}, journal=None),
                ]
                found.append(await ask("/take", version=0))
                found.append(await ask("/memory", version=0))
                found.append(await ask("/take", version=1))
                await ask("/memory", version=1)
                found.append(await ask("/status", "GET"))
                return found

        found = asyncio.run(run())
        before, memory, too_early, started, again, taken, saved, other, after = found
        ready = [{"url": "u", "state": "ready"}]
        self.assertEqual(before[0], 200)
        self.assertIsNone(before[1]["version"])
        self.assertEqual(before[1]["ledger"], {})
        self.assertEqual((before[1]["episodes"], before[1]["waiting"]), ({}, 0))
        self.assertEqual({*after[1]["episodes"]}, {"2_letters", "3_letters"})
        self.assertEqual((before[1]["replicas"], before[1]["repaired"]), (ready, 0))
        self.assertEqual(memory, (200, {}))
        self.assertEqual(too_early[0], 500)
        self.assertEqual(too_early[1]["type"], "AssertionError")
        self.assertIn("/start comes first", too_early[1]["error"])
        self.assertEqual(started, (200, {}))
        self.assertEqual((again[0], again[1]["type"]), (500, "RuntimeError"))
        self.assertIn("already", again[1]["error"])

        status, answer = taken
        self.assertEqual(status, 200)
        *groups, played, _ = trajectories.unpack(answer["played"])
        self.assertEqual([len(group) for group in groups], [3, 3])
        # Each is sent once, though it is of a group and has ended since the last step.
        self.assertLen(answer["played"]["records"], len(played))
        self.assertGreaterEqual(len(played), 6)
        for episode in played:
            (sample,) = episode.samples
            self.assertEqual(sample.tokens[-len(SAID) :], SAID)
            self.assertEqual({*sample.versions} - {-1}, {3})
        self.assertEqual(answer["repaired"], 0)
        self.assertBetween(answer["lag"], 0, 60)
        self.assertEqual(answer["ledger"]["in_flight"], 2, answer["ledger"])
        self.assertEqual(saved[0], 200)
        self.assertEqual(other[0], 200)
        self.assertEmpty({*ids(answer)} & {*ids(other[1])})
        self.assertEqual(after[1]["version"], 1)
        self.assertEqual(after[1]["ledger"]["done"], 2)
        named = {"update_info": {"path": "i0-v3"}}
        self.assertEqual(
            server.updates,
            [
                (fleet.START, {}),
                (fleet.UPDATE, named),
                (fleet.FINISH, {"weight_version": 3, **named}),
            ],
        )

    def test_servers_that_another_run_has_used(self):
        server = Server(version=7)

        async def run():
            async with orchestrating(server) as ask:
                await ask("/publish", folder="i0-v0", version=0)
                await ask("/start", groups={}, journal=None)
                return await ask("/take", version=0)

        with mock.patch.dict(os.environ, {"GLM5_JAX_API_KEY": "secret"}):
            status, answer = asyncio.run(run())
        self.assertEqual(status, 200)
        self.assertEqual((server.version, server.key), (8, "Bearer secret"))
        for episode in episodes(answer):
            (sample,) = episode.samples
            self.assertEqual({*sample.versions} - {-1}, {0})

    def test_rows_are_no_longer_than_the_trainer_s(self):
        """The servers of others may hold longer sequences."""
        server, room = Server(), 24
        short = dataclasses.replace(CONFIG.data, sequence_length=room)
        config = dataclasses.replace(CONFIG, data=short)

        async def run():
            async with orchestrating(server, config) as ask:
                return await ask("/evaluate")

        asyncio.run(run())
        for body in server.requests:
            most = len(body["token_ids"]) + body["sampling_params"]["max_tokens"]
            self.assertLessEqual(most, room)
        self.assertNotEmpty(server.requests)

    def test_an_evaluation_plays_the_held_out_tasks(self):
        server = Server()

        async def run():
            async with orchestrating(server) as ask:
                return await ask("/evaluate")

        status, answer = asyncio.run(run())
        self.assertEqual(status, 200)
        self.assertLen(answer["episodes"], 4)
        asked = {body["sampling_params"]["seed"] for body in server.requests}
        self.assertEqual(asked, {held_out.FIRST_ID + i for i in range(4)})

    @parameterized.parameters((1, 200), (1000, 500))
    def test_an_evaluation_outlives_lost_answers(self, num_lost, wanted):
        """One episode is played again, eight times in all."""
        server = Server()
        generate, asked = server.generate, []

        async def losing(request):
            seed = (await request.json())["sampling_params"]["seed"]
            if seed == held_out.FIRST_ID:
                asked.append(seed)
                if len(asked) <= num_lost:
                    return web.Response(status=502, text="the replica was lost")
            return await generate(request)

        server.generate = losing

        async def run():
            async with orchestrating(server) as ask:
                return await ask("/evaluate")

        with mock.patch.object(process, "_RETRY_SECONDS", 0.001):
            status, answer = asyncio.run(run())
        self.assertEqual(status, wanted)
        if status == 200:
            self.assertLen(answer["episodes"], 4)
        else:
            self.assertIn("the replica was lost", answer["error"])
        self.assertLen(asked, 2 if status == 200 else orchestrator_lib.MAX_FAILURES)

    def test_an_evaluation_beside_the_steps_comes_with_a_later_one(self):
        server = Server()

        async def run():
            async with orchestrating(server) as ask:
                await ask("/publish", folder="i0-v3", version=3)
                await ask("/start", groups={}, journal=None)
                self.assertEqual(await ask("/evaluate_beside", version=3), (200, {}))
                for version in itertools.count():
                    _, answer = await ask("/take", version=version)
                    if answer["evaluated"] is not None:
                        return answer["evaluated"]

        version, records = asyncio.run(run())
        self.assertEqual(version, 3)
        self.assertLen(trajectories.all_from_json(records), 4)

    def test_servers_that_only_evaluate_keep_their_version(self):
        """Those of training get newer ones meanwhile."""
        training, evaluating = Server(), Server(version=7)

        async def run():
            async with remote_test.served(*evaluating.routes()) as (url, _):
                theirs = {"servers": "http://a:1", "weights_store": "/w"}
                rl = dataclasses.replace(
                    CONFIG.rl,
                    **theirs | {"num_engines": 0, "evaluates_beside": True},
                    eval_servers=url,
                )
                config = dataclasses.replace(CONFIG, rl=rl)
                async with orchestrating(training, config) as ask:
                    await ask("/publish", folder="v0", version=0)
                    await ask("/start", groups={}, journal=None)
                    await ask("/evaluate_beside", version=0)
                    for version in itertools.count():
                        _, answer = await ask("/take", version=version)
                        if answer["evaluated"] is not None:
                            return answer["evaluated"]
                        new = version + 1
                        await ask("/publish", folder=f"v{new}", version=new)

        version, records = asyncio.run(run())
        found = held_out.Evaluation(version, trajectories.all_from_json(records))
        figures = held_out.mixed_figures(found)
        names = "eval/tasks", "eval/version", "eval/version_last", "eval/version_share"
        self.assertEqual([figures[name] for name in names], [4, 0, 0, 1.0])
        pins = {b["sampling_params"].get("weight_version") for b in evaluating.requests}
        self.assertEqual(pins, {8})  # they were used before: its version is theirs
        self.assertLen(evaluating.requests, 4)
        pins = {b["sampling_params"].get("weight_version") for b in training.requests}
        self.assertEqual(pins, {None})
        self.assertEqual([body for path, body in evaluating.updates][1:2], [UPDATE])

    def test_a_server_that_missed_a_version_gets_it(self):
        server, router = Server(), remote_test.Router(["ready", "ready"])
        server.routes = lambda: [*Server.routes(server)[:2], *router.routes()]

        async def run():
            async with orchestrating(server) as ask:
                await ask("/publish", folder="i0-v3", version=3)
                router.states[1] = "unfit"
                async with asyncio.timeout(30):
                    while router.states[1] != "ready":
                        await asyncio.sleep(0.01)

        with mock.patch.object(process, "_REPAIR_SECONDS", 0.01):
            asyncio.run(run())

    @parameterized.parameters("before", "while it waits", "with groups at hand")
    def test_what_fails_beside_the_episodes_ends_the_next_step(self, when):
        server, fails = Server(), asyncio.Event()

        async def repair(fleet, seconds):
            await fails.wait()
            raise ZeroDivisionError("repairs are over")

        async def generate(request):
            await asyncio.sleep(60)

        if when == "while it waits":
            server.generate = generate

        async def run():
            async with orchestrating(server) as ask:
                if when == "before":
                    fails.set()
                await ask("/publish", folder="i0-v0", version=0)
                await ask("/start", groups={}, journal=None)
                if when == "with groups at hand":
                    await ask("/take", version=0)
                    while (await ask("/status", "GET"))[1]["ledger"]["ready"] < 2:
                        await asyncio.sleep(0.01)
                    fails.set()
                taking = asyncio.create_task(ask("/take", version=1))
                await asyncio.sleep(0.1)
                fails.set()
                return await taking

        with mock.patch.object(fleet.Fleet, "repair", repair):
            began = time.monotonic()
            status, answer = asyncio.run(run())
        self.assertEqual((status, answer["type"]), (500, "ZeroDivisionError"))
        self.assertEqual(answer["error"], "repairs are over")
        self.assertLess(time.monotonic() - began, 40.0)

    def test_an_environment_that_pays_for_junk_ends_the_run_if_settings_say_so(self):
        settings = {"quarantine": "end", "canary_every": 1}
        config = dataclasses.replace(
            CONFIG, rl=dataclasses.replace(CONFIG.rl, **settings)
        )
        shop = monitor_test.Shop(monitor_test.square, lambda said: True, knows=True)

        async def run():
            async with orchestrating(Server(), config) as ask:
                await ask("/publish", folder="i0-v0", version=0)
                await ask("/start", groups={}, journal=None)
                for version in range(50):
                    status, answer = await ask("/take", version=version)
                    if status != 200:
                        return answer

        with mock.patch.object(environments, "make", return_value=shop):
            answer = asyncio.run(run())
        self.assertEqual(answer["type"], "PoisonedError")
        self.assertIn("'odd' pays for junk", answer["error"])

    def test_a_step_that_is_not_ready_says_so_in_time(self):
        server, answers = Server(), asyncio.Event()
        generate = server.generate

        async def late(request):
            await answers.wait()
            return await generate(request)

        server.generate = late

        async def run():
            async with orchestrating(server) as ask:
                await ask("/publish", folder="i0-v0", version=0)
                await ask("/start", groups={}, journal=None)
                found = [await ask("/take", version=0, seconds=0.01) for _ in range(2)]
                found.append(await ask("/evaluate", seconds=0.01))
                answers.set()
                found.append(await ask("/take", version=0))
                found.append(await ask("/evaluate"))
                return found, await ask("/take", version=1)

        found, other = asyncio.run(run())
        self.assertEqual(found[:3], [(200, {"is_ready": False})] * 3)
        self.assertEmpty({*ids(found[3][1])} & {*ids(other[1])})
        self.assertLen(ids(found[3][1]), 2)
        self.assertLen(found[4][1]["episodes"], 4)
        asked = [body["sampling_params"]["seed"] for body in server.requests]
        held_out_asked = [seed for seed in asked if seed >= held_out.FIRST_ID]
        self.assertLen(held_out_asked, 4)  # once

    def test_a_step_that_stalls_ends_what_asked_first(self):
        server, over = Server(), asyncio.Event()

        async def never(request):
            await over.wait()
            return web.Response()

        server.generate = never
        quick = {"answer_timeout_seconds": 0.2, "step_timeout_seconds": 0.1}
        rl = dataclasses.replace(CONFIG.rl, **quick, group_size=1, critic=True)

        async def run():
            async with orchestrating(server, dataclasses.replace(CONFIG, rl=rl)) as ask:
                await ask("/publish", folder="i0-v0", version=0)
                await ask("/start", groups={}, journal=None)
                answer = 200, {}
                while answer[0] == 200:
                    answer = await ask("/take", version=0, seconds=0.05)
                over.set()
                return answer

        with mock.patch.object(orchestrator_lib, "_RETRY_SECONDS", 10.0):
            status, answer = asyncio.run(run())
        self.assertEqual((status, answer["type"]), (500, "StalledError"))

    def test_the_delay_is_that_since_the_step_before(self):
        """By a clock on which the first tenth of a second takes 5.1."""

        async def run():
            async with orchestrating(Server()) as ask:
                await ask("/publish", folder="i0-v0", version=0)
                await ask("/start", groups={}, journal=None)
                await asyncio.sleep(0.15)
                steps = [await ask("/take", version=i) for i in (0, 1)]
                return [answer["lag"] for _, answer in steps]

        ticks = itertools.accumulate(itertools.chain([0.0, 5.1], itertools.repeat(0.1)))
        with mock.patch.object(lag, "time", mock.Mock(monotonic=ticks.__next__)):
            first, second = asyncio.run(run())
        self.assertAlmostEqual(first, 5.0)
        self.assertLess(second, 1e-6)


class LagTest(absltest.TestCase):
    async def watched(self, *works):
        """Returns the longest delay of a loop that does these works."""
        measured = lag.Lag()
        task = asyncio.create_task(measured.measure())
        with measured.naming():
            for work in works:
                await asyncio.sleep(0.15)
                work()
            await asyncio.sleep(0.15)
        task.cancel()
        return measured.taken()

    def test_a_late_event_loop_is_measured(self):
        """By a clock on which a tenth of a second takes 0.2504."""
        ticks = (0.2504 * i for i in itertools.count())
        with mock.patch.object(lag, "time", mock.Mock(monotonic=ticks.__next__)):
            longest = asyncio.run(self.watched(lambda: None))
        self.assertAlmostEqual(longest, 0.1504)

    def test_a_late_event_loop_is_warned_of(self):
        for limit, is_named in ((0.2, True), (30.0, False)):
            with (
                mock.patch.object(lag, "_LATE_SECONDS", limit),
                self.assertLogs("absl", std_logging.INFO) as logs,
            ):
                std_logging.getLogger("absl").info("at least one line")
                longest = asyncio.run(self.watched(lambda: time.sleep(0.4)))
            self.assertBetween(longest, 0.2, 30.0)
            said = [line for line in logs.output if "event loop was late" in line]
            self.assertEqual(bool(said), is_named)
        self.assertEqual(lag._LATE_SECONDS, 1.0)

    def test_the_code_that_blocks_an_event_loop_is_shown_once(self):
        shown, said = threading.Event(), []
        words = "in an_environment_that_computes\n    shown.wait(60)"

        def show(form, *values):
            said.append(form % values)
            if words in said[-1]:
                shown.set()

        def an_environment_that_computes():
            shown.wait(60)
            time.sleep(0.5)  # in which it is looked at again

        with (
            mock.patch.object(lag, "_LOOK_SECONDS", 0.15),
            mock.patch.object(lag, "logging", mock.Mock(error=show)),
        ):
            asyncio.run(self.watched(an_environment_that_computes))
        named = [text for text in said if "in an_environment_that_computes" in text]
        self.assertLen(named, 1)
        self.assertIn(words, named[0])
        names = [thread.name for thread in threading.enumerate()]
        self.assertNotIn("lag", names)


if __name__ == "__main__":
    absltest.main()
