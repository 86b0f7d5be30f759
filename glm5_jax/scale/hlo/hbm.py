"""Bytes that a compiled program moves to and from HBM."""

import re
from collections.abc import Iterator

from glm5_jax.scale.hlo import parser as hlo

# Instructions that move nothing: views, and loops over what is allocated already.
_VIEWS = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while"),
    *("conditional", "call", "after-all", "optimization-barrier", "opt-barrier"),
}
_CUTS = ("dynamic-slice", "gather")  # they read as much of their operand as they give


def traffic(module: hlo.Module, spare: float | int = 1) -> float:
    """Bytes that a device reads from and writes to HBM in a run.

    The operands and results of every scheduled instruction count once, times the runs
    of the loops around it. Exceptions:

    - An operand of which only slices or rows are read, and a result that is only
      updated, count as what is read and written.
    - A kernel that declares what it moves counts as that.
    - The start of what a SparseCore does names no arrays: its `custom-call-update`
      counts instead.
    - A grouped product counts the rows at an even load, as compiled/flops.py does.
      All other operations on the experts' rows have shapes that do not depend on the
      load, so they move whole buffers.

    Args:
      module: as compiled.
      spare: times an even load that the experts' buffers have room for.
    """
    return _traffic(module, module.entry, spare, {})


def _traffic(
    module: hlo.Module, name: str, spare: float | int, known: dict[str, float]
) -> float:
    if name in known:
        return known[name]
    total = 0.0
    for i in module.computations.get(name, {}).values():
        total += of_instruction(module, name, i, spare, known)
    known[name] = total
    return total


def of_instruction(
    module: hlo.Module,
    name: str,
    i: hlo.Instruction,
    spare: float | int,
    known: dict[str, float],
) -> float:
    """Returns the bytes that an instruction moves, with the loops that it runs.

    Args:
      module: as compiled.
      name: of the computation in which the instruction stands.
      i: the instruction.
      spare: times an even load that the experts' buffers have room for.
      known: bytes of computations that were counted; grows.
    """
    body = module.computations[name]
    if i.opcode == "while":
        runs = module.trip_count(i, name)
        inner = _traffic(module, i.called("body")[0], spare, known)
        return inner * (1 if runs is None else runs)
    if i.opcode in ("conditional", "call"):
        inside = (_traffic(module, c, spare, known) for c in i.called())
        return max(inside, default=0.0)
    if is_grouped(i):
        return _grouped(body, i, spare)
    if '"AllocateBuffer"' in i.rest:  # it writes nothing
        return 0.0
    if i.opcode == "custom-call-update":
        return float(_of_sparse_core(module, i, body[i.operands[0]]))
    if i.opcode in _VIEWS or i.opcode.endswith(("-done", "-update")):
        return 0.0
    return float(sum(_moved(module, body, i)))


def is_grouped(i: hlo.Instruction) -> bool:
    """Returns whether it is libtpu's kernel for a product of rows in groups."""
    return i.opcode == "custom-call" and "ragged_dot" in i.op_name


def _grouped(
    body: dict[str, hlo.Instruction], i: hlo.Instruction, spare: float | int
) -> float:
    """Bytes of a grouped product: rows (M, K) as they are filled, matrices whole.

    Of a stack of layers the matrices of one count (model/expert_products.py).
    """
    types = [i.type, *(body[name].type for name in i.operands if name in body)]
    within = re.search(r"\blayer_of_(\d+)\b", i.op_name)  # a stack of so many layers
    num_layers = int(within.group(1)) if within else 1
    total = 0.0
    for shape, size, is_hbm in (x for text in types for x in hlo.shapes(text)):
        is_rows = shape.count(",") == 1
        total += is_hbm * size / (spare if is_rows else num_layers)
    return total


def _of_sparse_core(
    module: hlo.Module, i: hlo.Instruction, start: hlo.Instruction
) -> int:
    """Bytes of an update whose type is ((operands), result, state), as XLA gives it.

    A scatter writes its last operand into the first one, in place. A gather reads rows
    of the first one.
    """
    operands, result = (hlo.elements(x) for x in hlo.elements(i.type)[:2])
    if _has(module, start, "scatter"):
        operands, result = operands[1:], operands[-1:]
    sizes = [_hbm(x) for x in operands]
    written = sum(map(_hbm, result))
    if _has(module, start, "gather"):
        sizes[0] = min(sizes[0], written)
    return sum(sizes) + written


def _has(module: hlo.Module, i: hlo.Instruction, opcode: str) -> bool:
    """Returns whether there is such an instruction in what another one calls."""
    inner = (j for c in i.called() for j in module.computations.get(c, {}).values())
    return any(j.opcode == opcode or _has(module, j, opcode) for j in inner)


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
    slices = _slices(module, inner)
    if i.opcode == "dynamic-update-slice":
        updates = {i.name: _hbm(body[i.operands[1]].type)}
    if i.opcode in _CUTS:
        slices = {i.operands[0]: _hbm(i.type)}
    if i.opcode.endswith("-start"):  # its type has the operands, too
        sources = (_hbm(body[name].type) for name in i.operands if name in body)
        yield max(_hbm(i.type) - sum(sources), 0)
    else:
        yield sum(updates.values()) if updates else _hbm(i.type)
    parameters = _parameters(inner)
    for k, operand in enumerate(i.operands):
        size = _hbm(body[operand].type) if operand in body else 0
        key = parameters.get(k, operand)
        if key in slices:
            size = min(size, slices[key])
        elif updates and size == _hbm(i.type):  # updated in place
            size = 0
        yield size


def _slices(module: hlo.Module, body: dict[str, hlo.Instruction]) -> dict[str, int]:
    """Sizes slices by the array they are cut from, those of inner fusions too."""
    out: dict[str, int] = {}

    def add(name: str, size: int) -> None:
        out[name] = out.get(name, 0) + size

    for i in reversed(body.values()):  # each before what it reads
        if i.opcode in _CUTS:
            size = hlo.num_bytes(i.type)
            add(i.operands[0], min(size, out.get(i.name, size)))
        if i.opcode == "fusion":
            inner = module.computations.get(i.called("calls")[0], {})
            found, parameters = _slices(module, inner), _parameters(inner)
            for k, operand in enumerate(i.operands):
                if parameters.get(k) in found:
                    add(operand, found[parameters[k]])
        if i.name in out and _is_renamed(i):  # so it is read no further either
            add(i.operands[0], out[i.name])
    return out


def _is_renamed(i: hlo.Instruction) -> bool:
    """Returns whether it is another view of its operand, such as of other tiles."""
    return i.opcode == "bitcast" or "output_to_operand_aliasing={{}: (0" in i.rest


def _parameters(body: dict[str, hlo.Instruction]) -> dict[int, str]:
    """Returns the names of a computation's parameters by their numbers."""
    return {
        int(re.findall(r"\d+", p.rest)[0]): p.name
        for p in body.values()
        if p.opcode == "parameter"
    }


def _sizes(
    inner: dict[str, hlo.Instruction], opcode: str, operand: int
) -> dict[str, int]:
    """Sizes updates by what they write, of the operand with this number."""
    out: dict[str, int] = {}
    for i in inner.values():
        if i.opcode == opcode:
            key = i.operands[0]
            size = hlo.num_bytes(inner[i.operands[operand]].type)
            out[key] = out.get(key, 0) + size
    return out


def _hbm(text: str) -> int:
    return sum(size for _, size, is_hbm in hlo.shapes(text) if is_hbm)
