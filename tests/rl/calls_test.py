"""Calls of untrusted code end in time, and coroutines to their end."""

import asyncio
import gc
import signal
import threading
import time
from unittest import mock

from absl.testing import absltest, parameterized

from glm5_jax.rl import calls, event_loop


class Clock(event_loop.Loop):
    """A loop whose time passes at once while all its coroutines sleep."""

    now = 0.0

    def __init__(self):
        super().__init__()
        select = self._selector.select

        def skip(timeout=None):
            self.now += timeout or 0.0
            return select(0.0)

        self._selector.select = skip

    def time(self):
        return self.now


def bounded(call, seconds=20.0):
    """Returns the result of a call in a loop of its own, without asyncio's complaints.

    asyncio logs an exception that nobody retrieves once its task is collected.
    """

    async def run():
        return await calls.bounded(call, seconds, object())

    try:
        return calls.run(run())
    finally:
        gc.collect()


class BoundedTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(self.assertNoLogs("asyncio"))

    def test_a_result(self):
        async def call():
            await asyncio.sleep(0)
            return 7

        self.assertEqual(bounded(call), 7)

    @parameterized.parameters(
        (ValueError("bad"), ValueError, "bad"),
        (SystemExit(3), RuntimeError, r"the call raised SystemExit\(3\)"),
        (GeneratorExit(), RuntimeError, "the call raised GeneratorExit"),
        (asyncio.CancelledError(), RuntimeError, "the call cancelled itself"),
    )
    def test_what_a_call_raises(self, error, kind, message):
        async def call():
            raise error

        with self.assertRaisesRegex(kind, message):
            bounded(call)

    def test_a_late_call_is_cancelled(self):
        ended = []

        async def call():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)
                raise ValueError("too late to matter")

        began = time.monotonic()
        with (
            self.assertNoLogs("absl"),
            self.assertRaisesRegex(calls.LateError, r"^took longer than 0\.125 s$"),
        ):
            bounded(call, 0.125)
        self.assertEqual(ended, [True])
        self.assertBetween(time.monotonic() - began, 0.125, 30)

    def test_a_call_that_ignores_its_cancellation_is_abandoned(self):
        end = threading.Event()

        async def call():
            while not end.is_set():
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue

        async def run():
            with self.assertRaises(calls.LateError):
                await calls.bounded(call, 0.05, object())
            end.set()
            await asyncio.sleep(0.05)
            return "went on"

        with (
            mock.patch.object(calls, "_CANCEL_SECONDS", 0.05),
            self.assertLogs("absl") as logs,
        ):
            self.assertEqual(calls.run(run()), "went on")
        self.assertIn("ignores being cancelled", logs.output[0])

    def test_a_call_has_a_second_to_clean_up(self):
        ended = []

        async def call():
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.9 if not ended else 60)
                ended.append(True)

        async def run():
            for seconds in (0.9, 1.0):
                began = asyncio.get_running_loop().time()
                with self.assertRaises(calls.LateError):
                    await calls.bounded(call, 5.0, object())
                passed = asyncio.get_running_loop().time() - began
                self.assertAlmostEqual(passed, 5.0 + seconds, places=6)
            self.assertEqual(ended, [True])
            await asyncio.sleep(60)

        with mock.patch.object(event_loop, "Loop", Clock), self.assertLogs("absl"):
            calls.run(run())
        self.assertEqual(ended, [True, True])

    def test_a_cancelled_caller_cancels_its_call(self):
        ended = []

        async def call():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        async def run():
            task = asyncio.create_task(calls.bounded(call, 60.0, object()))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait({task})
            self.assertEqual(ended, [True])
            return task.cancelled()

        self.assertTrue(calls.run(run()))


class FinishedTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(self.assertNoLogs("asyncio"))

    def test_a_result_and_an_error(self):
        async def work(error=None):
            await asyncio.sleep(0)
            if error is not None:
                raise error
            return 7

        self.assertEqual(calls.run(calls.finished(work())), 7)
        with self.assertRaisesRegex(ValueError, "bad"):
            calls.run(calls.finished(work(ValueError("bad"))))

    def test_work_ends_though_its_caller_is_cancelled_twice(self):
        ended = []

        async def work():
            await asyncio.sleep(0.05)
            ended.append(True)
            raise ValueError("nobody sees this")

        async def run():
            task = asyncio.create_task(calls.finished(work()))
            for _ in range(2):
                await asyncio.sleep(0.01)
                task.cancel()
                self.assertEmpty(ended)
            await asyncio.wait({task})
            self.assertEqual(ended, [True])
            return task.cancelled()

        self.assertTrue(calls.run(run()))
        gc.collect()


class RunTest(parameterized.TestCase):
    def test_within_another_loop(self):
        async def inner():
            return 7

        async def outer():
            return calls.run(inner())

        self.assertEqual(asyncio.run(outer()), 7)

    def test_an_interrupt_lets_coroutines_clean_up(self):
        ended = []

        async def main():
            try:
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.01)
                ended.append(True)

        with self.assertRaises(KeyboardInterrupt):
            calls.run(main())
        self.assertEqual(ended, [True])

    @parameterized.parameters((9.0, True), (60.0, False))
    def test_an_interrupt_of_the_loop_gives_ten_seconds(self, seconds, is_in_time):
        ended, loops = [], []

        async def main():
            loops.append(asyncio.get_running_loop())
            loops[0].call_soon(signal.raise_signal, signal.SIGINT)
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(seconds)
                ended.append(loops[0].time())
                raise ValueError("nobody sees this")

        with (
            mock.patch.object(event_loop, "Loop", Clock),
            self.assertRaises(KeyboardInterrupt),
        ):
            calls.run(main())
        self.assertEqual(ended, [9.0] * is_in_time)
        (loop,) = loops
        self.assertAlmostEqual(loop.time(), min(seconds, 10.0), places=6)
        self.assertTrue(loop.is_closed())
        # A coroutine that was left says so as it is destroyed.
        said = self.assertNoLogs if is_in_time else self.assertLogs
        with said("asyncio"):
            loops.clear()
            gc.collect()

    def test_generators_that_were_left_end(self):
        ended, kept = [], []

        async def numbers():
            try:
                yield 1
                yield 2
            finally:
                ended.append(True)

        async def main():
            kept.append(numbers())
            return await anext(kept[0])

        self.assertEqual(calls.run(main()), 1)
        self.assertEqual(ended, [True])


if __name__ == "__main__":
    absltest.main()
