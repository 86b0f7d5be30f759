"""Servers that are busy, lost, slow or wrong; and versions that some of them miss."""

import asyncio
import base64
import contextlib
import dataclasses
import json
from unittest import mock

import aiohttp
import numpy as np
from absl.testing import parameterized
from aiohttp import web

from glm5_jax import config
from glm5_jax.inference import requests
from glm5_jax.rl import completer
from glm5_jax.rl.actors import fleet as fleet_lib
from glm5_jax.rl.actors import remote
from glm5_jax.serving.router import session as router_session
from tests import environment

REQUEST = requests.Request(7, [1, 2, 3], 4, frozenset([9]), temperature=0.5)
ANSWER = {
    "choices": [
        {
            "token_ids": [5, 9],
            "logprobs": {"content": [{"logprob": -0.25}, {"logprob": -0.5}]},
            "finish_reason": "stop",
            "weight_versions": [3, 4],
            "cache_versions": [3, 3],
        }
    ]
}


LONG = 60.0  # seconds; what is waited for takes milliseconds
UPDATES = (fleet_lib.START, fleet_lib.UPDATE, fleet_lib.FINISH)


@contextlib.asynccontextmanager
async def served(*routes):
    """Yields the URL of a server with these routes, and a session of a client."""
    app = web.Application()
    for method, path, handler in routes:
        app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        async with aiohttp.ClientSession() as session:
            yield f"http://{host}:{port}", session
    finally:
        await runner.cleanup()


def complete(*answers, seconds=LONG, **how):
    """Returns the completion that these answers give, and the bodies they got."""
    bodies, left = [], list(answers)

    async def handle(request):
        bodies.append(await request.json())
        answer = left.pop(0) if len(left) > 1 else left[0]
        if callable(answer):
            return await answer(request)
        status, body = answer
        return web.json_response(body, status=status)

    async def run():
        async with served(("POST", remote.GENERATE, handle)) as (url, session):
            engine = remote.Remote(session, url, 64, seconds=seconds, **how)
            return await engine.complete(REQUEST)

    return asyncio.run(run()), bodies


