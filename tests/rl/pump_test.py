"""The engine waits for coroutines as long as they need, and no longer."""

import asyncio
import contextlib
import time
from unittest import mock

from absl.testing import absltest

from glm5_jax.inference import events, requests, service
from glm5_jax.rl import completer
from glm5_jax.rl import pump as pump_lib
from tests.rl import scripted

SOON = 20.0  # seconds; what is waited for takes milliseconds
ENDLESS = 10**6  # tokens; they take longer than SOON
HOLD = 600.0  # seconds that an engine waits for a loop in vain


class Engine(scripted.ScriptedEngine):
    """Keeps how many requests each dispatch had."""

    def __init__(self, num_tokens=1):
        tokens, capacity = [7] * num_tokens, num_tokens + 512
        super().__init__(lambda request: tokens, num_slots=16, capacity=capacity)
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
        engine = Engine()

        async def episode(pump, first, is_slow):
            for number in range(2):
                while is_slow and len(engine.sizes) < 2 + number:
                    await asyncio.sleep(0)
                    time.sleep(0.002)
                await pump.complete(request(first + number))

        async def main(pump, served):
            await asyncio.gather(*(episode(pump, 10 * i, i == 8) for i in range(9)))

        self.play(engine, main)
        self.assertEqual(engine.sizes, [8, 8, 1, 1])

    def test_a_cancelled_request_ends(self):
        engine = Engine(num_tokens=ENDLESS)

        async def main(pump, served):
            task = asyncio.create_task(pump.complete(request(0, ENDLESS)))
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
        engine = Engine(num_tokens=ENDLESS)

        async def main(pump, served):
            task = asyncio.create_task(pump.complete(request(0, ENDLESS)))
            while not engine.sizes:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(served.close)
            with self.assertRaisesRegex(completer.EngineError, "engine fails"):
                await task

        self.play(engine, main)

    def test_nobody_waits_for_a_loop_once_a_service_has_ended(self):
        """Least of all the loop itself, which would not turn for ten seconds."""

        async def main(pump, served):
            waits = self.enterContext(mock.patch.object(pump._is_over, "wait"))
            served.close()
            for _ in range(2):
                with self.assertRaises(events.ClosedError):
                    await pump.complete(request(0))
            waits.assert_not_called()

        self.play(Engine(), main)

    def test_a_closed_pump_holds_no_engine(self):
        """Though its loop does not turn any more."""
        self.enterContext(mock.patch.object(pump_lib, "_HOLD_SECONDS", HOLD))
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
        while not engine.sizes and time.monotonic() - began < SOON:
            time.sleep(0.001)
        self.assertNotEmpty(engine.sizes)
        served.close()
        self.assertLess(time.monotonic() - began, HOLD / 2)
        asking.cancel()
        loop.run_until_complete(asyncio.wait({asking}))


if __name__ == "__main__":
    absltest.main()
