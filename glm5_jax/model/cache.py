"""The cache of decoding, with the entries of each layer for every sequence.

A sequence's rows lie together or in pages; `Reader` alone knows where.

The cache of the whole stack is the carry of the scan over layers, so that a step writes
its rows in place and copies nothing. The attention that declares an entry is the only
code that knows its meaning (glm5_jax/model/attention/protocol.py).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

# Entries of a row for each token with a part for each head, [capacity, heads, ...],
# which devices of the tensor axis share.
ROWS_BY_HEAD = ("k", "v")
# Entries of a sequence without rows of tokens, [heads, ...], shared likewise: a state,
# and the last inputs of a convolution.
STATES = ("state", "recent")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """B sequences; tokens 0 to lengths - 1 of each are cached.

    The rows of a sequence lie together; or, with a table, in pages of equally many
    rows, which may belong to several sequences that begin alike.
    """

    entries: dict[str, Array]  # [layers with the entry, B or pages, ...]
    lengths: Int[Array, " B"]
    # Most tokens of a sequence.
    capacity: int = dataclasses.field(metadata={"static": True})
    # The pages of the sequences that a program computes, in the order of their rows; an
    # index beyond all pages marks a run of rows without a page, which is never written.
    table: Int[Array, "b n"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reader:
    """A cache at one layer, with what the layers share."""

    cache: Cache  # of B sequences
    slots: Int[Array, " b"] | None  # those that the tokens belong to; None: all B
    layers: dict[str, Int[Array, ""]]  # for each entry, how many layers before have it
    shared: Any  # handed from layer to layer, as in `Attention.forward`

    def append(self, name: str, rows: Shaped[Array, "b T *n"]) -> "Reader":
        """Writes rows of the new tokens after the rows of each sequence."""
        cache, stack = self.cache, self.cache.entries[name]
        sequences, places = self._located(name, self._places(rows.shape[1]))
        stack = stack.at[(self.layers[name], sequences, places)].set(rows)
        cache = dataclasses.replace(cache, entries=cache.entries | {name: stack})
        return dataclasses.replace(self, cache=cache)

    def sequences(self, name: str) -> Shaped[Array, "b ..."]:
        """Copies the layer's entry of each sequence, such as its rows or its state."""
        entries = self.cache.entries[name][self.layers[name]]
        if self.cache.table is not None:
            rows = entries[self.cache.table]  # no page: jax reads the last one
            rows = rows.reshape(rows.shape[0], -1, *rows.shape[3:])
            return rows[:, : self.cache.capacity]
        return entries if self.slots is None else entries[self.slots]

    def replace(self, name: str, values: Float[Array, "b ..."]) -> "Reader":
        """Overwrites the layer's entry of each sequence."""
        cache, slots = self.cache, self.slots
        stack = cache.entries[name]
        everyone = jnp.arange(stack.shape[1]) if slots is None else slots
        stack = stack.at[(self.layers[name], everyone)].set(values, mode="drop")
        cache = dataclasses.replace(cache, entries=cache.entries | {name: stack})
        return dataclasses.replace(self, cache=cache)

    def latest(
        self, name: str, size: int, num_new: int
    ) -> tuple[Shaped[Array, "b S *n"], Int[Array, "b 1"]]:
        """Copies the last `size` rows of each sequence, its new tokens among them.

        Args:
          name: of the entry.
          size: number of rows, at most the capacity.
          num_new: new tokens of each sequence, already appended.

        Returns:
          The rows, and the place in the sequence of the first of them.
        """
        places, capacity = self._places(num_new), self.cache.capacity
        first = jnp.clip(places[:, -1:] + 1 - size, 0, capacity - size)
        if size == capacity:
            return self.sequences(name), first
        at = self._located(name, first + jnp.arange(size)[None])
        return self.cache.entries[name][self.layers[name], *at], first

    def pages(
        self, name: str
    ) -> tuple[Shaped[Array, "pages S *width"], Int[Array, "b n"]]:
        """Returns the rows of all layers as pages, and the layer's pages; no copy."""
        stack, table = self.cache.entries[name], self.cache.table
        number = stack.shape[1]
        if table is None:  # a sequence is a page
            slots = jnp.arange(number) if self.slots is None else self.slots
            table = slots[:, None]
        table = jnp.minimum(table, number - 1)  # a kernel must find every page it reads
        page_table = self.layers[name] * number + table
        return stack.reshape(-1, *stack.shape[2:]), page_table

    def after(self, names: Any) -> "Reader":
        """Returns the reader at the next layer, after a layer with these entries."""
        layers = {name: n + (name in names) for name, n in self.layers.items()}
        return dataclasses.replace(self, layers=layers)

    def _places(self, num_new: int) -> Int[Array, "b T"]:
        """Returns the places of the new tokens in their sequences."""
        lengths, slots = self.cache.lengths, self.slots
        lengths = lengths if slots is None else lengths[slots]
        return lengths[:, None] + jnp.arange(num_new)[None]

    def _located(self, name: str, places: Int[Array, "b T"]) -> tuple[Array, Array]:
        """Returns indices (sequence, place), or (page, row of it), of an entry's rows.

        JAX drops rows that are written outside of all sequences and pages, and reads
        the last page in place of none; such rows are masked later.
        """
        slots, table = self.slots, self.cache.table
        if table is None:
            slots = jnp.arange(len(self.cache.lengths)) if slots is None else slots
            return slots[:, None], places
        _, number, size = self.cache.entries[name].shape[:3]
        pages = jnp.take_along_axis(
            table, places // size, axis=1, mode="fill", fill_value=number
        )
        return pages, places % size
