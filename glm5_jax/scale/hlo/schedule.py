"""What a program computes while its collectives are on their way.

The text of a compiled program is its schedule. A collective with a start and a done
runs beside the instructions between the two. Every other one runs alone.
"""

import dataclasses
import math
import re
from collections.abc import Iterable

from glm5_jax.scale.hlo import communication, hbm
from glm5_jax.scale.hlo import parser as hlo

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


@dataclasses.dataclass(frozen=True)
class Work:
    """What a device computes and moves."""

    flops: float = 0.0
    hbm_bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.hbm_bytes + other.hbm_bytes)


def beside(module: hlo.Module, spare: float | int = 1) -> dict[str, Work]:
    """Returns the work between the start and the end of each split collective.

    Work of one run, by the collective's name. Other collectives in between count as no
    work. Work that stands in several collectives counts in each of them.

    Args:
      module: as compiled.
      spare: times an even load that the experts' buffers have room for.
    """
    counter = Counter(module, spare)
    found: dict[str, Work] = {}
    for name, body in module.computations.items():
        running: set[str] = set()
        for i in body.values():
            kind = i.opcode.removesuffix("-start")
            if kind in communication.KINDS and kind != i.opcode:
                running.add(i.name)
                found[i.name] = Work()
            elif i.opcode.endswith("-done"):
                running -= {*i.operands}
            elif running and kind not in communication.KINDS:
                work = counter.instruction(name, i)
                found |= {start: found[start] + work for start in running}
    return found


@dataclasses.dataclass(frozen=True)
class Counter:
    """Counts the work of a module's computations."""

    module: hlo.Module
    spare: float | int
    bytes_of: dict[str, float] = dataclasses.field(default_factory=dict)  # by name
    flops_of: dict[str, float] = dataclasses.field(default_factory=dict)

    def instruction(self, name: str, i: hlo.Instruction) -> Work:
        """Returns the work of an instruction of a computation."""
        moved = hbm.of_instruction(self.module, name, i, self.spare, self.bytes_of)
        return Work(self.flops(name, i), moved)

    def flops(self, name: str, i: hlo.Instruction) -> float:
        """Returns the FLOPs of an instruction's products, in loops and fusions too."""
        if i.opcode == "while":
            runs = self.module.trip_count(i, name)
            (body,) = i.called("body")
            return (1 if runs is None else runs) * self.computation(body)
        if i.opcode in ("conditional", "call", "fusion"):
            return max((self.computation(c) for c in i.called()), default=0.0)
        if i.opcode == "custom-call":
            said = re.search(r'"flops":"(\d+)"', i.rest)
            whole = float(said.group(1)) if said else 0.0
            return whole / self.spare if hbm.is_grouped(i) else whole
        if i.opcode in ("convolution", "dot"):
            body = self.module.computations[name]
            return product_flops(i, [body[x].type for x in i.operands[:2]])
        return 0.0

    def computation(self, name: str) -> float:
        """Returns the FLOPs of a computation that runs once."""
        if name not in self.flops_of:
            body = self.module.computations.get(name, {})
            self.flops_of[name] = sum(self.flops(name, i) for i in body.values())
        return self.flops_of[name]


def product_flops(i: hlo.Instruction, operands: Iterable[str]) -> float:
    """Returns the FLOPs of a `dot`, or of a product that XLA writes as a convolution.

    Args:
      i: the instruction.
      operands: types of its two operands.
    """
    left, right = (_sizes(text) for text in operands)
    out = math.prod(_sizes(i.type))
    if i.opcode == "dot":
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
        numbers = dims.group(1).split(",") if dims and dims.group(1) else []
        return 2.0 * out * math.prod(left[int(n)] for n in numbers)
    labels = _LABELS.search(i.rest)
    if labels is None:
        return 0.0
    kernel = dict(zip(labels.group(2), right, strict=True))
    terms = kernel["i"]
    # A batch or an outer product has one term a place of a spatial dimension; where the
    # result has one place, all of them are summed.
    results = dict(zip(labels.group(3), _sizes(i.type), strict=True))
    for label, size in results.items():
        if label.isdigit() and size == 1:
            terms *= kernel[label]
    return 2.0 * out * terms


def _sizes(text: str) -> list[int]:
    """Returns the sizes of the first array of a type."""
    shape, _, _ = next(hlo.shapes(text))
    return [int(n) for n in re.findall(r"\d+", shape.partition("[")[2])]
