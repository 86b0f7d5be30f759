"""Running streams while long prompts arrive: one server, and prefill apart from decode.

    pip install -e ".[serve]"
    python benchmarks/prefill_apart_cpu.py --trials=5

The bench shape on a CPU. One server has cores 0 and 1; apart, one that answers has core
0 and one that reads prompts has core 1. Eight streams decode, and meanwhile prompts of
2,048 tokens arrive, each of which nobody has seen, one after the answer to the other.
A trial asks both ways in turn; the first is not counted. Programs are compiled as they
are needed, or come from the cache on disk: run it twice. A pause is the time between
two pieces of a stream. It is also given in seconds that the answering server computed,
over all cores, which other work on the machine changes less. The client shares the
cores with the servers.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import pathlib
import statistics
import tempfile
import time
import urllib.request

import aiohttp
import serving_cpu
import serving_load

STREAMS, SHORT, STREAMED = 8, 32, 1000  # streams, and their tokens
PROMPTS, LONG, NEW = 3, 2048, 8  # prompts that arrive, and their tokens
FLAGS = ("--num_slots=12", "--capacity=3072", "--num_pages=640", "--nowarm_up")


def computed(server: serving_load.Server) -> float:
    """Returns the seconds that a server has computed, over all cores."""
    tasks = pathlib.Path(f"/proc/{server.process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


async def gaps(
    client: aiohttp.ClientSession, server: serving_load.Server, prompt: list
) -> list[tuple[float, float]]:
    """Returns the pauses of a stream in seconds, of the clock and computed."""
    body = {"prompt": prompt, "max_tokens": STREAMED, "temperature": 0.0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    times = []
    async with client.post(f"{server.url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {") and b'"token_ids": []' not in line:
                times.append((time.perf_counter(), computed(server)))
    pairs = itertools.pairwise(times)
    return [(end[0] - begin[0], end[1] - begin[1]) for begin, end in pairs]


async def trial(server: serving_load.Server, seed: int) -> dict[str, float]:
    """Returns milliseconds: pauses of the streams, and first tokens of the prompts."""
    shorts = serving_load.prompts_of([SHORT] * STREAMS, 2 * seed)
    longs = serving_load.prompts_of([LONG] * PROMPTS, 2 * seed + 1)
    async with serving_load.session() as client:
        streams = [asyncio.create_task(gaps(client, server, x)) for x in shorts]
        await asyncio.sleep(0.5)
        firsts, is_beside = [], True
        for prompt in longs:
            firsts.append(
                (await serving_load.ask(client, server.url, prompt, NEW)).first
            )
            is_beside &= not any(stream.done() for stream in streams)
        found = [gap for stream in streams for gap in await stream]
    if not is_beside:
        print("The streams ended before the prompts; raise STREAMED.")
    clock, busy = zip(*found, strict=True)
    return {
        "longest pause of a stream": max(clock) * 1e3,
        "the same, computed": max(busy) * 1e3,
        "median pause": statistics.median(clock) * 1e3,
        "first token of 2,048": statistics.median(firsts) * 1e3,
    }


def figures(url: str) -> dict[str, float]:
    """Returns the figures of a server."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("glm5_jax_"): float(value) for name, value in pairs}


def main() -> None:
    """Starts the servers and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=5)
    trials = parser.parse_args().trials
    with contextlib.ExitStack() as stack:
        folder = f"{stack.enter_context(tempfile.TemporaryDirectory())}/bench"
        serving_cpu.write_model(folder)

        def start(cores: str, *flags: str) -> serving_load.Server:
            started = serving_load.serving(folder, cores, *FLAGS, *flags)
            return stack.enter_context(started)

        reader = start("1")
        apart = start("0", "--host_pages=640", f"--prefill_servers={reader.url}")
        ways = {"one server": start("0,1"), "apart": apart}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for seed in range(trials + 1):
            for name, server in ways.items():
                found[name].append(asyncio.run(trial(server, seed)))
        print("| milliseconds | one server | apart | apart / one, each trial |")
        print("|---|---|---|---|")
        for name in found["apart"][0]:
            one, other = ([x[name] for x in found[way][1:]] for way in ways)
            ratios = [f"{b / a:.2f}" for a, b in zip(one, other, strict=True)]
            both = " | ".join(f"{statistics.median(x):.0f}" for x in (one, other))
            print(f"| {name} | {both} | {', '.join(ratios)} |")
        told = figures(apart.url)
        size = told["page_bytes_fetched_total"] / told["pages_fetched_total"] / 64
        names = ("prompt_tokens_total", 'prefills_total{outcome="fetched"}')
        print(json.dumps({name: told[name] for name in names}))
        print(f"{size:.0f} bytes for each token that was handed over")


if __name__ == "__main__":
    main()
