"""Counts the matrix products of a compiled Triton kernel, and those of its source.

A tensor core's instruction says how many rows, columns and depth it multiplies, and who
issues it: a warp (HMMA), a group of four (HGMMA) or one thread for the whole program
(UTCHMMA, Blackwell's); with Q for H, 8-bit numbers. Where a tile has fewer rows than a
program's warps cover, several warps compute the same rows: then the instructions
multiply more than the source asks for. Only products within loops are counted, as all
kernels here have them.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator

_Product = tuple[str, int]  # an instruction's shape, and FLOPs of a program


@dataclasses.dataclass(frozen=True)
class Products:
    """Matrix products of one step of a kernel's loop, in one program."""

    issued_flops: int = 0  # by the instructions of all warps
    asked_flops: int = 0  # by the dots of the source
    instructions: tuple[str, ...] = ()  # of a warp or group: "36 HGMMA 64x32x16"

    @property
    def times(self) -> float | None:
        """How often each product of the source is computed; None without products."""
        return self.issued_flops / self.asked_flops if self.issued_flops else None


def count(sass: str, source: str, warps: int) -> Products:
    """Counts the products of a kernel.

    Args:
      sass: machine code as `nvdisasm --print-code` prints it.
      source: TTIR of a Triton kernel, TTGIR of a Gluon kernel.
      warps: warps per program.
    """
    loops = _loops(sass, warps)
    if not loops:
        return Products()
    found = collections.Counter(name for loop in loops for name, _ in loop)
    issued = sum(flops for loop in loops for _, flops in loop)
    return Products(
        issued_flops=issued // len(loops),
        asked_flops=sum(_dots(source)) // len(loops),
        instructions=tuple(f"{n // len(loops)} {k}" for k, n in found.items()),
    )


def _loops(sass: str, warps: int) -> list[list[_Product]]:
    """Returns the products of each loop that has any; nested loops count as one."""
    blocks, constants = _blocks(sass), {}
    found = {name: [] for name in blocks}
    for name, (lines, _) in blocks.items():
        for line in lines:
            if constant := re.search(r"\bUMOV (UR\d+), (0x[0-9a-f]+)", line):
                constants[constant[1]] = int(constant[2], 16)
            if product := _product(line, warps, constants):
                found[name].append(product)
    after = {name: _reached(blocks, name) for name in blocks if found[name]}
    loops: dict[frozenset, list[_Product]] = {}
    for name, reached in after.items():
        loop = frozenset(n for n in after if n in reached and name in after[n])
        if loop:
            loops.setdefault(loop, []).extend(found[name])
    return list(loops.values())


def _blocks(sass: str) -> dict[str, tuple[list[str], list[str]]]:
    """Returns the lines of each piece without jumps, and the pieces that may follow."""
    name = ""
    blocks: dict[str, tuple[list[str], list[str]]] = {name: ([], [])}
    for i, line in enumerate(sass.splitlines()):
        if label := re.match(r"\s*(\.L\w+):", line):
            blocks[name][1].append(label[1])
            name = label[1]
            blocks[name] = ([], [])
        blocks[name][0].append(line)
        jump = re.search(r"(@!?U?P\w+ +)?\b(?:BRA|EXIT)\b([^`]*)(.*)", line)
        if jump:
            is_conditional = jump[1] or "P" in jump[2]  # such as BRA.U !UP0
            blocks[name][1].extend(re.findall(r"\.L\w+", jump[3]))
            blocks[name][1].extend([str(i)] if is_conditional else [])
            name = str(i)
            blocks[name] = ([], [])
    return blocks


def _reached(blocks: dict[str, tuple[list[str], list[str]]], name: str) -> set[str]:
    """Returns what may run after a piece; the piece itself if it is in a loop."""
    reached, todo = set(), [*blocks[name][1]]
    while todo:
        new = todo.pop()
        if new in blocks and new not in reached:
            reached.add(new)
            todo += blocks[new][1]
    return reached


def _product(line: str, warps: int, constants: dict[str, int]) -> _Product | None:
    """Returns the product of an instruction, as the whole program issues it.

    Args:
      line: of SASS.
      warps: warps per program.
      constants: in registers of the program, which describe Blackwell's products.
    """
    if shape := re.search(r"\b([A-Z]GMMA)\.(\d+)x(\d+)x(\d+)\.", line):
        name, issuers = shape[1], warps // 4  # warp groups
        rows, columns, depth = map(int, shape.groups()[1:])
    elif shape := re.search(r"\b([A-Z]MMA)\.(16)(8)(\d+)\.", line):
        name, issuers = shape[1], warps
        rows, columns, depth = map(int, shape.groups()[1:])
    elif shape := re.search(r"\b(UTC[HQ]MMA) .*idesc\[(UR\d+)\]", line):
        # The PTX manual, "Instruction descriptor".
        described = constants[shape[2]]
        name, issuers, depth = shape[1], 1, 32 if shape[1] == "UTCQMMA" else 16
        rows, columns = (described >> 24 & 0x1F) * 16, (described >> 17 & 0x3F) * 8
    else:
        return None
    flops = 2 * rows * columns * depth * issuers
    return f"{name} {rows}x{columns}x{depth}", flops


def _dots(source: str) -> Iterator[int]:
    """Yields the FLOPs of each dot in the loops of the source."""
    tile = r"\S*<(\d+)x(\d+)x\w+[^>]*>"
    dot = re.compile(rf"(?:tt\.dot|warp_group_dot) .*: {tile} \* {tile}")
    end = None  # of the outermost loop around a line
    for line in source.splitlines():
        if end is None and re.search(r"\bscf\.(for|while)\b", line):
            end = re.match(r" *", line)[0] + "}"  # type: ignore
        elif end is not None and line.startswith(end):
            # A `while` goes on: "} do {".
            end = None if not line.rstrip().endswith("{") else end
        elif end is not None and (found := dot.search(line)):
            rows, depth, _, columns = map(int, found.groups())
            yield 2 * rows * depth * columns
