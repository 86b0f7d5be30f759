"""Plays many episodes at once, within the bounds of all and of each part."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from glm5_jax.environments import mixture, protocol
from glm5_jax.rl import episodes as episodes_lib

Run = Callable[
    [episodes_lib.Context, episodes_lib.Job], Awaitable[episodes_lib.Episode]
]


class Room:
    """The places of episodes that are under way at once."""

    def __init__(self, settings: episodes_lib.Settings) -> None:
        """Begins with all of them free.

        Args:
            settings: num_concurrent are there for all, and concurrency for each part.
        """
        self._concurrency = settings.concurrency
        self._of_all = asyncio.Semaphore(settings.num_concurrent)
        self._of_parts = [
            asyncio.Semaphore(most) if most else contextlib.nullcontext()
            for most in settings.concurrency or (0,)
        ]

    @contextlib.asynccontextmanager
    async def place(self, task: protocol.Task) -> AsyncIterator[None]:
        """Waits for a place of a task's part, then of all, until the block ends."""
        async with self._of_parts[part_of(self._concurrency, task)], self._of_all:
            yield


async def run_all(
    context: episodes_lib.Context,
    jobs: Sequence[episodes_lib.Job],
    on_episode: Callable[[int, episodes_lib.Episode], object] | None = None,
    run: Run = episodes_lib.run,
) -> list[episodes_lib.Episode]:
    """Plays episodes, as many at once as the settings allow; returns them in order.

    Those of a part that is at its bound keep no others waiting.

    Args:
        context: of all.
        jobs: the episodes. Those of one part begin in this order.
        on_episode: called with the index of a job when its episode ends.
        run: plays an episode.

    Raises:
        Exception: the engine's, or that of `on_episode`; it ends all others.
    """
    episodes: dict[int, episodes_lib.Episode] = {}
    room = Room(context.settings)

    async def play(i: int, job: episodes_lib.Job) -> None:
        async with room.place(job.task):
            episodes[i] = await run(context, job)
            if on_episode is not None:
                on_episode(i, episodes[i])

    try:
        async with asyncio.TaskGroup() as group:
            for i, job in enumerate(jobs):
                group.create_task(play(i, job))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the one that stopped the others
    assert len(episodes) == len(jobs), "every job ends in one episode"
    return [episodes[i] for i in range(len(jobs))]


def part_of(concurrency: Sequence[int], task: protocol.Task) -> int:
    """Returns the place of a task's bound among those of all parts."""
    return mixture.part_of(task) if len(concurrency) > 1 else 0
