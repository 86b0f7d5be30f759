"""The collectives of a compiled step: over which axes, how often, how many bytes.

Bytes are those that a device puts on its links, as a ring would move them: for n
devices and an array of b bytes, (n - 1) / n b for an all-gather (b gathered),
reduce-scatter (b before) and all-to-all, twice that for an all-reduce, b for a
permutation; of a ragged exchange all that fits both the sender's and the receiver's
array. Loops count as often as they run.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from glm5_jax.scale.hlo import parser as hlo

KINDS = {
    "all-gather": 1,
    "all-reduce": 2,
    "reduce-scatter": 1,
    "all-to-all": 1,
    "ragged-all-to-all": 1,
    "collective-broadcast": 1,
    "collective-permute": 1,
}
DCN = "dcn"  # the network between slices, as an axis
_ANONYMOUS = re.compile(
    r"(jit|pjit|vmap|pmap|custom_\w+|branch_\d+_fun)\b.*"
    r"|while|body|cond|scan|eval_jaxpr|closed_call|checkpoint|remat\w*"
    r"|shard_map|core_call|.*->.*|jvp\(\)|transpose\(.*\(\)\)+|jvp|transpose"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective instruction with all of its runs in a step."""

    kind: str
    axes: tuple[str, ...]  # of the mesh, along which its groups lie
    phase: str  # "forward", "backward" or "optimizer"
    scope: str  # named scopes
    shape: str  # of one run's result
    num_devices: int  # of a group
    count: int  # runs in a step
    wire_bytes: float  # that a device sends, in all runs
    name: str = ""  # of the instruction


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of a step, and the loops that could not be counted."""

    collectives: tuple[Collective, ...]
    uncounted_loops: tuple[str, ...]  # that ran an unknown number of times: once here

    def total(self, *names: str) -> dict[tuple[str, ...], tuple[int, float]]:
        """Runs and bytes by some of a collective's fields."""
        sums: dict[tuple[str, ...], tuple[int, float]] = {}
        for c in self.collectives:
            key = tuple(_text(getattr(c, name)) for name in names)
            count, wire = sums.get(key, (0, 0.0))
            sums[key] = count + c.count, wire + c.wire_bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def find(module: hlo.Module, mesh: Mapping[str, int], num_slices: int = 1) -> Traffic:
    """Walks a module from its entry.

    Args:
      module: of one slice, as libtpu compiles it.
      mesh: sizes of the axes, in order; the first one goes across slices.
      num_slices: among which the first axis is split.
    """
    first, *others = mesh.items()
    local = {first[0]: first[1] // num_slices, **dict(others)}
    walk = _Walk(module, dict(mesh), local, num_slices, set())
    found = walk.computation(module.entry, 1, "")
    return Traffic(tuple(found), tuple(sorted(walk.uncounted)))


@dataclasses.dataclass(frozen=True)
class _Walk:
    module: hlo.Module
    mesh: dict[str, int]
    local: dict[str, int]  # the part of the mesh that is in a slice
    num_slices: int
    uncounted: set[str]

    def computation(self, name: str, times: int, op_name: str) -> list[Collective]:
        """Collectives of a computation that runs so often."""
        out: list[Collective] = []
        body = self.module.computations.get(name, {})
        is_scatter = name.startswith("all-reduce-scatter")
        for i in body.values():
            kind = i.opcode.removesuffix("-start")
            where = i.op_name or op_name
            if i.opcode.endswith(("-done", "-update")):
                continue
            if kind in KINDS:
                out.append(self.collective(body, i, kind, times, where, is_scatter))
            elif i.opcode == "send" and "megascale" in i.rest:
                out.append(self.across_slices(i, times, where))
            elif i.opcode == "while":
                runs = self.module.trip_count(i, name)
                if runs is None:
                    self.uncounted.add(i.op_name or i.name)
                body_name = i.called("body")[0]
                runs = 1 if runs is None else runs
                where = where or self.module.name_of_loop(i)
                out += self.computation(body_name, times * runs, where)
            elif i.opcode == "conditional":  # the branch that sends most
                branches = [self.computation(c, times, where) for c in i.called()]
                out += max(branches, key=lambda b: sum(c.wire_bytes for c in b))
            else:
                for called in i.called():
                    out += self.computation(called, times, where)
        return [c for c in out if c.wire_bytes > 0]

    def collective(
        self,
        body: Mapping[str, hlo.Instruction],
        i: hlo.Instruction,
        kind: str,
        times: int,
        where: str,
        is_scatter: bool,
    ) -> Collective:
        """Bytes and axes of one instruction."""
        size = hlo.num_bytes(i.type)
        arrays = [shape for shape, _, _ in hlo.shapes(i.type)]
        if kind == "collective-permute":
            axes, num_devices, wire = self._permute(i)
            wire *= next(hlo.shapes(i.type))[1]
        else:
            ids, num_in_all = groups(i.rest, math.prod(self.mesh.values()))
            num_devices = len(ids)
            if i.opcode == "all-gather-start":  # operands and results
                size *= num_devices / (num_devices + 1)
            if kind == "reduce-scatter":
                size *= num_devices
            if kind == "ragged-all-to-all":
                size = min(hlo.num_bytes(body[name].type) for name in i.operands[:2])
            wire = KINDS[kind] * size * (num_devices - 1) / num_devices
            axes = self._axes(ids, num_in_all)
        if is_scatter and kind == "all-reduce":  # its result is sliced at once
            kind, wire = "reduce-scatter", wire / 2
        return Collective(
            kind=kind,
            axes=axes,
            phase=phase(where),
            scope=scope(where),
            shape=arrays[0] + (f" + {len(arrays) - 1} more" if arrays[1:] else ""),
            num_devices=num_devices,
            count=times,
            wire_bytes=wire * times,
            name=i.name,
        )

    def across_slices(self, i: hlo.Instruction, times: int, where: str) -> Collective:
        """Returns the transfer that libtpu hands to the data-centre network."""
        shape, size, _ = next(hlo.shapes(i.type))
        kind = re.search(r'_transfer_type="(\w+)"', i.rest)
        name = kind.group(1).lower().replace("_", "-") if kind else "send"
        n = self.num_slices
        wire = KINDS.get(name, 1) * size * (n - 1) / n if name in KINDS else size
        return Collective(
            kind=name,
            axes=(DCN,),
            phase=phase(where),
            scope=scope(where),
            shape=shape,
            num_devices=n,
            count=times,
            wire_bytes=wire * times,
        )

    def _permute(self, i: hlo.Instruction) -> tuple[tuple[str, ...], int, float]:
        """Axes along which devices send, their number, and the share that does."""
        text = re.search(r"source_target_pairs=\{(.*?)\}\}", i.rest)
        pairs = re.findall(r"\{(\d+),(\d+)", text.group(1) + "}}" if text else "")
        moving = [(int(a), int(b)) for a, b in pairs if a != b]
        axes: set[str] = set()
        for pair in moving:
            axes.update(self._axes(pair, 0))
        ordered = tuple(a for a in self.mesh if a in axes)
        return ordered, len(moving), 1.0 if moving else 0.0

    def _axes(self, ids: Sequence[int], num_in_all: int) -> tuple[str, ...]:
        """Axes along which some devices differ."""
        is_whole = num_in_all == math.prod(self.mesh.values())
        sizes = self.mesh if is_whole else self.local
        places = np.unravel_index(np.asarray(ids), tuple(sizes.values()))
        pairs = zip(sizes, places, strict=True)
        return tuple(axis for axis, place in pairs if np.ptp(place) > 0)


def groups(text: str, num_devices: int) -> tuple[list[int], int]:
    """Devices of the first of the replica groups, and of all of them together.

    Syntaxes: {{0,1},{2,3}}; [2,2]<=[4] and [2,2]<=[2,2]T(1,0) (an iota, transposed);
    mesh['a'=2,'b'=4] {'b'} (groups along b), and {'b':(2)2} (along the factor of b of
    size 2 inside a factor of 2).
    """
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}([^=]*)", text):
        ids = [int(n) for n in found.group(1).split(",")]
        return ids, len(re.findall(r"\d+", found.group(0).partition("}}")[0]))
    iota = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if found := re.search(iota, text):
        shape, dims, order = (_ints(group or "") for group in found.groups())
        ids = np.arange(math.prod(dims)).reshape(dims)
        ids = ids.transpose(order) if order else ids
        return ids.reshape(shape)[0].tolist(), ids.size
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", text):
        sizes = {k: int(n) for k, n in re.findall(r"'([^']+)'=(\d+)", found.group(1))}
        return _of_mesh(sizes, found.group(2)), math.prod(sizes.values())
    return list(range(num_devices)), num_devices  # {}: one group


