"""Several tasksets as one, in exact proportions: "2*reverse:3-6+calculator_untold:2".

A weight counts a part's tasks in each cycle, 1 if it is left out, and they are spread
over the cycle evenly. So any number of tasks from the first one on has every part
within one task of its share, in each split and for every seed.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

from glm5_jax import config, messages
from glm5_jax.environments import proofs, protocol

SEPARATOR = "+"
_PART = re.compile(r"(?:(\d{1,4})\*)?(.+)")
_MAX_CYCLE = 10_000  # tasks


class Mixture:
    """Tasks of several tasksets in turn; a tag names the taskset of a task.

    Attributes:
        parts: the tasksets.
        has_agents: whether programs of their own play the tasks of a part.
    """

    def __init__(self, name: str, make: Callable[[str], protocol.Taskset]) -> None:
        """Makes the parts.

        Args:
            name: parts with weights, joined by "+".
            make: returns the taskset of a part.

        Raises:
            config.InputError: a part does not exist, is named twice, has weight 0, or
                has no split with the others.
        """
        self.name = name
        found = [_PART.fullmatch(part) for part in name.split(SEPARATOR)]
        if not all(found):
            raise config.InputError(
                f"rl.environment={name!r} must be names joined by '+', each with a "
                f"weight before it if wanted, as in '2*reverse:3-6+gcd'."
            )
        parts = [(int(x[1] or 1), x[2]) for x in found if x is not None]
        names = [part for _, part in parts]
        if len({*names}) < len(names) or min(weight for weight, _ in parts) < 1:
            raise config.InputError(
                f"rl.environment={name!r} must name each part once, with a weight of "
                f"at least 1."
            )
        self.parts = [make(part) for part in names]
        self.has_agents = any(map(protocol.has_agents, self.parts))
        self.splits = [
            split
            for split in protocol.SPLITS
            if all(split in protocol.splits(part) for part in self.parts)
        ]
        if not self.splits:
            raise config.InputError(
                f"rl.environment={name!r}: no split has tasks of all parts; leave out "
                f"those for training or those for evaluation alone."
            )
        self._cycle = _even([weight for weight, _ in parts])
        self._weights = [weight for weight, _ in parts]

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns the next task of the part whose turn it is."""
        cycle, place = divmod(index, len(self._cycle))
        number = self._cycle[place]
        rank = self._cycle[:place].count(number)
        part = self.parts[number]
        task = part.task(split, seed, cycle * self._weights[number] + rank)
        return dataclasses.replace(task, id=f"{number}/{task.id}", tag=part.name)

    def environment(self) -> protocol.Environment:
        """Returns an environment that becomes the one of its task's part.

        That of an agent cannot: `part_of` tells who plays any task.
        """
        return _Environment(self.part_of)

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message] | None:
        """Returns what the task's part says."""
        part, own = self.part_of(task)
        return part.demonstration(own)

    def attempts(self, task: protocol.Task) -> proofs.Attempts | None:
        """Returns the attempts that the task's part knows."""
        return proofs.attempts_of(*self.part_of(task))

    def source_of(self, task: protocol.Task) -> str:
        """Returns what the task's part says of its source."""
        return proofs.source_of(*self.part_of(task))

    def scored_by(self, task: protocol.Task) -> str:
        """Returns what the task's part says of its scoring."""
        return proofs.scored_by(*self.part_of(task))

    async def leaks(
        self, environment: "_Environment", task: protocol.Task
    ) -> Sequence[str]:
        """Returns what the task's part finds that an agent could read."""
        part, own = self.part_of(task)
        assert environment.inner is not None
        return await proofs.leaks(part, environment.inner, own)

    def part_of(self, task: protocol.Task) -> tuple[protocol.Taskset, protocol.Task]:
        """Returns the part of a task, and the task with the part's own id."""
        _, _, own = task.id.partition("/")
        return self.parts[part_of(task)], dataclasses.replace(task, id=own)


def part_of(task: protocol.Task) -> int:
    """Returns the number of the part of a mixture from which a task is."""
    return int(task.id.partition("/")[0])


class _Environment:
    """One episode of any part."""

    def __init__(
        self,
        part_of: Callable[[protocol.Task], tuple[protocol.Taskset, protocol.Task]],
    ) -> None:
        self._part_of = part_of
        self.inner: protocol.Environment | None = None

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        part, own = self._part_of(task)
        inner = part.environment()
        assert isinstance(inner, protocol.Environment)
        self.inner = inner
        return await inner.reset(own)

    async def step(self, message: messages.Message) -> protocol.StepResult:
        assert self.inner is not None
        return await self.inner.step(message)

    def shown(self, history: Sequence[messages.Message]) -> Sequence[messages.Message]:
        inner = self.inner
        return inner.shown(history) if isinstance(inner, protocol.Editor) else history

    async def close(self) -> None:
        if self.inner is not None:
            await self.inner.close()


def _even(weights: Sequence[int]) -> list[int]:
    """Returns the part of each place of a cycle, each within one task of its share.

    It is the one furthest behind its share. Where that is not enough, as with several
    small weights beside large ones, it is the one that must come soonest (R. Tijdeman,
    The chairman assignment problem, 1980).
    """
    total = sum(weights)
    if total > _MAX_CYCLE:
        raise config.InputError(
            f"The weights of rl.environment add up to {total}, more than {_MAX_CYCLE}; "
            f"use smaller ones."
        )
    return _in_order(weights, _behind) or _in_order(weights, _due) or []


def _in_order(
    weights: Sequence[int], rank: Callable[[int, int, int, int], tuple[int, ...]]
) -> list[int] | None:
    """Returns the parts by their lowest ranks; None if a share is missed by a task."""
    total, used, order = sum(weights), [0] * len(weights), []
    for place in range(1, total + 1):
        ranks = [rank(place, total, w, n) for w, n in zip(weights, used, strict=True)]
        order.append(ranks.index(min(ranks)))
        used[order[-1]] += 1
        shares = zip(weights, used, strict=True)
        if any(abs(place * w - total * n) >= total for w, n in shares):
            return None
    return order


def _behind(place: int, total: int, weight: int, used: int) -> tuple[int, ...]:
    """Ranks a part by how far it is behind its share."""
    return (total * used - place * weight,)


def _due(place: int, total: int, weight: int, used: int) -> tuple[int, ...]:
    """Ranks a part by the place of its next task, if it may come already."""
    is_early = total * used >= place * weight
    return is_early, -(-total * (used + 1) // weight), total * used - place * weight
