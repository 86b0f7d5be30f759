"""Arguments of a program by kind, replicas among them, and bytes that HBM moves."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from glm5_jax.scale import hlo

# What moves nothing by itself: views, and loops over what was allocated before.
_VIEWS = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while"),
    *("conditional", "call", "after-all", "optimization-barrier", "opt-barrier"),
}


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


def traffic(module: hlo.Module) -> float:
    """Bytes that a device reads from and writes to HBM in a run.

    Operands and results of every scheduled instruction, once each, times the loops
    around it; of an operand that is only sliced and of a result that is only updated,
    the slice; of a kernel what it says of itself, if it does.
    """
    return _traffic(module, module.entry, {})


def _traffic(module: hlo.Module, name: str, known: dict[str, float]) -> float:
    if name in known:
        return known[name]
    total, body = 0.0, module.computations.get(name, {})
    for i in body.values():
        if i.opcode == "while":
            runs = module.trip_count(i, name)
            inner = _traffic(module, i.called("body")[0], known)
            total += inner * (1 if runs is None else runs)
        elif i.opcode in ("conditional", "call"):
            total += max((_traffic(module, c, known) for c in i.called()), default=0)
        elif i.opcode not in _VIEWS and not i.opcode.endswith(("-done", "-update")):
            total += sum(_moved(module, body, i))
    known[name] = total
    return total


def _moved(
    module: hlo.Module, body: dict[str, hlo.Instruction], i: hlo.Instruction
) -> Iterator[int]:
    """Bytes that an instruction reads and writes."""
    said = re.search(r'"bytes_accessed":"(\d+)"', i.rest)
    if said and i.opcode == "custom-call":
        yield int(said.group(1))
        return
    inner: dict[str, hlo.Instruction] = {}
    if i.opcode == "fusion":
        inner = module.computations.get(i.called("calls")[0], {})
    updates = _sizes(inner, "dynamic-update-slice", 1) | _sizes(inner, "scatter", 2)
    slices = _sizes(inner, "dynamic-slice", None)
    if i.opcode == "dynamic-update-slice":
        updates = {i.name: _hbm(body[i.operands[1]].type)}
    if i.opcode == "dynamic-slice":
        slices = {i.operands[0]: _hbm(i.type)}
    yield sum(updates.values()) if updates else _hbm(i.type)
    parameters = {
        int(re.findall(r"\d+", p.rest)[0]): p.name
        for p in inner.values()
        if p.opcode == "parameter"
    }
    for k, operand in enumerate(i.operands):
        size = _hbm(body[operand].type) if operand in body else 0
        key = parameters.get(k, operand)
        if key in slices:
            size = min(size, slices[key])
        elif updates and size == _hbm(i.type):  # updated in place
            size = 0
        yield size


def _sizes(
    inner: dict[str, hlo.Instruction], opcode: str, operand: int | None
) -> dict[str, int]:
    """Of slices, by the array they are cut from; of updates, what they write."""
    out: dict[str, int] = {}
    for i in inner.values():
        if i.opcode == opcode:
            what = i.type if operand is None else inner[i.operands[operand]].type
            key = i.operands[0]
            out[key] = out.get(key, 0) + hlo.num_bytes(what)
    return out


def _hbm(text: str) -> int:
    return sum(size for _, size, is_hbm in hlo.shapes(text) if is_hbm)


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
