"""Starts many boxes at once and counts what they take and what they leave behind.

    python benchmarks/sandbox.py [--boxes=1000] [--kind=bubblewrap]

Prints seconds to start all of them, to run a command in each and to end them; commands
a second in one box and in all; processes and memory (proportional set size) of a box;
and the processes, mounts and folders that are left, which must be none.
"""

import argparse
import asyncio
import collections
import pathlib
import tempfile
import time

from glm5_jax.environments import sandbox

AT_ONCE = 32  # starts and ends
COMMANDS = 200  # in one box


def memory() -> tuple[int, int]:
    """Returns processes of boxes, and the bytes that they take."""
    count, size = 0, 0
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            if not any(mark in words for mark in (b"glm5_jax_box_", b"-v _line")):
                continue
            lines = (entry / "smaps_rollup").read_text().splitlines()
        except (OSError, ValueError):
            continue
        pss = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
        count, size = count + 1, size + 1024 * sum(pss)
    return count, size


def left() -> dict[str, int]:
    """Counts what boxes may leave behind."""
    count, _ = memory()
    mounts = pathlib.Path("/proc/mounts").read_text().count("glm5_jax_box_")
    folders = len([*pathlib.Path(tempfile.gettempdir()).glob("glm5_jax_box_*")])
    return {"processes": count, "mounts": mounts, "folders": folders}


async def run(num_boxes: int, kind: str | None) -> None:
    """Prints the figures."""
    before = left()
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
    count, size = await asyncio.to_thread(memory)
    each = size / num_boxes / 2**20
    print(f"{count / num_boxes:.1f} processes and {each:.2f} MiB of memory a box")
    began = time.perf_counter()
    await asyncio.gather(*map(end, boxes))
    print(f"ended in {time.perf_counter() - began:.2f} s")
    print(f"left behind: { {k: v - before[k] for k, v in left().items()} }")


def main() -> None:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--boxes", type=int, default=1000)
    parser.add_argument("--kind", choices=sandbox.KINDS)
    args = parser.parse_args()
    asyncio.run(run(args.boxes, args.kind))


if __name__ == "__main__":
    main()
