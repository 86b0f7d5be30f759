"""An orchestrator in a thread of this process, with this process's engine."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import TypeVar

from glm5_jax.data.chat import templates
from glm5_jax.environments import protocol
from glm5_jax.inference import service as service_lib
from glm5_jax.rl import calls, entrance
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import pump as pump_lib
from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import journal as journal_lib
from glm5_jax.rl.actors import lag as lag_lib
from glm5_jax.rl.actors import monitor
from glm5_jax.rl.actors import orchestrator as orchestrator_lib

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Game:
    """What is played."""

    taskset: protocol.Taskset
    template: templates.Template
    settings: episodes_lib.Settings
    jobs: Callable[[int], Sequence[episodes_lib.Job]]  # of a group, by its index
    drop_equal: bool  # groups of equal rewards
    watch: monitor.Settings | None = None  # None: the default


class Local:
    """Plays in the background; every method waits for the thread that plays."""

    def __init__(
        self,
        service: service_lib.Service,
        game: Game,
        groups: groups_lib.Groups[orchestrator_lib.Group],
        journal: journal_lib.Journal,
    ) -> None:
        """Begins to play.

        Args:
          service: of the engine, which may have other clients.
          game: what is played.
          groups: which the thread alone uses from now on.
          journal: of the groups, which the thread alone uses, too.

        Raises:
          InputError: see `entrance.of`.
        """
        self._service, self._game = service, game
        self._groups, self._journal = groups, journal
        self.lag = lag_lib.Lag()  # of the thread's event loop
        self._started: futures.Future[asyncio.AbstractEventLoop] = futures.Future()
        self._orchestrator: orchestrator_lib.Orchestrator
        self._end: asyncio.Event
        self._thread = threading.Thread(target=self._run, name="actors", daemon=True)
        self._thread.start()
        self._loop = self._started.result()

    def take(self, stall_seconds: float) -> list[tuple[int, orchestrator_lib.Group]]:
        """Waits for the groups of the next step: see `Orchestrator.take`."""
        waiting = self._orchestrator.take(stall_seconds)
        return asyncio.run_coroutine_threadsafe(waiting, self._loop).result()

    def call(self, function: Callable[[orchestrator_lib.Orchestrator], T]) -> T:
        """Returns what a function makes of the orchestrator, in its thread."""

        async def called() -> T:
            return function(self._orchestrator)

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result()

    def close(self) -> None:
        """Cancels all episodes and closes their environments."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        """Is the thread; hands what keeps it from playing to who waits for it."""
        try:
            calls.run(self._play())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _play(self) -> None:
        """Plays until `close`."""
        game, pump = self._game, pump_lib.Pump(self._service)
        self._end = asyncio.Event()
        plain = episodes_lib.Context(pump, game.taskset, game.template, game.settings)
        async with entrance.of(plain) as context:
            self._orchestrator = orchestrator_lib.Orchestrator(
                context,
                game.jobs,
                self._groups,
                drop_equal=game.drop_equal,
                journal=self._journal,
                watch=game.watch,
            )
            playing = asyncio.create_task(self._orchestrator.run())
            measuring = asyncio.create_task(self.lag.measure())
            try:
                self._started.set_result(asyncio.get_running_loop())
                with self.lag.naming():
                    await self._end.wait()
            finally:
                playing.cancel()
                measuring.cancel()
                await asyncio.wait({playing, measuring})
                if not playing.cancelled():
                    playing.exception()  # `take` has raised it
                pump.close()
