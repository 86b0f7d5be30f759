"""The cache of decoding, with the entries of each layer for every sequence.

The cache of the whole stack is the carry of the scan over layers, so that a step writes
its rows in place and copies nothing. The attention that declares an entry is the only
code that knows its meaning (glm5_jax/model/attention/protocol.py).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Entries of a row for each token with a part for each head, [capacity, heads, ...],
# which devices of the tensor axis share.
ROWS_BY_HEAD = ("k", "v")
# Entries of a sequence without rows of tokens, [heads, ...], shared likewise: a state,
# and the last inputs of a convolution.
STATES = ("state", "recent")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """B sequences; tokens 0 to lengths - 1 of each are cached."""

    entries: dict[str, Array]  # [layers with the entry, B, ...]
    lengths: Int[Array, " B"]
    # Most tokens of a sequence.
    capacity: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reader:
    """A cache at one layer, with what the layers share."""

    cache: Cache  # of B sequences
    slots: Int[Array, " b"] | None  # those that the tokens belong to; None: all B
    layers: dict[str, Int[Array, ""]]  # for each entry, how many layers before have it
    shared: Any  # handed from layer to layer, as in `Attention.forward`

    def append(self, name: str, rows: Float[Array, "b T *n"]) -> "Reader":
        """Writes rows of the new tokens after the rows of each sequence."""
        cache, (slots, places) = self.cache, self._places(rows.shape[1])
        stack = cache.entries[name]
        stack = stack.at[(self.layers[name], slots, places)].set(rows)
        cache = dataclasses.replace(cache, entries=cache.entries | {name: stack})
        return dataclasses.replace(self, cache=cache)

    def sequences(self, name: str) -> Float[Array, "b ..."]:
        """Copies the layer's entry of each sequence, such as its rows or its state."""
        entries = self.cache.entries[name][self.layers[name]]
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
    ) -> tuple[Float[Array, "b S *n"], Int[Array, "b 1"]]:
        """Copies the last `size` rows of each sequence, its new tokens among them.

        Args:
          name: of the entry.
          size: number of rows, at most the capacity.
          num_new: new tokens of each sequence, already appended.

        Returns:
          The rows, and the place in the sequence of the first of them.
        """
        stack, (slots, places) = self.cache.entries[name], self._places(num_new)
        first = jnp.clip(places[:, -1:] + 1 - size, 0, stack.shape[2] - size)
        if size == stack.shape[2]:
            return self.sequences(name), first
        return stack[self.layers[name], slots, first + jnp.arange(size)[None]], first

    def pages(
        self, name: str
    ) -> tuple[Float[Array, "pages S width"], Int[Array, "b 1"]]:
        """Returns the rows of all layers as pages, and the layer's pages; no copy."""
        stack = self.cache.entries[name]
        batch = stack.shape[1]
        slots = jnp.arange(batch) if self.slots is None else self.slots
        slots = jnp.minimum(slots, batch - 1)  # a kernel must find every page it reads
        page_table = self.layers[name] * batch + slots[:, None]
        return stack.reshape(-1, *stack.shape[2:]), page_table

    def after(self, names: Any) -> "Reader":
        """Returns the reader at the next layer, after a layer with these entries."""
        layers = {name: n + (name in names) for name, n in self.layers.items()}
        return dataclasses.replace(self, layers=layers)

    def _places(self, num_new: int) -> tuple[Array, Array]:
        """Indices (sequence, place) of the new tokens; JAX drops those outside."""
        lengths, slots = self.cache.lengths, self.slots
        if slots is None:
            slots = jnp.arange(len(lengths))
        else:
            lengths = lengths[slots]
        return slots[:, None], lengths[:, None] + jnp.arange(num_new)[None]
