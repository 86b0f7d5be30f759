"""Events of other threads reach their queues in order, and wake the loop seldom."""

import asyncio
import threading
from unittest import mock

from absl.testing import absltest

from glm5_jax.serving import letters
from tests import environment

NUM_THREADS, NUM_LETTERS = 4, 2000


class LettersTest(absltest.TestCase):
    def test_every_letter_arrives_once_in_the_order_of_its_thread(self):
        async def main():
            carrier = letters.Letters(asyncio.get_running_loop())
            queues = [asyncio.Queue() for _ in range(NUM_THREADS)]

            def write(queue):
                for number in range(NUM_LETTERS):
                    carrier.send(queue, number)

            threads = [threading.Thread(target=write, args=(q,)) for q in queues]
            for thread in threads:
                thread.start()
            # The loop reads while the threads write, so that they meet in `_arrive`.
            async with asyncio.timeout(60):
                got = [[await q.get() for _ in range(NUM_LETTERS)] for q in queues]
            for thread in threads:
                thread.join()
            await asyncio.sleep(0)
            self.assertEqual([q.qsize() for q in queues], [0] * NUM_THREADS)
            return got

        expected = [[*range(NUM_LETTERS)]] * NUM_THREADS
        self.assertEqual(asyncio.run(main()), expected)

    def test_a_loop_is_woken_once_for_all_letters_before_it_looks(self):
        async def main():
            loop, queue = asyncio.get_running_loop(), asyncio.Queue()
            carrier, wake = letters.Letters(loop), loop.call_soon_threadsafe
            with mock.patch.object(
                loop, "call_soon_threadsafe", side_effect=wake
            ) as woken:
                for expected in (1, 2):
                    for number in range(64):
                        carrier.send(queue, number)
                    self.assertEqual(woken.call_count, expected)
                    got = [await queue.get() for _ in range(64)]
                    self.assertEqual(got, [*range(64)])

        asyncio.run(main())


if __name__ == "__main__":
    environment.main()
