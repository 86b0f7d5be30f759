"""The interface between a layer and its attention.

A variant is one file with a frozen dataclass that has these methods, and one line in
`attention.make`. Two examples:

- Grouped-query attention with a window declares q, k, v and o projections, returns its
  keys and values as `attended`, keeps the entries "k" and "v" in the cache, and narrows
  the visible keys from `context.lo` to the last `window` keys.
- A gated delta net (gated_delta.py) has no keys. Over whole rows it resets its state
  where a document begins (where a token's place in the row is `context.lo`) and skips
  padding (`context.is_token`). Its cache entry is the state of a sequence, which a step
  overwrites, so the entry's shape does not depend on the capacity.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float

from glm5_jax.model import cache as cache_lib
from glm5_jax.model import context as context_lib


class Output(NamedTuple):
    """The output of attention over whole rows."""

    x: Float[Array, "B T D"]
    shared: Any  # the argument of the next layer, see `Attention.forward`
    attended: Any  # what the queries read; None for a variant without any
    indexer_kl: Float[Array, ""] | None  # mean over tokens; None without an indexer


@runtime_checkable
class Attention(Protocol):
    """The attention of one layer, made for a config when the model is built."""

    def table(self) -> dict[str, Any]:
        """Returns the parameters, as entries of the layer's table.

        The projections are the entry "self_attn". Names are checkpoint keys.
        """
        ...

    def forward(
        self,
        params: dict,
        x: Float[Array, "B T D"],
        context: context_lib.Context,
        shared: Any = None,
        kl_weight: Float[Array, ""] | None = None,
        attended: Any = None,
    ) -> Output:
        """Runs over whole rows of packed documents; no gradient crosses documents.

        Args:
          params: the layer's, fetched; those of `table` are among them.
          x: normed hidden states, on a mesh the tokens of this device.
          context: positions, documents, padding.
          shared: the value that layers share, which each hands to the next. A variant
            that shares nothing returns it unchanged.
          kl_weight: weight of the layer in the loss of the indexer that it uses; None
            computes no loss.
          attended: of an earlier call, to read again instead of keys made of x.
        """
        ...

    def decode(
        self,
        params: dict,
        x: Float[Array, "b T D"],
        context: context_lib.Context,
        reader: cache_lib.Reader,
    ) -> tuple[Float[Array, "b T D"], cache_lib.Reader]:
        """Runs over the next tokens of cached sequences.

        Args:
          params: as those of `forward`.
          x: normed hidden states of the new tokens.
          context: their positions; lo to hi - 1 are the cached keys that each may see.
            In a model with states, is_token says which of them are no padding.
          reader: the cache at this layer. The new one has the tokens' entries.
        """
        ...

    def cache_entries(self, capacity: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and type of what is cached of one sequence in this layer.

        Entries with a row for each token have `capacity` as their first dim. Those that
        devices share by heads are named in cache.py.
        """
        ...

    def cached(self, attended: Any) -> dict[str, Array]:
        """Returns the cache's entries of what `forward` attended to.

        Entries may be smaller than in `cache_entries`; the cache pads them with zeros.
        An entry may be absent, and is then zeros.
        """
        ...

    def flops(self, length: int) -> float:
        """Returns the FLOPs of a forward pass for a token, without its weights'.

        It is the mean over the tokens of a document of this length. Products with
        parameters are counted from the table.
        """
        ...
