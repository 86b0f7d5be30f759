"""Copies pages of the cache to arrays of the host, and back.

A prompt that begins with such a page need not read its tokens again. This pays where
copying a page takes less time than reading its tokens, so for all but tiny models; it
needs a working set of prefixes that the pages of the device cannot hold.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from glm5_jax.inference import limits as limits_lib
from glm5_jax.inference import pages as pages_lib
from glm5_jax.inference import steps
from glm5_jax.inference.pages import Move

BATCH = 8  # pages of a copy; two programs, whatever is copied


class HostPages:
    """Pages of the cache in host memory.

    Attributes:
        num_restored: pages that came back.
    """

    def __init__(self, limits: limits_lib.Limits) -> None:
        """Takes memory with the first copy."""
        self._num_pages = limits.host_pages
        self.num_restored = 0
        self._arrays: dict[str, np.ndarray] = {}  # [layers, pages, rows, ...]

    def move(self, moves: collections.deque[Move], state: steps.State) -> steps.State:
        """Makes all copies in their order, and removes them; consumes the state."""
        while moves:
            batch = _first(moves)
            state = self._move(batch, state)
            for _ in batch:
                moves.popleft()
        return state

    def copied(
        self, nodes: Sequence[pages_lib.Node], entries: dict[str, Array]
    ) -> dict[str, np.ndarray]:
        """Returns the rows of pages, wherever they are: [layers, pages, rows, ...].

        Args:
          nodes: of the pages.
          entries: of the cache, after all moves.
        """
        found = {
            name: np.empty((len(x), len(nodes), *x.shape[2:]), x.dtype)
            for name, x in entries.items()
        }
        hosted = [i for i, node in enumerate(nodes) if node.host >= 0]
        for name, rows in found.items() if hosted else ():
            hosts = [nodes[i].host for i in hosted]
            rows[:, hosted] = self._arrays[name][:, hosts]
        others = [i for i, node in enumerate(nodes) if node.host < 0]
        for start in range(0, len(others), BATCH):
            batch = others[start : start + BATCH]
            pages = _padded([nodes[i].page for i in batch], entries)
            for name, rows in jax.device_get(_read(entries, pages)).items():
                found[name][:, batch] = rows[:, : len(batch)]
        return found

    def reserve(self, rows: dict[str, np.ndarray]) -> None:
        """Takes memory for rows of this form before the first copy."""
        for name, values in rows.items():
            self._array(name, values)

    def put(self, hosts: Sequence[int], rows: dict[str, np.ndarray]) -> None:
        """Replaces pages of the host memory by rows as `copied` returns them."""
        for name, values in rows.items():
            self._array(name, values)[:, hosts] = values

    def _move(self, batch: Sequence[Move], state: steps.State) -> steps.State:
        """Makes the copies of a batch of `_first`."""
        entries = state.cache.entries
        pages = _padded([move.page for move in batch], entries)
        hosts = [move.host for move in batch]
        if batch[0].to_host:
            copies = jax.device_get(_read(entries, pages))
            for name, rows in copies.items():
                self._array(name, rows)[:, hosts] = rows[:, : len(batch)]
            return state
        self.num_restored += len(batch)
        hosts += hosts[:1] * (BATCH - len(batch))
        rows = {name: array[:, hosts] for name, array in self._arrays.items()}
        cache = dataclasses.replace(state.cache, entries=_write(entries, pages, rows))
        return dataclasses.replace(state, cache=cache)

    def _array(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Returns the pages of an entry of the cache."""
        if name not in self._arrays:
            shape = rows.shape[0], self._num_pages, *rows.shape[2:]
            self._arrays[name] = np.empty(shape, rows.dtype)
        return self._arrays[name]


def _padded(pages: Sequence[int], entries: dict[str, Array]) -> Int[Array, " pages"]:
    """Returns indices of pages, with one beyond all pages as padding."""
    missing = next(iter(entries.values())).shape[1]
    return jnp.asarray([*pages] + [missing] * (BATCH - len(pages)))


def _first(moves: Iterable[Move]) -> list[Move]:
    """Returns the first moves that can be made at once: of one kind, on other pages."""
    batch: list[Move] = []
    for move in itertools.islice(moves, BATCH):
        is_alike = all(
            move.to_host == other.to_host
            and move.page != other.page
            and move.host != other.host
            for other in batch
        )
        if not is_alike:
            break
        batch.append(move)
    return batch


@jax.jit
def _read(entries: dict[str, Array], pages: Int[Array, " pages"]) -> dict[str, Array]:
    """Returns these pages of each entry; any page for an index beyond all."""
    return {name: x.at[:, pages].get(mode="clip") for name, x in entries.items()}


@functools.partial(jax.jit, donate_argnames="entries")
def _write(
    entries: dict[str, Array], pages: Int[Array, " pages"], rows: dict[str, Array]
) -> dict[str, Array]:
    """Replaces these pages of each entry; none for an index beyond all."""
    return {
        name: x.at[:, pages].set(rows[name], mode="drop") for name, x in entries.items()
    }
