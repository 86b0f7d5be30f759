"""Notes what episodes ask of the engines: how much ended, who waits, who is idle."""

import time

from glm5_jax.inference import requests
from glm5_jax.rl import completer
from glm5_jax.rl.actors import window as window_lib


class Watched:
    """A completer that notes its requests."""

    def __init__(self, engine: completer.Completer, window: window_lib.Window) -> None:
        """Asks `engine`, and tells `window` what was drawn."""
        self._engine, self._window = engine, window
        self.num_ended = 0  # requests
        self._waiting: dict[int, float] = {}  # since when, by id of the request
        self._measured = self._changed = time.monotonic()  # last measured, last changed
        self._idle_seconds = 0.0  # since it was measured

    @property
    def capacity(self) -> int:
        """Returns the most tokens of a prompt and its completion."""
        return self._engine.capacity

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests under way."""
        return len(self._waiting)

    def longest_wait(self) -> float:
        """Returns the seconds for which a request has waited at most."""
        return time.monotonic() - min(self._waiting.values(), default=time.monotonic())

    async def complete(self, request: requests.Request) -> requests.Completion:
        """Returns the completion of a request: see `completer.Completer`."""
        self._count_idle()
        self._waiting[request.id] = time.monotonic()
        try:
            completion = await self._engine.complete(request)
        finally:
            self._count_idle()
            self._waiting.pop(request.id, None)  # another may have its id
            self.num_ended += 1
        self._window.drew(request, completion)
        return completion

    def idle(self) -> tuple[float, float]:
        """Returns the seconds without a request, and all, since the last call."""
        self._count_idle()
        seconds, idle = self._changed - self._measured, self._idle_seconds
        self._measured, self._idle_seconds = self._changed, 0.0
        return idle, seconds

    def _count_idle(self) -> None:
        """Counts the time since the last change, if nobody waited; call it before."""
        now = time.monotonic()
        if not self._waiting:
            self._idle_seconds += now - self._changed
        self._changed = now
