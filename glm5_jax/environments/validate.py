"""The commands `validate`, which proves tasks several at a time, and `export`."""

import asyncio
import dataclasses
import os
import pathlib
import re
import sys
from typing import Any

import tqdm
from absl import logging

from glm5_jax import config, environments
from glm5_jax.config import checks
from glm5_jax.environments import ledger, proofs, protocol, sandbox
from glm5_jax.environments.sandbox import processes
from glm5_jax.environments.service import remote, through

ALL = "all"  # splits
_SHOWN = 5  # tasks that fail
_WATCH_SECONDS = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Which tasks are proven, and how."""

    num_tasks: int = 20  # at most: of a list of tasks, as many as it has
    split: str = ""  # "": the taskset's first; ALL: one after the other
    seed: int = 0
    num_repeats: int = 10  # episodes of the solution
    num_at_once: int = 4  # tasks
    through: str = ""  # address of a service that plays the episodes; "": here

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            config.InputError: one is too small, or there is no such split.
        """
        sizes = "num_tasks", "num_repeats", "num_at_once"
        checks.require(
            *checks.positive(self, *sizes, most=checks.MAX_SIZE),
            (
                self.split in ("", ALL, *protocol.SPLITS),
                f"--split must be train, held_out or {ALL}, got {self.split!r}.",
            ),
        )


def validate(name: str, settings: Settings, out: pathlib.Path | None) -> dict[str, Any]:
    """Proves tasks and returns their figures.

    Args:
        name: of the taskset, as rl.environment.
        settings: which tasks.
        out: file for the proofs, one JSON line a task. Tasks that it has a line of are
            not played again. None: the file of the taskset's folder, if it has one
            that can be written and the episodes are played here.

    Raises:
        config.InputError: there is no such taskset, or programs play its episodes.
    """
    taskset = _provable(name, settings.through)
    own = getattr(taskset, "proofs", None)
    if out is None and own is not None and os.access(own.parent, os.W_OK):
        out = own
    kept = ledger.Ledger(out, taskset, settings.num_repeats, settings.through)
    found = asyncio.run(_prove_all(taskset, settings, kept))
    for proof in [proof for proof in found if proof.failures][:_SHOWN]:
        sys.stderr.write(f"{proof.task}: {'; '.join(proof.failures)}\n")
    return {
        "taskset": name,
        "sandbox": _sandbox(settings),
        **proofs.summarize(found),
        "own_megabytes_most": _own_megabytes(),
    }


def _own_megabytes() -> float:
    """Returns what this process took at most, with the taskset's data; 0: not told."""
    status = pathlib.Path("/proc/self/status")
    text = status.read_text("utf-8") if status.is_file() else ""
    most = re.search(r"VmHWM:\s+(\d+) kB", text)
    return round(int(most[1]) * 1024 / 1e6, 1) if most else 0.0


def _provable(name: str, address: str) -> protocol.Taskset:
    """Returns the taskset whose tasks are proven.

    Raises:
        config.InputError: see `validate`; or a service is asked for its solutions.
    """
    taskset = environments.make(name)
    with_agents = [*map(protocol.has_agents, protocol.parts(taskset))]
    if all(with_agents) or (address and any(with_agents)):
        raise config.InputError(
            f"{name!r} is played by programs of its own, which cannot be replayed."
        )
    if isinstance(taskset, remote.Remote):
        raise config.InputError(
            f"{name!r} tells no solutions; prove it by the taskset that it serves: "
            f"python -m glm5_jax.environments validate NAME --through={name}."
        )
    if address:  # the service has no tasks that failed
        return through.Through(taskset, remote.Remote(address))
    whole = getattr(taskset, "whole", None)  # with those that failed before
    return whole() if whole else taskset


