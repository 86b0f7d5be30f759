"""Replicas without a model, which stream real events over real sockets.

python -m tests.serving.router.light --port=N serves one in a process of its own.
"""

import asyncio
import contextlib
import json
import os
import sys

from starlette import applications, responses, routing

from glm5_jax.http_server import guard, listening
from tests import quick_servers  # noqa: F401  they end at once

KEY = "inner"  # of the replicas
_REFUSALS = {"busy": 429, "failing": 500, "closing": 503, "other": 409}


class Light:
    """A server that answers as one of a model does.

    Attributes:
        name: tells which replica answered: its texts begin with it.
        model: name of its model.
        version: of its weights.
        mode: "ok"; "busy" (429), "failing" (500), "closing" (503) or "other"
            (409: has other weights than the request wants); "half": breaks
            within its third token, or within a whole answer; "silent": opens a stream
            and sends no token; "unwell": /health answers 500.
        is_open: a stream's last token waits for it.
        seen: bodies of the requests for texts.
        asked: requests to all replicas.
        keys: that the router showed.
        num_silent: streams that send no token.
        num_cancelled: streams whose client left.
    """

    def __init__(self, name):
        self.name, self.model, self.version, self.mode = name, "light", 0, "ok"
        self.seen, self.asked, self.keys = [], [], set()
        self.num_silent = self.num_cancelled = 0
        self.is_paused = False
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.url = ""
        posts = {
            "/v1/chat/completions": self._chat,
            "/v1/messages": self._chat,
            "/inference/v1/generate": self._whole,
            "/pause": self._control,
            "/resume": self._control,
            "/finish_weight_update": self._control,
        }
        gets = {
            "/health": self._health,
            "/metrics": self._metrics,
            "/v1/models": self._models,
            "/is_paused": self._tell_paused,
        }
        self._app = applications.Starlette(
            routes=[
                *(
                    routing.Route(path, act, methods=["POST"])
                    for path, act in posts.items()
                ),
                *(routing.Route(path, act) for path, act in gets.items()),
            ]
        )

    @contextlib.asynccontextmanager
    async def serving(self, port=0):
        """Listens while it lasts; yields the address."""
        with contextlib.closing(listening.bind("127.0.0.1", port)) as listener:
            async with running(self._app, listener):
                self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                yield self.url

    async def _health(self, request):
        return responses.JSONResponse({}, 500 if self.mode == "unwell" else 200)

    async def _metrics(self, request):
        return responses.PlainTextResponse(
            "# HELP glm5_jax_weights_version Version of the weights.\n"
            "# TYPE glm5_jax_weights_version gauge\n"
            f"glm5_jax_weights_version {self.version}\n"
            f'glm5_jax_requests_ended_total{{reason="stop"}} {len(self.seen)}\n'
        )

    async def _models(self, request):
        self.keys.add(request.headers.get("authorization"))
        return responses.JSONResponse({"data": [{"id": self.model}]})

    async def _tell_paused(self, request):
        return responses.JSONResponse({"is_paused": self.is_paused})

    async def _control(self, request):
        if self.mode == "failing":
            return responses.JSONResponse({"error": "no"}, 500)
        path, query = request.url.path, request.url.query
        self.asked.append(f"{path}?{query}" if query else path)
        if path in ("/pause", "/resume"):
            self.is_paused = path == "/pause"
        told = {"status": path[1:]}
        if path == "/finish_weight_update":
            self.version += 1
            told["weight_version"] = self.version
        return responses.JSONResponse(told)

    async def _whole(self, request):
        if refusal := await self._refuse(request):
            return refusal
        await asyncio.sleep(self.seen[-1].get("pause", 0))
        key = request.headers.get("authorization")
        told = json.dumps({"name": self.name, "key": key})

        async def parts():
            yield told[:5]
            if self.mode == "half":
                raise ConnectionAbortedError
            yield told[5:]

        return responses.StreamingResponse(parts(), media_type="application/json")

    async def _chat(self, request):
        if refusal := await self._refuse(request):
            return refusal
        fields = self.seen[-1]
        events = self._events(fields.get("max_tokens", 4), fields.get("pause", 0))
        return responses.StreamingResponse(events, media_type="text/event-stream")

    async def _refuse(self, request):
        body = await request.json()
        if self.mode in _REFUSALS:
            status = _REFUSALS[self.mode]
            headers = {"Retry-After": "7"} if status == 429 else {}
            told = {"error": self.name}
            return responses.JSONResponse(told, status, headers)
        self.seen.append(body)
        return None

    async def _events(self, number, pause):
        yield event({"role": "assistant", "content": ""})
        try:
            for index in range(number):
                if self.mode == "silent":
                    self.num_silent += 1
                    await asyncio.Event().wait()
                if self.mode == "half" and index == 2:
                    yield "data: {"
                    raise ConnectionAbortedError
                if index == number - 1:
                    await self.is_open.wait()
                await asyncio.sleep(pause)
                yield event({"content": f"{self.name}{index} "})
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        yield event({}, "stop")
        yield "data: [DONE]\n\n"


def event(delta, reason=None):
    """Returns an event of a chat's stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"


@contextlib.asynccontextmanager
async def running(made, listener):
    """Runs an application in this event loop; it gets no signals."""
    server = listening.make_server(made, drain_seconds=1)
    server.capture_signals = contextlib.nullcontext
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def together(contexts):
    """Enters contexts; leaves them at the same time, as a server waits in its end."""
    found = [await one.__aenter__() for one in contexts]
    try:
        yield found
    finally:
        await asyncio.gather(*(one.__aexit__(None, None, None) for one in contexts))


@contextlib.asynccontextmanager
async def routing_to(urls, options, **limits):
    """Runs a router; yields its address and the router, once all are in service."""
    # Most of what a process of a replica would import, which needs no router.
    from glm5_jax.serving.router import app

    router = app.Router(options, guard.Limits(**limits))
    try:
        for url in urls:
            router.join(url)
        with contextlib.closing(listening.bind("127.0.0.1", 0)) as listener:
            async with running(router.door, listener):
                await until(lambda: len(router.pool.ready()) == len(urls))
                yield f"http://127.0.0.1:{listener.getsockname()[1]}", router
    finally:
        await router.close()


async def until(holds, seconds=60):
    """Waits for something that other tasks or processes do."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.002)


if __name__ == "__main__":
    number = int(sys.argv[-1].removeprefix("--port="))
    with contextlib.closing(listening.bind("127.0.0.1", number)) as own:
        made = Light(f"pid{os.getpid()}-")._app
        listening.make_server(made, drain_seconds=5).run(sockets=[own])
