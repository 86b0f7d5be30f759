"""The arrays that a program is given: by kind, and those that devices hold twice."""

import dataclasses
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument of the program."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    device_bytes: int
    num_copies: int  # devices that hold the same part


def arguments(tree: Any, names: tuple[str, ...]) -> list[Array]:
    """Every array of a program's arguments, from shapes with shardings.

    Args:
      tree: the tuple of arguments.
      names: of the arguments, e.g. ("params", "opt_state", "batch").
    """
    out = []
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        words = [names[path[0].idx], *(_word(key) for key in path[1:])]
        local = x.sharding.shard_shape(x.shape)
        num_parts = round(x.size / max(np.prod(local), 1))
        out.append(
            Array(
                name=".".join(words),
                kind=_kind(words),
                shape=x.shape,
                dtype=str(x.dtype),
                spec=str(tuple(x.sharding.spec)),
                device_bytes=int(np.prod(local)) * x.dtype.itemsize,
                num_copies=x.sharding.mesh.size // max(num_parts, 1),
            )
        )
    return out


def by_kind(arrays: list[Array]) -> dict[str, int]:
    """Bytes of a device by kind of array, largest first."""
    sums: dict[str, int] = {}
    for array in arrays:
        sums[array.kind] = sums.get(array.kind, 0) + array.device_bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def replicated(arrays: list[Array], least_bytes: int = 0) -> list[Array]:
    """Arrays that more than one device holds the same part of, largest first."""
    found = [a for a in arrays if a.num_copies > 1 and a.device_bytes > least_bytes]
    return sorted(found, key=lambda a: -a.device_bytes)


def _kind(words: list[str]) -> str:
    """The kind of an argument by its path."""
    if words[0] == "opt_state":
        return "optimizer moments"
    if words[0] != "params":
        return words[0]
    for kind, parts in _KINDS.items():
        if set(parts) & set(words):
            return f"parameters: {kind}"
    return "parameters: norms and biases"


_KINDS = {
    "experts": ("experts",),
    "attention": ("self_attn", "indexer"),
    "embeddings": ("embed_tokens", "lm_head"),
    "dense": ("mlp", "shared_experts", "eh_proj", "gate"),
}


def _word(key: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)
