"""Makes many tasks by a model, several at a time; resumes, and tells the yield.

FOLDER/drafts.jsonl has a line for each topic that is done, FOLDER/tasks a folder for
each proven task: `harbor:FOLDER/tasks` is their taskset.
"""

import asyncio
import collections
import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from glm5_jax import config
from glm5_jax.config import checks
from glm5_jax.environments import endpoint, proofs, sandbox
from glm5_jax.environments.worlds.terminal.author import steps

LOG, TASKS = "drafts.jsonl", "tasks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How many tasks are made, and how."""

    num_tasks: int = 20  # that are tried; topics repeat
    num_refinements: int = 3  # of each
    num_repeats: int = 10  # episodes of each solution
    num_at_once: int = 4

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            config.InputError: one is too small.
        """
        sizes = "num_tasks", "num_repeats", "num_at_once"
        checks.require(
            *checks.positive(self, *sizes, most=checks.MAX_SIZE),
            (
                self.num_refinements >= 0,
                f"--num_refinements must not be negative, got {self.num_refinements}.",
            ),
        )


def run(
    ask: endpoint.Ask, topics: str, out: pathlib.Path, settings: Settings
) -> dict[str, Any]:
    """Makes tasks and returns the yield; what a folder has is not made again.

    Args:
        ask: the model.
        topics: joined by ","; or a file with one a line.
        out: folder of the tasks.
        settings: how many.

    Raises:
        config.InputError: there is no topic or no bubblewrap, or the endpoint does not
            answer; what was done until then is kept.
    """
    names = _topics(topics)
    sandbox.require("bubblewrap")  # before a model is asked
    (out / TASKS).mkdir(parents=True, exist_ok=True)
    asyncio.run(_make_all(ask, names, out, settings))
    done = _done(out / LOG)
    return {"folder": str(out / TASKS), **_yield([*done.values()])}


def _topics(given: str) -> list[str]:
    path = pathlib.Path(given)
    is_file = path.is_file()
    parts = path.read_text("utf-8").split("\n") if is_file else given.split(",")
    names = [part.strip() for part in parts if part.strip() and part[0] != "#"]
    if not names:
        raise config.InputError(f"{given!r} names no topic; give a text or a file.")
    return names


async def _make_all(
    ask: endpoint.Ask, topics: Sequence[str], out: pathlib.Path, settings: Settings
) -> None:
    gate = asyncio.Semaphore(settings.num_at_once)
    known = {
        path.read_text(encoding="utf-8").strip().removeprefix("You are in /work. ")
        for path in (out / TASKS).glob("*/instruction.md")
        if not path.parent.name.startswith(".")
    }
    done = _done(out / LOG)

    async def make(number: int) -> None:
        topic = topics[number % len(topics)]
        name = f"{number:04}_{re.sub(r'[^a-z0-9]+', '_', topic.lower())[:40]}"
        async with gate:
            made = await steps.make(
                ask,
                topic,
                out / TASKS / name,
                known,
                settings.num_refinements,
                settings.num_repeats,
            )
        entry = {"number": number, "topic": topic, "name": name}
        entry |= {**dataclasses.asdict(made), "num_requests": made.num_requests}
        with (out / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        logging.info("%s: %s after %d requests", name, made.outcome, made.num_requests)

    await asyncio.gather(
        *(make(number) for number in range(settings.num_tasks) if number not in done)
    )


def _done(path: pathlib.Path) -> Mapping[int, Mapping[str, Any]]:
    """Returns the lines of a log by their numbers; half a line is none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return {entry["number"]: entry for entry in entries}


def _yield(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns counts of topics, of requests, and of failures by kind."""
    kept = [entry for entry in entries if entry["outcome"] == steps.KEPT]
    rounds = collections.Counter(entry["num_requests"] - 1 for entry in kept)
    kinds = collections.Counter(
        proofs.kind(failure).split(": ")[0]
        for entry in entries
        for failures in entry["failures"]
        for failure in failures
    )
    return {
        "tried": len(entries),
        "kept": len(kept),
        "kept_after_refinements": {str(n): rounds[n] for n in sorted(rounds)},
        "never_proven": len(entries) - len(kept),
        "requests": sum(entry["num_requests"] for entry in entries),
        "failures": dict(kinds.most_common()),
    }
