"""The engine waits for coroutines as long as they need, and no longer."""

import asyncio
import contextlib
import time

from absl.testing import absltest

from glm5_jax.inference import requests, service
from glm5_jax.rl import completer
from glm5_jax.rl import pump as pump_lib
from tests.rl import scripted

SOON = 20.0  # seconds; what is waited for takes milliseconds
HOLD = 5.0  # seconds; an engine that waits for a loop in vain takes 10


class Engine(scripted.ScriptedEngine):
    """Keeps how many requests each dispatch had."""

    def __init__(self, num_tokens=1):
        super().__init__(lambda request: [7] * num_tokens, num_slots=16)
        self.sizes = []

    def step(self):
        self.sizes.append(len(self._running))
        time.sleep(0.001)
        return super().step()


def request(id, num_tokens=1):
    return requests.Request(id, [1], num_tokens)


class PumpTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(self.assertNoLogs("asyncio"))

    def play(self, engine, main):
        """Returns what a coroutine function of a pump and its service returns."""

        async def bounded(pump, served):
            async with asyncio.timeout(SOON):
                return await main(pump, served)

        with contextlib.closing(service.Service(engine)) as served:
            pump = pump_lib.Pump(served)
            try:
                return asyncio.run(bounded(pump, served))
            finally:
                pump.close()

    def test_dispatches_have_all_coroutines(self):
        """Each takes a dozen rounds of the loop until it asks for more."""

        async def episode(pump, first, num_rounds):
            for number in range(3):
                for _ in range(num_rounds):
                    await asyncio.sleep(0)
                    time.sleep(0.0005)  # the engine's thread could begin
                await pump.complete(request(first + number))

        async def main(pump, served):
            for first in (0, 100):
                rounds = (0, 12, 12, 12)
                todo = [episode(pump, first + 10 * i, n) for i, n in enumerate(rounds)]
                await asyncio.gather(*todo)
                await asyncio.sleep(0.02)  # the engine is idle

        engine = Engine()
        self.play(engine, main)
        self.assertEqual(engine.sizes, [4] * 6)

    def test_nobody_waits_for_one_that_is_slow(self):
        async def episode(pump, first, num_rounds):
            for number in range(2):
                for _ in range(num_rounds):
                    await asyncio.sleep(0)
                    time.sleep(0.002)
                await pump.complete(request(first + number))

        async def main(pump, served):
            rounds = (*[0] * 8, 90)
            await asyncio.gather(
                *(episode(pump, 10 * i, n) for i, n in enumerate(rounds))
            )

        engine = Engine()
        self.play(engine, main)
        self.assertEqual(engine.sizes, [8, 8, 1, 1])

    def test_a_cancelled_request_ends(self):
        engine = Engine(num_tokens=400)

        async def main(pump, served):
            task = asyncio.create_task(pump.complete(request(0, 400)))
            while not engine.sizes:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait({task})
            while engine.num_pending:
                await asyncio.sleep(0.001)
            return task.cancelled()

        self.assertTrue(self.play(engine, main))
        self.assertEqual(engine.num_aborted, 1)

    def test_a_service_that_ends_fails_its_requests(self):
        engine = Engine(num_tokens=400)

        async def main(pump, served):
            task = asyncio.create_task(pump.complete(request(0, 400)))
            while not engine.sizes:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(served.close)
            with self.assertRaisesRegex(completer.EngineError, "engine fails"):
                await task

        self.play(engine, main)

    def test_a_closed_pump_holds_no_engine(self):
        """Though its loop does not turn any more."""
        engine = Engine()
        served = service.Service(engine)
        pump = pump_lib.Pump(served)
        loop = asyncio.new_event_loop()
        self.addCleanup(loop.close)

        async def main():
            asking = asyncio.create_task(pump.complete(request(0)))
            await asyncio.sleep(0)
            time.sleep(0.05)  # the engine waits for the loop now
            pump.close()
            return asking

        asking = loop.run_until_complete(main())
        began = time.monotonic()
        while not engine.sizes and time.monotonic() - began < HOLD:
            time.sleep(0.001)
        served.close()
        self.assertLess(time.monotonic() - began, HOLD)
        asking.cancel()
        loop.run_until_complete(asyncio.wait({asking}))


if __name__ == "__main__":
    absltest.main()
