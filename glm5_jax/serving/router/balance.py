"""Chooses a replica for a key: the one that its last request had, unless it is full."""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping

from glm5_jax.serving.router import ring as ring_lib

_MAX_MOVED = 2**16  # keys that are remembered away from home


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """The most requests that a replica has at the same time.

    The bound is factor * mean, as in "Consistent hashing with bounded loads" (Mirrokni
    et al., 2018), and never below `spare`: two requests that begin alike should share
    a replica that is nearly idle.

    Attributes:
      factor: above 1, or the replicas could not take all requests.
      spare: requests that a replica takes in any case, at least 1.
    """

    factor: float = 1.25
    spare: int = 4

    def __post_init__(self) -> None:
        """Checks that the replicas together can take every request."""
        if self.factor < 1 or self.spare < 1:
            raise ValueError(
                f"factor and spare must be at least 1, got {self.factor} and "
                f"{self.spare}."
            )

    def limit(self, num_requests: int, num_replicas: int) -> int:
        """Returns the bound; `num_requests` includes the one to place."""
        return max(self.spare, math.ceil(self.factor * num_requests / num_replicas))


class Balance:
    """Places keys on replicas by a ring, and within the bound.

    A key belongs to its home, the first replica on the ring that is in service. Where
    the home is full it moves to the next one that has room, and stays there, since its
    cache is there, until it has been idle for `idle_seconds`; then it goes home.
    """

    def __init__(
        self,
        bound: Bound,
        idle_seconds: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins without replicas."""
        self.ring = ring_lib.Ring()
        self._bound, self._idle_seconds, self._clock = bound, idle_seconds, clock
        self._moved: collections.OrderedDict[str, tuple[str, float]] = (
            collections.OrderedDict()
        )

    @property
    def num_moved(self) -> int:
        """Returns the number of keys that are remembered away from home."""
        return len(self._moved)

    def choose(
        self, key: str, loads: Mapping[str, int], excluded: Collection[str] = ()
    ) -> str | None:
        """Returns the replica for a request, or None if none is left.

        Args:
          key: of the conversation.
          loads: requests under way at each replica that is in service.
          excluded: replicas that have refused this request.
        """
        left = [name for name in self.ring.walk(key) if name in loads]
        if not any(name not in excluded for name in left):
            return None
        limit = self._bound.limit(sum(loads.values()) + 1, len(loads))
        order = left
        moved = self._moved_to(key)
        if moved in loads:
            order = [moved, *left]
        chosen = next((n for n in order if n not in excluded and loads[n] < limit), "")
        if not chosen:  # those with room have refused
            chosen = min((n for n in left if n not in excluded), key=loads.__getitem__)
        self._remember(key, chosen, is_home=chosen == left[0])
        return chosen

    def _moved_to(self, key: str) -> str:
        """Returns where a key is away from home, or an empty name."""
        name, used = self._moved.get(key, ("", 0.0))
        return name if self._clock() - used < self._idle_seconds else ""

    def _remember(self, key: str, name: str, is_home: bool) -> None:
        self._moved.pop(key, None)
        if not is_home:
            self._moved[key] = name, self._clock()
        while self._moved:
            first, (_, used) = next(iter(self._moved.items()))
            is_old = self._clock() - used >= self._idle_seconds
            if not is_old and len(self._moved) <= _MAX_MOVED:
                return
            del self._moved[first]
