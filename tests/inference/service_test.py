"""Checks that each request of a service ends once, whatever happens around it."""

import asyncio
import functools
import threading
import time
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


class ServiceCase(parameterized.TestCase):
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


class ServiceTest(ServiceCase):
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
        self.assertEqual(self.service.stats().failures, 2)
        self.check(first, good)
        self.check(later, after)

    def test_a_client_that_raises_is_aborted(self):
        calls = []

        def broken(event):
            calls.append(event)
            raise ValueError("gone")

        request, other = Request(60, [3], 40), make_requests()[1]
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

        before = {*threading.enumerate()}
        clients = asyncio.run(complete_all())
        self.assertEmpty({*threading.enumerate()} - before)
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
        late = []

        def failing(machine):
            late.append(self.service.call(lambda _: 5))
            raise SystemExit

        self.service.pause()
        (client,) = self.submit(make_requests()[0])
        with mock.patch.object(engine.Engine, "step", failing):
            self.service.resume()
            self.assertEqual(client.end().reason, "error")
            self.assertTrue(self.service.drain(SECONDS))
        self.assertEqual(late[0].result(SECONDS), 5)
        with self.assertRaises(events.ClosedError):
            self.submit(make_requests()[1])


class PauseTest(ServiceCase):
    def test_running_requests_stay_where_they_are(self):
        """Five requests and four slots; the pause comes after the first dispatch."""
        began, paused = time.monotonic(), []

        def pausing(event):
            if not paused:  # before others hear that it has begun
                paused.append(self.service.pause())
            clients[0](event)

        requests = [Request(i, [7] * 12, 11) for i in range(6)]
        clients = [Client() for _ in requests]
        self.service.pause()
        for request, client in zip(requests, (pausing, *clients[1:5]), strict=False):
            self.service.submit(request, client)
        self.service.resume()
        self.assertTrue(clients[0].has_begun.wait(SECONDS))
        paused[0].result(SECONDS)
        self.service.submit(requests[5], clients[5])
        for _ in range(2):
            self.service.call(lambda _: None).result(SECONDS)
        stats = self.service.stats()
        self.assertTrue(stats.is_paused)
        self.assertEqual((stats.running, stats.waiting), (4, 2))
        self.assertEqual((stats.free_slots, stats.dispatches), (0, 1))
        self.assertEqual([len(client.events) for client in clients], [1] * 4 + [0] * 2)
        self.service.resume()
        for client in clients:
            self.assertEqual(client.end().reason, "length")
        self.service.call(lambda _: None).result(SECONDS)
        stats = self.service.stats()
        # The last two requests read one token each behind an equal prompt.
        self.assertEqual((stats.prompt_tokens, stats.cached_tokens), (4 * 12 + 2, 22))
        self.assertEqual((stats.drawn_tokens, stats.dispatches), (6 * 11, 6))
        self.assertEqual((stats.ended, stats.failures), ({"length": 6}, 0))
        self.assertBetween(stats.dispatch_seconds, 1e-6, time.monotonic() - began)

    def test_new_requests_wait_without_a_dispatch(self):
        self.service.pause("wait").result(SECONDS)
        self.submit(make_requests()[0])
        self.service.call(lambda _: None).result(SECONDS)
        self.assertEqual(self.service.stats().dispatches, 0)
        self.service.pause("wait").result(SECONDS)

    def test_a_failure_does_not_count_for_requests_that_are_held_back(self):
        gate, (first, second) = threading.Event(), make_requests()[:2]
        with mock.patch.object(engine.Engine, "step", side_effect=RuntimeError("lost")):
            self.service.call(lambda _: gate.wait(SECONDS))
            (failed,) = self.submit(first)
            paused = self.service.pause("wait")
            (held,) = self.submit(second)
            gate.set()
            self.assertEqual(failed.end().message, "RuntimeError: lost")
            paused.result(SECONDS)
        self.service.resume()
        self.assertIn(held.end().reason, ("stop", "length"))
        self.check(second, held)

    def test_closing_ends_requests_and_a_pause_that_waits_for_them(self):
        """The thread has ended when `close` returns, and its slots are free."""
        gate, ends = threading.Event(), []

        def slow(event):
            time.sleep(0.05)
            ends.append(event.reason)

        self.service.call(lambda _: gate.wait(SECONDS))
        self.service.submit(make_requests()[4], slow)
        paused = self.service.pause("wait")
        closing = threading.Thread(target=self.service.close)
        closing.start()
        with self.assertRaises(events.ClosedError):
            while True:
                self.service.call(lambda _: time.sleep(0.001))
                time.sleep(0.001)  # or the commands would take minutes
        gate.set()
        closing.join(SECONDS)
        self.assertEqual(ends, ["abort"])
        with self.assertRaises(events.ClosedError):
            paused.result(SECONDS)
        stats = self.service.stats()
        self.assertEqual((stats.running, stats.waiting, stats.free_slots), (0, 0, 4))


