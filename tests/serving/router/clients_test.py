"""Unmodified clients through the router, before servers of a real, tiny model."""

import asyncio
import contextlib
import threading

import anthropic
import httpx
import openai

from glm5_jax.http_server import guard, listening
from glm5_jax.serving import app
from glm5_jax.serving.router import app as router_app
from glm5_jax.serving.router import command
from tests import environment
from tests.serving import scripted

HI = {"role": "user", "content": "Hi"}
OUTER = "outer"


@contextlib.contextmanager
def routed(urls, key=scripted.KEY, prefill_urls=()):
    """Runs the command's router in a thread; yields its address."""
    settings = command.Settings(
        api_key=OUTER,
        options=router_app.Options(replica_key=key),
        prefill_urls=prefill_urls,
    )
    with contextlib.closing(listening.bind("127.0.0.1", 0)) as listener:
        listener.listen()  # clients that come before the thread wait
        ends, has_begun = [], threading.Event()

        @contextlib.asynccontextmanager
        async def beside(router, end):
            ends.append(end)
            has_begun.set()
            yield

        thread = threading.Thread(
            target=lambda: asyncio.run(command.run(listener, urls, settings, beside))
        )
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            has_begun.wait(60)
            ends[0]()
            thread.join()


class ClientsTest(scripted.ServerTest):
    """Two servers over one engine: what a client sees is all that is tested here."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        listener = cls.enterClassContext(
            contextlib.closing(listening.bind("127.0.0.1", 0))
        )
        listener.listen()
        door = app.make(cls.model, guard.Limits(api_key=scripted.KEY))
        second = listening.make_server(door, drain_seconds=10)
        thread = threading.Thread(target=second.run, kwargs={"sockets": [listener]})
        thread.start()
        cls.addClassCleanup(thread.join)
        cls.addClassCleanup(setattr, second, "should_exit", True)
        urls = [cls.url, f"http://127.0.0.1:{listener.getsockname()[1]}"]
        cls.routed_url = cls.enterClassContext(routed(urls))

    def test_openai(self):
        url = f"{self.routed_url}/v1"
        with openai.OpenAI(base_url=url, api_key=OUTER, max_retries=0) as client:
            self.assertEqual(client.models.list().data[0].id, scripted.NAME)
            settings = {"model": scripted.NAME, "messages": [HI]}
            whole = client.chat.completions.create(**settings).choices[0].message
            self.assertEqual((whole.reasoning_content, whole.content), ("So", "Hé!"))
            chunks = [*client.chat.completions.create(**settings, stream=True)]
            deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
            self.assertEqual("".join(deltas), "Hé!")
            with self.assertRaises(openai.NotFoundError):
                client.chat.completions.create(**{**settings, "model": "other"})
            with self.assertRaisesRegex(openai.BadRequestError, "temperature"):
                client.chat.completions.create(**settings, temperature=-1)
            answer = client.responses.create(model=scripted.NAME, input="Hi")
            self.assertEqual(answer.output_text, "Hé!")

    def test_anthropic(self):
        made = anthropic.Anthropic(
            base_url=self.routed_url, api_key=OUTER, max_retries=0
        )
        settings = {"model": scripted.NAME, "max_tokens": 99, "messages": [HI]}
        with made as client, client.messages.stream(**settings) as stream:
            self.assertEqual("".join(stream.text_stream), "Hé!")

    def test_ids_pause_and_figures(self):
        key = {"Authorization": f"Bearer {OUTER}"}
        url = self.routed_url
        with httpx.Client(base_url=url, headers=key, timeout=60) as http:
            body = {"token_ids": scripted.TOKENIZER.encode("a")}
            body["sampling_params"] = {"max_tokens": 3}
            found = http.post("/inference/v1/generate", json=body).json()
            ids = found["choices"][0]["token_ids"]
            self.assertEqual(scripted.TOKENIZER.spell(ids), "bcd")
            for path in ("pause", "resume"):
                self.assertEqual(http.post(f"/{path}", json={}).status_code, 200)
                told = http.get("/is_paused").json()
                self.assertEqual(told["is_paused"], path == "pause")
                self.assertLen(told["replicas"], 2)
            text = http.get("/metrics").text
            self.assertEqual(text.count("glm5_jax_slots_free{replica="), 2)
            self.assertIn("<html", http.get("/").text)
            self.assertEqual(httpx.get(f"{url}/v1/models").status_code, 401)


if __name__ == "__main__":
    environment.main()
