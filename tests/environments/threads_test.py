"""Calls in threads that never return keep nobody waiting."""

import asyncio
import subprocess
import sys
import threading
import time
import weakref
from concurrent import futures

from absl.testing import absltest

from glm5_jax.environments import threads
from tests import environment

HUNG = 20  # calls, more than run at once
# A program whose calls in threads never return.
FOR_EVER = """
import asyncio, threading
from glm5_jax.rl import calls
async def main():
    for _ in range(9):
        task = asyncio.create_task(asyncio.to_thread(threading.Event().wait))
        await asyncio.wait({task}, timeout=0.01)
    return 7
print(calls.run(main()))
"""


class ThreadsTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.over = threading.Event()
        self.addCleanup(self.over.set)

    def made(self, most=3, seconds=0.1):
        made = threads.Threads(most, seconds)
        self.addCleanup(made.shutdown)
        return made

    def test_results_and_errors(self):
        made = self.made()
        self.assertEqual(made.submit(divmod, 7, 2).result(), (3, 1))
        with self.assertRaises(ZeroDivisionError):
            made.submit(divmod, 7, 0).result()
        names = made.submit(lambda: threading.current_thread().name).result()
        self.assertStartsWith(names, "asyncio_")
        made.shutdown()
        with self.assertRaises(RuntimeError):
            made.submit(divmod, 7, 2)

    def test_no_more_than_most_run_at_once(self):
        made, lock, now, most = self.made(seconds=60.0), threading.Lock(), [0], [0]
        first = threading.Barrier(3)

        def call(number):
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            if number < 3:
                first.wait(20)
            time.sleep(0.002)
            with lock:
                now[0] -= 1
            return number

        found = [made.submit(call, number) for number in range(100)]
        self.assertEqual([future.result() for future in found], [*range(100)])
        self.assertEqual(most[0], 3)

    def test_no_more_threads_start_than_run_at_once(self):
        """Though calls come while a thread begins."""
        for _ in range(50):
            made = threads.Threads(3, 60.0)
            found = [made.submit(time.sleep, 0.0002) for _ in range(12)]
            futures.wait(found)
            made.shutdown()
            self.assertLessEqual(made._number, 3)

    def test_calls_that_hang_give_way(self):
        made = self.made()
        hung = [made.submit(self.over.wait) for _ in range(HUNG)]
        self.assertEqual(made.submit(divmod, 7, 2).result(20), (3, 1))
        self.over.set()
        self.assertEqual([future.result(20) for future in hung], [True] * HUNG)
        self.assertEqual(made.submit(divmod, 7, 2).result(20), (3, 1))

    def test_a_thread_lives_on_for_what_it_has_started(self):
        """And ends with the executor."""
        made = threads.Threads(3)
        found = [made.submit(threading.current_thread).result() for _ in range(20)]
        self.assertLessEqual(len(set(found)), 3)
        self.assertTrue(found[0].is_alive())
        made.shutdown()
        found[0].join(20)
        self.assertFalse(found[0].is_alive())

    def test_a_thread_that_waits_keeps_nothing_of_its_last_call(self):
        made, kept = self.made(), threading.Event()
        seen = weakref.ref(kept)
        made.submit(kept.is_set).result()
        del kept
        deadline = time.monotonic() + 20
        while seen() is not None:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.001)

    def test_a_call_that_is_cancelled_while_it_waits_is_not_made(self):
        made, seen = self.made(seconds=60.0), []
        hung = [made.submit(self.over.wait) for _ in range(3)]
        cancelled = made.submit(seen.append, 1)
        self.assertTrue(cancelled.cancel())
        self.over.set()
        for future in hung:
            future.result(20)
        made.submit(seen.append, 2).result(20)
        self.assertEqual(seen, [2])

    def test_it_serves_an_event_loop(self):
        async def main():
            asyncio.get_running_loop().set_default_executor(self.made())
            hung = [
                asyncio.create_task(asyncio.to_thread(self.over.wait))
                for _ in range(HUNG)
            ]
            await asyncio.sleep(0)
            async with asyncio.timeout(20):
                found = await asyncio.to_thread(divmod, 7, 2)
            self.over.set()
            await asyncio.gather(*hung)
            return found

        self.assertEqual(asyncio.run(main()), (3, 1))

    def test_a_program_ends_although_calls_hang(self):
        done = subprocess.run(
            [sys.executable, "-c", FOR_EVER], capture_output=True, text=True, timeout=60
        )
        self.assertEqual((done.returncode, done.stdout), (0, "7\n"), done.stderr)


if __name__ == "__main__":
    environment.main()
