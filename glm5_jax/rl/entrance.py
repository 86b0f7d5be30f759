"""Opens addresses for agents, where a taskset has agents; they need the extra serve."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator

from glm5_jax.environments import protocol
from glm5_jax.http_server import extra
from glm5_jax.rl import episodes


@contextlib.asynccontextmanager
async def of(context: episodes.Context) -> AsyncIterator[episodes.Context]:
    """Yields a context in which the taskset's agents can ask, if it has any.

    Raises:
      InputError: it has some, and the extra serve is missing.
    """
    if not protocol.has_agents(context.taskset):
        yield context
        return
    extra.require("A taskset of agents")
    from glm5_jax.rl import doors

    async with doors.serving() as opened:
        yield dataclasses.replace(context, doors=opened)