def export(
    name: str, split: str, seed: int, num_tasks: int, out: pathlib.Path | None
) -> None:
    """Writes tasks in Harbor's format, a folder each.

    A task that cannot be written is named in the log.

    Raises:
        config.InputError: none can be, or the folder is missing or not empty.
    """
    taskset = environments.make(name)
    write = getattr(taskset, "export", None)
    if write is None:
        raise config.InputError(f"{name!r} has no tasks in Harbor's format.")
    if out is None:
        raise config.InputError("--out is missing; name a new folder.")
    if out.exists() and any(out.iterdir()):
        raise config.InputError(f"--out={out} is not empty; choose another folder.")
    split = split or protocol.splits(taskset)[0]
    size = getattr(taskset, "size", None)
    count = min(num_tasks, size(split)) if size else num_tasks
    refusals = []
    for index in range(max(count, 1)):  # none is refused with what to do
        task = taskset.task(split, seed, index)
        try:
            write(task, out / task.id.replace("/", "_"))
        except config.InputError as error:
            logging.warning("%s", error)
            refusals.append(str(error))
    if len(refusals) >= count:
        raise config.InputError(f"no task of {name!r} was written: {refusals[0]}")


async def _prove_all(
    taskset: protocol.Taskset, settings: Settings, kept: ledger.Ledger
) -> list[proofs.Proof]:
    gate = asyncio.Semaphore(settings.num_at_once)
    places = _replayable(taskset, settings.seed, _places(taskset, settings))
    bar = tqdm.tqdm(total=len(places), unit="task", disable=not sys.stderr.isatty())

    memory = _Memory()

    async def prove(place: int) -> proofs.Proof:
        split, index = places[place]
        task = taskset.task(split, settings.seed, index)
        if (proof := kept.find(task)) is None:
            async with gate:
                memory.begin(place)
                proof = await proofs.prove(taskset, task, settings.num_repeats)
                proof = dataclasses.replace(
                    proof, megabytes=memory.end(place), sandbox=_sandbox(settings)
                )
            kept.add(task, proof)
        bar.update()
        return proof

    watching = asyncio.create_task(memory.watch())
    try:
        with bar:
            return await asyncio.gather(*map(prove, range(len(places))))
    finally:
        watching.cancel()


def _sandbox(settings: Settings) -> str:
    """Returns the sandbox of this machine, "" if a service plays the episodes."""
    return "" if settings.through else sandbox.describe()


def _places(taskset: protocol.Taskset, settings: Settings) -> list[tuple[str, int]]:
    """Returns the splits and indices of the tasks to prove."""
    first, *others = protocol.splits(taskset)
    splits = [first, *others] if settings.split == ALL else [settings.split or first]
    size = getattr(taskset, "size", None)
    places: list[tuple[str, int]] = []
    count = settings.num_tasks  # of each
    for split in splits:
        places += [
            (split, i) for i in range(min(count, size(split)) if size else count)
        ]
    return places or [(splits[0], 0)]  # which says that there is none


def _replayable(
    taskset: protocol.Taskset, seed: int, places: list[tuple[str, int]]
) -> list[tuple[str, int]]:
    """Returns the places of the tasks of a mixture that no program of its own plays.

    Raises:
        config.InputError: there is none.
    """
    if not protocol.has_agents(taskset):
        return places

    def is_replayable(split: str, index: int) -> bool:
        part, _ = protocol.part_of(taskset, taskset.task(split, seed, index))
        return not protocol.has_agents(part)

    found = [place for place in places if is_replayable(*place)]
    if not found:
        raise config.InputError(
            f"the first --num_tasks={len(places)} of {taskset.name!r} are played by "
            f"programs of their own, which cannot be replayed; raise --num_tasks."
        )
    logging.warning(
        "%d of %d tasks are left out: programs of their own play them, which cannot be "
        "replayed.",
        len(places) - len(found),
        len(places),
    )
    return found


class _Memory:
    """The memory of all processes that are started from now on, looked at at times."""

    def __init__(self) -> None:
        self._most: dict[int, int] = {}  # in bytes, by the number of a task's place
        self._before = processes.resident_bytes(os.getpid())

    async def watch(self) -> None:
        """Looks until it is cancelled."""
        while True:
            now = processes.resident_bytes(os.getpid()) if self._most else 0
            now = max(now - self._before, 0)
            for place in self._most:
                self._most[place] = max(self._most[place], now)
            await asyncio.sleep(_WATCH_SECONDS)

    def begin(self, place: int) -> None:
        """Begins to look for a task."""
        self._most[place] = 0

    def end(self, place: int) -> float:
        """Returns the megabytes at most since a task began."""
        return round(self._most.pop(place) / 1e6, 1)
