"""Small tasks with one right answer, for models whose tokens are bytes.

A name is a kind and, if one likes, its size: "reverse", "reverse:3-6", "countdown:3".
A problem is a pure function of (name, split, seed, index). Which split it may be in is
decided by a hash of what it asks, whatever the seed, the size and the order of what
commutes: no training problem of a kind is held out, under any size. Some kinds are the
problems of another: "reverse_dense" pays differently (ladder.py), and
the calculators differ in their tool.
"""

import dataclasses
import difflib
import hashlib
import math
import random
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from glm5_jax import config

# "told": the prompt describes the tool. "untold": it is there, but the prompt is spared
# the bytes of its description; demonstrations teach the call. "none": there is no tool.
Tool = Literal["told", "untold", "none"]

SPLITS = ("train", "held_out")
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
_MAX_DRAWS = 10_000  # until a problem of the split is found
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LARGEST_TARGET = 100  # of countdown


@dataclasses.dataclass(frozen=True)
class Problem:
    """A conversation to continue, what is right, and one way to get there."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    answer: str
    demonstration: tuple[Mapping[str, Any], ...]  # starts with the messages
    tools: tuple[Mapping[str, Any], ...] = ()
    tag: str = ""  # its size, e.g. "6_letters"


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A problem before its split is known."""

    key: str  # what is asked; the split is decided by it
    prompt: str
    answer: str


@dataclasses.dataclass(frozen=True)
class _Kind:
    problems: str  # the name that they are drawn under
    make: Callable[[random.Random, int], _Draft]  # of a size
    low: int  # sizes drawn from unless the name says which
    high: int
    smallest: int
    largest: int
    unit: str
    tool: Tool = "none"


def problem(name: str, split: str, seed: int, index: int) -> Problem:
    """Problem `index` of the endless list that `seed` makes of a task's split.

    Args:
        name: of `names()`, with its size or without.
        split: "train" or "held_out".
        seed: of the list.
        index: in the list, from 0. Lists of small tasks repeat problems.

    Raises:
        config.InputError: there is no such task, size or split.
    """
    kind_name, low, high = parse(name)
    if split not in SPLITS:
        raise config.InputError(f"split must be one of {SPLITS}, got {split!r}.")
    kind = _KINDS[kind_name]
    place = f"{split}/{seed}/{index}"
    stream = f"{kind.problems}{name.removeprefix(kind_name)}/{place}"
    draft, size = _draw(kind, (low, high), split, stream)
    messages = ({"role": "user", "content": draft.prompt},)
    answer = ({"role": "assistant", "content": draft.answer},)
    calls = _calls(draft) if kind.tool != "none" else ()
    return Problem(
        id=f"{name}/{place}",
        messages=messages,
        answer=draft.answer,
        demonstration=messages + calls + answer,
        tools=(CALC_TOOL,) if kind.tool == "told" else (),
        tag=f"{size}_{kind.unit}",
    )


def names() -> tuple[str, ...]:
    """Every kind of task."""
    return tuple(_KINDS)


def tool(name: str) -> Tool:
    """Returns what a task has for a tool.

    Raises:
        config.InputError: there is no such task.
    """
    return _KINDS[parse(name)[0]].tool


def parse(name: str) -> tuple[str, int, int]:
    """The kind that a name means, and its smallest and largest size.

    Raises:
        config.InputError: there is no such kind or size.
    """
    kind_name, _, size = name.partition(":")
    kind = _KINDS.get(kind_name)
    if kind is None:
        close = difflib.get_close_matches(kind_name, names(), n=1)
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
    """The split of what a problem asks: sha256(key) % 100 < 20 is held out."""
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


def _calls(draft: _Draft) -> tuple[Mapping[str, Any], ...]:
    """The call of the calculator that solves a problem, and what comes back."""
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
    """a+b or a-b of numbers with at most `size` digits, one of them with as many."""
    a, b = _number(rng, size), _number(rng, rng.randint(1, size))
    if rng.random() < 0.5:
        a, b = b, a
    if rng.random() < 0.5:
        return _Draft(f"{min(a, b)}+{max(a, b)}", f"{a}+{b}", str(a + b))
    return _Draft(f"{min(a, b)}-{max(a, b)}", f"{a}-{b}", str(a - b))


def _chain_sum(rng: random.Random, size: int) -> _Draft:
    """Sum and difference of `size` numbers of one or two digits."""
    terms = [_number(rng, rng.randint(1, 2)) for _ in range(size)]
    signed = [terms[0], *(rng.choice((-1, 1)) * t for t in terms[1:])]
    text = str(signed[0]) + "".join(f"{t:+d}" for t in signed[1:])
    return _Draft(",".join(map(str, sorted(signed))), text, str(sum(signed)))


def _gcd(rng: random.Random, size: int) -> _Draft:
    """Numbers of at most `size` digits whose greatest common divisor is uniform."""
    limit = 10**size - 1
    divisor = rng.randint(1, limit // 3)
    while True:
        a, b = (rng.randint(1, limit // divisor) for _ in range(2))
        if math.gcd(a, b) == 1:
            break
    a, b = divisor * a, divisor * b
    return _Draft(f"{min(a, b)},{max(a, b)}", f"gcd {a} {b}", str(divisor))


def _countdown(rng: random.Random, size: int) -> _Draft:
    """A target and the `size` numbers that make it, each used once, by + - and *."""
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
    """A product of two numbers of `size` digits: too much for a small model's head."""
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
