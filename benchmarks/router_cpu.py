"""Measures what the router costs: the same requests to a replica and through a router.

    python benchmarks/router_cpu.py

Replica, router and client are processes of this machine. The replica has no model: it
answers at once, or streams events as fast as they are taken, so that all time is that
of HTTP. Times are the medians of --repeats rounds, the two sides in turn.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import aiohttp
from starlette import applications, requests, responses, routing

from glm5_jax.http_server import listening

_CHUNK = {"object": "chat.completion.chunk", "id": "chatcmpl-0", "model": "m"}


def serve_replica(port: int) -> None:
    """Serves answers without a model."""

    async def health(_: requests.Request) -> responses.Response:
        return responses.JSONResponse({})

    async def models(_: requests.Request) -> responses.Response:
        return responses.JSONResponse({"data": [{"id": "m"}]})

    async def answer(request: requests.Request) -> responses.Response:
        number = (await request.json()).get("events", 0)
        if not number:
            return responses.JSONResponse({"choices": []})

        async def events() -> AsyncIterator[str]:
            for index in range(number):
                choices = [{"index": 0, "delta": {"content": f"word{index} "}}]
                yield f"data: {json.dumps({**_CHUNK, 'choices': choices})}\n\n"
                await asyncio.sleep(0)

        return responses.StreamingResponse(events(), media_type="text/event-stream")

    app = applications.Starlette(
        routes=[
            routing.Route("/health", health),
            routing.Route("/v1/models", models),
            routing.Route("/v1/chat/completions", answer, methods=["POST"]),
        ]
    )
    with contextlib.closing(listening.bind("127.0.0.1", port)) as listener:
        listening.make_server(app, drain_seconds=1).run(sockets=[listener])


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """Starts a process that listens at --port; yields its address."""
    with contextlib.closing(listening.bind("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    child = subprocess.Popen([sys.executable, *arguments, f"--port={port}"])
    try:
        yield f"http://127.0.0.1:{port}", child
    finally:
        child.terminate()
        child.wait()


async def answers(http: aiohttp.ClientSession, url: str) -> bool:
    """Returns whether a server is ready."""
    try:
        async with http.get(f"{url}/health") as found:
            return found.status == 200
    except aiohttp.ClientError:
        return False


async def ask(http: aiohttp.ClientSession, url: str, events: int, user: int) -> int:
    """Returns the size of an answer."""
    body = {"events": events, "user": str(user)}
    async with http.post(f"{url}/v1/chat/completions", json=body) as found:
        assert found.status == 200, found.status
        return len(await found.read())


async def seconds(url: str, number: int, events: int, together: int) -> float:
    """Returns the time of `number` requests, `together` of them at a time."""
    async with aiohttp.ClientSession() as http:
        await ask(http, url, events, 0)
        left = iter(range(number))

        async def work() -> None:
            for index in left:
                await ask(http, url, events, index)

        begun = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(together)))
        return time.perf_counter() - begun


def cpu_seconds(child: subprocess.Popen) -> float:
    """Returns the CPU time of a process, where /proc tells."""
    with open(f"/proc/{child.pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    direct: str, routed: str, router: subprocess.Popen, options: argparse.Namespace
) -> None:
    """Prints the table."""
    async with aiohttp.ClientSession() as http:
        while not all([await answers(http, url) for url in (direct, routed)]):
            await asyncio.sleep(0.1)
    print("| | replica | through the router | the router's CPU |")
    print("|---|---|---|---|")
    for name, number, events, together in (
        ("a whole answer, one at a time, ms", options.requests, 0, 1),
        ("a whole answer, 64 at a time, ms", options.requests, 0, 64),
        ("an event, one stream, us", 1, options.events, 1),
        ("an event, 64 streams, us", 64, options.events // 16, 64),
    ):
        times: dict[str, list[float]] = {direct: [], routed: []}
        cpu = 0.0
        for _ in range(options.repeats):
            for url, found in times.items():
                before = cpu_seconds(router)
                found.append(await seconds(url, number, events, together))
                cpu += (cpu_seconds(router) - before) * (url == routed)
        unit = 1e6 / (number * events) if events else 1e3 / number
        shown = [statistics.median(found) * unit for found in times.values()]
        shown.append(cpu / options.repeats * unit)
        print(f"| {name} | " + " | ".join(f"{value:.3g}" for value in shown) + " |")


def main() -> None:
    """Starts the processes and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--events", type=int, default=4000, help="of the one stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, help="serves the replica (internal)")
    options = parser.parse_args()
    if options.port is not None:
        serve_replica(options.port)
        return
    with started(__file__) as (direct, _):
        flags = ("-m", "glm5_jax.route", f"--replicas={direct}", "--spare=999")
        with started(*flags) as (routed, router):
            asyncio.run(measure(direct, routed, router, options))


if __name__ == "__main__":
    main()
