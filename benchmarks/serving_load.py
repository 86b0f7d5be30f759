"""A server process for benchmarks/serving_cpu.py, and a client that loads it."""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import aiohttp
import numpy as np

READY_SECONDS = 1800.0
_TIMEOUT = aiohttp.ClientTimeout(total=None)


def free_port() -> int:
    """Returns a port that nobody listens at."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@dataclasses.dataclass
class Server:
    """A server process on one core."""

    process: subprocess.Popen
    url: str

    def rss_mib(self) -> float:
        """Returns the memory that the process has resident."""
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(x for x in text.splitlines() if x.startswith("VmRSS"))
        return int(line.split()[1]) / 1024


@contextlib.contextmanager
def serving(folder: str, core: int | str, *flags: str) -> Iterator[Server]:
    """Starts `glm5_jax.serve` on a core or several, waits for it, and ends it."""
    port = free_port()
    command = ["taskset", "-c", str(core), sys.executable, "-m", "glm5_jax.serve"]
    process = subprocess.Popen(
        [*command, f"--checkpoint={folder}", f"--port={port}", "--warm_up", *flags],
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(process, port)
        yield Server(process, f"http://127.0.0.1:{port}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _wait(process: subprocess.Popen, port: int) -> None:
    """Waits until the port is open."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port)),
        ):
            return
        time.sleep(0.2)
    raise SystemExit("The server did not start; run its command by hand.")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one streamed request got."""

    num_tokens: int
    first: float  # seconds until its first tokens
    seconds: float


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Yields a client without a limit on connections."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as client:
        yield client


async def ask(
    client: aiohttp.ClientSession, url: str, prompt: Sequence[int], num_tokens: int
) -> Answer:
    """Streams a completion of exactly `num_tokens`, and counts its ids."""
    body = {
        "prompt": [*prompt],
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    began, first, number = time.perf_counter(), 0.0, 0
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                number += len(choice["token_ids"])
            if number:  # the first event tells the prompt
                first = first or time.perf_counter() - began
    if number != num_tokens:
        raise RuntimeError(f"{number} tokens came instead of {num_tokens}.")
    return Answer(number, first, time.perf_counter() - began)


async def ask_all(
    url: str, prompts: Sequence[Sequence[int]], sizes: Sequence[int], together: bool
) -> float:
    """Returns the seconds of all requests, together or one after another."""
    async with session() as client:
        began = time.perf_counter()
        asked = [ask(client, url, *x) for x in zip(prompts, sizes, strict=True)]
        if together:
            await asyncio.gather(*asked)
        else:
            for one in asked:
                await one
        return time.perf_counter() - began


def prompts_of(sizes: Sequence[int], seed: int) -> list[list[int]]:
    """Returns random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 256, size).tolist() for size in sizes]
