"""The one thing that episodes ask of an engine: to complete a prompt.

An engine in this process is one (pump.py), servers behind a URL are another
(actors/remote.py). Nothing here imports jax, so that episodes can run without it.
"""

from typing import Protocol, runtime_checkable

from glm5_jax.inference import requests


class EngineError(RuntimeError):
    """Raised if the engine fails for a request."""


@runtime_checkable
class Completer(Protocol):
    """Completes prompts for the coroutines of one event loop."""

    @property
    def capacity(self) -> int:
        """Returns the most tokens of a prompt and its completion."""
        ...

    async def complete(self, request: requests.Request) -> requests.Completion:
        """Returns the completion of a request; ends the request if cancelled.

        Raises:
          InputError: the engine refuses the request.
          EngineError: the engine fails for the request.
        """
        ...
