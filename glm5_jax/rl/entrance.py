"""Opens addresses for agents, where a taskset has agents; they need the extra serve."""

import contextlib
import dataclasses
import importlib.util
from collections.abc import AsyncIterator

from glm5_jax import config
from glm5_jax.rl import episodes

_PACKAGES = ("aiohttp", "fastapi", "uvicorn")  # of the extra serve


def require_extra(what: str) -> None:
    """Checks that the packages of the extra serve are installed.

    Args:
      what: needs them, for the message.

    Raises:
      InputError: one is missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise config.InputError(
            f"{what} needs packages that are not installed ({', '.join(missing)}): "
            f'pip install "glm5_jax[serve]".'
        )


@contextlib.asynccontextmanager
async def of(context: episodes.Context) -> AsyncIterator[episodes.Context]:
    """Yields a context in which the taskset's agents can ask, if it has any.

    Raises:
      InputError: it has some, and the extra serve is missing.
    """
    if not getattr(context.taskset, "has_agents", False):
        yield context
        return
    require_extra("A taskset of agents")
    from glm5_jax.rl import doors

    async with doors.serving() as opened:
        yield dataclasses.replace(context, doors=opened)
