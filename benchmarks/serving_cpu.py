"""Speed of the HTTP server: a real process, real sockets, the bench shape on a CPU.

    pip install -e ".[serve]" aiohttp
    python benchmarks/serving_cpu.py
    python benchmarks/serving_cpu.py --only=streams,slots --runs=5

The server runs on core 0, the client on core 1. The model has random weights; every
request draws exactly as many tokens as it asks for. The servers compile all programs
first, which takes minutes unless the compilation cache has them. The first run is not
counted. Prints a table for each measurement:

    streams   64 concurrent streams, beside the same requests of an engine without HTTP
    mixed     16 requests of mixed lengths, together and one after another
    slots     one request, of a server with 64 slots and of one with a single slot
    prefix    time to the first token with a prompt of 2,048 + 32 tokens, of which the
              first are new, or cached in pages
    hold      200 concurrent streams for a minute: lost ones, and the server's memory
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import serving_load
from decode_lengths import MIXED

from glm5_jax import presets
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.inference import engine as engine_lib
from glm5_jax.model import transformer
from glm5_jax.weights import huggingface_export

CONFIG = presets.BENCH
SERVER_CORE, CLIENT_CORE = 0, 1
NUM_STREAMS, PROMPT, NEW_TOKENS = 64, 64, 128
PREFIX, REST, PAGES = 2048, 32, 256
HELD, HOLD_SECONDS = 200, 60.0
ALL = ("streams", "mixed", "slots", "prefix", "hold")


def write_model(folder: str) -> None:
    """Writes a model with random weights, and a tokenizer."""
    init = jax.jit(transformer.init_params, static_argnums=0)
    huggingface_export.save_params(init(CONFIG, jax.random.key(0)), CONFIG, folder)
    made = tokenizer_lib.byte_tokenizer(tokenizer_lib.SPECIAL_TOKENS)
    made.save(f"{folder}/tokenizer.json")


def offline() -> None:
    """Answers each line of stdin with the seconds that the streams' requests take."""
    init = jax.jit(transformer.init_params, static_argnums=0)
    params = init(CONFIG, jax.random.key(0))
    machine = engine_lib.Engine(
        params, CONFIG, num_slots=NUM_STREAMS, capacity=PROMPT + NEW_TOKENS
    )
    for seed, _ in enumerate(sys.stdin):
        prompts = serving_load.prompts_of([PROMPT] * NUM_STREAMS, seed)
        began = time.perf_counter()
        for id, prompt in enumerate(prompts):
            request = engine_lib.Request(id, prompt, NEW_TOKENS, temperature=0.0)
            machine.submit(request)
        while machine.num_pending:
            machine.step()
        print(time.perf_counter() - began, flush=True)


