"""Runs tasks in this process, or in worker processes that end with it."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from multiprocessing import connection
from typing import TypeVar

import tqdm

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def results(
    function: Callable[[_Task], _Result], tasks: Sequence[_Task], num_workers: int
) -> Iterator[_Result]:
    """Yields the results of a module-level function, in the order of the tasks.

    Raises:
        RuntimeError: a worker died.
    """
    num_workers = min(num_workers, len(tasks))
    if num_workers <= 1:
        yield from map(function, tasks)
        return
    context = multiprocessing.get_context("spawn")  # threads do not survive a fork
    with futures.ProcessPoolExecutor(num_workers, context, _begin) as pool:
        try:
            yield from pool.map(function, tasks)
        except futures.process.BrokenProcessPool as error:
            raise RuntimeError(
                "a worker has died; where memory ran out, give fewer --workers or a "
                "smaller --shard_mib. What is finished stays: run the command again."
            ) from error


def bar(label: str, num_bytes: int, *, is_shown: bool = True) -> tqdm.tqdm:
    """Returns a progress bar in bytes, shown only on a terminal."""
    return tqdm.tqdm(
        desc=label,
        total=num_bytes,
        unit="B",
        unit_scale=True,
        disable=not (is_shown and sys.stderr.isatty()),
    )


def _begin() -> None:
    """Gives the tokenizer one thread, and ends the worker when its parent dies."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        signal.raise_signal(signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
