"""Checks that each request of a service ends once, whatever happens around it."""

import asyncio
import functools
import threading
from unittest import mock

import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.inference import engine, events, programs, results, service
from glm5_jax.inference.limits import Limits
from glm5_jax.inference.requests import Request
from tests import environment
from tests.inference import engine_test
from tests.model import tiny

MODEL, SECONDS = engine_test.COUNTED, 60.0
SIZES = {"num_slots": 4, "capacity": 64, "chunk": 16, "num_steps": 5}
POISON = 95  # a token of the vocabulary


@functools.cache
def params():
    return tiny.params(MODEL)


def make_engine(num_pages=0):
    limits = Limits(num_pages=num_pages, page_size=8)
    return engine.Engine(params(), MODEL, **SIZES, limits=limits)


@functools.cache
def make_requests():
    """Makes more requests than slots; some prompts begin like others."""
    rng = np.random.default_rng(1)
    found = []
    for i, length in enumerate((3, 20, 20, 5, 33, 9, 20, 2, 14, 40)):
        prompt = [7] * (length // 2) + rng.integers(1, 90, -(-length // 2)).tolist()
        found.append(Request(i, prompt, int(rng.integers(1, 20)), frozenset([i])))
    return found


@functools.cache
def wanted():
    """Returns each completion of an engine that nothing disturbs."""
    return engine_test.run_all(make_engine(), make_requests())


class Client:
    """Records the events of a request."""

    def __init__(self):
        self.events = []
        self.has_begun, self.has_ended = threading.Event(), threading.Event()

    def __call__(self, event):
        self.events.append(event)
        self.has_begun.set()
        if isinstance(event, events.End):
            self.has_ended.set()

    def end(self):
        assert self.has_ended.wait(SECONDS)
        return self.events[-1]


class ServiceTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.service = service.Service(make_engine())
        self.addCleanup(self.service.close)

    def submit(self, *requests):
        clients = [Client() for _ in requests]
        for request, client in zip(requests, clients, strict=True):
            self.service.submit(request, client)
        return clients

    def check(self, request, client):
        """Checks the events of a request against its undisturbed completion."""
        *drawn, end = client.events
        self.assertIsInstance(end, events.End)
        ids = [i for event in drawn for i in event.ids]
        self.assertEqual(ids, end.completion.tokens)
        for name in ("logprobs", "versions"):
            values = [x for event in drawn for x in getattr(event, name)]
            self.assertEqual(values, getattr(end.completion, name))
        want = wanted()[request.id]
        self.assertEqual(ids, want.tokens[: len(ids)])
        is_whole = end.reason in ("stop", "length")
        self.assertEqual(is_whole, len(ids) == len(want.tokens), end)
        if is_whole:
            self.assertEqual(end.reason, want.finish_reason)
        np.testing.assert_allclose(
            end.completion.logprobs,
            want.logprobs[: len(ids)],
            atol=engine_test.LOGPROB_ATOL,
        )

    def test_a_failing_dispatch_ends_its_own_requests_only(self):
        bad = Request(50, [POISON, 3], 9)

        def failing(params, config, state, parts, **options):
            if POISON in np.asarray(parts.tokens):
                raise RuntimeError("RESOURCE_EXHAUSTED")
            return prefill(params, config, state, parts, **options)

        prefill = programs.prefill
        first, later = make_requests()[4], make_requests()[1]
        with mock.patch.object(programs, "prefill", failing):
            (good,) = self.submit(first)
            self.assertTrue(good.has_begun.wait(SECONDS))
            (client,) = self.submit(bad)
            end = client.end()
            (after,) = self.submit(later)
            good.end(), after.end()
        self.assertEqual(end.reason, "error")
        self.assertEqual(end.message, "RuntimeError: RESOURCE_EXHAUSTED")
        self.assertLen(client.events, 1)
        self.assertEqual(self.service.stats().failures, service.MAX_FAILURES)
        self.check(first, good)
        self.check(later, after)

    def test_a_client_that_raises_is_aborted(self):
        calls = []

        def broken(event):
            calls.append(event)
            raise ValueError("gone")

        request, other = make_requests()[:2]
        self.service.submit(request, broken)
        (client,) = self.submit(other)
        client.end()
        self.check(other, client)
        self.assertTrue(self.service.drain(SECONDS))
        self.assertLen([e for e in calls if isinstance(e, events.End)], 1)
        self.assertLessEqual(len(calls), 2)

    def test_coroutines_share_it_without_threads_of_their_own(self):
        async def complete(request):
            loop, queue = asyncio.get_running_loop(), asyncio.Queue()
            self.service.submit(
                request, lambda e: loop.call_soon_threadsafe(queue.put_nowait, e)
            )
            client = Client()
            while not client.has_ended.is_set():
                client(await queue.get())
            return client

        async def complete_all():
            return await asyncio.gather(*map(complete, make_requests()))

        before = threading.active_count()
        clients = asyncio.run(complete_all())
        self.assertEqual(threading.active_count(), before)
        for request, client in zip(make_requests(), clients, strict=True):
            self.check(request, client)

    def test_a_pause_holds_requests_back_and_weights_change_meanwhile(self):
        request, other = make_requests()[4], make_requests()[1]
        self.service.pause().result(SECONDS)
        clients = self.submit(request, other)
        self.service.publish(params(), 3).result(SECONDS)
        stats = self.service.stats()
        self.assertEqual((stats.dispatches, stats.waiting), (0, 2))
        self.assertTrue(stats.is_paused)
        wrong = self.service.publish(params(), 1)
        with self.assertRaisesRegex(config_lib.InputError, "version must increase"):
            wrong.result(SECONDS)
        self.service.resume()
        for asked, client in zip((request, other), clients, strict=True):
            self.assertEqual(set(client.end().completion.versions), {3})
            self.check(asked, client)

    @parameterized.parameters(("wait", {"stop", "length"}), ("abort", {"abort"}))
    def test_a_pause_ends_requests_as_asked(self, mode, reasons):
        clients = self.submit(*make_requests()[:6])
        self.service.pause(mode).result(SECONDS)
        ended = {client.end().reason for client in clients}
        self.assertContainsSubset(ended, {*reasons, "stop", "length"})
        stats = self.service.stats()
        self.assertEqual(stats.free_slots, 4)

    def test_drained_and_closed_services_refuse_work(self):
        (client,) = self.submit(make_requests()[0])
        self.assertTrue(self.service.drain(SECONDS))
        self.check(make_requests()[0], client)
        with self.assertRaises(events.ClosedError):
            self.submit(make_requests()[1])
        self.service.close()
        self.service.close()
        self.service.abort(0)  # nothing left to abort
        with self.assertRaises(events.ClosedError):
            self.service.publish(params(), 9)

    def test_closing_aborts(self):
        self.service.pause()
        clients = self.submit(*make_requests()[:3])
        self.assertFalse(self.service.call(lambda _: None).result(SECONDS))
        self.service.close()
        self.assertEqual({c.end().reason for c in clients}, {"abort"})

    def test_requests_are_refused_where_they_are_submitted(self):
        with self.assertRaisesRegex(config_lib.InputError, "Prompt 3 is empty"):
            self.submit(Request(3, [], 4))
        self.service.pause()
        self.submit(make_requests()[0])
        with self.assertRaisesRegex(config_lib.InputError, "already running"):
            self.submit(make_requests()[0])
        self.assertNotIn(self.service.new_id(), {0})

    def test_a_result_that_cannot_be_written_ends_its_requests(self):
        client = Client()
        with mock.patch.object(results, "write", mock.Mock(side_effect=ValueError)):
            self.service.submit(make_requests()[0], client)
            self.assertEqual(client.end().reason, "error")
            self.service.call(lambda _: None).result(SECONDS)
            self.assertLessEqual(self.service.stats().dispatches, 3)  # it is idle
        (after,) = self.submit(make_requests()[1])
        after.end()
        self.check(make_requests()[1], after)

    def test_tokens_are_sent_before_the_end_where_another_row_failed(self):
        """The dispatch of both ended with an error after it wrote the first row."""
        first, second = make_requests()[0], make_requests()[3]
        write = results.write

        def failing(result, part, *others):
            if part.work.request.id == second.id:
                raise ValueError("injected")
            return write(result, part, *others)

        self.service.pause()
        clients = self.submit(first, second)
        with mock.patch.object(results, "write", failing):
            self.service.resume()
            ends = [client.end() for client in clients]
        self.assertEqual([end.reason for end in ends], ["error", "error"])
        self.assertNotEmpty(ends[0].completion.tokens)
        self.check(first, clients[0])

    def test_if_the_thread_fails_every_request_ends(self):
        self.service.pause()
        (client,) = self.submit(make_requests()[0])
        with mock.patch.object(
            engine.Engine, "step", mock.Mock(side_effect=SystemExit)
        ):
            self.service.resume()
            self.assertEqual(client.end().reason, "error")
            self.assertTrue(self.service.drain(SECONDS))
        with self.assertRaises(events.ClosedError):
            self.submit(make_requests()[1])


if __name__ == "__main__":
    environment.main()
