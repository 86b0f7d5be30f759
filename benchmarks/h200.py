"""Runs all kernels on one H200: values of small cases, times, and comparisons.

    python benchmarks/h200.py --out=DIR --seconds=540

runs what there is time for and, called again with the same DIR, the rest. Needs jax
for CUDA, triton and jax-triton (the extra `gpu`); with torch, its own path is timed on
the same card. Where they lie in a folder of their own, name it: PYTHONPATH=FOLDER.
`--small` rehearses it anywhere.

An op runs in a process of its own (h200_child.py), which is ended when a row takes too
long and started again behind a row that ended it: an illegal address or a hang costs
one row. Every measured number is on the disk before the next one is begun. DIR holds
rows/, one file a row, log/, what processes said, and table.md, rows.json and times.png.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import h200_rows  # noqa: E402
from h200_rows import Row  # noqa: E402

from pallas_kernels.bench import measure  # noqa: E402

CHILD = (sys.executable, str(ROOT / "benchmarks" / "h200_child.py"))
ROW_SECONDS = 90  # that a row may take, the start of its process included
CARD = "card"  # a file that the process locks which has the card
AGAIN = h200_rows.AGAIN
SILENCE = "silence"  # instead of a line
TICK = 0.2  # seconds between looks at the card's file


def main(argv: list[str] | None = None, child: tuple[str, ...] = CHILD) -> int:
    """Runs what time allows; 1 if a row failed, else 3 if some are still to be run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True, help="a folder; rows in it are kept")
    add("--seconds", type=float, default=540, help="to stop after")
    add("--jobs", type=int, default=4, help="processes: they compile side by side")
    add("--row_seconds", type=float, default=ROW_SECONDS, help="that a row may take")
    add("--only", default="", help="ops or phases: sparse_mla,values,baseline")
    add("--retry", action="store_true", help="rows that failed too")
    add("--small", action="store_true", help="a rehearsal anywhere")
    args = parser.parse_args(argv)
    known, wanted = h200_rows.names(), set(filter(None, args.only.split(",")))
    if wanted - known:
        parser.error(f"--only must be of {', '.join(sorted(known))}, got {args.only}")
    for folder in ("rows", "log"):
        (args.out / folder).mkdir(parents=True, exist_ok=True)
    phases, ops = wanted & set(h200_rows.PHASES), wanted - set(h200_rows.PHASES)
    rows = [
        row
        for row in h200_rows.plan(args.small)
        if (not phases or row.phase in phases) and (not ops or row.op in ops)
    ]
    waiting = [row for row in rows if _is_waiting(args.out, row, args.retry)]
    for row in waiting:
        h200_rows.forget_failure(args.out, row)
    for row in _run(waiting, args, child):
        found = h200_rows.read(args.out, row)
        note = found.get("failure") or h200_rows.brief(found)
        print(f"{row.name}: {note.splitlines()[0]}", flush=True)
    everything = {row: h200_rows.read(args.out, row) for row in rows}
    found = {row: values for row, values in everything.items() if values}
    print(h200_rows.report(args.out, found))
    left = [row for row in rows if not everything[row].get("is_done")]
    if left:
        print(f"{len(left)} rows are left: call it again.")
    failed = [r for r in found.values() if "failure" in r or r.get("is_wrong")]
    return 1 if failed else 3 if left else 0


def _is_waiting(out: pathlib.Path, row: Row, retry: bool) -> bool:
    """Returns whether a row was never ended, or failed and is to be run again."""
    found = h200_rows.read(out, row)
    return not found.get("is_done") or (retry and "failure" in found)


def _run(
    rows: list[Row], args: argparse.Namespace, command: tuple[str, ...]
) -> Iterator[Row]:
    """Rows as they end, of some processes, each for neighbours of one op."""
    deadline = time.monotonic() + args.seconds
    groups: queue.SimpleQueue[list[Row]] = queue.SimpleQueue()
    for _, same in itertools.groupby(rows, lambda row: row[:2]):
        groups.put(list(same))
    ended: queue.Queue[Row] = queue.Queue()
    stop = threading.Event()

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                same = groups.get_nowait()
                while same and not stop.is_set() and time.monotonic() < deadline:
                    for row in _of_child(same, args, command, deadline, stop):
                        same.remove(row)
                        ended.put(row)

    (args.out / CARD).write_text("")  # the process that has the card writes its number
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        try:
            workers = [pool.submit(work) for _ in range(args.jobs)]
            while not all(worker.done() for worker in workers) or not ended.empty():
                with contextlib.suppress(queue.Empty):
                    yield ended.get(timeout=0.2)
            for worker in workers:
                worker.result()
        finally:
            stop.set()


def _of_child(
    rows: list[Row],
    args: argparse.Namespace,
    command: tuple[str, ...],
    deadline: float,
    stop: threading.Event,
) -> Iterator[Row]:
    """Runs rows in a process of their own; those that end."""
    options = ["--small"] if args.small else []
    with (args.out / "log" / f"{rows[0].op}.txt").open("a") as log:
        child = subprocess.Popen(
            [*command, str(args.out), *(row.name for row in rows), *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env={
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the others need memory
                measure.CARD: str(args.out / CARD),
                **os.environ,
            },
        )
        try:
            yield from _ended(child, list(rows), args, deadline, stop)
        finally:
            _end(child)


def _ended(
    child: subprocess.Popen,
    rows: list[Row],
    args: argparse.Namespace,
    deadline: float,
    stop: threading.Event,
) -> Iterator[Row]:
    """Rows that the child ends, and then the one that ends the child."""
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
    for row in rows:
        line = _answer(child, lines, args, deadline, stop)
        if line is None or line == AGAIN:
            return  # the next call runs it; or its process may be poisoned
        if line != row.name:
            why = f"no answer after {args.row_seconds:.0f} s"
            if line != SILENCE:
                why = f"its process ended with {_reason(child, line)}"
            failure = f"{why}: see log/{row.op}.txt"
            h200_rows.write(args.out, row, {"failure": failure, "is_done": True})
            yield row
            return
        yield row


def _answer(
    child: subprocess.Popen,
    lines: queue.Queue[str],
    args: argparse.Namespace,
    deadline: float,
    stop: threading.Event,
) -> str | None:
    """Returns what the child says next; SILENCE, or None if it is not to blame."""
    waited = 0.0
    while not stop.is_set() and time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=TICK)
            return None if stop.is_set() else line
        # It may wait for the card, as long as all others have it.
        has_card = (args.out / CARD).read_text() == str(child.pid)
        waited += TICK if has_card else TICK / args.jobs
        if waited > args.row_seconds:
            return SILENCE
    return None


def _read(stream: Any, lines: queue.Queue) -> None:
    for line in stream:
        lines.put(line.strip())
    lines.put("")  # its end


def _reason(child: subprocess.Popen, line: str) -> str:
    if line:
        return f"the words {line!r}"
    code = child.wait()
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _end(child: subprocess.Popen) -> None:
    """Ends a process that may hang in a driver, and what it started."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