class RemoteTest(parameterized.TestCase):
    def test_a_request_leaves_nothing_to_the_server(self):
        found, (body,) = complete((200, ANSWER))
        self.assertEqual(found.tokens, [5, 9])
        self.assertEqual(found.logprobs, [-0.25, -0.5])
        self.assertEqual(found.versions, [3, 4])
        self.assertEqual(found.cache_versions, [3, 3])
        self.assertEqual(found.finish_reason, "stop")
        self.assertEqual(body["token_ids"], [1, 2, 3])
        wanted = {
            **{"max_tokens": 4, "temperature": 0.5, "seed": 7, "stop_token_ids": [9]},
            **{"ignore_eos": True, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
            **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
            **{"repetition_penalty": 1.0, "logprobs": 1},
        }
        self.assertEqual(body["sampling_params"], wanted)

    def test_experts_are_read(self):
        experts = np.arange(12, dtype="<u2").reshape(4, 1, 3)
        data = base64.b64encode(experts.tobytes()).decode()
        packed = {"data": data, "shape": [4, 1, 3]}
        (choice,) = ANSWER["choices"]
        answer = {"choices": [{**choice, "routed_experts": packed}]}
        found, _ = complete((200, answer), with_experts=True)
        np.testing.assert_array_equal(found.experts, experts)

    def test_versions_are_those_of_the_run(self):
        async def run():
            answers = ("POST", remote.GENERATE, handle)
            async with served(answers) as (url, session):
                engine = remote.Remote(session, url, 64, seconds=LONG)
                engine.versions_ahead = 2
                return await engine.complete(REQUEST)

        async def handle(request):
            return web.json_response(ANSWER)

        found = asyncio.run(run())
        self.assertEqual((found.versions, found.cache_versions), ([1, 2], [1, 1]))

    def test_a_router_is_told_which_conversation_it_is(self):
        told = []

        async def handle(request):
            told.append(request.headers.get(remote.SESSION))
            return web.json_response(ANSWER)

        async def run():
            async with served(("POST", remote.GENERATE, handle)) as (url, session):
                engine = remote.Remote(session, url, 64, seconds=LONG)
                await engine.complete(REQUEST)
                await engine.complete(dataclasses.replace(REQUEST, session=5))

        asyncio.run(run())
        self.assertEqual(told, [None, "5"])
        self.assertEqual(remote.SESSION.lower(), router_session.HEADER)

    def test_it_knows_what_the_cache_had(self):
        """A server that does not tell is no reason to play fewer episodes."""
        told = {"prompt_tokens_details": {"cached_tokens": 2}}
        for usage, want in ((told, 2), ({"prompt_tokens_details": None}, 3), (None, 3)):
            found, _ = complete((200, ANSWER | {"usage": usage}))
            self.assertEqual(found.num_cached, want)

    def test_a_busy_server_is_asked_again(self):
        busy = (429, {"error": "full"}), (503, {"error": "no replica"})
        found, bodies = complete(*busy, (200, ANSWER))
        self.assertEqual(found.tokens, [5, 9])
        self.assertLen(bodies, 3)

    @parameterized.named_parameters(
        ("fails", (500, {"error": "boom"}), "answers 500: .*boom"),
        ("other_form", (200, {"choices": []}), "in another form"),
        ("aborted", (200, None), "ended a request: abort"),
        ("no_logprobs", (200, {"choices": [{"logprobs": None}]}), "in another form"),
        ("always_busy", (503, {}), "completed a request for 0.5 s.*answer_timeout_sec"),
    )
    def test_errors_are_those_of_the_engine(self, answer, words):
        if answer == (200, None):
            (choice,) = ANSWER["choices"]
            answer = (200, {"choices": [{**choice, "finish_reason": "abort"}]})
        seconds = 0.5 if answer[0] == 503 else LONG
        with self.assertRaisesRegex(completer.EngineError, words):
            complete(answer, seconds=seconds)

    @parameterized.parameters(400, 404, 413, 422)
    def test_a_request_that_is_refused_is_wrong_input(self, status):
        with self.assertRaisesRegex(config.InputError, "refuses a request: .*too long"):
            complete((status, {"error": "too long"}))

    @parameterized.parameters(
        (None, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]),  # doubled, up to a limit
        ("3", [3.0, 3.0, 3.0, 3.0, 3.0, 3.2, 5.0]),
        ("9", [5.0, 5.0]),
        ("soon", [0.1, 0.2]),
    )
    def test_a_busy_server_says_when_to_come_again(self, wait, waits):
        slept, left = [], list(waits)

        async def sleep(seconds):
            slept.append(seconds)

        async def busy(request):
            if not left:
                return web.json_response(ANSWER)
            left.pop()
            headers = {} if wait is None else {"Retry-After": wait}
            return web.Response(status=503, headers=headers)

        with mock.patch.object(remote, "asyncio", mock.Mock(sleep=sleep)):
            complete(busy, seconds=60.0)
        self.assertEqual(slept, waits)

    def test_a_server_may_be_busy_for_hours(self):
        """A float has no 2^1024."""
        answers = [(503, "", 0.0)] * 1030 + [(200, ANSWER, 0.0)]
        session = mock.Mock(spec=aiohttp.ClientSession)
        made = remote.Remote(session, "http://a:1", 64, seconds=1e6)
        sleep = mock.AsyncMock()
        with (
            mock.patch.object(made, "_ask", mock.AsyncMock(side_effect=answers)),
            mock.patch.object(remote, "asyncio", mock.Mock(sleep=sleep)),
        ):
            found = asyncio.run(made.complete(REQUEST))
        self.assertEqual(found.tokens, [5, 9])
        self.assertEqual(sleep.await_args, mock.call(5.0))

    def test_no_time_left_is_no_request(self):
        """A limit of 0 seconds would be none for aiohttp."""
        clock = mock.Mock(monotonic=mock.Mock(return_value=100.0))
        with (
            mock.patch.object(remote, "time", clock),
            self.assertRaisesRegex(completer.EngineError, "for 0 s"),
        ):
            complete((200, ANSWER), seconds=0.0)

    def test_an_answer_is_shown_in_part(self):
        with self.assertRaises(completer.EngineError) as caught:
            complete((500, {"error": "x" * 1000}))
        self.assertEqual(str(caught.exception).count("x"), 300 - len('{"error": "'))

    def test_a_slow_or_vanished_server_is_lost(self):
        async def slow(request):
            await asyncio.sleep(60)

        async def vanishes(request):
            request.transport.close()
            await asyncio.sleep(60)

        late = "has not completed a request for 0.3 s.*rl.answer_timeout_seconds"
        lost = "is lost: Server disconnected"
        for answer, seconds, words in ((slow, 0.3, late), (vanishes, LONG, lost)):
            with self.assertRaisesRegex(completer.EngineError, words):
                complete(answer, seconds=seconds)

    def test_a_server_that_closes_a_connection_is_asked_again(self):
        """It may do so just as a request comes on a connection that was kept."""
        left = [None, None]

        async def vanishes(request):
            if not left:
                return web.json_response(ANSWER)
            left.pop()
            request.transport.close()
            await asyncio.sleep(60)

        found, bodies = complete(vanishes)
        self.assertEqual(found.tokens, [5, 9])
        self.assertLen(bodies, 3)

    def test_a_cancelled_request_closes_its_connection(self):
        async def run():
            asked, closed = asyncio.Event(), asyncio.Event()

            async def handle(request):
                asked.set()
                while request.transport is not None:  # None: the client has left
                    await asyncio.sleep(0.01)
                closed.set()

            route = ("POST", remote.GENERATE, handle)
            async with served(route) as (url, session):
                engine = remote.Remote(session, url, 64, seconds=LONG)
                task = asyncio.create_task(engine.complete(REQUEST))
                async with asyncio.timeout(LONG):
                    await asked.wait()
                    task.cancel()
                    await closed.wait()
                return task.cancelled()

        self.assertTrue(asyncio.run(run()))

    def test_the_capacity_is_the_smallest(self):
        async def models(request):
            sizes = [{"max_model_len": 96}, {"max_model_len": 64}]
            return web.json_response({"data": sizes})

        async def run():
            async with served(("GET", remote.MODELS, models)) as (url, session):
                return await remote.capacity_of(session, url)

        self.assertEqual(asyncio.run(run()), 64)

    def test_an_error_tells_no_capacity(self):
        async def models(request):
            return web.json_response({"data": [{"max_model_len": 96}]}, status=503)

        async def run():
            async with served(("GET", remote.MODELS, models)) as (url, session):
                return await remote.capacity_of(session, url)

        with self.assertRaisesRegex(completer.EngineError, "does not tell its models"):
            asyncio.run(run())


