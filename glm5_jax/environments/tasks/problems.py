"""Small tasks with one right answer, for models whose tokens are bytes.

A name is a kind with an optional size: "reverse", "reverse:3-6", "countdown:3". A
problem is a pure function of (name, split, seed, index). A hash of its question decides
which split it is in, for every seed and size and for every order of commuting operands,
so no training problem of a kind is held out under another size. Some kinds share their
problems: "reverse_dense" pays differently (ladder.py), and the calculators differ in
their tool.
"""

import dataclasses
import difflib
import hashlib
import math
import random
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from glm5_jax import config, messages
from glm5_jax.environments import protocol

# "told": the prompt describes the tool. "untold": the tool exists, but the prompt does
# not describe it, to save bytes; demonstrations teach the call. "none": no tool.
Tool = Literal["told", "untold", "none"]

SPLITS = protocol.SPLITS
CALC_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Integer arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}

_HELD_OUT_PERCENT = 20
_MAX_DRAWS = 10_000  # to find a problem of the split
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LARGEST_TARGET = 100  # of countdown


@dataclasses.dataclass(frozen=True)
class Problem:
    """A conversation to continue, its answer, and a conversation that solves it."""

    id: str
    messages: tuple[messages.Message, ...]
    answer: str
    demonstration: tuple[messages.Message, ...]  # starts with the messages
    tools: tuple[Mapping[str, Any], ...] = ()
    tag: str = ""  # its size, e.g. "6_letters"


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A problem before its split is known."""

    key: str  # the question in one normal form; decides the split
    prompt: str
    answer: str


@dataclasses.dataclass(frozen=True)
class _Kind:
    problems: str  # the name that seeds them
    make: Callable[[random.Random, int], _Draft]  # of a size
    low: int  # sizes without one in the name
    high: int
    smallest: int
    largest: int
    unit: str
    tool: Tool = "none"


def problem(name: str, split: str, seed: int, index: int) -> Problem:
    """Returns problem `index` of the endless list that `seed` gives for a split.

    Args:
        name: one of `names()`, with or without a size.
        split: "train" or "held_out".
        seed: of the list.
        index: position in the list, from 0. Lists of small tasks repeat problems.

    Raises:
        config.InputError: the task, size or split does not exist.
    """
    kind_name, low, high = parse(name)
    if split not in SPLITS:
        raise config.InputError(f"split must be one of {SPLITS}, got {split!r}.")
    kind = _KINDS[kind_name]
    place = f"{split}/{seed}/{index}"
    stream = f"{kind.problems}{name.removeprefix(kind_name)}/{place}"
    draft, size = _draw(kind, (low, high), split, stream)
    question = ({"role": "user", "content": draft.prompt},)
    answer = ({"role": "assistant", "content": draft.answer},)
    calls = _calls(draft) if kind.tool != "none" else ()
    return Problem(
        id=f"{name}/{place}",
        messages=question,
        answer=draft.answer,
        demonstration=question + calls + answer,
        tools=(CALC_TOOL,) if kind.tool == "told" else (),
        tag=f"{size}_{kind.unit}",
    )


def names() -> tuple[str, ...]:
    """Returns every kind of task."""
    return tuple(_KINDS)


def tool(name: str) -> Tool:
    """Returns how a task presents its tool.

    Raises:
        config.InputError: the task does not exist.
    """
    return _KINDS[parse(name)[0]].tool


def parse(name: str) -> tuple[str, int, int]:
    """Returns the kind of a name, and its smallest and largest size.

    Raises:
        config.InputError: the kind or size does not exist.
    """
    kind_name, _, size = name.partition(":")
    kind = _KINDS.get(kind_name)
    if kind is None:
        close = difflib.get_close_matches(kind_name, names())
        guess = f" Did you mean {close[0]!r}?" if close else ""
        raise config.InputError(
            f"There is no task {kind_name!r}.{guess} Choose one of "
            f"{', '.join(names())}."
        )
    if not size:
        return kind_name, kind.low, kind.high
    given = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", size)
    low, high = (int(given[1]), int(given[2] or given[1])) if given else (0, 0)
    if not kind.smallest <= low <= high <= kind.largest:
        raise config.InputError(
            f"The size of task {name!r} must be {kind.unit} as LOW-HIGH within "
            f"{kind.smallest}-{kind.largest}, got {size!r}; e.g. "
            f"'{kind_name}:{kind.low}-{kind.high}'."
        )
    return kind_name, low, high


def split_of(key: str) -> str:
    """Returns the split of a question: held out if sha256(key) % 100 < 20."""
    digest = int(hashlib.sha256(key.encode()).hexdigest(), 16)
    return SPLITS[digest % 100 < _HELD_OUT_PERCENT]


def _draw(
    kind: _Kind, sizes: tuple[int, int], split: str, seed: str
) -> tuple[_Draft, int]:
    """Draws from `seed` until a problem is of the split; returns it and its size."""
    rng = random.Random(seed)  # seeded by SHA-512 of the text
    for _ in range(_MAX_DRAWS):
        size = rng.randint(*sizes)
        draft = kind.make(rng, size)
        if split_of(f"{kind.problems} {draft.key}") == split:
            return draft, size
    raise config.InputError(
        f"Task {kind.problems!r} of size {sizes[0]}-{sizes[1]} has no {split} problem; "
        f"take a larger size."
    )


def _calls(draft: _Draft) -> tuple[messages.Message, ...]:
    """Returns the calculator call that solves a problem, and its result."""
    call = {"function": {"name": "calc", "arguments": {"expression": draft.prompt}}}
    return (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": draft.answer},
    )


def _reverse(rng: random.Random, size: int) -> _Draft:
    word = "".join(rng.choices(_LETTERS, k=size))
    return _Draft(min(word, word[::-1]), f"reverse {word}", word[::-1])


def _sort(rng: random.Random, size: int) -> _Draft:
    word = "".join(rng.choices(_LETTERS, k=size))
    ordered = "".join(sorted(word))
    return _Draft(ordered, f"sort {word}", ordered)


def _arithmetic(rng: random.Random, size: int) -> _Draft:
    """Makes a+b or a-b; one number has `size` digits, the other at most as many."""
    a, b = _number(rng, size), _number(rng, rng.randint(1, size))
    if rng.random() < 0.5:
        a, b = b, a
    if rng.random() < 0.5:
        return _Draft(f"{min(a, b)}+{max(a, b)}", f"{a}+{b}", str(a + b))
    return _Draft(f"{min(a, b)}-{max(a, b)}", f"{a}-{b}", str(a - b))


def _chain_sum(rng: random.Random, size: int) -> _Draft:
    """Makes sums and differences of `size` numbers of one or two digits."""
    terms = [_number(rng, rng.randint(1, 2)) for _ in range(size)]
    signed = [terms[0], *(rng.choice((-1, 1)) * t for t in terms[1:])]
    text = str(signed[0]) + "".join(f"{t:+d}" for t in signed[1:])
    return _Draft(",".join(map(str, sorted(signed))), text, str(sum(signed)))


def _gcd(rng: random.Random, size: int) -> _Draft:
    """Makes two numbers of at most `size` digits with a uniform common divisor."""
    limit = 10**size - 1
    divisor = rng.randint(1, limit // 3)
    while True:
        a, b = (rng.randint(1, limit // divisor) for _ in range(2))
        if math.gcd(a, b) == 1:
            break
    a, b = divisor * a, divisor * b
    return _Draft(f"{min(a, b)},{max(a, b)}", f"gcd {a} {b}", str(divisor))


def _countdown(rng: random.Random, size: int) -> _Draft:
    """Makes a target and the `size` numbers that give it by + - *, each used once."""
    while True:
        numbers = [rng.randint(1, 9) for _ in range(size)]
        value, text = numbers[0], str(numbers[0])
        for i, n in enumerate(numbers[1:]):
            operator = rng.choice("+-*")
            left = text if i == 0 else f"({text})"
            text = f"{left}{operator}{n}"
            value = {"+": value + n, "-": value - n, "*": value * n}[operator]
        if 0 < value <= _LARGEST_TARGET:
            break
    rng.shuffle(numbers)
    given = " ".join(map(str, numbers))
    ordered = ",".join(map(str, sorted(numbers)))
    return _Draft(f"{ordered}={value}", f"make {value} of {given}", text)


def _calculator(rng: random.Random, size: int) -> _Draft:
    """Makes a product of two numbers of `size` digits, too hard without a tool."""
    a, b = _number(rng, size), _number(rng, size)
    return _Draft(f"{min(a, b)}*{max(a, b)}", f"{a}*{b}", str(a * b))


def _number(rng: random.Random, num_digits: int) -> int:
    smallest = 10 ** (num_digits - 1) if num_digits > 1 else 0
    return rng.randint(smallest, 10**num_digits - 1)


_REVERSE = _Kind("reverse", _reverse, 3, 6, 1, 256, "letters")
_CALCULATOR = _Kind("calculator", _calculator, 2, 3, 2, 9, "digits", "told")
_KINDS: Mapping[str, _Kind] = {
    "reverse": _REVERSE,
    "reverse_dense": _REVERSE,
    "sort": _Kind("sort", _sort, 3, 6, 1, 256, "letters"),
    "arithmetic": _Kind("arithmetic", _arithmetic, 1, 2, 1, 9, "digits"),
    "chain_sum": _Kind("chain_sum", _chain_sum, 2, 4, 2, 32, "terms"),
    "gcd": _Kind("gcd", _gcd, 2, 2, 1, 9, "digits"),
    "countdown": _Kind("countdown", _countdown, 3, 3, 2, 6, "numbers"),
    "calculator": _CALCULATOR,
    "calculator_untold": dataclasses.replace(_CALCULATOR, tool="untold"),
    "calculator_without_tool": dataclasses.replace(_CALCULATOR, tool="none"),
}
