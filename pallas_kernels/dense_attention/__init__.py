"""Attention in multi-head form over selected keys.

o[t] = sum_s softmax_s(scale q[t] . k[s]) v[s] over the selected s. The op also returns
the log-sum-exp of every row, from which the backward pass and the indexer's loss
restore the probabilities. A row without keys gives zeros and a log-sum-exp of zero.
"""

from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import contract, dispatch

IMPLEMENTATIONS = ("tiled", "tpu", "gpu", "reference")


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N O"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    selection: Bool[Array, "B S T"] | UInt32[Array, "B T W"] | None = None,
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N O"], Float[Array, "B N T"]]:
    """Attends to the keys lo .. hi - 1 of each query that are selected.

    Args:
      q: queries; the last T of the S tokens.
      k: keys. In float32 beside half-precision q they are rounded to q's type, and have
        a float32 gradient, as sums over devices need.
      v: values; their type is k's.
      lo: first visible key.
      hi: end of the visible keys; cut to t + 1 + S - T if larger.
      selection: a mask or bits (see `pallas_kernels.selection`) that mark only visible
        keys; None selects all visible keys. Kernels read bits, plain XLA masks.
      scale: factor on q . k.
      implementation: see IMPLEMENTATIONS; None for the best one.

    Returns:
      The outputs, and the log-sum-exp of the scaled scores in float32.

    Raises:
      ValueError: if shapes or types do not fit each other.
      NotImplementedError: if a named implementation cannot take the arguments.
    """
    floats = {"q": (q, "B T N H"), "k": (k, "B S N H"), "v": (v, "B S N O")}
    known, lo, hi = contract.bounded("dense_attention", floats, lo, hi)
    contract.form("dense_attention", selection, known)
    args = (q, k, v, lo, hi, selection, scale)
    op = dispatch.Op("dense_attention", "dense_attention", IMPLEMENTATIONS)
    return dispatch.run(op, implementation, args)
