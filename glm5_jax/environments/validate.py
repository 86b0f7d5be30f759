"""The commands `validate`, which proves tasks several at a time, and `export`."""

import asyncio
import dataclasses
import json
import pathlib
import sys
from typing import Any

import tqdm

from glm5_jax import config, environments
from glm5_jax.config import checks
from glm5_jax.environments import proofs, protocol
from glm5_jax.environments.service import remote, through

_SHOWN = 5  # tasks that fail


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Which tasks are proven, and how."""

    num_tasks: int = 20  # at most: of a list of tasks, as many as it has
    split: str = ""  # "": the taskset's first
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
                self.split in ("", *protocol.SPLITS),
                f"--split must be train or held_out, got {self.split!r}.",
            ),
        )


def validate(name: str, settings: Settings, out: pathlib.Path | None) -> dict[str, Any]:
    """Proves tasks and returns their figures.

    Args:
        name: of the taskset, as rl.environment.
        settings: which tasks.
        out: file for the proofs, one JSON line a task; None writes none.

    Raises:
        config.InputError: there is no such taskset, or programs play its episodes.
    """
    taskset = _provable(name, settings.through)
    found = asyncio.run(_prove_all(taskset, settings))
    if out is not None:
        lines = [json.dumps(dataclasses.asdict(proof)) for proof in found]
        out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for proof in [proof for proof in found if proof.failures][:_SHOWN]:
        sys.stderr.write(f"{proof.task}: {'; '.join(proof.failures)}\n")
    return {"taskset": name, **proofs.summarize(found)}


def _provable(name: str, address: str) -> protocol.Taskset:
    """Returns the taskset whose tasks are proven.

    Raises:
        config.InputError: see `validate`; or a service is asked for its solutions.
    """
    taskset = environments.make(name)
    if getattr(taskset, "has_agents", False):
        raise config.InputError(
            f"{name!r} is played by programs of its own, which cannot be replayed."
        )
    if isinstance(taskset, remote.Remote):
        raise config.InputError(
            f"{name!r} tells no solutions; prove it by the taskset that it serves: "
            f"python -m glm5_jax.environments validate NAME --through={name}."
        )
    return through.Through(taskset, remote.Remote(address)) if address else taskset


def export(
    name: str, split: str, seed: int, num_tasks: int, out: pathlib.Path | None
) -> None:
    """Writes tasks in Harbor's format, a folder each.

    Raises:
        config.InputError: the taskset cannot, or the folder is missing or not empty.
    """
    taskset = environments.make(name)
    write = getattr(taskset, "export", None)
    if write is None:
        raise config.InputError(f"{name!r} has no tasks in Harbor's format.")
    if out is None:
        raise config.InputError("--out is missing; name a new folder.")
    if out.exists() and any(out.iterdir()):
        raise config.InputError(f"--out={out} is not empty; choose another folder.")
    for index in range(num_tasks):
        task = taskset.task(split or protocol.splits(taskset)[0], seed, index)
        write(task, out / task.id.replace("/", "_"))


async def _prove_all(
    taskset: protocol.Taskset, settings: Settings
) -> list[proofs.Proof]:
    gate = asyncio.Semaphore(settings.num_at_once)
    split = settings.split or protocol.splits(taskset)[0]
    count = settings.num_tasks
    if size := getattr(taskset, "size", None):
        count = max(1, min(count, size(split)))
    bar = tqdm.tqdm(total=count, unit="task", disable=not sys.stderr.isatty())

    async def prove(index: int) -> proofs.Proof:
        async with gate:
            task = taskset.task(split, settings.seed, index)
            proof = await proofs.prove(taskset, task, settings.num_repeats)
        bar.update()
        return proof

    with bar:
        return await asyncio.gather(*map(prove, range(count)))
