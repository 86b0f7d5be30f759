"""What the guard lets in, by the messages of a server of ASGI."""

import asyncio

from absl.testing import absltest

from glm5_jax.http_server import guard
from tests import environment

LIMIT, CLIENTS = 2, 5
SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
}


class ConcurrencyTest(absltest.TestCase):
    def test_who_is_still_sending_a_body_has_a_place(self):
        """A body of several packets comes after those of others have begun."""
        statuses, most = [], 0

        async def app(scope, receive, send):
            nonlocal most
            most = max(most, whole.num_active)
            start = {"type": "http.response.start", "status": 200, "headers": []}
            await send(start)
            await send({"type": "http.response.body", "body": b"{}"})

        async def client(have_begun):
            parts = [
                {"type": "http.request", "body": b"{", "more_body": True},
                {"type": "http.request", "body": b"}"},
            ]

            async def receive():
                if len(parts) == 1:
                    await have_begun.wait()
                if not parts:
                    await asyncio.Event().wait()  # the client stays
                return parts.pop(0)

            async def send(message):
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            await whole(dict(SCOPE), receive, send)

        async def run():
            have_begun = asyncio.Event()
            clients = [asyncio.create_task(client(have_begun)) for _ in range(CLIENTS)]
            for _ in range(10):
                await asyncio.sleep(0)
            have_begun.set()
            await asyncio.gather(*clients)

        whole = guard.Guard(app, guard.Limits(max_concurrency=LIMIT))
        asyncio.run(run())
        self.assertCountEqual(statuses, [200] * LIMIT + [429] * (CLIENTS - LIMIT))
        self.assertEqual(most, LIMIT)
        self.assertEqual(whole.num_active, 0)
        self.assertEqual(whole.num_refused, CLIENTS - LIMIT)


class OpenPathTest(absltest.TestCase):
    def test_health_is_answered_without_its_body(self):
        """It needs no key, so that nobody may fill the memory by it."""
        statuses, bodies = [], []

        async def app(scope, receive, send):
            bodies.append(await receive())
            start = {"type": "http.response.start", "status": 200, "headers": []}
            await send(start)
            await send({"type": "http.response.body", "body": b"{}"})

        async def receive():
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b"x" * 2**10, "more_body": True}

        async def send(message):
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        limits = guard.Limits(api_key="secret", max_body_bytes=2**15)
        whole = guard.Guard(app, limits)
        asked = {**SCOPE, "method": "GET", "path": "/health"}
        asyncio.run(whole(asked, receive, send))
        self.assertEqual(statuses, [200])
        self.assertEqual(bodies, [{"type": "http.request", "body": b""}])
        self.assertEqual(whole.num_active, 0)


if __name__ == "__main__":
    environment.main()
