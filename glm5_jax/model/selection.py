"""The keys that a query attends to: every visible key, or a selection of them.

A selection is tagged with its form, of which the chip and the length decide
(`pallas_kernels.selection` describes the forms). Whoever needs a certain form asks
`isinstance`; nothing looks at the number type of an array.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

import pallas_kernels
from pallas_kernels import selection as forms


class AllVisible(NamedTuple):
    """Every key of the query's document up to the query itself."""


class Mask(NamedTuple):
    """A boolean for each pair, keys first: the form of plain XLA on a CPU."""

    keep: Bool[Array, "*n B S T"]


class Bits(NamedTuple):
    """A bit for each pair, in the layout that kernels for dense products read."""

    words: UInt32[Array, "*n B T W"]


class Listed(NamedTuple):
    """The indices of the keys, ascending, with -1 as padding at the end."""

    indices: Int[Array, "*n B T K"]


Selection = AllVisible | Mask | Bits | Listed
_FORMS: dict[str, tuple[Callable[..., Selection], Callable[..., Array]]] = {
    "mask": (Mask, pallas_kernels.indexer_mask),
    "bits": (Bits, pallas_kernels.indexer_bits),
    "list": (Listed, pallas_kernels.indexer_topk),
}


def top_keys(
    q: Array,
    k: Array,
    w: Array,
    k_exponents: Array | None,
    lo: Array,
    hi: Array,
    topk: int,
    is_listed: bool,
) -> Selection:
    """Selects the keys with the highest scores of an indexer.

    Args:
      q: the indexer's queries [B, T, I, J].
      k: its keys [B, S, J].
      w: its head weights [B, T, I].
      k_exponents: powers of two [B, S] that scale keys of 8 bits.
      lo: first visible key of each query [B, T].
      hi: end of the visible keys [B, T].
      topk: keys to select.
      is_listed: asks for a list; otherwise the form is the fastest one here.
    """
    make, choose = _FORMS["list" if is_listed else forms.form(k.shape[1])]
    return make(choose(q, k, w, lo, hi, topk=topk, k_exponents=k_exponents))


def empty(
    batch: int, num_queries: int, num_keys: int, topk: int, is_listed: bool
) -> Selection:
    """Returns zeros with the structure of what `top_keys` returns."""
    if is_listed:
        return Listed(jnp.zeros((batch, num_queries, topk), jnp.int32))
    make, _ = _FORMS[forms.form(num_keys)]
    return make(forms.empty(batch, num_queries, num_keys, topk))


def dense_argument(selection: Selection) -> Array | None:
    """Returns the argument named selection of kernels that take a mask or bits."""
    if isinstance(selection, Mask):
        return selection.keep
    return selection.words if isinstance(selection, Bits) else None