@dataclasses.dataclass
class Router:
    """A router with replicas, some of which refuse; it keeps what they were told."""

    states: list[str]
    takes: bool = True
    refusal: int = 500
    metrics: str = "glm5_jax_weights_version 0"
    silent: list = dataclasses.field(default_factory=list)  # statuses of /metrics first
    told: list = dataclasses.field(default_factory=list)

    def routes(self):
        urls = [f"http://replica:{i}" for i in range(len(self.states))]

        async def replicas(request):
            told = zip(urls, self.states, strict=True)
            found = [{"url": url, "state": state} for url, state in told]
            return web.json_response({"replicas": found})

        async def tell(request):
            body = json.loads(await request.text())
            only = request.query.get("replica")
            self.told.append((request.path, body, *([only] if only else [])))
            index = urls.index(only) if only else None
            if not self.takes:
                return web.json_response({"error": "no"}, status=self.refusal)
            if self.metrics and request.path.endswith(fleet_lib.FINISH):
                version = self.told[-1][1]["weight_version"]
                self.metrics = f"glm5_jax_weights_version {version}"
            if index is not None and request.path.endswith(fleet_lib.FINISH):
                self.states[index] = "ready"
            return web.json_response({})

        async def metrics(request):
            status = self.silent.pop(0) if self.silent else None
            if status is None:
                return web.Response(text=self.metrics)
            return web.Response(text="other 1" if status == 200 else "", status=status)

        paths = (fleet_lib.START, fleet_lib.UPDATE, fleet_lib.FINISH)
        return [
            ("GET", fleet_lib.METRICS, metrics),
            ("GET", fleet_lib.REPLICAS, replicas),
            ("POST", fleet_lib.REPLICAS, tell),
            *(("POST", path, tell) for path in paths),
        ]


