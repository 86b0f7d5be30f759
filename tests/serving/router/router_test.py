"""The router over real sockets, before replicas without a model."""

import asyncio
import collections
import contextlib
import dataclasses
import json
import unittest

import aiohttp
from absl.testing import absltest

from glm5_jax.serving.router import app, balance, health
from tests import environment
from tests.serving.router import light
from tests.serving.router.light import until

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
CHECKS = health.Checks(seconds=0.02, max_seconds=9.0, max_failures=2, lost_seconds=0.2)
OPTIONS = app.Options(
    replica_key=light.KEY, checks=CHECKS, max_wait=60.0, drain_seconds=60.0
)
NUM_SESSIONS = 48
STREAM = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


class RouterTest(absltest.TestCase, unittest.IsolatedAsyncioTestCase):
    """Three replicas behind a router; `started` opens them in the test's event loop."""

    async def asyncSetUp(self):
        asyncio.get_running_loop().set_debug(False)  # slow

    async def started(self, number=3, options=OPTIONS, **limits):
        stack = contextlib.AsyncExitStack()
        self.addAsyncCleanup(stack.aclose)
        self.lights = [light.Light("abcdef"[i]) for i in range(number)]
        contexts = light.together([one.serving() for one in self.lights])
        urls = await stack.enter_async_context(contexts)
        self.by_url = dict(zip(urls, self.lights, strict=True))
        routed = light.routing_to([*self.by_url], options, **limits)
        self.url, self.router = await stack.enter_async_context(routed)
        self.http = await stack.enter_async_context(aiohttp.ClientSession(self.url))

    async def post(self, path, headers=None, **fields):
        """Returns status, headers and text of a whole answer."""
        async with self.http.post(path, json=fields, headers=headers or {}) as found:
            return found.status, found.headers, await found.text()

    async def home(self, session="s"):
        """Returns the replica of a session, and the others."""
        _, _, text = await self.post(GENERATE, {"X-Session-ID": session})
        name = json.loads(text)["name"]
        [home] = [one for one in self.lights if one.name == name]
        home.seen.clear()
        return home, [one for one in self.lights if one is not home]

    async def chat(self, session="s", **fields):
        """Returns the status and the text of a stream."""
        status, _, text = await self.post(
            CHAT, {"X-Session-ID": session}, **STREAM, **fields
        )
        return status, text

    async def figures(self):
        async with self.http.get("/metrics") as found:
            return await found.text()


class PassingTest(RouterTest):
    async def test_sessions_stay_and_spread(self):
        await self.started()
        names = []
        for session in map(str, range(30)):
            header = {"X-Session-ID": session}
            asked = [await self.post(GENERATE, header) for _ in range(2)]
            first, second = (json.loads(text)["name"] for _, _, text in asked)
            self.assertEqual(first, second)
            names.append(first)
        self.assertEqual({*names}, {"a", "b", "c"})

    async def test_a_stream_comes_event_by_event(self):
        await self.started(1)
        (one,) = self.lights
        one.is_open.clear()
        async with self.http.post(CHAT, json=STREAM) as found:
            self.assertEqual(found.content_type, "text/event-stream")
            self.assertEqual(found.headers["X-Replica"], one.url)
            text = b""
            while b"a2" not in text:  # of four: the last one waits
                text += await found.content.readany()
            one.is_open.set()
            text += await found.content.read()
        want = [light.event({"role": "assistant", "content": ""})]
        want += [light.event({"content": f"a{i} "}) for i in range(4)]
        want += [light.event({}, "stop"), "data: [DONE]\n\n"]
        self.assertEqual(text.decode(), "".join(want))

    async def test_a_client_that_leaves_ends_the_answer(self):
        await self.started(1)
        (one,) = self.lights
        one.is_open.clear()
        async with self.http.post(CHAT, json=STREAM) as found:
            await found.content.readany()
        await until(lambda: one.num_cancelled == 1)
        one.mode = "silent"  # it leaves before a byte
        asked = asyncio.create_task(self.post(CHAT, **STREAM))
        await until(lambda: one.num_silent == 1)
        asked.cancel()
        await until(lambda: one.num_cancelled == 2)
        (replica,) = self.router.pool.replicas.values()
        await until(lambda: replica.load == 0)
        self.assertEqual(replica.answered["cancelled"], 2)

    async def test_keys(self):
        """Clients show the router's key, and replicas see theirs."""
        await self.started(1, api_key="outer")
        async with self.http.get("/health") as found:
            self.assertEqual(found.status, 200)
        for path in ("/v1/models", "/replicas", "/metrics", "/is_paused"):
            async with self.http.get(path) as found:
                self.assertEqual(found.status, 401, path)
        header = {"Authorization": "Bearer outer", "X-Api-Key": "outer"}
        _, _, text = await self.post(GENERATE, header)
        self.assertEqual(json.loads(text)["key"], f"Bearer {light.KEY}")
        self.assertEqual(self.lights[0].keys, {f"Bearer {light.KEY}"})

    async def test_other_routes_and_limits(self):
        await self.started(1, max_body_bytes=99, max_concurrency=1)
        async with self.http.get("/v1/models?x=1") as found:
            self.assertEqual(await found.json(), {"data": [{"id": "light"}]})
        async with self.http.get("/nowhere") as found:
            self.assertEqual(found.status, 404)
        status, _, _ = await self.post(GENERATE, prompt="a" * 99)
        self.assertEqual(status, 413)
        self.lights[0].is_open.clear()
        async with self.http.post(CHAT, json={}) as found:
            await found.content.readany()
            status, headers, _ = await self.post(GENERATE)
            self.assertEqual((status, headers["Retry-After"]), (429, "1"))
            self.lights[0].is_open.set()

    async def test_figures(self):
        await self.started(2)
        await self.chat()
        text = await self.figures()
        for one in self.lights:
            label = f'replica="{one.url}"'
            for line in (
                f"glm5_jax_router_replica_ready{{{label}}} 1\n",
                f"glm5_jax_weights_version{{{label}}} 0\n",
                f'requests_ended_total{{{label},reason="stop"}} {len(one.seen)}\n',
            ):
                self.assertIn(line, text)
        self.assertEqual(text.count("# TYPE glm5_jax_weights_version gauge"), 1)
        self.assertIn(',outcome="200"} 1\n', text)


