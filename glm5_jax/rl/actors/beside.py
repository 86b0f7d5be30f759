"""Plays held-out tasks beside the episodes that a trainer learns from.

The trainer does not wait, so new weights may come before the last task is played. Its
episodes go on with them, as others do, and each token has the version that drew it:
held_out.py tells how many are of the version that the evaluation began with: all where
engines of their own play them (pinned.py).
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from absl import logging

from glm5_jax.rl import at_once, completer, held_out
from glm5_jax.rl import episodes as episodes_lib

# Requests of an evaluation that the trainer waits for may run at the same time.
_FIRST_ID = 2**29  # beyond theirs


class _Asked(NamedTuple):
    """An evaluation that is to begin."""

    version: int
    jobs: Sequence[episodes_lib.Job]
    prepare: Callable[[], Awaitable[None]] | None


class Beside:
    """At most one evaluation; every method runs in one event loop."""

    def __init__(self, context: episodes_lib.Context) -> None:
        """Begins none yet; `run` plays.

        Args:
          context: of its episodes, settings.num_concurrent of which are under way.
        """
        self._context = context
        self._asked: asyncio.Queue[_Asked] = asyncio.Queue()
        self._under_way: int | None = None  # its version
        self._over: held_out.Evaluation | None = None

    def begin(
        self,
        jobs: Sequence[episodes_lib.Job],
        version: int,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> bool:
        """Begins an evaluation; False, with a warning, while another is under way.

        Args:
          jobs: of the held-out tasks.
          version: of the weights that the engines have.
          prepare: gives engines of their own the version; it is done first.
        """
        if self._under_way is not None:
            logging.warning(
                "No evaluation begins with version %d: that of version %d is still "
                "under way. Raise eval_every, or lower rl.num_eval_tasks.",
                version,
                self._under_way,
            )
            return False
        self._under_way = version
        own = [
            dataclasses.replace(job, request_id=job.request_id + _FIRST_ID)
            for job in jobs
        ]
        self._asked.put_nowait(_Asked(version, own, prepare))
        return True

    def taken(self) -> held_out.Evaluation | None:
        """Returns the evaluation that is over, once."""
        over, self._over = self._over, None
        return over

    async def run(self) -> None:
        """Plays what is begun, until it is cancelled.

        Raises:
          Exception: of an episode, but for the engines' errors.
        """
        while True:
            version, jobs, prepare = await self._asked.get()
            try:
                if prepare is not None:
                    await prepare()
                episodes = await at_once.run_all(self._context, jobs)
                self._over = held_out.Evaluation(version, episodes)
            except completer.EngineError as error:
                logging.warning(
                    "The evaluation of version %d is given up: %s", version, error
                )
            self._under_way = None