class FleetTest(parameterized.TestCase):
    def test_a_server_that_missed_a_version_gets_the_current_one(self):
        router = Router(["ready", "ready"])

        async def run():
            async with served(*router.routes()) as (url, session):
                fleet = fleet_lib.Fleet(session, url)
                repair = asyncio.create_task(fleet.repair(0.01))
                await fleet.publish("i0000-v000003", 3)
                router.states[1] = "unfit"
                async with asyncio.timeout(30):
                    while not fleet.num_repaired:
                        await asyncio.sleep(0.01)
                repair.cancel()
                return fleet.num_repaired

        self.assertEqual(asyncio.run(run()), 1)
        self.assertEqual(router.states, ["ready", "ready"])
        named = {"update_info": {"path": "i0000-v000003"}}
        words = [
            (fleet_lib.START, {}),
            (fleet_lib.UPDATE, named),
            (fleet_lib.FINISH, {"weight_version": 3, **named}),
        ]
        # Through the router, which alone may reach it and know its key.
        apart = [(*told, "http://replica:1") for told in words]
        trusted = router.told[6][1]
        self.assertEqual(router.told[:6], words + apart)
        self.assertEqual(trusted, {"url": "http://replica:1", "has_weights": True})

    @parameterized.parameters(
        "{}", "[]", "null", '{"replicas": 1}', '{"replicas": [1]}'
    )
    def test_a_strange_answer_ends_no_repairs(self, strange):
        router, left = Router(["unfit"]), [strange]
        *others, get = router.routes()[:2]

        async def replicas(request):
            if left:
                return web.Response(text=left.pop(), content_type="application/json")
            return await get[2](request)

        routes = [*others, (*get[:2], replicas), *router.routes()[2:]]

        async def run():
            async with served(*routes) as (url, session):
                fleet = fleet_lib.Fleet(session, url)
                fleet.current = "folder", 5
                repair = asyncio.create_task(fleet.repair(0.01))
                async with asyncio.timeout(30):
                    while not fleet.num_repaired and not repair.done():
                        await asyncio.sleep(0.01)
                repair.cancel()
                return fleet.num_repaired

        self.assertEqual(asyncio.run(run()), 1)
        self.assertEqual(left, [])

    @parameterized.parameters(
        ((7, 5), 3, 8, 9),  # another run has used the servers
        ((3,), 3, 4, 5),  # they may still draw with it
        ((2,), 3, 3, 4),
        ((0,), 0, 0, 1),  # servers that nobody has used
    )
    def test_versions_of_servers_increase(self, had, version, first, second):
        """As their /metrics tell, alone or behind a router."""
        name = "glm5_jax_weights_version"
        labels = ["", '{replica="http://a:1"}'] if len(had) == 1 else ['{replica="u"}']
        for label in labels:
            lines = [f"# TYPE {name} gauge", *(f"{name}{label} {n}" for n in had)]
            router = Router(["ready"], metrics="\n".join([*lines, "other 99"]))

            async def run(router=router):
                async with served(*router.routes()) as (url, session):
                    fleet = fleet_lib.Fleet(session, url)
                    await fleet.publish("a", version)
                    router.metrics = f"{name} 99"  # asked for once
                    await fleet.publish("b", version + 1)
                    return fleet.ahead

            self.assertEqual(asyncio.run(run()), first - version)
            told = [body for path, body in router.told if path == fleet_lib.FINISH]
            versions = [body["weight_version"] for body in told]
            self.assertEqual(versions, [first, second])

    @parameterized.parameters(False, True)
    def test_servers_are_told_whether_to_read_every_text_again(self, clears):
        router = Router(["ready"])

        async def run():
            async with served(*router.routes()) as (url, session):
                await fleet_lib.Fleet(session, url, clears_cache=clears).publish("a", 5)

        asyncio.run(run())
        (body,) = [body for path, body in router.told if path == fleet_lib.FINISH]
        self.assertEqual(body.get("clear_cache"), clears or None)

    @parameterized.parameters(400, 401, 403, 404, 413, 422)
    def test_what_no_wait_would_mend_ends_the_run_at_once(self, refusal):
        """Servers of another model, or that want another key."""
        router = Router(["ready"], takes=False, refusal=refusal)

        async def run():
            async with served(*router.routes()) as (url, session):
                await fleet_lib.Fleet(session, url).publish("folder", 5, seconds=LONG)

        words = rf"refuse version 5 \({refusal}\): .*no"
        with self.assertRaisesRegex(completer.EngineError, words):
            asyncio.run(run())

    def test_a_version_waits_for_a_server_that_starts_again(self):
        router = Router(["down"])

        async def start_again():
            await asyncio.sleep(0.1)
            router.states[0] = "unfit"

        async def run():
            async with served(*router.routes()) as (url, session):
                starting = asyncio.create_task(start_again())
                await fleet_lib.Fleet(session, url).publish("folder", 5, seconds=LONG)
                await starting

        slept, sleep = [], asyncio.sleep

        async def noted(seconds):
            slept.append(seconds)
            await sleep(0.01)

        library = mock.Mock(sleep=noted, Lock=asyncio.Lock)
        with mock.patch.object(fleet_lib, "asyncio", library):
            asyncio.run(run())
        self.assertEqual(router.states, ["ready"])
        self.assertEqual({*slept}, {0.2})  # a fifth of a second between two looks

    @parameterized.parameters(
        # A router refuses for one server; the others must get the rest.
        (500, "", ["start", "update", "finish"]),
        # Without an answer there is nobody to go on with.
        (None, "", ["start"]),
        (500, "http://a:1", ["start"]),
        (None, "http://a:1", ["start"]),
    )
    def test_a_step_that_fails(self, status, server, asked):
        """Of an update of all servers through the router, or of one apart."""
        found, told = [], []

        async def step(request):
            self.assertEqual(request.query.get("replica", ""), server)
            found.append(request.path.split("_")[0][1:])
            if len(found) > 1:
                return web.json_response({})
            if status is None:
                request.transport.close()
            return web.Response(status=status or 200)

        async def replicas(request):
            state = "unfit" if server else "ready"
            return web.json_response({"replicas": [{"url": server, "state": state}]})

        async def tell(request):
            told.append(await request.json())
            return web.json_response({})

        paths = (fleet_lib.START, fleet_lib.UPDATE, fleet_lib.FINISH)
        routes = [("POST", path, step) for path in paths]
        routes += [("GET", fleet_lib.REPLICAS, replicas)]
        routes += [("POST", fleet_lib.REPLICAS, tell)]

        async def metrics(request):
            version = 5 if found else 0
            return web.Response(text=f"glm5_jax_weights_version {version}")

        routes += [("GET", fleet_lib.METRICS, metrics)]

        async def run():
            async with served(*routes) as (url, session):
                fleet = fleet_lib.Fleet(session, url)
                if not server:
                    await fleet.publish("folder", 5, seconds=0.0)
                    return
                fleet.current = "folder", 5
                # The router needs three seconds to see that a server is right.
                for seconds in (0.0, 2.9):
                    clock.monotonic.return_value = 100.0 + seconds
                    await fleet._repair()
                self.assertEqual(fleet.num_repaired, 0)
                self.assertEqual(found, asked)
                clock.monotonic.return_value += 0.1
                await fleet._repair()
                self.assertEqual(fleet.num_repaired, 1)

        clock = mock.Mock(monotonic=mock.Mock(return_value=100.0))
        with mock.patch.object(fleet_lib, "time", clock):
            asyncio.run(run())
        again = ["start", "update", "finish"] if server else []
        self.assertEqual(found, asked + again)
        self.assertLen(told, len(server) > 0)

    @parameterized.named_parameters(
        ("refuses", 500, "/replicas answers 500: x{300}$"),
        ("vanishes", None, "/replicas answers 0: Server disconnected"),
    )
    def test_a_router_that_does_not_list_its_servers(self, status, words):
        async def replicas(request):
            if status is None:
                request.transport.close()
            return web.Response(text="x" * 1000, status=status or 200)

        async def run():
            async with served(("GET", fleet_lib.REPLICAS, replicas)) as (url, session):
                await fleet_lib.Fleet(session, url).replicas()

        with self.assertRaisesRegex(completer.EngineError, words):
            asyncio.run(run())

    def test_servers_in_service_that_did_not_take_a_version_get_it_again(self):
        """As where reading it has failed in all of them: none is behind another."""
        name = "glm5_jax_weights_version"
        router = Router(["ready"], takes=False, metrics=f"{name} 4")

        async def recover():
            while len(router.told) < 3:
                await asyncio.sleep(0.01)
            router.takes = True

        async def run():
            async with served(*router.routes()) as (url, session):
                recovering = asyncio.create_task(recover())
                await fleet_lib.Fleet(session, url).publish("folder", 5, seconds=LONG)
                await recovering

        with mock.patch.object(fleet_lib, "_AGAIN_SECONDS", 0.05):
            asyncio.run(run())
        self.assertGreaterEqual(len(router.told), 6)
        self.assertEqual({path for path, _ in router.told[3:6]}, {*UPDATES})

    @parameterized.parameters(500, 200)
    def test_servers_that_tell_no_version_are_asked_again(self, status):
        """A busy server's is left out of what a router tells."""
        name = "glm5_jax_weights_version"
        router = Router(["ready"], metrics=f"{name} 7", silent=[status])

        async def run():
            async with served(*router.routes()) as (url, session):
                fleet = fleet_lib.Fleet(session, url)
                await fleet.publish("a", 5, seconds=LONG)
                router.silent = [status]
                await fleet.publish("b", 6, seconds=LONG)
                return fleet.ahead

        self.assertEqual(asyncio.run(run()), 3)
        told = [body for path, body in router.told if path == fleet_lib.FINISH]
        self.assertEqual([body["weight_version"] for body in told], [8, 9])  # once each

    @parameterized.parameters(500, 200)
    def test_silence_is_not_taken_for_a_version(self, status):
        router = Router(["ready"])

        async def run():
            async with served(*router.routes()) as (url, session):
                fleet = fleet_lib.Fleet(session, url)
                await fleet.publish("a", 5, seconds=LONG)
                router.silent, router.takes = [status] * 1000, False
                await fleet.publish("b", 6, seconds=0.3)

        with self.assertRaisesRegex(completer.EngineError, "version 6.*tell.*/metrics"):
            asyncio.run(run())

    def test_servers_that_never_tell_their_version_end_the_run(self):
        router = Router(["ready"], silent=[200] * 1000)

        async def run():
            async with served(*router.routes()) as (url, session):
                await fleet_lib.Fleet(session, url).publish("a", 5, seconds=0.3)

        words = "tell.*at /metrics"
        with self.assertRaisesRegex(completer.EngineError, words):
            asyncio.run(run())
        self.assertEmpty(router.told)

    def test_a_version_that_no_server_takes_is_an_error(self):
        router = Router(["unfit", "down"], takes=False)

        async def run():
            async with served(*router.routes()) as (url, session):
                await fleet_lib.Fleet(session, url).publish("folder", 5, seconds=0.3)

        with self.assertRaisesRegex(completer.EngineError, "has taken version 5"):
            asyncio.run(run())


if __name__ == "__main__":
    environment.main()