class RetryTest(RouterTest):
    async def test_one_that_is_busy_or_fails_is_not_heard_of(self):
        await self.started()
        for mode in ("busy", "failing", "closing", "other", "half"):
            home, others = await self.home(mode)
            home.mode = mode
            status, _, text = await self.post(GENERATE, {"X-Session-ID": mode})
            self.assertEqual(status, 200, mode)
            self.assertIn(json.loads(text)["name"], [one.name for one in others])
            home.mode = "ok"
        self.assertIn("glm5_jax_router_retries_total 5\n", await self.figures())

    async def test_all_are_busy(self):
        await self.started()
        for one in self.lights:
            one.mode = "busy"
        status, headers, _ = await self.post(GENERATE)
        self.assertEqual((status, headers["Retry-After"]), (429, "7"))
        self.lights[0].mode = "failing"
        status, _, _ = await self.post(GENERATE)
        self.assertEqual(status, 429)
        for one in self.lights:
            one.mode = "failing"
        status, _, text = await self.post(GENERATE)
        self.assertEqual((status, json.loads(text)["error"][0] in "abc"), (500, True))
        for one in self.lights:
            one.mode = "other"  # a request for a version that none has
        status, _, _ = await self.post(GENERATE)
        self.assertEqual(status, 409)

    async def test_a_request_that_breaks_replicas_meets_two(self):
        await self.started()
        for one in self.lights:
            one.mode = "half"
        status, _, text = await self.post(GENERATE)
        self.assertEqual(status, 502)
        self.assertIn(
            "was lost before it answered", json.loads(text)["error"]["message"]
        )
        self.assertEqual(sum(len(one.seen) for one in self.lights), 2)

    async def test_a_stream_without_a_token_begins_again_elsewhere(self):
        await self.started()
        home, others = await self.home()
        home.mode = "silent"
        asked = asyncio.create_task(self.chat())
        await until(lambda: home.num_silent)
        home.mode = "unwell"  # out of service, and lost after a while
        status, text = await asked
        self.assertEqual(status, 200)
        self.assertEqual(text.count('"role"'), 1)
        self.assertIn("data: [DONE]", text)
        self.assertLen([one for one in others if one.seen], 1)

    async def test_a_stream_that_breaks_ends_with_an_error(self):
        await self.started()
        for one in self.lights:
            one.mode = "half"
        status, text = await self.chat()
        self.assertEqual(status, 200)
        *parts, last, end = text.split("\n\n")
        self.assertEqual(end, "")
        self.assertLen(parts, 3)  # the role and two tokens
        told = json.loads(last.removeprefix("data: "))["error"]
        self.assertIn("was lost", told["message"])
        _, _, text = await self.post("/v1/messages", **STREAM)
        self.assertIn('event: error\ndata: {"type": "error", "error": {', text)
        self.assertIn("router_broken_streams_total 2\n", await self.figures())

    async def test_a_lost_replica_s_streams_break(self):
        await self.started(1)
        (one,) = self.lights
        one.is_open.clear()
        asked = asyncio.create_task(self.chat())
        await until(lambda: one.seen)
        one.mode = "unwell"
        _, text = await asked
        self.assertIn("a2", text)
        self.assertIn('"error"', text)