class CommandTest(ServiceCase):
    def test_a_new_service_sleeps_and_has_done_nothing(self):
        stats = self.service.stats()
        self.assertEqual((stats.running, stats.waiting, stats.version), (0, 0, 0))
        read = stats.prompt_tokens, stats.cached_tokens, stats.drawn_tokens
        self.assertEqual(read, (0, 0, 0))
        done = stats.dispatches, stats.dispatch_seconds, stats.failures
        self.assertEqual(done, (0, 0.0, 0))
        self.assertEqual((stats.restored, stats.preemptions), (0, 0))
        time.sleep(0.02)
        self.assertIs(self.service.stats(), stats)  # a thread that is busy renews it

    def test_a_program_may_end_without_closing_it(self):
        threads = [t for t in threading.enumerate() if t.name == "engine"]
        self.assertNotEmpty(threads)
        self.assertTrue(all(thread.daemon for thread in threads))

    def test_new_ids_are_those_of_no_running_request(self):
        self.assertEqual(self.service.new_id(), 0)
        self.service.pause()
        self.submit(Request(1, [3], 1), Request(2**31 - 1, [3], 1))
        self.assertEqual([self.service.new_id() for _ in range(2)], [2, 3])
        self.service._last_id = 2**31 - 3
        self.assertEqual([self.service.new_id() for _ in range(2)], [2**31 - 2, 0])

    def test_who_is_answered_finds_it_in_the_figures(self):
        """Also while the dispatch that follows takes long."""
        begun, may_end = threading.Event(), threading.Semaphore(0)
        self.addCleanup(may_end.release, 100)  # before the service is closed
        step = self.service._engine.step

        def slow():
            begun.set()
            may_end.acquire(timeout=SECONDS)
            return step()

        self.enter_context(mock.patch.object(self.service._engine, "step", slow))
        self.submit(Request(0, [1, 2, 3], 50))
        self.assertTrue(begun.wait(SECONDS))
        published = self.service.publish(params(), 7)
        may_end.release()  # the next dispatch waits
        published.result(SECONDS)
        self.assertEqual(self.service.stats().version, 7)

    def test_nobody_cancels_a_command(self):
        gate = threading.Event()
        self.service.call(lambda _: gate.wait(SECONDS))
        later = self.service.call(lambda _: 5)
        self.assertFalse(later.cancel())
        gate.set()
        self.assertEqual(later.result(SECONDS), 5)

    def test_an_abort_ends_its_request_alone(self):
        running = Request(60, [3], 40)
        held, other, begun = (Client() for _ in range(3))

        def aborting(event):
            begun(event)
            if isinstance(event, events.Tokens):
                self.service.abort(running.id)

        self.service.submit(running, aborting)
        self.assertEqual(begun.end().reason, "abort")
        self.assertLess(len(begun.events[-1].completion.tokens), 40)
        self.service.pause()
        self.service.submit(make_requests()[0], held)
        self.service.submit(make_requests()[1], other)
        self.service.abort(make_requests()[0].id)
        self.service.abort(77)  # of no request
        self.assertEqual(held.end().reason, "abort")
        self.service.resume()
        other.end()
        self.check(make_requests()[1], other)
        self.service.call(lambda _: None).result(SECONDS)
        self.assertEqual(self.service.stats().free_slots, 4)

    def test_draining_ends_a_pause_and_returns_with_the_last_end(self):
        self.service.pause()
        (client,) = self.submit(make_requests()[4])
        began = time.monotonic()
        self.assertTrue(self.service.drain(SECONDS))
        self.assertTrue(client.has_ended.is_set())
        self.assertLess(time.monotonic() - began, SECONDS / 2)

    def test_who_drained_the_service_sees_what_ended(self):
        snapshot = self.service._snapshot

        def slowly():
            time.sleep(0.1)
            return snapshot()

        with mock.patch.object(self.service, "_snapshot", slowly):
            self.submit(make_requests()[0])
            self.assertTrue(self.service.drain(SECONDS))
            self.assertEqual(sum(self.service.stats().ended.values()), 1)

    def test_a_failure_counts_until_the_next_token(self):
        """Every dispatch that decodes fails once."""
        decode, calls = programs.decode, []

        def flaky(*args, **options):
            calls.append(None)
            if len(calls) % 2:
                raise RuntimeError("injected")
            return decode(*args, **options)

        with mock.patch.object(programs, "decode", flaky):
            (client,) = self.submit(Request(60, [3], 16))
            self.assertEqual(client.end().reason, "length")
        self.assertLen(calls, 6)


if __name__ == "__main__":
    environment.main()
