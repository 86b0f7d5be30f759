"""Named shapes and inputs for tests, benchmarks and ahead-of-time compiles."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import latent_rows, selection

INDEX_PATTERNS = ("random", "local")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a layer; the defaults are GLM-5's (arXiv 2602.15763, table 10)."""

    name: str
    queries: int
    keys: int
    batch: int = 1
    topk: int = 2048
    documents: int = 1  # equal parts of a row; if > 1 the last query sees nothing
    heads: int = 64
    latent: int = 512  # C
    rope: int = 64  # R
    row_padding: int = 0  # zeros after [latent | rope] that fill a tile
    byte_padding: int = 0  # bytes after a cached row of bytes that fill a tile
    head_dim: int = 256  # H in multi-head form
    value_dim: int = 256  # O
    index_heads: int = 32
    index_dim: int = 128
    hidden: int = 6144  # D
    expert_dim: int = 2048  # F
    experts: int = 256
    experts_per_token: int = 8
    dtype: str = "bfloat16"

    @property
    def scale(self) -> float:
        """Factor on q . k."""
        return self.head_dim**-0.5

    def row_form(self, codes: str) -> latent_rows.Form:
        """Returns the form of a cached row of bytes."""
        return latent_rows.Form(self.latent, self.rope, codes, self.dtype)


def full(length: int) -> Case:
    """A GLM-5 layer over one document of `length` tokens."""
    return Case(str(length), length, length)


_SMALL: Any = {
    "heads": 16,
    "latent": 128,
    "head_dim": 128,
    "value_dim": 128,
    "index_heads": 8,
    "hidden": 128,
    "expert_dim": 64,
    "experts": 4,
    "experts_per_token": 2,
}
# For tests: odd lengths, fewer keys than top-k, continued rows, packed documents.
SMALL = {
    case.name: case
    for case in (
        Case("short", 5, 5, topk=64, **_SMALL),
        Case("documents", 150, 150, batch=2, documents=3, topk=32, **_SMALL),
        Case("continued", 40, 333, topk=64, **_SMALL),
        Case("float32", 70, 200, topk=64, dtype="float32", **_SMALL),
    )
}


def shapes(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and type of every op's inputs, by name."""
    b, t, s, n = case.batch, case.queries, case.keys, case.heads
    width = case.latent + case.rope + case.row_padding
    byte_width = case.row_form("int8").width + case.byte_padding
    e, d, f = case.experts, case.hidden, case.expert_dim
    half, exact, integer = case.dtype, "float32", "int32"
    table = {
        "q": ((b, t, n, case.head_dim), half),
        "k": ((b, s, n, case.head_dim), half),
        "v": ((b, s, n, case.value_dim), half),
        "q_latent": ((b, t, n, width), half),
        "kv": ((b, s, width), half),
        "kv_fp8": ((b, s, byte_width), "uint8"),
        "kv_int8": ((b, s, byte_width), "uint8"),
        "q_index": ((b, t, case.index_heads, case.index_dim), half),
        "k_index": ((b, s, case.index_dim), half),
        "q_index_fp8": ((b, t, case.index_heads, case.index_dim), "float8_e4m3fn"),
        "k_index_fp8": ((b, s, case.index_dim), "float8_e4m3fn"),
        "k_exponents": ((b, s), "int8"),
        "w": ((b, t, case.index_heads), exact),
        "lo": ((b, t), integer),
        "hi": ((b, t), integer),
        "bits": ((b, t, selection.num_words(s)), "uint32"),
        "indices": ((b, t, case.topk), integer),
        "lse": ((b, n, t), exact),
        "weight": ((b, t), exact),
        "rows": ((b * t * case.experts_per_token, d), half),
        "experts": ((e, d, f), half),
        "experts_fp8": ((e, d, f), "float8_e4m3fn"),
        "experts_int8": ((e, d, f), "int8"),
        "scales": ((e, -(-d // 128), -(-f // 128)), exact),
        "group_sizes": ((e,), integer),
    }
    return {k: jax.ShapeDtypeStruct(shape, d) for k, (shape, d) in table.items()}


def bounds(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns first visible key and end [B, T] for the last T of S tokens."""
    t = np.arange(case.keys)
    size = -(-case.keys // case.documents)
    lo = np.broadcast_to(t // size * size, (case.batch, case.keys))
    hi = np.broadcast_to(t + 1, (case.batch, case.keys)).copy()
    if case.documents > 1:
        hi[0, -1] = 0
    part = slice(case.keys - case.queries, None)
    return lo[:, part].astype(np.int32), hi[:, part].astype(np.int32)


def make(case: Case, *names: str, seed: int = 0, pattern: str = "random") -> tuple:
    """Makes random inputs by name, in the given order.

    Args:
      case: sizes.
      *names: names in `shapes`, except "bits" and "lse", which other ops make.
      seed: seeds normals and index lists.
      pattern: index lists are "random" over the visible keys, or "local": half of them
        are the nearest keys.
    """
    table, out = shapes(case), []
    for i, name in enumerate(names):
        rng = np.random.default_rng((seed, i))
        if name in ("lo", "hi"):
            value = bounds(case)[name == "hi"]
        elif name == "indices":
            value = _lists(case, rng, pattern)
        elif name == "weight":
            value = rng.random(table[name].shape)
        else:
            value = rng.standard_normal(table[name].shape, dtype=np.float32)
            value = value / np.sqrt(case.latent / 64) if name == "q_latent" else value
        out.append(jnp.asarray(value, table[name].dtype))
    return tuple(out)


def _lists(case: Case, rng: np.random.Generator, pattern: str) -> np.ndarray:
    """See `lists`, drawn by numpy."""
    shape = (case.batch, case.queries, case.topk)
    uniform = rng.random(shape, np.float32)
    return lists(case, uniform, pattern, np)


def lists(case: Case, uniform: Any, pattern: str, xp: Any = jnp) -> Any:
    """Makes ascending lists: one key from each of K equal parts of a query's keys.

    A query that sees at most K keys lists them all.

    Args:
      case: sizes.
      uniform: numbers [B, T, K] from 0 to 1.
      pattern: see `make`.
      xp: jax.numpy, or numpy, which takes seconds for long lists.
    """
    lo, hi = (xp.asarray(x)[..., None] for x in bounds(case))
    j = xp.arange(case.topk, dtype=xp.int32)[None, None]
    num_seen = xp.maximum(hi - lo, 0)
    near = case.topk // 2 if pattern == "local" else 0
    parts, far = case.topk - near, xp.maximum(num_seen - near, 0)
    start, end = j * far // parts, (j + 1) * far // parts
    drawn = start + (uniform * (end - start)).astype(xp.int32)
    spread = lo + xp.where(
        j < parts, xp.minimum(drawn, end - 1), num_seen - case.topk + j
    )
    all_seen = xp.where(j < num_seen, lo + j, -1)
    return xp.where(num_seen <= case.topk, all_seen, spread).astype(xp.int32)
