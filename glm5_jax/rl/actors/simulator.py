"""Predicts the speed and staleness of asynchronous reinforcement learning.

A simulation of discrete events: engines that sample, environments that take their time,
and a trainer, which learns from groups in the order of groups.py. An engine's active
sequences share it: each draws a token in `step_seconds(n)` if n of them are active.
Where trainer and engines share a machine, both slow down while both work: what is left
of a step and of a draw then takes `Contention` times as long.
"""

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import machines


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of an episode."""

    tokens: int  # that the model draws
    seconds: float  # that the environment then takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contention:
    """How many times longer work takes while others use the same machine.

    The defaults are those of machines of their own.
    """

    step: float = 1.0  # of training, while an engine has an active sequence
    draw: float = 1.0  # of an engine, while a step runs

    def __post_init__(self) -> None:
        """Checks the factors.

        Raises:
          ValueError: one of them is below 1.
        """
        if min(self.step, self.draw) < 1:
            raise ValueError(
                f"step and draw must be at least 1, got {self.step} and {self.draw}: "
                f"nothing is faster beside other work."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speeds:
    """The machines."""

    num_engines: int
    slots: int  # of an engine
    step_seconds: Callable[[int], float]  # for a token of each of n sequences
    train_seconds: Callable[[int], float]  # for a step on n sampled tokens
    publish_seconds: float  # in which engines stand still
    contention: Contention = Contention()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The run."""

    batch_size: int  # groups of a step
    group_size: int
    max_staleness: int
    num_concurrent: int  # episodes under way; groups begin whole, while there are fewer
    num_steps: int
    num_skipped: int = 0  # first steps, in which a run fills up: no figure counts them
    # Most episodes under way of each part of a mixture; 0: no bound; (): one part.
    concurrency: tuple[int, ...] = ()
    part: Callable[[int], int] = lambda group: 0  # of a group, by its index

    def __post_init__(self) -> None:
        """Checks the bounds.

        Raises:
          ValueError: a group can never begin.
        """
        if any(0 < most < self.group_size for most in self.concurrency):
            raise ValueError(
                f"concurrency must be 0 or at least group_size={self.group_size}, got "
                f"{self.concurrency}: a group begins as a whole."
            )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a run would be like, without the steps that are skipped."""

    seconds: float
    num_tokens: int  # sampled
    train_idle: float  # share of the time in which the trainer waits
    engine_idle: float  # share of the engines' time without an active sequence
    occupancy: float  # mean share of the slots that are active
    staleness: dict[int, int]  # number of groups by versions behind, at their beginning

    @property
    def tokens_per_second(self) -> float:
        """Returns the sampled tokens of a second."""
        return self.num_tokens / self.seconds


def predict(
    episode: Callable[[int, int], Sequence[Turn]], speeds: Speeds, settings: Settings
) -> Prediction:
    """Simulates a run.

    Args:
      episode: returns the turns of an episode, by its group's index and its number in
        the group.
      speeds: of the machines.
      settings: of the run.
    """
    return _Run(episode, speeds, settings).run()


@dataclasses.dataclass
class _Episode:
    """An episode under way."""

    group: int
    turns: Iterator[Turn]
    engine: int
    current: Turn | None = None
    num_tokens: int = 0


class _Run:
    """The state of a simulation."""

    def __init__(
        self,
        episode: Callable[[int, int], Sequence[Turn]],
        speeds: Speeds,
        settings: Settings,
    ) -> None:
        self._episode, self._speeds, self._settings = episode, speeds, settings
        self._groups: groups_lib.Groups[int] = groups_lib.Groups(
            settings.batch_size, settings.max_staleness
        )
        self._engines = [
            machines.Engine(speeds.slots, speeds.step_seconds)
            for _ in range(speeds.num_engines)
        ]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._episodes: dict[int, _Episode] = {}
        self._waiting: list[int] = []  # groups whose part has no room; oldest first
        self._of_parts: collections.Counter[int] = collections.Counter()  # episodes
        self._left: dict[int, int] = {}  # episodes of a group that have not ended
        self._tokens: collections.Counter[int] = collections.Counter()  # of a group
        self._num_tokens = 0
        self._step: machines.Step | None = None
        self._trained = 0.0
        self._staleness: collections.Counter[int] = collections.Counter()

    def run(self) -> Prediction:
        settings, before = self._settings, self._totals()
        self._begin()
        self._contend()
        while self._groups.version < settings.num_skipped + settings.num_steps:
            ends = [engine.end for engine in self._engines]
            first = min(range(len(ends)), key=ends.__getitem__)
            at = self._events[0][0] if self._events else math.inf
            self._now = min(ends[first], at)
            assert math.isfinite(self._now), "something is always under way"
            version = self._groups.version
            if at <= ends[first]:
                heapq.heappop(self._events)[2]()
            else:
                self._engines[first].advance(self._now)
                self._end_turn(self._engines[first].pop())
            self._contend()
            if version < self._groups.version == settings.num_skipped:
                before = self._totals()
        return self._prediction(before)

    def _begin(self) -> None:
        """Begins groups and episodes, and a step of training, as far as they may."""
        self._train()
        while len(self._episodes) < self._settings.num_concurrent:
            index = next(filter(self._has_room, self._waiting), None)
            if index is None:
                if (new := self._groups.begin()) is None:
                    return
                self._waiting.append(new)
                continue
            self._waiting.remove(index)
            self._left[index] = self._settings.group_size
            for number in range(self._settings.group_size):
                self._begin_episode(index, number)

    def _has_room(self, index: int) -> bool:
        """Tells whether a whole group may begin, as places.py does."""
        settings = self._settings
        part = settings.part(index)
        most = settings.concurrency[part] if settings.concurrency else 0
        return not most or self._of_parts[part] + settings.group_size <= most

    def _begin_episode(self, index: int, number: int) -> None:
        engines = range(len(self._engines))
        least = min(engines, key=lambda i: self._engines[i].num_assigned)
        turns = iter(self._episode(index, number))
        id = next(self._order)
        self._episodes[id] = _Episode(index, turns, least)
        self._of_parts[self._settings.part(index)] += 1
        self._begin_turn(id)

    def _begin_turn(self, id: int) -> None:
        episode = self._episodes[id]
        episode.current = next(episode.turns, None)
        if episode.current is None:
            self._end_episode(id)
            return
        engine = self._engines[episode.engine]
        engine.advance(self._now)
        engine.add(next(self._order), id, episode.current.tokens)

    def _end_turn(self, id: int) -> None:
        """Lets the environment answer."""
        episode = self._episodes[id]
        assert episode.current is not None, "a sequence was drawn for a turn"
        episode.num_tokens += episode.current.tokens
        self._at(episode.current.seconds, lambda: self._begin_turn(id))

    def _end_episode(self, id: int) -> None:
        episode = self._episodes.pop(id)
        self._of_parts[self._settings.part(episode.group)] -= 1
        self._num_tokens += episode.num_tokens
        self._tokens[episode.group] += episode.num_tokens
        self._left[episode.group] -= 1
        if not self._left[episode.group]:
            self._groups.finish(episode.group, self._tokens.pop(episode.group))
        self._begin()

    def _train(self) -> None:
        batch = self._groups.take() if self._step is None else None
        if batch is None:
            return
        for index, _ in batch:
            self._staleness[self._groups.staleness([index])] += 1
        seconds = self._speeds.train_seconds(sum(tokens for _, tokens in batch))
        self._trained += seconds
        self._set_step(machines.Step(self._now + seconds))

    def _set_step(self, step: machines.Step) -> None:
        """Lets a step end at its time; an event of an earlier plan does nothing."""

        def end() -> None:
            if self._step is step:
                self._end_step()

        self._step = step
        heapq.heappush(self._events, (step.end, next(self._order), end))

    def _end_step(self) -> None:
        self._step = None
        self._groups.commit(self._groups.publish())
        for index in self._waiting:  # nothing of them was played
            self._groups.renew(index)
        for engine in self._engines:
            engine.advance(self._now)
            engine.stand_still(self._speeds.publish_seconds)
        self._begin()

    def _contend(self) -> None:
        """Slows the engines down while a step runs, and the step while one draws."""
        contention = self._speeds.contention
        draw = contention.draw if self._step else 1.0
        for engine in self._engines:
            engine.slow_down(self._now, draw)
        is_drawing = any(engine.is_active for engine in self._engines)
        factor = contention.step if is_drawing else 1.0
        if self._step and factor != self._step.slowdown:
            slowed = self._step.slowed(self._now, factor)
            self._trained += slowed.end - self._step.end
            self._set_step(slowed)

    def _at(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), call))

    def _totals(self) -> "_Totals":
        for engine in self._engines:
            engine.advance(self._now)
        return _Totals(
            seconds=self._now,
            num_tokens=self._num_tokens,
            trained=self._trained,
            idle=sum(engine.idle for engine in self._engines),
            area=sum(engine.area for engine in self._engines),
            staleness=self._staleness.copy(),
        )

    def _prediction(self, before: "_Totals") -> Prediction:
        now = self._totals()
        seconds = now.seconds - before.seconds
        total = seconds * len(self._engines)
        return Prediction(
            seconds=seconds,
            num_tokens=now.num_tokens - before.num_tokens,
            train_idle=1 - (now.trained - before.trained) / seconds,
            engine_idle=(now.idle - before.idle) / total,
            occupancy=(now.area - before.area) / total / self._speeds.slots,
            staleness=dict(sorted((now.staleness - before.staleness).items())),
        )


@dataclasses.dataclass(frozen=True)
class _Totals:
    """Sums from the beginning of a simulation to a time."""

    seconds: float
    num_tokens: int
    trained: float  # seconds
    idle: float  # seconds of all engines
    area: float  # seconds times active sequences
    staleness: collections.Counter[int]