class MembersTest(RouterTest):
    async def test_one_that_is_unwell_leaves_and_comes_back(self):
        await self.started()
        home, _ = await self.home()
        home.mode = "unwell"
        await until(lambda: len(self.router.pool.ready()) == 2)
        async with self.http.get("/replicas") as found:
            told = {one["url"]: one for one in (await found.json())["replicas"]}
        self.assertEqual(told[home.url]["state"], "down")
        self.assertEqual(told[home.url]["reason"], "/health answers 500")
        home.mode = "ok"
        await until(lambda: len(self.router.pool.ready()) == 3)
        self.assertIs((await self.home())[0], home)
        label = f'replica="{home.url}"'
        figures = await self.figures()
        self.assertIn(f"router_replica_ejections_total{{{label}}} 1\n", figures)

    async def test_requests_wait_while_none_is_in_service(self):
        await self.started(1)
        (one,) = self.lights
        one.mode = "unwell"
        await until(lambda: not self.router.pool.ready())
        async with self.http.get("/health") as found:
            self.assertEqual(found.status, 503)
        asked = asyncio.create_task(self.post(GENERATE))
        await asyncio.sleep(0.05)
        one.mode = "ok"
        status, _, _ = await asked
        self.assertEqual(status, 200)

    async def test_without_any_replica_the_answer_is_503(self):
        options = app.Options(max_wait=0.05, checks=CHECKS)
        await self.started(0, options)
        status, headers, text = await self.post(GENERATE)
        self.assertEqual((status, headers["Retry-After"]), (503, "1"))
        self.assertIn("none has joined", text)

    async def test_joining_and_leaving(self):
        await self.started(1)
        first = self.lights[0]
        new = light.Light("n")
        async with new.serving() as url:
            status, _, text = await self.post("/replicas", url=f"{url}/")
            self.assertEqual((status, json.loads(text)["state"]), (200, "joining"))
            await until(lambda: len(self.router.pool.ready()) == 2)
            first.is_open.clear()
            session = next(
                s for s in map(str, range(99))
                if next(self.router.pool.balance.ring.walk(f"session {s}")) == first.url
            )  # fmt: skip
            asked = asyncio.create_task(self.chat(session))
            await until(lambda: first.seen)
            leaving = asyncio.create_task(
                self.http.delete("/replicas", json={"url": first.url})
            )
            await until(lambda: len(self.router.pool.ready()) == 1)
            _, _, text = await self.post(GENERATE, {"X-Session-ID": session})
            self.assertEqual(json.loads(text)["name"], "n")
            self.assertFalse(leaving.done())  # it waits for the answer under way
            first.is_open.set()
            self.assertIn("[DONE]", (await asked)[1])
            found = await leaving
            told = {"url": first.url, "state": "left", "cut_off": 0}
            self.assertEqual(await found.json(), told)
            self.assertEqual([*self.router.pool.replicas], [url])

    async def test_one_becomes_four_and_then_three_under_load(self):
        """Every request is answered, and only the sessions of who leaves move."""
        bound = balance.Bound(spare=NUM_SESSIONS)  # nobody is ever full
        await self.started(1, dataclasses.replace(OPTIONS, bound=bound))
        sessions = [*map(str, range(NUM_SESSIONS))]
        news = [light.Light(name) for name in "xyz"]
        homes, is_over = collections.defaultdict(list), False

        async def talk(session):
            while not is_over:
                status, _, text = await self.post(
                    GENERATE, {"X-Session-ID": session}, pause=0.005
                )
                self.assertEqual(status, 200, text)
                homes[session].append(json.loads(text)["name"])

        async def rounds(number=2):
            counts = {session: len(homes[session]) for session in sessions}
            await until(
                lambda: all(len(homes[s]) >= n + number for s, n in counts.items())
            )

        talking = [asyncio.create_task(talk(session)) for session in sessions]
        async with light.together([one.serving() for one in news]) as urls:
            await rounds()
            for url in urls:
                await self.post("/replicas", url=url)
            await until(lambda: len(self.router.pool.ready()) == 4)
            await rounds()
            before = {session: homes[session][-1] for session in sessions}
            self.assertEqual({*before.values()}, {"a", "x", "y", "z"})
            async with self.http.delete("/replicas", json={"url": urls[0]}) as found:
                self.assertEqual((await found.json())["cut_off"], 0)
            await rounds()
            after = {session: homes[session][-1] for session in sessions}
            is_over = True
            await asyncio.gather(*talking)
        self.assertEqual({*after.values()}, {"a", "y", "z"})
        stayed = [s for s, name in before.items() if name != "x"]
        self.assertEqual([after[s] for s in stayed], [before[s] for s in stayed])

    async def test_leaving_cuts_off_what_takes_too_long(self):
        await self.started(1)
        (one,) = self.lights
        one.is_open.clear()
        asked = asyncio.create_task(self.chat())
        await until(lambda: one.seen)
        body = {"url": one.url, "drain_seconds": 0.05}
        async with self.http.delete("/replicas", json=body) as found:
            self.assertEqual((await found.json())["cut_off"], 1)
        self.assertIn('"error"', (await asked)[1])

    async def test_a_replica_that_reads_prompts_gets_no_requests(self):
        """But pauses and updates of the weights, as all do."""
        await self.started(1)
        (one,), reader = self.lights, light.Light("r")
        async with reader.serving() as url:
            _, _, text = await self.post("/replicas", url=url, prefill=True)
            self.assertTrue(json.loads(text)["prefill"])
            await until(lambda: len(self.router.pool.ready()) == 2)
            for session in map(str, range(12)):
                _, _, text = await self.post(GENERATE, {"X-Session-ID": session})
                self.assertEqual(json.loads(text)["name"], "a")
            for path in ("/pause", "/resume", "/finish_weight_update"):
                await self.post(path)
            self.assertEqual(reader.asked, one.asked)
            self.assertIn(
                f'requests_ended_total{{replica="{url}"', await self.figures()
            )
            self.assertEmpty(reader.seen)
            one.mode = "unwell"
            await until(lambda: [*self.router.pool.ready()] == [url])
            async with self.http.get("/health") as found:
                self.assertEqual(found.status, 503)

    async def test_bad_addresses(self):
        await self.started(1)
        wrong = ("", "ftp://a:1", "http://", "http://a:x", "http://a/v1", 'http://"a')
        for url in (*wrong, "http://a:1\nx", "http://u:p@a", 3, None):
            status, _, _ = await self.post("/replicas", url=url)
            self.assertEqual(status, 400, url)
        for name in ("has_weights", "prefill"):
            status, _, _ = await self.post("/replicas", url="http://a:1", **{name: 1})
            self.assertEqual(status, 400, name)
        for body in ("[]", "{"):
            head = {"Content-Type": "application/json"}
            async with self.http.post("/replicas", data=body, headers=head) as found:
                self.assertEqual(found.status, 400, body)
        body = {"url": "http://127.0.0.1:9"}
        async with self.http.delete("/replicas", json=body) as found:
            self.assertEqual(found.status, 404)

    async def test_one_with_another_model_gets_nothing(self):
        await self.started(1)
        new = light.Light("n")
        new.model = "other"
        async with new.serving() as url:
            replica = self.router.join(url)
            await until(lambda: replica.state == "unfit")
            self.assertEqual(
                replica.reason, "It serves 'other', and the others 'light'."
            )
            new.model = "light"
            await until(lambda: replica.state == "ready")


