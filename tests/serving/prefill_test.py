"""One server reads prompts and another one answers, over real sockets.

Between them stands a server that may damage what it passes on.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import threading
import zlib
from concurrent import futures
from unittest import mock

import aiohttp
import httpx
import jax
import numpy as np
from absl.testing import absltest, parameterized
from starlette import applications, responses, routing

from glm5_jax import config as config_lib
from glm5_jax.data.chat import templates
from glm5_jax.http_server import guard, listening
from glm5_jax.inference import engine, handover, service
from glm5_jax.inference.limits import Limits
from glm5_jax.serving import command, fetching, page_bytes, prefill, served
from tests import environment
from tests.inference import engine_test, fewer_programs, handover_test
from tests.model import tiny
from tests.serving import scripted
from tests.serving.router import clients_test

KEY, NAME, SIZE = "secret", "apart", 8
MODEL = dataclasses.replace(
    handover_test.CONFIG, vocab_size=scripted.TOKENIZER.vocab_size
)
LIMITS = Limits(num_pages=32, page_size=SIZE, host_pages=24, with_adjustments=True)
NEW = 6  # tokens of an answer
GENERATE = "/inference/v1/generate"


@functools.cache
def params(seed=0):
    return tiny.params(MODEL, seed)


@contextlib.contextmanager
def driven(limits=LIMITS):
    """Runs an engine in its thread."""
    sizes = {"num_slots": 2, "capacity": 96, "chunk": 16, "num_steps": 4}
    with fewer_programs.of_all_rows():
        made = engine.Engine(params(), MODEL, **sizes, limits=limits)
    with contextlib.closing(service.Service(made)) as driver:
        yield driver


@contextlib.contextmanager
def serving(driver, fetcher=None, **limits):
    """Serves an engine; yields the address and the server."""
    model = served.Served(
        name=NAME,
        service=driver,
        tokenizer=scripted.TOKENIZER,
        template=templates.Template(scripted.TOKENIZER),
        stop_ids=frozenset([0]),
        defaults={"temperature": 0.0},
        fetcher=fetcher,
    )
    allowed = guard.Limits(**{"api_key": KEY, **limits})
    with scripted.running(model, allowed) as found:
        yield found


def client():
    """Returns a client with the key, and without certificates."""
    unkept = httpx.Limits(max_keepalive_connections=0)  # servers come and go
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.Client(headers=headers, limits=unkept, timeout=60, verify=False)


class Between:
    """Passes prompts on to a server, and its pages back, as `mode` says.

    Attributes:
        mode: "ok"; "damaged": another bit; "cut": the connection breaks within the
            pages; "more": bytes that nobody asked for; "other": the answer to another
            request; "page": no pages at all; "silent": no answer.
        act: called between the two ways.
        num_passed: prompts that the server has read.
    """

    def __init__(self, url):
        self._url, self.mode, self.num_passed = url, "ok", 0
        self.act = lambda: None
        self._last = b""
        route = routing.Route("/prefill", self._pass, methods=["POST"])
        self.app = applications.Starlette(routes=[route])

    async def _pass(self, request):
        headers = {"Authorization": request.headers["authorization"]}
        headers["Content-Type"] = "application/json"
        body = await request.body()
        async with (
            aiohttp.ClientSession(self._url, headers=headers) as http,
            http.post("/prefill", data=body) as found,
        ):
            status, data = found.status, bytearray(await found.read())
        self.num_passed += status == 200
        await asyncio.to_thread(self.act)
        before, self._last = self._last, bytes(data)
        if self.mode == "damaged":
            data[-1] ^= 1
        elif self.mode == "more":
            data += bytes(2**17)
        elif self.mode == "other":
            data = before
        elif self.mode == "page":
            data = b"<html></html>"
        elif self.mode == "silent":
            await asyncio.sleep(60)
        elif self.mode == "cut":
            return responses.StreamingResponse(self._broken(bytes(data)))
        return responses.Response(bytes(data), status)

    async def _broken(self, data):
        yield data[: len(data) // 2]
        raise ConnectionAbortedError

    @contextlib.contextmanager
    def serving(self):
        """Listens in a thread; yields the address and the server."""
        with contextlib.closing(listening.bind("127.0.0.1", 0)) as listener:
            listener.listen()
            server = listening.make_server(self.app, drain_seconds=1)
            thread = threading.Thread(
                target=server.run, kwargs={"sockets": [listener]}, daemon=True
            )
            thread.start()
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
            finally:
                server.should_exit = True
                thread.join()


class ApartTest(parameterized.TestCase):
    """A reader and an answering engine; a third one does both and says what is right.

    Each test has servers of its own.
    """

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.drivers = [cls.enterClassContext(driven()) for _ in range(3)]
        cls.reader, cls.answering, cls.alone = cls.drivers
        cls.http = cls.enterClassContext(client())

    def setUp(self):
        super().setUp()
        version = self.next_version()
        for driver in self.drivers:
            driver.publish(params(), version).result()
        self.servers = []
        self.reader_url = self.enter(serving(self.reader))
        self.between = Between(self.reader_url)
        self.alone_url = self.enter(serving(self.alone))
        self.begin(self.enter(self.between.serving()))

    def enter(self, started):
        """Enters the context of a server; returns the address."""
        url, server = self.enterContext(started)
        self.servers.append(server)
        return url

    def tearDown(self):
        """Lets all servers end at the same time, as each waits in its end."""
        super().tearDown()
        for server in self.servers:
            server.should_exit = True

    def next_version(self):
        return max(driver.stats().version for driver in self.drivers) + 1

    def begin(self, url, **settings):
        """Starts the server that answers."""
        settings = {"api_key": KEY, "urls": [url], "max_seconds": 20.0} | settings
        self.fetcher = fetching.Fetcher(
            self.answering, NAME, fetching.Settings(**settings)
        )
        self.url = self.enter(serving(self.answering, self.fetcher))

    def prompt(self, size=45):
        """Returns a prompt that no other test has."""
        rng = np.random.default_rng(zlib.crc32(self.id().encode()))
        return rng.integers(1, 250, size).tolist()

    def post(self, url, path, **body):
        return self.http.post(url + path, json=body)

    def generate(self, url, prompt):
        """Returns the greedy ids and their log-probs."""
        settings = {"max_tokens": NEW, "logprobs": 1, "temperature": 0.0}
        body = {"token_ids": prompt, "sampling_params": settings}
        answer = self.post(url, GENERATE, **body)
        self.assertEqual(answer.status_code, 200, answer.text)
        (choice,) = answer.json()["choices"]
        told = choice["logprobs"]["content"]
        return choice["token_ids"], [x["raw_logprob"] for x in told]

    def check(self, prompt, **outcomes):
        """Compares the answer with that of one server, and what became of prompts."""
        before = self.answering.stats().prompt_tokens
        ids, logprobs = self.generate(self.url, prompt)
        want_ids, want = self.generate(self.alone_url, prompt)
        self.assertEqual(ids, want_ids)
        np.testing.assert_allclose(logprobs, want, atol=engine_test.LOGPROB_ATOL)
        scripted.wait_until(lambda: self.fetcher.outcomes == outcomes)
        return self.answering.stats().prompt_tokens - before

    def test_only_the_tail_is_read_where_the_answer_is_given(self):
        prompt = self.prompt()
        self.assertEqual(self.check(prompt, fetched=1), 45 - 40)
        self.assertEqual(self.fetcher.num_pages, 5)
        # The server that has read the pages gives the same bits.
        self.assertEqual(
            self.generate(self.url, prompt), self.generate(self.reader_url, prompt)
        )
        figures = self.figures(self.url)
        self.assertIn('glm5_jax_prefills_total{outcome="fetched"} 1\n', figures)
        self.assertIn("glm5_jax_pages_fetched_total 5\n", figures)
        sent = self.figures(self.reader_url)
        self.assertIn("glm5_jax_pages_sent_total 5\n", sent)
        self.assertIn("glm5_jax_page_bytes_held 0\n", sent)

    def figures(self, url):
        return self.http.get(f"{url}/metrics").text

    def test_pages_that_are_known_are_not_sent_again(self):
        prompt = self.prompt(70)
        self.check(prompt[:45], fetched=1)
        self.check(prompt[:45], fetched=1)  # all of it is known
        self.check(prompt, fetched=2)
        self.assertEqual(self.fetcher.num_pages, 8)
        self.assertEqual(self.between.num_passed, 2)

    def test_short_prompts_and_short_rests_are_read_at_once(self):
        self.begin(self.reader_url, least_tokens=24)
        prompt = self.prompt(64)
        self.assertEqual(self.check(prompt[:24]), 24)
        self.assertEqual(self.check(prompt[:50], fetched=1), 50 - 48)
        self.assertEqual(self.check(prompt, fetched=1), 64 - 48)

    def test_requests_with_one_prompt_share_the_way(self):
        """Also where the first of them leaves."""
        prompt, is_free = self.prompt(), threading.Event()
        self.between.act = is_free.wait
        with futures.ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
            stack.callback(is_free.set)
            body = {"token_ids": prompt, "sampling_params": {"max_tokens": NEW}}
            with self.assertRaises(httpx.ReadTimeout):
                self.http.post(self.url + GENERATE, json=body, timeout=0.01)
            asked = [pool.submit(self.generate, self.url, prompt) for _ in range(3)]
            scripted.wait_until(
                lambda: [f.num_waiting for f in self.under_way()] == [3]
            )
            is_free.set()
            ids = [one.result()[0] for one in asked]
        self.assertEqual(ids, [self.generate(self.alone_url, prompt)[0]] * 3)
        self.assertEqual(self.fetcher.outcomes, {"fetched": 1})

    def under_way(self):
        return [*self.fetcher._under_way.values()]

    @parameterized.parameters(False, True)
    def test_every_form_of_an_answer(self, is_stream):
        texts = [f"{i} is the first of two numbers to add" for i in range(4)]
        body = {"max_tokens": NEW, "stream": is_stream, "temperature": 0.0}
        forms = {
            "/v1/chat/completions": {"messages": [_said(texts[0])], "logprobs": True},
            "/v1/completions": {"prompt": texts[1]},
            "/v1/messages": {"messages": [_said(texts[2])]},
            "/v1/responses": {"input": texts[3], "max_output_tokens": NEW},
        }
        for number, (path, fields) in enumerate(forms.items(), 1):
            found = []
            before = self.answering.stats().prompt_tokens
            for url in (self.url, self.alone_url):
                answer = self.post(url, path, **body, **fields)
                self.assertEqual(answer.status_code, 200, answer.text)
                found.append(_plain(answer.text, is_stream))
            self.assertEqual(*found)
            self.assertLessEqual(self.answering.stats().prompt_tokens - before, SIZE)
            self.assertEqual(self.fetcher.outcomes, {"fetched": number})

    @parameterized.parameters("damaged", "more", "page")
    def test_wrong_pages_are_refused(self, mode):
        self.between.mode = mode
        self.assertEqual(self.check(self.prompt(), refused=1), 45)
        self.assertEqual(self.between.num_passed, 1)
        self.between.mode = "ok"  # but the server is not asked for a while
        self.check(self.prompt()[1:], refused=1, no_server=1)

    def test_pages_of_another_text_are_refused(self):
        prompt = self.prompt()
        self.check(prompt, fetched=1)
        self.between.mode = "other"
        other = [prompt[0] + 1, *prompt[1:]]
        self.assertEqual(self.check(other, fetched=1, refused=1), 45)

    def test_the_reader_is_lost(self):
        """It breaks within the pages, then nobody listens at its address."""
        self.between.mode = "cut"
        self.assertEqual(self.check(self.prompt(), failed=1), 45)
        self.assertEqual(self.between.num_passed, 1)
        # It holds the port, and does not listen.
        with contextlib.closing(listening.bind("127.0.0.1", 0)) as silent:
            self.begin(f"http://127.0.0.1:{silent.getsockname()[1]}")
            self.check(self.prompt()[1:], failed=1)

    def test_a_silent_reader_costs_its_time_only(self):
        self.begin(self.reader_url, max_seconds=0.2)
        self.reader.pause().result()
        self.assertEqual(self.check(self.prompt(), failed=1), 45)
        self.assertEqual(self.under_way(), [])
        # Its request has ended, too, although it is paused.
        scripted.wait_until(lambda: self.reader._num_open == 0)
        self.reader.resume().result()

    def test_keys(self):
        body = {"token_ids": self.prompt()}
        url = self.reader_url + fetching.PATH
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            found = httpx.post(url, json=body, headers=headers)
            self.assertEqual(found.status_code, 401)
        self.assertEqual(
            self.post(self.reader_url, fetching.PATH, **body).status_code, 200
        )
        self.begin(self.reader_url, api_key="wrong")
        self.check(self.prompt(), failed=1)

    def test_the_weights_of_one_server_are_newer(self):
        self.reader.publish(params(1), self.next_version()).result()
        self.assertEqual(self.check(self.prompt(), refused=1), 45)
        self.assertEqual(self.between.num_passed, 0)  # it has sent no pages

    def test_weights_are_replaced_on_the_way(self):
        """Nobody may answer with them before the pages of the old ones are refused."""

        def publish():
            version = self.next_version()
            for driver in (self.answering, self.alone):
                driver.publish(params(1), version).result()

        self.between.act = publish
        self.assertEqual(self.check(self.prompt(), refused=1), 45)
        self.assertEqual(self.between.num_passed, 1)

    def test_other_weights_of_the_same_version(self):
        version = self.next_version()
        for driver, seed in ((self.reader, 1), (self.answering, 0), (self.alone, 0)):
            driver.publish(params(seed), version).result()
        self.assertEqual(self.check(self.prompt(), refused=1), 45)

    def test_through_the_router(self):
        self.begin(self.reader_url)
        with clients_test.routed([self.url], KEY, [self.reader_url]) as url:
            headers = {"Authorization": f"Bearer {clients_test.OUTER}"}
            with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
                scripted.wait_until(lambda: _states(http) == ["ready", "ready"])
                body = {"token_ids": self.prompt(), "sampling_params": {}}
                body["sampling_params"] = {"max_tokens": NEW, "temperature": 0.0}
                for i in range(6):  # of six sessions none comes to the reader
                    session = {"X-Session-ID": f"{i}"}
                    answer = http.post(GENERATE, json=body, headers=session)
                    self.assertEqual(answer.headers["X-Replica"], self.url)
                http.post("/pause", json={})
                self.assertTrue(self.reader.stats().is_paused)
                http.post("/resume", json={})
                figures = http.get("/metrics").text
        (choice,) = answer.json()["choices"]
        want, _ = self.generate(self.alone_url, body["token_ids"])
        self.assertEqual(choice["token_ids"], want)
        label = f'replica="{self.url}",outcome="fetched"'
        self.assertIn(f"glm5_jax_prefills_total{{{label}}} 1\n", figures)


def _said(text):
    return {"role": "user", "content": text}


class BoundsTest(absltest.TestCase):
    """What a server that reads prompts refuses, and how long it holds their pages."""

    def test_pages_are_held_until_they_are_taken_or_their_time_is_over(self):
        driver = self.enterContext(driven())
        reads = prefill.Prefills(served.Served(name=NAME, service=driver))
        parts = [memoryview(bytes(prefill._PART + 1))] * 3

        async def run():
            sent = reads._sent(parts, 7)
            await anext(sent)
            self.assertEqual(reads.num_held, 7)
            await sent.aclose()  # the client leaves
            self.assertEqual((reads.num_held, reads.num_bytes), (0, 0))
            sizes = [len(part) async for part in reads._sent(parts, 7)]
            self.assertEqual(sizes, [prefill._PART, 1] * 3)
            self.assertEqual((reads.num_held, reads.num_bytes), (0, 7))
            loop, slow = asyncio.get_running_loop(), reads._sent(parts, 7)
            await anext(slow)
            late = loop.time() + prefill.TAKE_SECONDS + 1
            with (
                mock.patch.object(loop, "time", return_value=late),
                self.assertRaisesRegex(TimeoutError, "not taken in time"),
            ):
                await anext(slow)
            self.assertEqual(reads.num_held, 0)

        asyncio.run(run())

    def test_wrong_requests(self):
        with driven() as driver, serving(driver) as (url, _), client() as http:
            for fields, status, message in (
                ({"token_ids": [1] * 96}, 400, "at most 96"),
                ({"token_ids": [1, 9999]}, 400, "ids lie in"),
                ({"token_ids": []}, 400, "is empty"),
                ({"token_ids": [1], "first_page": -1}, 400, "first_page"),
                ({"token_ids": [1], "model": "other"}, 404, "does not exist"),
                ({"token_ids": [1], "weight_version": 5}, 409, "version 0 here"),
            ):
                path = url + fetching.PATH
                found = http.post(path, json=fields)
                self.assertEqual(found.status_code, status, found.text)
                self.assertIn(message, found.json()["error"]["message"])
            with mock.patch.object(prefill, "MAX_HELD_BYTES", -1):
                found = http.post(path, json={"token_ids": [1]})
                self.assertEqual(found.status_code, 429)

    def test_servers_without_pages(self):
        limits = Limits(with_adjustments=True)
        with driven(limits) as driver, serving(driver) as (url, _):
            found = httpx.post(
                url + fetching.PATH,
                json={"token_ids": [1]},
                headers={"Authorization": f"Bearer {KEY}"},
            )
            self.assertEqual(found.status_code, 400)
            self.assertIn("--num_pages=N", found.json()["error"]["message"])
            with self.assertRaisesRegex(config_lib.InputError, "--num_pages=N"):
                fetching.Fetcher(driver, NAME, fetching.Settings(urls=[url]))
            options = command.Options(prefill_servers=[url], num_pages=9)
            with self.assertRaisesRegex(config_lib.InputError, "and --host_pages"):
                command._fetcher(driver, NAME, options)

    def test_heads_that_are_none(self):
        form = handover.Form(2, {"x": jax.ShapeDtypeStruct((1, 1, 2), np.float32)})
        rows = np.arange(4, dtype=np.float32).reshape(1, 2, 2)
        pages = handover.Pages("mark", 3, 1, {"x": rows})
        tokens = [*range(6)]
        data = b"".join(page_bytes.encoded(pages, form, tokens))
        self.assertLessEqual(len(data), page_bytes.most_bytes(form, 2))
        found = page_bytes.decoded(data, form, tokens, 1)
        np.testing.assert_array_equal(found.arrays["x"], rows)
        self.assertEqual((found.mark, found.version, found.first), ("mark", 3, 1))
        for wrong, message in (
            (b"", "do not begin with a head"),
            (bytes(8) + b"[]", "do not begin with a head"),
            ((2).to_bytes(8, "little") + b"[]", "do not begin with a head"),
            (b"\xff" * 8 + data[8:], "do not begin with a head"),
            (data[:-1], "cut off"),
            (data + b"x", "cut off"),
            (data.replace(b'"mark"', b'"mark "', 1), "do not begin with a head"),
            (data.replace(b"mark", b"Mark", 2), "do not begin with a head"),
            (data.replace(b': "mark"', b': "Mark"'), "digest is wrong"),
            (data.replace(b'version": 3', b'version": 4'), "digest is wrong"),
            (data.replace(b'num_pages": 2', b'num_pages": 1'), "cut off"),
        ):
            with self.assertRaisesRegex(page_bytes.DamageError, message):
                page_bytes.decoded(wrong, form, tokens, 1)
        for arguments, message in (
            ((form, tokens, 0), "other pages"),
            ((dataclasses.replace(form, page_size=1), tokens, 1), "other pages"),
            ((form, tokens[:4], 1), "digest is wrong"),
            ((form, [9, *tokens[1:]], 1), "digest is wrong"),
        ):
            with self.assertRaisesRegex(page_bytes.DamageError, message):
                page_bytes.decoded(data, *arguments)


def _states(http):
    return [replica["state"] for replica in http.get("/replicas").json()["replicas"]]


def _plain(text, is_stream):
    """Returns the fields of an answer without ids and times."""
    if not is_stream:
        return _stripped(json.loads(text))
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [_stripped(json.loads(line[6:])) for line in lines]


def _stripped(value):
    if isinstance(value, dict):
        dropped = ("id", "created", "created_at", "item_id", "logprob", "usage")
        return {k: _stripped(v) for k, v in value.items() if k not in dropped}
    return [*map(_stripped, value)] if isinstance(value, list) else value


if __name__ == "__main__":
    environment.main()
