"""An event loop that its guests cannot stop.

A guest is an environment. Its calls, and the tasks that it makes, run in its context.
It can cancel only these tasks.
"""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

_GUEST: contextvars.ContextVar[object] = contextvars.ContextVar("guest", default=None)


class Loop(asyncio.SelectorEventLoop):
    """The event loop of an engine and its environments."""

    def __init__(self) -> None:
        """Makes tasks that know their guest."""
        super().__init__()
        self.set_task_factory(_make_task)

    def stop(self) -> None:
        """Stops the loop.

        Raises:
            RuntimeError: a guest called it.
        """
        if _GUEST.get() is not None:
            raise RuntimeError("an environment must not stop the event loop")
        super().stop()


def context_of(guest: object) -> contextvars.Context:
    """Returns a context for the code of `guest`."""
    context = contextvars.copy_context()
    context.run(_GUEST.set, guest)
    return context


class _Task(asyncio.Task):
    """A task that a guest can cancel only if it made it."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], **how: Any) -> None:
        context = how.get("context") or contextvars.copy_context()
        self._guest = context.get(_GUEST)
        super().__init__(coroutine, **how)

    def cancel(self, msg: Any = None) -> bool:
        guest = _GUEST.get()
        if guest is not None and guest is not self._guest:
            raise RuntimeError("an environment must cancel no task but its own")
        return super().cancel(msg)


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, /, **how: Any
) -> asyncio.Task[Any]:
    return _Task(coroutine, loop=loop, **how)
