"""An event loop that its guests can neither stop nor cancel as a whole.

A guest is an environment. Whatever it calls runs in its context, and so do the tasks
that it makes: those it may cancel, and nobody else's.
"""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

_GUEST: contextvars.ContextVar[object] = contextvars.ContextVar("guest", default=None)


class Loop(asyncio.SelectorEventLoop):
    """The loop of an engine and of the environments that it works for."""

    def __init__(self) -> None:
        """Lets every task know whose it is."""
        super().__init__()
        self.set_task_factory(_make_task)

    def stop(self) -> None:
        """Stops the loop.

        Raises:
            RuntimeError: a guest asks for it.
        """
        if _GUEST.get() is not None:
            raise RuntimeError("an environment must not stop the event loop")
        super().stop()


def context_of(guest: object) -> contextvars.Context:
    """Returns a context whose code is that of `guest`."""
    context = contextvars.copy_context()
    context.run(_GUEST.set, guest)
    return context


class _Task(asyncio.Task):
    """A task that no guest but the one that made it can cancel."""

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
