"""Plays answers that must earn nothing to the environments of a run.

An environment that pays for them pays for junk. Nothing is sampled: a canary is a task
of a group that has ended, and an answer of one of two kinds.

wrong: turns of which the taskset knows that they are wrong (environments/proofs.py),
and doing nothing, if that is not right. Only tasksets that can be proven have them.
None should be paid, but a generator of tasks may err now and then, and a service, too.

borrowed: the one turn that earned the reward of other tasks, of the tag's answers the
one that was paid for the most (answers.py). It may happen to be right, for a share p of
the tasks. Tasks that are known to have it for their answer are left out, and of the
others ALL_OF in a row must pay: that takes (p**-ALL_OF - 1) / (1 - p) canaries in the
mean, 40,000 for p = 3/4 and 10**10 for p = 1/2. Then the right answers of other tasks
are played, if they are known, and nonsense. Where most of the former are paid, but not
the latter, the tasks share their answer, as those that ask for the same program with
other examples.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from absl import logging

from glm5_jax.environments import proofs, protocol
from glm5_jax.rl import calls
from glm5_jax.rl.actors import answers as answers_lib

WRONG, BORROWED = "wrong", "borrowed"
SOME, OF = 3, 16  # wrong ones that are paid, of the last ones: too many
ALL_OF = 32  # borrowed ones
_OTHERS = 8  # tasks whose right answers are played then
_MOST_WAITING = 8
_WHICH = {WRONG: "are wrong", BORROWED: "it had paid for other tasks"}
_NOTHING = (proofs.NOTHING,) * 64
_NONSENSE = ({**proofs.NOTHING, "content": "Ozymandias 17"},)
_SHOWN = 100  # characters
_CLOSE_SECONDS = 60.0

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Canary:
    """An answer to play."""

    kind: str
    task: protocol.Task
    paid: answers_lib.Paid | None  # that is borrowed


class _Tally:
    """What became of the last canaries of a kind, of one tag."""

    def __init__(self, kind: str, every: int) -> None:
        self.kind, self._every = kind, every
        self.paid = collections.deque[bool](maxlen=OF if kind == WRONG else ALL_OF)
        self.num_groups = every  # since the last one: the first comes at once
        self.is_waiting = False  # one is under way, or about to be
        self.number = 0  # of the wrong turns that are played next
        self.tasks = collections.deque[protocol.Task](maxlen=_OTHERS)  # of the last

    def is_due(self) -> bool:
        """Tells whether to play one: now and then, and after one that was paid."""
        return not self.is_waiting and self.num_groups >= self._every

    def note(self, is_paid: bool | None) -> None:
        """Notes one; None: nobody can tell."""
        self.is_waiting = False
        self.num_groups = self._every if is_paid else 0
        if is_paid is not None:
            self.paid.append(is_paid)
            self.number += not is_paid  # what was paid is asked again

    def is_too_much(self) -> bool:
        """Tells whether the environment pays for junk."""
        if self.kind == WRONG:
            return sum(self.paid) >= SOME
        return len(self.paid) == ALL_OF and all(self.paid)


class Canaries:
    """The canaries of a run, by tag; one is under way at a time."""

    def __init__(
        self,
        taskset: protocol.Taskset,
        every: int,
        seconds: float,
        found: Callable[[str, str], None],
    ) -> None:
        """Plays none yet; `run` does.

        Args:
          taskset: of the run.
          every: groups of a tag from one canary of a kind to the next; 0: none.
          seconds: longest time of one.
          found: is told the tag, and how, whose environments pay for junk.
        """
        self._taskset, self._every = taskset, every
        is_provable = isinstance(taskset, proofs.Provable)
        self._kinds = (WRONG, BORROWED) if is_provable else (BORROWED,)
        self._seconds, self._found = seconds, found
        self._tallies: dict[tuple[str, str], _Tally] = {}
        self._waiting: asyncio.Queue[_Canary] = asyncio.Queue(_MOST_WAITING)

    def ended(self, task: protocol.Task, paid: answers_lib.Paid | None) -> None:
        """Lets canaries be played with the task of a group that has ended.

        A program of its own takes no answers, so its tasks have none.

        Args:
          task: of the group.
          paid: the commonest answer of its tag that was paid before the group.
        """
        part, _ = protocol.part_of(self._taskset, task)
        is_playable = self._every and not protocol.has_agents(part)
        for kind in self._kinds if is_playable else ():
            tally = self._tallies.setdefault(
                (task.tag, kind), _Tally(kind, self._every)
            )
            tally.num_groups += 1
            is_foreign = paid is not None and paid.is_foreign_to(task)
            is_possible = kind == WRONG or is_foreign
            if tally.is_due() and is_possible and not self._waiting.full():
                tally.is_waiting = True
                self._waiting.put_nowait(_Canary(kind, task, paid))

    def shares(self) -> dict[tuple[str, str], float]:
        """Returns the share of the last canaries that was paid, by tag and kind."""
        return {
            place: sum(tally.paid) / len(tally.paid)
            for place, tally in self._tallies.items()
            if tally.paid
        }

    def forget(self, tag: str) -> None:
        """Forgets what became of a tag's; the next group that ends has one."""
        for kind in self._kinds:
            if tally := self._tallies.get((tag, kind)):
                tally.paid.clear()

    async def settle(self) -> None:
        """Waits until none is under way."""
        await self._waiting.join()

    async def run(self) -> None:
        """Plays until it is cancelled.

        Raises:
          Exception: of `found`.
        """
        while True:
            canary = await self._waiting.get()
            task, tally = canary.task, self._tallies[canary.task.tag, canary.kind]
            turns = await self._in_thread(self._turns, canary, tally.number)
            tally.note(None if turns is None else await self._is_paid(task, turns))
            if tally.is_too_much() and not await self._do_share(task, tally):
                assert turns is not None, "what is paid was played"
                self._found(
                    task.tag,
                    f"{sum(tally.paid)} of the last {len(tally.paid)} answers that "
                    f"{_WHICH[canary.kind]}, the last one "
                    f"{str(turns[-1].get('content'))[:_SHOWN]!r}",
                )
            tally.tasks.append(task)
            self._waiting.task_done()

    def _turns(self, canary: _Canary, number: int) -> proofs.Turns | None:
        """Returns the turns to play; None: they are right, or none are known.

        Args:
          canary: to play.
          number: of the wrong turns.
        """
        known, paid = self._known(canary.task), canary.paid
        right = answers_lib.key_of(known.right[-1]) if known else None
        if canary.kind == BORROWED:
            assert paid is not None, "a borrowed answer was paid"
            return None if paid.key == right else (paid.message,)
        if known is None:
            return None
        is_right = right == answers_lib.key_of(proofs.NOTHING)
        wrong = (*known.wrong, *(() if is_right else (_NOTHING,)))
        return wrong[number % len(wrong)] if wrong else None

    async def _do_share(self, task: protocol.Task, tally: _Tally) -> bool:
        """Tells whether the right answers of other tasks are right for one, too.

        Nonsense tells them from those that a scorer pays whatever they are.
        """
        if tally.kind == WRONG:
            return False
        paid = []
        for other in tally.tasks:
            known = await self._in_thread(self._known, other)
            if known and len(known.right) == 1:
                paid.append(await self._is_paid(task, known.right))
        is_most = 2 * sum(map(bool, paid)) > len(paid)
        if not is_most or await self._is_paid(task, _NONSENSE):
            return False
        logging.log_every_n_seconds(
            logging.INFO, "Tasks of the tag %r share their answers.", 600, task.tag
        )
        tally.paid.clear()
        return True

    async def _is_paid(self, task: protocol.Task, turns: proofs.Turns) -> bool | None:
        """Plays an episode; returns whether it earned all, None if unknown."""
        said: float | str = "it takes too long"
        try:
            environment = self._taskset.environment()
            assert isinstance(environment, protocol.Environment)
            try:
                said = await calls.bounded(
                    lambda: proofs.played(environment, task, turns),
                    self._seconds,
                    guest=environment,
                )
            finally:
                close = calls.bounded(environment.close, _CLOSE_SECONDS, environment)
                await calls.finished(close)
        except (calls.LateError, TimeoutError):
            pass
        except Exception as error:  # an environment may be anybody's
            said = f"{type(error).__name__}: {error}"
        if isinstance(said, str):
            logging.log_every_n_seconds(
                logging.INFO, "A canary of %s: %s.", 600, task.id, said
            )
            return None
        return said >= 1

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T | None:
        """Returns what a taskset makes in a thread; None: it takes too long."""
        try:
            return await calls.bounded(
                lambda: asyncio.to_thread(function, *args), self._seconds, guest=self
            )
        except calls.LateError as error:
            logging.log_every_n_seconds(
                logging.WARNING, "No attempts of a task for canaries: %s.", 600, error
            )
            return None

    def _known(self, task: protocol.Task) -> proofs.Attempts | None:
        """Returns the right and wrong turns that the taskset knows."""
        try:
            known = proofs.attempts_of(self._taskset, task)
        except Exception as error:  # a taskset may be anybody's
            logging.log_every_n_seconds(
                logging.WARNING, "No attempts of %s: %r.", 600, task.id, error
            )
            return None
        return known if known and known.right else None
