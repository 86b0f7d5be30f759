"""Starts many boxes at once and counts what they take and what they leave behind.

    python benchmarks/sandbox.py [--boxes=1000] [--kind=bubblewrap]

Prints seconds to start all of them, to run a command in each and to end them; commands
a second in one box and in all; processes and memory (proportional set size) of a box;
and the processes, mounts and folders that are left, which must be none.
"""

import argparse
import asyncio
import collections
import contextlib
import os
import pathlib
import tempfile
import time
from collections.abc import Iterable

from glm5_jax.environments import sandbox
from glm5_jax.environments.sandbox import processes

AT_ONCE = 32  # starts and ends
COMMANDS = 200  # in one box


def family() -> set[int]:
    """Returns the processes that this one has started, and theirs."""
    return {pid for pid, _ in processes.sizes(os.getpid())}


def memory(pids: Iterable[int]) -> int:
    """Returns the bytes that processes take, each share of common pages once."""
    size = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
            lines = [line.split() for line in text.splitlines()]
            size += sum(1024 * int(line[1]) for line in lines if line[0] == "Pss:")
    return size


def left(seen: set[int], folder: str) -> dict[str, int]:
    """Counts what boxes in a folder may leave behind, of processes those of boxes."""
    mounts = pathlib.Path("/proc/mounts").read_text().count(folder)
    alive = [pid for pid in seen if pathlib.Path(f"/proc/{pid}").exists()]
    folders = len(os.listdir(folder))
    return {"processes": len(alive), "mounts": mounts, "folders": folders}


async def run(num_boxes: int, kind: str | None) -> None:
    """Prints the figures."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def start() -> sandbox.Box:
        async with gate:
            return await sandbox.start(sandbox.Image({"n.txt": b"1\n"}), kind=kind)

    async def end(box: sandbox.Box) -> None:
        async with gate:
            await box.close()

    began = time.perf_counter()
    boxes = await asyncio.gather(*(start() for _ in range(num_boxes)))
    print(f"{kind or sandbox.describe()}: {num_boxes} boxes")
    print(f"started in {time.perf_counter() - began:.2f} s")
    began = time.perf_counter()
    done = await asyncio.gather(*(box.run("cat n.txt", 120) for box in boxes))
    outcomes = collections.Counter((r.exit_code, r.stdout) for r in done)
    print(f"first command of each: {time.perf_counter() - began:.2f} s, {outcomes}")
    began = time.perf_counter()
    for _ in range(5):
        await asyncio.gather(*(box.run("echo 1", 120) for box in boxes))
    rate = 5 * num_boxes / (time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(COMMANDS):
        await boxes[0].run("echo 1")
    alone = COMMANDS / (time.perf_counter() - began)
    print(f"{rate:.0f} commands a second in all, {alone:.0f} in one")
    seen = family()
    each = await asyncio.to_thread(memory, seen) / num_boxes / 2**20
    print(f"{len(seen) / num_boxes:.1f} processes and {each:.2f} MiB of memory a box")
    began = time.perf_counter()
    await asyncio.gather(*map(end, boxes))
    print(f"ended in {time.perf_counter() - began:.2f} s")
    print(f"left behind: {left(seen, tempfile.gettempdir())}")


def main() -> None:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--boxes", type=int, default=1000)
    parser.add_argument("--kind", choices=sandbox.KINDS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # boxes may be another user's
        tempfile.tempdir = folder  # others' boxes are not counted
        asyncio.run(run(args.boxes, args.kind))


if __name__ == "__main__":
    main()
