"""Tells whether the engine still works, not only whether its server answers.

The thread that runs an engine takes commands between two dispatches. One that does
nothing shows that it comes round: an engine that hangs in a dispatch leaves it waiting,
one that is idle or paused does not.
"""

import time
from concurrent import futures

from glm5_jax.http_server import errors
from glm5_jax.inference import events
from glm5_jax.serving import served


class Liveness:
    """A command that does nothing, sent again with every question."""

    def __init__(self, model: served.Served) -> None:
        """Sends none yet."""
        self._model = model
        self._sent: tuple[float, futures.Future[None]] | None = None

    def require(self) -> None:
        """Checks that the engine works, as far as earlier questions can tell.

        Raises:
            ApiError: it takes no command any more, or not for max_dispatch_seconds.
        """
        try:
            if self._sent is None or self._sent[1].done():
                sent = self._model.service.call(lambda engine: None)
                self._sent = time.monotonic(), sent
        except events.ClosedError as error:
            raise errors.ApiError(503, str(error)) from error
        seconds = time.monotonic() - self._sent[0]
        if seconds > self._model.max_dispatch_seconds:
            raise errors.ApiError(
                503, f"A step of the engine has taken more than {seconds:.0f} s."
            )
