"""Attention in multi-head form over the keys that a mask selects.

o[t] = sum_s softmax_s(scale q[t] . k[s]) v[s] over s with mask[s, t]; and the
log-sum-exp of every row, from which the backward pass and the indexer's loss restore
the probabilities. A row without any key gives zeros, and a log-sum-exp of zero.
"""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.masked_mla import reference, tiled

IMPLEMENTATIONS = ("tiled", "reference")


def masked_mla(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N O"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    mask: Bool[Array, "B S T"] | None = None,
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N O"], Float[Array, "B N T"]]:
    """Attends to the keys lo .. hi - 1 of each query that `mask` selects.

    Args:
      q: queries; the last T of the S tokens.
      k: keys.
      v: values.
      lo: first visible key.
      hi: end of the visible keys; at most t + 1 + S - T.
      mask: selection among them, keys first; it marks visible keys alone. None
        selects all.
      scale: factor on q . k.
      implementation: "tiled", "reference" or None for the best one.

    Returns:
      The outputs, and the log-sum-exp of the scaled scores in float32.
    """
    name = dispatch.choose(implementation, "tiled", IMPLEMENTATIONS)
    module = tiled if name == "tiled" else reference
    return module.masked_mla(q, k, v, lo, hi, mask, scale)
