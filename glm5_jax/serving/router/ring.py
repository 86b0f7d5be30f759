"""Consistent hashing: few keys move when a member joins or leaves."""

import bisect
import hashlib
from collections.abc import Iterable, Iterator

NUM_POINTS = 256  # of a member on the ring: its share varies by 1/sqrt of that


class Ring:
    """Members at hashed points of a circle; a key belongs to the next point's member.

    A member that leaves gives its keys to the others, and one that joins takes its
    share from them. No other key moves (Karger et al., 1997).
    """

    def __init__(self, names: Iterable[str] = (), num_points: int = NUM_POINTS) -> None:
        """Begins with the members `names`."""
        self._num_points = num_points
        self._names: set[str] = set()
        self._points: list[tuple[int, str]] = []  # sorted
        for name in names:
            self.add(name)

    def __len__(self) -> int:
        """Returns the number of members."""
        return len(self._names)

    def add(self, name: str) -> None:
        """Adds a member; no-op for one that is there."""
        if name not in self._names:
            self._names.add(name)
            self._points += self._points_of(name)
            self._points.sort()

    def remove(self, name: str) -> None:
        """Removes a member; no-op without it."""
        if name in self._names:
            self._names.remove(name)
            self._points = [point for point in self._points if point[1] != name]

    def walk(self, key: str) -> Iterator[str]:
        """Yields every member once, in the order in which the key meets them."""
        first = bisect.bisect_right(self._points, (place(key), ""))
        met: set[str] = set()
        for step in range(len(self._points)):
            name = self._points[(first + step) % len(self._points)][1]
            if name not in met:
                met.add(name)
                yield name
                if len(met) == len(self._names):
                    return

    def _points_of(self, name: str) -> Iterator[tuple[int, str]]:
        return ((place(f"{name} {i}"), name) for i in range(self._num_points))


def place(text: str) -> int:
    """Returns the point of a text on the circle, the same one in every process."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "big")
