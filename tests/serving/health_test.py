"""Whether a server is well: not if its engine hangs, though it still answers."""

import asyncio
import contextlib
import threading
from unittest import mock

import httpx
from absl.testing import absltest

from glm5_jax.http_server import guard
from glm5_jax.inference import drafter, events, requests, service
from glm5_jax.serving import app, liveness, metrics, served
from tests.rl import scripted

LIMIT = 30.0  # seconds of a step, above which an engine hangs, by the test's clock
SECONDS = 20.0  # for what takes milliseconds


class Hanging(scripted.ScriptedEngine):
    """An engine whose steps take until `goes_on`."""

    def __init__(self):
        super().__init__(lambda _: [7] * 4)
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def step(self):
        self.hangs.set()
        self.goes_on.wait(SECONDS)
        return super().step()


class HealthTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.engine = Hanging()
        self.addCleanup(self.engine.goes_on.set)
        self.service = service.Service(self.engine)
        model = served.Served(
            name="m", service=self.service, max_dispatch_seconds=LIMIT
        )
        self.app = app.make(model, guard.Limits())
        self.now = 0.0
        clock = mock.Mock(monotonic=lambda: self.now)
        self.enterContext(mock.patch.object(liveness, "time", clock))

    async def health(self):
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://m") as asks:
            answer = await asks.get("/health")
            return answer.status_code, answer.json()

    def submit(self):
        self.service.submit(requests.Request(0, [1], 4), lambda event: None)

    def test_an_engine_that_hangs_is_not_well_until_it_goes_on(self):
        async def run():
            self.assertEqual(await self.health(), (200, {"status": "ok"}))
            self.submit()
            await asyncio.to_thread(self.engine.hangs.wait, SECONDS)
            self.assertEqual((await self.health())[0], 200)
            self.now += 2 * LIMIT
            status, told = await self.health()
            self.assertEqual(status, 503)
            self.assertIn("A step of the engine has taken", told["error"]["message"])
            self.engine.goes_on.set()
            await asyncio.to_thread(self.service.drain, SECONDS)
            self.assertEqual(await self.health(), (200, {"status": "ok"}))

        with contextlib.closing(self.service):
            asyncio.run(run())

    def test_an_engine_that_has_ended_is_not_well(self):
        self.service.close()
        status, told = asyncio.run(self.health())
        self.assertEqual(status, 503)
        self.assertIn("The service has ended", told["error"]["message"])

    def test_one_without_work_is_well(self):
        """It is idle for longer than a step may take, and then pauses."""

        async def ask_twice():
            for _ in range(2):
                self.assertEqual((await self.health())[0], 200)
                self.service.call(lambda _: None).result(SECONDS)  # it comes round
                self.now += 2 * LIMIT

        async def run():
            await ask_twice()
            self.service.pause().result()
            self.submit()
            await ask_twice()

        with contextlib.closing(self.service):
            asyncio.run(run())


class FiguresTest(absltest.TestCase):
    def test_large_figures_have_all_their_digits(self):
        stats = events.Stats(
            version=1_000_001,
            **dict.fromkeys(("running", "waiting", "free_slots", "free_pages"), 0),
            is_paused=True,
            dispatch_seconds=1234567.25,
            restored=0,
            preemptions=0,
            acceptance=drafter.Acceptance(),
            ended={},
            prompt_tokens=123_456_789,
        )
        door = mock.Mock(spec=guard.Guard, num_active=0, num_refused=0)
        lines = "".join(metrics._lines(stats, door)).splitlines()
        for line in (
            "weights_version 1000001",
            "prompt_tokens_total 123456789",
            "dispatch_seconds_total 1234567.25",
            "paused 1",
        ):
            self.assertIn(f"glm5_jax_{line}", lines)


if __name__ == "__main__":
    absltest.main()
