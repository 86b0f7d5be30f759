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


def traffic(module: hlo.Module, num_sharing: int = 1) -> float:
    """Bytes that a device reads from and writes to HBM in a run.

    Operands and results of every scheduled instruction, once each, times the loops
    around it; of an operand that is only sliced and of a result that is only updated,
    the slice; of a kernel what it says of itself, if it does; of a grouped product the
    rows at an even load, as its FLOPs (flops.py). What else moves the experts' rows is
    XLA's, whose shapes do not depend on the load: it moves the buffers whole.

    Args:
      module: as compiled.
      num_sharing: devices whose experts share the rows that buffers have room for.
    """
    return _traffic(module, module.entry, num_sharing, {})


def _traffic(
    module: hlo.Module, name: str, num_sharing: int, known: dict[str, float]
) -> float:
    if name in known:
        return known[name]
    total, body = 0.0, module.computations.get(name, {})
    for i in body.values():
        if i.opcode == "while":
            runs = module.trip_count(i, name)
            inner = _traffic(module, i.called("body")[0], num_sharing, known)
            total += inner * (1 if runs is None else runs)
        elif i.opcode in ("conditional", "call"):
            inside = (_traffic(module, c, num_sharing, known) for c in i.called())
            total += max(inside, default=0)
        elif _is_grouped(i):
            total += _grouped(body, i, num_sharing)
        elif i.opcode not in _VIEWS and not i.opcode.endswith(("-done", "-update")):
            total += sum(_moved(module, body, i))
    known[name] = total
    return total


def _is_grouped(i: hlo.Instruction) -> bool:
    """Returns whether it is libtpu's kernel for a product of rows in groups."""
    return i.opcode == "custom-call" and "ragged_dot" in i.op_name


def _grouped(
    body: dict[str, hlo.Instruction], i: hlo.Instruction, num_sharing: int
) -> float:
    """Bytes of a grouped product: rows (M, K) as they are filled, matrices whole."""
    types = [i.type, *(body[name].type for name in i.operands if name in body)]
    total = 0.0
    for shape, size, is_hbm in (x for text in types for x in hlo.shapes(text)):
        is_rows = shape.count(",") == 1
        total += is_hbm * size / (num_sharing if is_rows else 1)
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
    """Sizes slices by the array they are cut from, updates by what they write."""
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
