"""Plays groups of episodes without pause, and hands each step its groups.

The coroutines of one event loop do everything. `run` begins a group whenever groups.py
admits one and there is room; `take` waits for the groups of the next step. Nothing here
imports jax: engines are behind a `completer.Completer`.
"""

import asyncio
import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import logging

from glm5_jax.rl import advantages, completer
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl.actors import beside, failing, monitor, starving, watched
from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import journal as journal_lib
from glm5_jax.rl.actors import places as places_lib
from glm5_jax.rl.actors import window as window_lib

Group = list[episodes_lib.Episode]  # of one task
Jobs = places_lib.Jobs
MAX_FAILURES = 8  # engine errors in a row, after which the run ends
_RETRY_SECONDS = 0.5  # from an engine's error to the next attempt, times their number


class Played(NamedTuple):
    """The episodes that have ended, and what became of them."""

    episodes: list[episodes_lib.Episode]
    unused: list[episodes_lib.Episode]  # that no step learns from, as has been decided
    counts: collections.Counter[str]  # of what they were for


class StalledError(RuntimeError):
    """Raised if no episode advances any more."""


class Orchestrator:
    """The episodes of an asynchronous run; every method runs in its event loop."""

    def __init__(
        self,
        context: episodes_lib.Context,
        jobs: Callable[[int], Jobs],
        groups: groups_lib.Groups[Group],
        *,
        drop_equal: bool,
        evaluation: beside.Beside | None = None,
        journal: journal_lib.Journal | None = None,
        watch: monitor.Settings | None = None,
    ) -> None:
        """Prepares; `run` plays.

        Args:
          context: of all episodes. At most settings.num_concurrent are under way, and
            fewer where the cache has no room for them (window.py), but a group begins
            as a whole. settings.concurrency bounds the parts of a mixture (places.py).
          jobs: returns the episodes of a group by its index, which is called once for
            every beginning of the group, in a thread: a taskset may wait for a service.
          groups: which may begin, and which belong to a step.
          drop_equal: whether groups of equal rewards are dropped, and replaced.
          evaluation: plays held-out tasks; None: one with the engine of the others.
          journal: keeps what is under way, for a start after a kill; None: nobody does.
          watch: what is done about environments that pay for junk; None: the default.
        """
        self.window = window_lib.Window(context.settings.num_concurrent)
        self._engine = watched.Watched(context.engine, self.window)
        self._journal = journal or journal_lib.Journal(None)
        remembering = journal_lib.Remembering(self._engine, self._journal)
        self._context = dataclasses.replace(context, engine=remembering)
        self._jobs, self._drop_equal = jobs, drop_equal
        self.evaluation = evaluation or beside.Beside(self._context)
        self.groups = groups
        self._failing, self._starving = failing.Failing(), starving.Starving()
        self._monitor = monitor.Monitor(
            context, self._failing, watch or monitor.Settings()
        )
        self._waited = 0.0  # seconds of `take`, since `figures`
        self.places = places_lib.Places(context.settings.concurrency)
        self._num_failures = 0  # errors of the engines in a row
        self._epoch = (
            0  # errors in all, of which groups that fail together count as one
        )
        self._num_retrying = 0  # groups that wait before they begin again
        self._turn = asyncio.Event()  # set, and replaced, at every change
        self._error: BaseException | None = None  # after which groups do not come
        self._played = Played([], [], collections.Counter())  # since the last `take`
        # Groups whose files are not needed once the step's own is written.
        self._over: collections.deque[list[int]] = collections.deque()  # by step
        self._dropped: list[int] = []  # of the next step
        # The group whose task is being made, and since when.
        self._making: tuple[int, float] | None = None
        # Groups of before a kill that wait for room to go on, by index.
        self._resumed: dict[int, journal_lib.Known] = {}

    async def run(self) -> None:
        """Plays groups until it is cancelled.

        Raises:
          EngineError: the engines failed MAX_FAILURES times in a row.
          FailingError: nearly all environments fail.
          PoisonedError: one pays for junk, and the settings end the run.
          Exception: of a taskset that makes no task.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.evaluation.run())
                await self._resume()
                tasks.create_task(self._monitor.run())
                while True:
                    while (jobs := await self._next()) is not None:
                        tasks.create_task(self._play(*jobs))
                    await self._turn.wait()
        except BaseExceptionGroup as errors:
            self._error = errors.exceptions[0]  # the one that stopped the others
            raise self._error from None
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._tell()
            self._journal.close()

    async def take(self, stall_seconds: float) -> list[tuple[int, Group]]:
        """Waits for the groups of the next step; returns them with their indices.

        Raises:
          StalledError: no turn and no episode ended for so long.
          Exception: `run` has ended with it, or `give_up` was told it.
        """
        began = time.monotonic()
        while (batch := self._ready()) is None:
            if self._error is not None:
                raise self._error
            before = self._num_turns()
            try:
                await asyncio.wait_for(self._turn.wait(), stall_seconds)
            except TimeoutError:
                if self._num_turns() == before:
                    raise StalledError(self._stalled(stall_seconds)) from None
        self._waited += time.monotonic() - began
        self._starving.took(group[0].task.tag for _, group in batch)
        self._over.append([*self._dropped, *(index for index, _ in batch)])
        self._dropped = []
        if len(self._over) > 2:  # the step's own file is written: Rollouts.keep
            for index in self._over.popleft():
                self._journal.forget(index)
        return batch

    def give_up(self, error: BaseException) -> None:
        """Ends the waiting of `take` with an error of what groups need."""
        self._error = self._error or error
        self._tell()

    def published(self, version: int) -> None:
        """Lets groups begin with a version, which the engines have."""
        while self.groups.version < version:
            self.groups.publish()
        for index, _ in self.places.waiting:
            if index not in self._resumed:  # nothing of it was played
                self.groups.renew(index)
        self._tell()

    def played(self) -> Played:
        """Returns the episodes since the last call."""
        played, self._played = self._played, Played([], [], collections.Counter())
        return played

    def figures(self) -> dict[str, float]:
        """Returns metrics of the time since the last call, and of now."""
        tags = self.places.of_tags
        waited, self._waited = self._waited, 0.0
        idle, seconds = self._engine.idle()
        return {
            "actors/trainer_waited_seconds": round(waited, 3),
            "actors/engines_idle_seconds": round(idle, 3),
            "actors/engines_idle_share": round(idle / seconds if seconds else 0.0, 4),
            "actors/steps_without_group": self._starving.longest,
            "actors/most_episodes": self.window.limit,
            "actors/waiting_groups": len(self.places.waiting),
            **{f"actors/episodes/{tag}": n for tag, n in tags.items() if len(tags) > 1},
            "actors/reread_share": round(self.window.reread_share(), 4),
            **self._monitor.figures(),
        }

    async def _resume(self) -> None:
        """Lets the groups that were under way at a kill wait for room to go on."""
        for known in await asyncio.to_thread(self._journal.read, self.groups.version):
            if not self.groups.resume(known.index, known.version):
                self._journal.forget(known.index)
                continue
            jobs = await self._made(known.index)
            self._resumed[known.index] = known
            self.places.add(known.index, jobs)

    async def _next(self) -> tuple[int, Jobs] | None:
        """Begins a group if one may begin; returns its index and its episodes."""
        while not self._num_retrying and self.places.num_under_way < self.window.limit:
            self._skip_paused()
            if (group := self.places.begin()) is not None:
                new = journal_lib.Known(group[0], self.groups.version)
                self._journal.begin(self._resumed.pop(group[0], new), group[1])
                return group
            if (index := self.groups.begin()) is None:
                break
            self.places.add(index, await self._made(index))
        return None

    async def _made(self, index: int) -> Jobs:
        """Returns the episodes of a group, whose task its taskset makes."""
        self._making = index, time.monotonic()
        jobs = await asyncio.to_thread(self._jobs, index)
        self._making = None
        self._starving.began(jobs[0].task.tag)
        return jobs

    def _skip_paused(self) -> None:
        """Ends the groups that have not begun and whose tag is paused."""
        for index, tag in self.places.waiting:
            if self._failing.is_paused(tag) and index not in self._resumed:
                self.places.remove(index)
                self.groups.skip(index)
                self._starving.lost(tag, "paused")

    async def _play(self, index: int, jobs: Jobs) -> None:
        """Plays the episodes of a group and judges them."""
        tasks = [asyncio.create_task(self._episode(job)) for job in jobs]
        epoch = self._epoch
        try:
            group = [*await asyncio.gather(*tasks)]
        except completer.EngineError as error:
            await _cancelled(tasks)
            await self._failed(error, epoch)
            self._journal.forget(index)
            self.groups.restart(index)
        except BaseException:
            await _cancelled(tasks)
            raise
        else:
            self._num_failures = 0
            self._judge(index, group)
        self._tell()

    async def _episode(self, job: episodes_lib.Job) -> episodes_lib.Episode:
        self.window.began(job.request_id)
        try:
            episode = self._journal.ended(job)
            if episode is None:
                episode = await episodes_lib.run(self._context, job)
                if episode.label.is_scored:  # else the environment may be repaired
                    self._journal.end(job, episode)
            return episode
        finally:
            self.places.ended(job)
            self.window.ended(job.request_id, self._context.settings.max_turns)
            self._tell()

    def _num_turns(self) -> int:
        """Returns the turns that ended, with those of before a kill that came again."""
        return self._engine.num_ended + self._journal.num_repeated

    def _ready(self) -> list[tuple[int, Group]] | None:
        """Returns the groups of the next step, if they are ready."""
        distrusted = self.groups.drop_ready(self._is_quarantined, "quarantined")
        if stale := self.groups.drop_stale():
            logging.warning(
                "%d groups are dropped: weights drew them that are more than %d "
                "versions (rl.max_staleness) older than their step's, so a server has "
                "missed versions.",
                len(stale),
                self.groups.max_staleness,
            )
        for why, dropped in (("quarantined", distrusted), ("stale", stale)):
            for index, group in dropped:
                self._lost(index, group, why)
                self._played.unused.extend({id(e): e for e in group}.values())
                self._played.counts[f"dropped_{why}_groups"] += 1
                self._tell()  # another may begin
        return self.groups.take()

    def _lost(self, index: int, group: Group, why: str) -> None:
        """Notes a group that no step learns from."""
        if why in ("invalid", "quarantined"):  # another start may find it repaired
            self._journal.forget(index)
        else:
            self._dropped.append(index)
        self._starving.lost(group[0].task.tag, why)

    def _is_quarantined(self, group: Group) -> bool:
        return self._monitor.is_quarantined(group[0].task.tag)

    def _judge(self, index: int, group: Group) -> None:
        """Finishes a group, or drops one that teaches nothing.

        Raises:
          FailingError: nearly all environments fail.
        """
        kept, counts = advantages.select(
            [group], group_size=len(group), drop_equal=self._drop_equal
        )
        used = {id(episode) for episodes in kept for episode in episodes}
        self._played.episodes.extend(group)
        self._played.unused.extend(e for e in group if id(e) not in used)
        self._played.counts.update(counts)
        is_invalid = counts["dropped_invalid_groups"]
        if kept:
            found = (s.oldest_version for e in kept[0] for s in e.samples)
            oldest = min((v for v in found if v is not None), default=None)
            self.groups.finish(index, kept[0], oldest)
        else:
            why = "invalid" if is_invalid else "equal"
            self.groups.drop(index, why)
            self._lost(index, group, why)
        failed = [e for e in group if not e.label.is_scored] if is_invalid else []
        reason = f"{failed[0].label.value}: {failed[0].reason}" if failed else ""
        self._failing.note(group[0].task.tag, reason)
        if not is_invalid:
            self._monitor.note(group)

    async def _failed(self, error: completer.EngineError, epoch: int) -> None:
        """Waits before a group begins again; no other one begins meanwhile.

        Groups that were under way together fail together: the first of them counts.

        Args:
          error: that of the group.
          epoch: `_epoch` as the group began.

        Raises:
          EngineError: that of the last attempt.
        """
        if epoch == self._epoch:
            self._epoch += 1
            self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            raise error
        logging.warning("A group begins again: %s", error)
        self._num_retrying += 1
        try:
            await asyncio.sleep(_RETRY_SECONDS * max(self._num_failures, 1))
        finally:
            self._num_retrying -= 1

    def _tell(self) -> None:
        """Wakes everyone who waits for a change."""
        self._turn.set()
        self._turn = asyncio.Event()

    def _stalled(self, seconds: float) -> str:
        ledger = {k: v for k, v in sorted(self.groups.ledger().items()) if v}
        waits = ""
        if self._making is not None:
            index, began = self._making
            age = f"{time.monotonic() - began:.0f} s"
            waits = f" The taskset has been making group {index}'s task for {age}."
        return (
            f"no episode has advanced for {seconds:g} s: {self.places.num_under_way} "
            f"episodes are under way, {self._engine.num_waiting} wait for an engine, "
            f"the oldest for {self._engine.longest_wait():.0f} s; groups: {ledger}, of "
            f"which {len(self.places.waiting)} wait for a place of rl.concurrency."
            f"{waits}"
        )


async def _cancelled(tasks: Sequence[asyncio.Task]) -> None:
    """Cancels tasks and waits until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
