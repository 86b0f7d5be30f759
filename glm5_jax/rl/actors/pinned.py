"""Servers that only evaluate, with one version of the weights from the first task on.

They get no weights but those of an evaluation, and every request is pinned to them: a
server with others refuses it, so no token of another version can be in the figures.
"""

import aiohttp

from glm5_jax.rl.actors import fleet as fleet_lib
from glm5_jax.rl.actors import remote


class Pinned:
    """The servers behind a router of their own.

    Attributes:
      engine: the servers, as a `completer.Completer`.
      fleet: gives them weights, also those that start again.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, capacity: int, seconds: float
    ) -> None:
        """Asks nothing yet.

        Args:
          session: see `remote.Remote`.
          url: of the router.
          capacity: most tokens of an episode.
          seconds: for an answer.
        """
        self._session, self._url, self._capacity = session, url, capacity
        self.fleet = fleet_lib.Fleet(session, url)
        self.engine = remote.Remote(session, url, capacity, seconds=seconds)

    async def take(self, folder: str, version: int) -> None:
        """Gives the servers a version; their engine asks for no other from then on.

        Args:
          folder: of the version, relative to the root of the servers.
          version: above the last one.

        Raises:
          EngineError: they do not take it.
        """
        await self.fleet.publish(folder, version)
        room = await remote.capacity_of(self._session, self._url)
        self.engine.versions_ahead = self.fleet.ahead
        self.engine.weight_version = version
        self.engine.capacity = min(room, self._capacity)