class EveryoneTest(RouterTest):
    async def test_all_pause_and_resume(self):
        await self.started()
        status, _, text = await self.post("/pause?mode=keep")
        self.assertEqual((status, json.loads(text)), (200, {"status": "pause"}))
        for one in self.lights:
            self.assertEqual(one.asked, ["/pause?mode=keep"])
        async with self.http.get("/is_paused") as found:
            told = await found.json()
        self.assertTrue(told["is_paused"])
        self.assertEqual(told["replicas"], {one.url: True for one in self.lights})
        new = light.Light("n")
        async with new.serving() as url:
            replica = self.router.join(url)
            await until(lambda: replica.state == "ready")
            self.assertTrue(new.is_paused)  # one that joins pauses first
            await self.post("/resume")
            self.assertFalse(any(one.is_paused for one in (*self.lights, new)))

    async def test_one_that_fails_is_named_and_gets_nothing_until_it_is_right(self):
        await self.started()
        bad, *good = self.lights
        bad.mode = "failing"
        status, _, text = await self.post("/finish_weight_update", weight_version="1")
        self.assertEqual(status, 502)
        told = json.loads(text)
        self.assertIn("failed at 1 of 3", told["error"]["message"])
        self.assertEqual(told["replicas"][bad.url]["status"], 500)
        self.assertEqual(told["replicas"][good[0].url]["status"], 200)
        self.assertCountEqual(self.router.pool.ready(), [one.url for one in good])
        bad.mode = "ok"
        replica = self.router.pool.replicas[bad.url]
        await until(lambda: "version 0" in replica.reason)
        self.assertIn("the others 1", replica.reason)
        bad.version = 1  # in the end it has the weights
        await until(lambda: len(self.router.pool.ready()) == 3)

    async def test_one_that_comes_back_with_old_weights_gets_nothing(self):
        await self.started(2)
        for other in self.lights:
            other.version = 1_000_001
        await self.post("/finish_weight_update")
        one = self.lights[0]
        replica = self.router.pool.replicas[one.url]
        one.mode = "unwell"
        await until(lambda: replica.state == "down")
        one.mode, one.version = "ok", 1_000_001  # as after a restart
        await until(lambda: replica.state == "unfit")
        self.assertIn("version 1000001 of the weights", replica.reason)
        self.assertIn("others 1000002;", replica.reason)
        status, _, _ = await self.post("/replicas", url=one.url, has_weights=True)
        self.assertEqual(status, 200)
        await until(lambda: replica.state == "ready")

    async def test_the_only_one_that_comes_back_with_old_weights_gets_nothing(self):
        """No other can be asked for the version that it ought to have."""
        await self.started(1)
        (one,) = self.lights[:1]
        await self.post("/finish_weight_update")
        replica = self.router.pool.replicas[one.url]
        one.mode = "unwell"
        await until(lambda: replica.state == "down")
        one.mode, one.version = "ok", 0
        await until(lambda: replica.state == "unfit")
        one.version = 1
        await until(lambda: replica.state == "ready")

    async def test_an_update_for_one_is_for_no_other(self):
        """It has the router's key, and comes into service with the weights."""
        await self.started(2)
        one, other = self.lights
        one.mode = "failing"
        await self.post("/finish_weight_update")
        replica = self.router.pool.replicas[one.url]
        await until(lambda: "version 0" in replica.reason)
        one.mode, path = "ok", f"/finish_weight_update?replica={one.url}/"
        one.version = 6
        status, _, text = await self.post(path)
        self.assertEqual(status, 200)
        self.assertEqual(json.loads(text)["weight_version"], 7)
        self.assertEqual(one.asked, ["/finish_weight_update"])
        self.assertEqual(other.asked, ["/finish_weight_update"])
        await until(lambda: "version 7" in replica.reason)
        one.version = 1
        await until(lambda: replica.state == "ready")
        one.mode = "failing"
        self.assertEqual((await self.post(path))[0], 502)
        self.assertEqual(replica.state, "ready")  # until it is asked with the others
        for wrong, status in (("http://127.0.0.1:1", 404), ("a", 400)):
            wrong = f"/update_weights?replica={wrong}"
            self.assertEqual((await self.post(wrong))[0], status)

    async def test_one_that_missed_the_resume_resumes_before_it_is_in_service(self):
        await self.started(2)
        await self.post("/pause")
        one = self.lights[0]
        one.mode = "failing"
        status, _, _ = await self.post("/resume")
        self.assertEqual(status, 502)
        self.assertTrue(one.is_paused)
        one.mode = "ok"
        await until(lambda: len(self.router.pool.ready()) == 2)
        self.assertFalse(one.is_paused)

    async def test_a_request_that_all_refuse_is_passed_on(self):
        await self.started(2)
        status, _, text = await self.post("/update_weights")
        self.assertEqual(status, 404)
        self.assertLen(json.loads(text)["replicas"], 2)


class BalanceTest(RouterTest):
    async def test_a_full_replica_s_next_request_goes_elsewhere(self):
        options = app.Options(checks=CHECKS, bound=balance.Bound(spare=2))
        await self.started(3, options)
        for one in self.lights:
            one.is_open.clear()
        asked = [asyncio.create_task(self.chat("s")) for _ in range(12)]
        await until(lambda: sum(len(one.seen) for one in self.lights) == 12)
        most = max(len(one.seen) for one in self.lights)
        self.assertLessEqual(most, 5)  # ceil(1.25 * 12 / 3)
        for one in self.lights:
            one.is_open.set()
        for status, text in await asyncio.gather(*asked):
            self.assertEqual(status, 200)
            self.assertIn("[DONE]", text)


if __name__ == "__main__":
    environment.main()
