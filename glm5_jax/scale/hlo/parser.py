"""Reads the text of a compiled module: computations, instructions, loops, shapes.

The text is that of XLA's schedule after optimisation. Traps it has: metadata of Mosaic
kernels contains line breaks and braces, so a computation ends only where a line outside
of quotes is a brace alone or names an execution thread; and on TPU a loop's trip count
is not written down, so it is read from the constant in its condition.
"""

import dataclasses
import re
from collections.abc import Iterator

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$", re.DOTALL)
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation"
    r"|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
# The scope of loops over rows for which experts' buffers had no room, which an even
# load never enters (model/expert_rounds.py).
_OVERFLOW = re.compile(r"\boverflow\b")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line: %name = type opcode(operands), attributes."""

    name: str
    type: str
    opcode: str
    rest: str  # operands and attributes
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        depth = 0
        for i, letter in enumerate(self.rest):
            depth += (letter == "(") - (letter == ")")
            if depth == 0:
                return re.findall(r"%([\w.\-]+)", self.rest[: i + 1])
        return []

    @property
    def op_name(self) -> str:
        """Path of named scopes and of the primitive, as jax wrote it."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found.group(1) if found else ""

    def called(self, *kinds: str) -> list[str]:
        """Computations that it refers to; default: all."""
        names = []
        for kind, value in _CALLED.findall(self.rest):
            if not kinds or kind in kinds:
                names += re.findall(r"[\w.\-]+", value)
        return names


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations by name."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def trip_count(self, loop: Instruction, caller: str) -> int | None:
        """Returns how often a while loop's body runs; None if it is no constant.

        A loop over what overflows the experts' buffers runs at no even load: 0 times.
        """
        if _OVERFLOW.search(self.name_of_loop(loop)):
            return 0
        known = re.search(r'known_trip_count"?:\s*\{"?n"?:"?(\d+)', loop.rest)
        if known:
            return int(known.group(1))
        (condition,) = loop.called("condition")
        bound = self._bound(condition)
        if bound is None:
            return None
        limit, index = bound
        return max(limit - self._initial(loop, caller, index), 0)

    def name_of_loop(self, loop: Instruction) -> str:
        """Finds the loop's name; in its condition, where it has lost its own."""
        condition = self.computations.get(loop.called("condition")[0], {})
        names = (i.op_name for i in condition.values() if i.op_name)
        return loop.op_name or next(names, "")

    def _bound(self, condition: str) -> tuple[int, int] | None:
        """Limit and tuple index of the counter in `counter < limit`."""
        body = self.computations[condition]
        limits = [c for i in body.values() if (c := _constant(i)) is not None]
        texts = [i.rest for i in body.values()]
        for instruction in body.values():
            for name in instruction.called("calls"):
                texts += [i.rest for i in self.computations[name].values()]
        if len(limits) != 1 or any("direction=G" in text for text in texts):
            return None
        indices = [
            int(found.group(1))
            for i in body.values()
            if i.opcode == "get-tuple-element"
            and (found := re.search(r"index=(\d+)", i.rest))
        ]
        is_last = any("direction=LE" in text for text in texts)
        return (limits[0] + is_last, indices[0]) if len(indices) == 1 else None

    def _initial(self, loop: Instruction, caller: str, index: int) -> int:
        """Returns what the counter starts from; 0 where that is no constant here."""
        body = self.computations[caller]
        start = body.get(loop.operands[0])
        if start is None or start.opcode != "tuple":
            return 0
        value = body.get(start.operands[index])
        while value is not None and value.opcode in ("copy", "bitcast"):
            value = body.get(value.operands[0])
        return (_constant(value) or 0) if value else 0


def parse(text: str) -> Module:
    """Parses the text that `compiled.as_text()` returns."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in _joined(text):
        if current is None:
            if found := _HEADER.match(line):
                current = computations.setdefault(found.group(2), {})
                entry = found.group(2) if found.group(1) else entry
        elif _is_end(line):
            current = None
        elif instruction := _instruction(line):
            current[instruction.name] = instruction
    return Module(computations, entry)


def shapes(text: str) -> Iterator[tuple[str, int, bool]]:
    """Arrays of a type: shape as text, bytes, and whether it lies in HBM."""
    for dtype, dims, layout in _ARRAY.findall(text):
        size = _bits(dtype)
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        space = re.search(r"S\((\d+)\)", layout)
        yield f"{dtype}[{dims}]", (size + 7) // 8, space is None


def elements(text: str) -> list[str]:
    """Types of a tuple's elements; a type that is no tuple is its own."""
    text = text.strip()
    if not text.startswith("("):
        return [text]
    parts, depth = [""], 0
    for letter in text[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def num_bytes(text: str) -> int:
    """Bytes of all arrays of a type, without the padding of tiles."""
    return sum(size for _, size, _ in shapes(text))


def _joined(text: str) -> Iterator[str]:
    """Lines, with those that metadata broke put together again."""
    whole = ""
    for line in text.splitlines():
        is_quoted = _QUOTE.sub("", whole).count('"') % 2 == 1
        if whole and not _HEADER.match(line) and (is_quoted or not _begins(line)):
            whole += "\n" + line
            continue
        if whole:
            yield whole
        whole = ""
        if _INSTRUCTION.match(line):
            whole = line
        else:
            yield line
    if whole:
        yield whole


_QUOTE = re.compile(r"\\.")  # an escaped letter, which opens no quotation


def _begins(line: str) -> bool:
    """Returns whether a line is no continuation of the one before."""
    return bool(_is_end(line) or _INSTRUCTION.match(line))


def _is_end(line: str) -> bool:
    return line == "}" or line.startswith("}, execution_thread")


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    root, name, right = found.groups()
    opcode = _OPCODE.search(right)
    if not opcode:
        return None
    kind, rest = right[: opcode.start()], right[opcode.end() - 1 :]
    return Instruction(name, kind, opcode.group(1), rest, bool(root))


def _constant(instruction: Instruction) -> int | None:
    """Value of an integer constant."""
    if instruction.opcode != "constant":
        return None
    found = re.match(r"\((-?\d+)\)", instruction.rest)
    return int(found.group(1)) if found else None


def _bits(dtype: str) -> int:
    """Bits of an element: the number in its name."""
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+?(\d+)", dtype)
    return int(found.group(1)) if found else 0