def _of_mesh(sizes: Mapping[str, int], along: str) -> list[int]:
    """The first group along some axes, or factors of axes, of a mesh."""
    stride, strides = 1, {}
    for axis in reversed(list(sizes)):
        strides[axis] = stride
        stride *= sizes[axis]
    ids = np.zeros(1, int)
    for axis, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", along):
        whole = sizes[axis]
        size, before = int(size or whole), int(before or 1)
        step = strides[axis] * whole // (before * size)
        ids = np.add.outer(ids, step * np.arange(size)).reshape(-1)
    return ids.tolist()


def phase(op_name: str) -> str:
    """Returns the part of the step that an operation belongs to, by its name."""
    if re.search(r"(^|/)optimizer(/|$)", op_name):
        return "optimizer"
    return "backward" if "transpose(" in op_name else "forward"


def scope(op_name: str) -> str:
    """Returns the named scopes of an operation, without jax's and XLA's own."""
    parts = []
    for part in op_name.split("/")[:-1]:  # the last one is the primitive
        if not _ANONYMOUS.fullmatch(part):
            parts.append(re.sub(r"^(?:\w+\()*|\)*$", "", part))
    return "/".join(parts)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _text(value: object) -> str:
    return " x ".join(value) if isinstance(value, tuple) else str(value)