@contextlib.contextmanager
def offline_engine() -> Iterator[subprocess.Popen]:
    """Runs `offline` in a process on the server's core."""
    child = subprocess.Popen(
        ["taskset", "-c", str(SERVER_CORE), sys.executable, __file__, "--offline"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        yield child
        child.stdin.close()


def streams(folder: str, runs: int) -> None:
    """Compares the streams with the engine alone, alternating."""
    flags = f"--num_slots={NUM_STREAMS}", f"--capacity={PROMPT + NEW_TOKENS}"
    seconds: dict[str, list[float]] = {"offline": [], "HTTP": []}
    with (
        serving_load.serving(folder, SERVER_CORE, *flags) as server,
        offline_engine() as child,
    ):
        for run in range(runs + 1):
            child.stdin.write("\n")
            child.stdin.flush()
            alone = float(child.stdout.readline())
            prompts = serving_load.prompts_of([PROMPT] * NUM_STREAMS, run)
            sizes = [NEW_TOKENS] * NUM_STREAMS
            asked = serving_load.ask_all(server.url, prompts, sizes, True)
            through = asyncio.run(asked)
            if run:
                seconds["offline"].append(alone)
                seconds["HTTP"].append(through)
    rates = {
        name: NUM_STREAMS * NEW_TOKENS / statistics.median(values)
        for name, values in seconds.items()
    }
    share = f"{rates['HTTP'] / rates['offline']:.0%} of the engine alone"
    print(f"\n| {NUM_STREAMS} streams | tokens a second |\n|---|---|")
    print(f"| engine alone | {rates['offline']:.0f} |")
    print(f"| through HTTP | {rates['HTTP']:.0f}, {share} |", flush=True)


def mixed(folder: str, runs: int) -> None:
    """Compares requests together with one after another."""
    flags = "--num_slots=16", "--capacity=512"
    sizes = [new for _, new in MIXED]
    found: dict[bool, list[float]] = {True: [], False: []}
    with serving_load.serving(folder, SERVER_CORE, *flags) as server:
        for run in range(runs + 1):
            for together, seconds in found.items():
                prompts = serving_load.prompts_of([p for p, _ in MIXED], run)
                asked = serving_load.ask_all(server.url, prompts, sizes, together)
                seconds.append(asyncio.run(asked))
    both = [statistics.median(found[together][1:]) for together in (False, True)]
    print(f"\n| {len(MIXED)} requests of mixed lengths | seconds |\n|---|---|")
    print(f"| one after another | {both[0]:.2f} |")
    print(f"| together | {both[1]:.2f}, {both[0] / both[1]:.1f} times as fast |")


def slots(folder: str, runs: int) -> None:
    """Compares one request of a server with many slots and of one with a single."""
    rows = {}
    with contextlib.ExitStack() as stack:
        servers = {
            number: stack.enter_context(
                serving_load.serving(
                    folder, SERVER_CORE, f"--num_slots={number}", "--capacity=512"
                )
            )
            for number in (1, NUM_STREAMS)
        }
        found: dict[int, list[float]] = {number: [] for number in servers}
        for run in range(runs + 1):
            for number, server in servers.items():
                (prompt,) = serving_load.prompts_of([PROMPT], run)
                asked = serving_load.ask_all(server.url, [prompt], [NEW_TOKENS], True)
                found[number].append(asyncio.run(asked) / NEW_TOKENS * 1e3)
        rows = {number: statistics.median(x[1:]) for number, x in found.items()}
    more = rows[NUM_STREAMS] / rows[1] - 1
    print("\n| one request | milliseconds a token |\n|---|---|")
    print(f"| 1 slot | {rows[1]:.2f} |")
    print(f"| {NUM_STREAMS} slots | {rows[NUM_STREAMS]:.2f}, {more:+.0%} |", flush=True)


def prefix(folder: str, runs: int) -> None:
    """Compares the first token's time of new and of cached prefixes."""
    capacity = PREFIX + 2 * REST
    flags = "--num_slots=4", f"--capacity={capacity}", f"--num_pages={PAGES}"

    async def first(url: str, prompt: list[int]) -> float:
        async with serving_load.session() as client:
            return (await serving_load.ask(client, url, prompt, 1)).first

    found: dict[str, list[float]] = {"new": [], "cached": [], "short": []}
    with serving_load.serving(folder, SERVER_CORE, *flags) as server:
        for run in range(runs + 1):
            (shared,) = serving_load.prompts_of([PREFIX], run)
            rests = serving_load.prompts_of([REST] * 3, run + 1000)
            for (name, seconds), rest in zip(found.items(), rests, strict=True):
                prompt = rest if name == "short" else shared + rest
                seconds.append(asyncio.run(first(server.url, prompt)) * 1e3)
    rows = {name: statistics.median(values[1:]) for name, values in found.items()}
    print("\n| prompt | milliseconds to the first token |\n|---|---|")
    print(f"| {PREFIX} + {REST} tokens, all new | {rows['new']:.0f} |")
    print(f"| {PREFIX} cached + {REST} new | {rows['cached']:.0f} |")
    print(f"| {REST} new alone | {rows['short']:.0f} |", flush=True)


async def _hold(server: serving_load.Server, seconds: float) -> tuple[int, int, list]:
    """Returns streams that ended, lost ones, and the memory while it lasted."""
    end, counts, memory = time.monotonic() + seconds, {"done": 0, "lost": 0}, []

    async def client(number: int, http: object) -> None:
        (prompt,) = serving_load.prompts_of([PROMPT], number)
        while time.monotonic() < end:
            try:
                await serving_load.ask(http, server.url, prompt, NEW_TOKENS)
                counts["done"] += 1
            except Exception as error:
                print(f"lost: {error!r}")
                counts["lost"] += 1

    async def watch() -> None:
        while time.monotonic() < end:
            memory.append(server.rss_mib())
            await asyncio.sleep(1)

    async with serving_load.session() as http:
        await asyncio.gather(watch(), *(client(i, http) for i in range(HELD)))
    return counts["done"], counts["lost"], memory


def hold(folder: str, seconds: float) -> None:
    """Holds many streams for a minute."""
    flags = f"--num_slots={NUM_STREAMS}", f"--capacity={PROMPT + NEW_TOKENS}"
    with serving_load.serving(folder, SERVER_CORE, *flags) as server:
        asyncio.run(_hold(server, seconds / 10))  # what the first requests keep
        done, lost, memory = asyncio.run(_hold(server, seconds))
    print(f"\n| {HELD} streams at a time, {seconds:.0f} seconds | |\n|---|---|")
    print(f"| ended | {done} |\n| lost | {lost} |")
    print(f"| memory, first and last, MiB | {memory[0]:.0f}, {memory[-1]:.0f} |")


def main() -> None:
    """Parses flags and prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(ALL), help="names, with commas")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hold_seconds", type=float, default=HOLD_SECONDS)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        offline()
        return
    os.sched_setaffinity(0, {CLIENT_CORE})
    with tempfile.TemporaryDirectory() as parent:
        folder = f"{parent}/bench"
        write_model(folder)
        for name in args.only.split(","):
            if name == "hold":
                hold(folder, args.hold_seconds)
            else:
                globals()[name](folder, args.runs)
    print(json.dumps({"jax": jax.__version__, "runs": args.runs}))


if __name__ == "__main__":
    main()
