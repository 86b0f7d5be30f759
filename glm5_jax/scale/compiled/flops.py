"""Floating-point operations of matrix products, counted in the traced program.

The compiler's own count takes a loop's body once and a kernel for nothing. Here:

- A scan counts as often as it runs, a shard_map by its local shapes, and an array that
  jit splits by itself as split evenly.
- A kernel counts by its cost estimate, or else by its body times its grid.
- A conditional counts as the more expensive branch.
- A loop over rows for which the experts' buffers had no room (model/expert_rounds.py)
  does not count: an even load never enters it.
- A grouped product counts all rows of its buffer; `at_even_load` counts those that are
  in use when every expert has equally many.
- An operation whose results nobody reads does not count, as the compiler removes it.
  jax keeps every kernel in a trace, also where recomputation does not need it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

GROUPED = "grouped products"
_OVERFLOW = re.compile(r"\boverflow\b")  # the scope of such loops


@dataclasses.dataclass
class Flops:
    """The FLOPs of one device in one run of the program."""

    by_kind: dict[str, float] = dataclasses.field(default_factory=dict)
    num_unknown_loops: int = 0  # whose trip count is data: counted once

    @property
    def total(self) -> float:
        """The sum of all kinds."""
        return sum(self.by_kind.values(), 0.0)

    def at_even_load(self, spare: float | int) -> "Flops":
        """Returns the count where all experts have equally many rows.

        Buffers have room for `spare` times as many. We assume that a grouped
        product skips the tiles after the last group; no chip has shown it.
        """
        by_kind = dict(self.by_kind)
        if GROUPED in by_kind:
            by_kind[GROUPED] /= spare
        return Flops(by_kind, self.num_unknown_loops)

    def add(self, kind: str, flops: float) -> None:
        """Adds FLOPs to a kind."""
        self.by_kind[kind] = self.by_kind.get(kind, 0.0) + flops

    def merge(self, other: "Flops") -> None:
        """Adds all of another count."""
        for kind, flops in other.by_kind.items():
            self.add(kind, flops)
        self.num_unknown_loops += other.num_unknown_loops


def count(jaxpr: Any, num_devices: int) -> Flops:
    """Counts a jaxpr whose products jit splits over `num_devices`."""
    total = Flops()
    _walk(getattr(jaxpr, "jaxpr", jaxpr), 1.0, num_devices, total)
    return total


def _walk(jaxpr: Any, times: float, num_devices: int, total: Flops) -> None:
    """Adds `times` runs of a jaxpr, split over the devices that are not manual."""
    for equation in _live(jaxpr):
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            total.add("dense products", times * _dot(equation) / num_devices)
        elif name in ("ragged_dot", "ragged_dot_general"):
            total.add(GROUPED, times * _ragged(equation) / num_devices)
        elif name == "conv_general_dilated":
            raise NotImplementedError("convolutions are not counted")
        elif name == "pallas_call":
            _kernel(equation, times / num_devices, total)
        elif name == "cond":
            total.merge(_dearest(params["branches"], times, num_devices))
        elif name == "shard_map":
            manual = _manual(params)
            _walk(_inner(params["jaxpr"]), times, num_devices // manual, total)
        elif not _is_overflow(equation):
            runs = params["length"] if name == "scan" else 1
            inner = list(_jaxprs(params))
            before = total.total
            for sub in inner:
                _walk(sub, times * runs, num_devices, total)
            if name == "while" and total.total > before:
                total.num_unknown_loops += 1


def _is_overflow(equation: Any) -> bool:
    """Returns whether it is a loop that only uneven loads enter."""
    scopes = str(equation.source_info.name_stack)
    return equation.primitive.name == "while" and bool(_OVERFLOW.search(scopes))


def _live(jaxpr: Any) -> list[Any]:
    """Equations with an effect, or with a result that the body's results need."""
    needed, found = set(map(id, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(id(x) in needed for x in equation.outvars):
            needed.update(map(id, equation.invars))
            found.append(equation)
    return found[::-1]


def _dot(equation: Any) -> float:
    """Returns twice the product of all sizes that the contraction runs over."""
    (lhs_contract, _), _ = equation.params["dimension_numbers"]
    lhs, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2.0 * math.prod(out) * math.prod(lhs[d] for d in lhs_contract)


def _ragged(equation: Any) -> float:
    """Counts a product in which every row meets one group."""
    numbers = equation.params.get("ragged_dot_dimension_numbers")
    lhs, rhs = (v.aval.shape for v in equation.invars[:2])
    if numbers is None:
        return 2.0 * math.prod(lhs) * rhs[-1]
    (lhs_contract, rhs_contract), (_, rhs_batch) = numbers.dot_dimension_numbers
    if set(numbers.lhs_ragged_dimensions) & set(lhs_contract):  # a gradient of weights
        free = [d for i, d in enumerate(rhs) if i not in (*rhs_contract, *rhs_batch)]
        return 2.0 * math.prod(lhs) * math.prod(free)
    groups = numbers.rhs_group_dimensions
    used = (*rhs_contract, *rhs_batch, *groups)
    free = [d for i, d in enumerate(rhs) if i not in used]
    return 2.0 * math.prod(lhs) * math.prod(free)


def _kernel(equation: Any, times: float, total: Flops) -> None:
    """Adds a Pallas kernel: its own estimate, or its body for each of its programs."""
    estimate = equation.params.get("cost_estimate")
    kind = f"kernel {equation.params.get('name') or 'without a name'}"
    if estimate is not None:
        total.add(kind, times * estimate.flops)
        return
    grid = equation.params["grid_mapping"].grid
    runs = math.prod(n for n in grid if isinstance(n, int))
    inside = Flops()
    _walk(_inner(equation.params["jaxpr"]), times * runs, 1, inside)
    total.add(kind, inside.total)
    total.num_unknown_loops += inside.num_unknown_loops


def _dearest(branches: Any, times: float, num_devices: int) -> Flops:
    counts = []
    for branch in branches:
        counts.append(Flops())
        _walk(_inner(branch), times, num_devices, counts[-1])
    return max(counts, key=lambda c: c.total)


def _manual(params: Mapping[str, Any]) -> int:
    """Devices among which a shard_map splits: its shapes inside are local ones."""
    mesh = params["mesh"]
    return math.prod(mesh.shape[axis] for axis in params["newly_manual_axes"])


def _jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, list | tuple) else [value]:
            if hasattr(_inner(item), "eqns"):
                yield _inner(item)


def _inner(item: Any) -> Any:
    """The jaxpr of a closed one."""
    return getattr(item, "jaxpr", item)


def of_traced(traced: jax.stages.Traced, num_devices: int) -> Flops:
    """Counts the program that `jax.jit(f).trace(...)` returns."""
    return count(traced.jaxpr, num_devices)
