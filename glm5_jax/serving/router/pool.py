"""The replicas that the router knows, and which of them are in service."""

import asyncio
import collections
import contextlib
import dataclasses
import enum
import re
from collections.abc import AsyncIterator, Collection, Iterator

from glm5_jax import config
from glm5_jax.http_server import errors
from glm5_jax.serving.router import balance

_ADDRESS = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


class State(enum.StrEnum):
    """Whether a replica gets requests, and if not, why."""

    JOINING = "joining"  # has not answered yet
    READY = "ready"
    DOWN = "down"  # does not answer any more
    UNFIT = "unfit"  # answers, but another model, or lacks an update of the weights
    LEAVING = "leaving"  # gets no new requests, and ends those that it has


@dataclasses.dataclass(eq=False)
class Replica:
    """A server behind the router.

    Attributes:
      url: its address, without a slash at the end.
      is_prefill: whether it reads prompts for the others, and gets no requests.
      state: see `State`.
      reason: why it is not in service, for people.
      load: requests under way.
      answered: requests by outcome, for the figures.
      num_ejections: times that it went out of service.
      is_trusted: whether it may come into service with any version of the weights.
      missed_resume: whether it is to resume before it comes into service.
    """

    url: str
    is_prefill: bool = False
    state: State = State.JOINING
    reason: str = "has not answered yet"
    load: int = 0
    answered: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    num_ejections: int = 0
    is_trusted: bool = False
    missed_resume: bool = False
    _open: set[asyncio.Timeout] = dataclasses.field(default_factory=set)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Counts a request while it lasts."""
        self.load += 1
        try:
            yield
        finally:
            self.load -= 1

    @contextlib.asynccontextmanager
    async def until_cut_off(self) -> AsyncIterator[None]:
        """Waits for the replica at most until `cut_off`; cannot be nested.

        Raises:
          TimeoutError: it was cut off.
        """
        async with asyncio.timeout(None) as cut:
            self._open.add(cut)
            try:
                yield
            finally:
                self._open.discard(cut)

    def cut_off(self) -> int:
        """Breaks all requests under way, and returns their number."""
        now = asyncio.get_running_loop().time()
        number = len(self._open)
        for cut in self._open:
            cut.reschedule(now)
        self._open.clear()
        return number

    def described(self) -> dict[str, object]:
        """Returns what GET /replicas tells."""
        return {
            "url": self.url,
            "prefill": self.is_prefill,
            "state": str(self.state),
            "reason": self.reason,
            "load": self.load,
        }


class Pool:
    """Chooses replicas for requests.

    Attributes:
      replicas: by address.
      balance: places keys.
      version: of the weights of those in service; None as long as nobody knows.
      is_paused: whether the replicas are paused.
      in_service: held during a request to all replicas, and while one comes into
        service, so that none misses it.
    """

    def __init__(self, bound: balance.Bound, max_wait: float) -> None:
        """Begins without replicas.

        Args:
          bound: of a replica's requests.
          max_wait: seconds that a request waits while none is in service.
        """
        self.replicas: dict[str, Replica] = {}
        self.balance = balance.Balance(bound)
        self.version: float | None = None
        self.is_paused = False
        self.in_service = asyncio.Lock()
        self._max_wait = max_wait
        self._changed = asyncio.Condition()

    def ready(self) -> dict[str, Replica]:
        """Returns the replicas in service by address."""
        every = self.replicas.items()
        return {url: one for url, one in every if one.state == State.READY}

    def answering(self) -> dict[str, Replica]:
        """Returns the replicas in service that get requests, by address."""
        every = self.ready().items()
        return {url: one for url, one in every if not one.is_prefill}

    def join(self, url: str, is_prefill: bool = False) -> Replica:
        """Adds a replica, or returns the one that has this address.

        Args:
          url: its address.
          is_prefill: see `Replica`.

        Raises:
          InputError: the address is none.
        """
        url = checked(url)
        found = self.replicas.get(url)
        if found is None or found.state == State.LEAVING:
            found = self.replicas[url] = Replica(url, is_prefill)
            self.balance.ring.add(url)
        return found

    def drop(self, replica: Replica) -> None:
        """Removes a replica, unless another one has its address now."""
        if self.replicas.get(replica.url) is replica:
            del self.replicas[replica.url]
            self.balance.ring.remove(replica.url)

    async def change(self, replica: Replica, state: State, reason: str = "") -> None:
        """Changes a replica's state; one that leaves does not come back."""
        if replica.state == State.LEAVING:
            return
        if replica.state == State.READY and state in (State.DOWN, State.UNFIT):
            replica.num_ejections += 1
        replica.state, replica.reason = state, reason
        async with self._changed:
            self._changed.notify_all()

    async def choose(self, key: str, excluded: Collection[str]) -> Replica | None:
        """Returns the replica for a request; None if all have refused it.

        Waits while none is in service.

        Raises:
          ApiError: none came into service in time.
        """
        if not self.answering():
            await self._wait()
        ready = self.answering()
        loads = {url: one.load for url, one in ready.items()}
        url = self.balance.choose(key, loads, excluded)
        return None if url is None else ready[url]

    async def _wait(self) -> None:
        """Waits until a replica is in service.

        Raises:
          ApiError: it took too long.
        """
        try:
            async with asyncio.timeout(self._max_wait), self._changed:
                await self._changed.wait_for(self.answering)
        except TimeoutError:
            states = collections.Counter(str(r.state) for r in self.replicas.values())
            shown = ", ".join(f"{number} {state}" for state, number in states.items())
            raise errors.busy(
                f"No replica is in service ({shown or 'none has joined'}); try again "
                f"later.",
                503,
            ) from None


def checked(url: str) -> str:
    """Returns an address in its one spelling.

    Raises:
      InputError: it is not http://HOST:PORT.
    """
    given = url.strip().rstrip("/")
    if not _ADDRESS.fullmatch(given):
        raise config.InputError(
            f"A replica's address must look like http://HOST:PORT, got {url!r}."
        )
    return given
