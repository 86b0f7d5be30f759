"""Families of functions to write, made from seeds, with solutions and near misses.

A maker draws what the function must do; the hidden tests are what its solution returns
for inputs that are drawn too. To add a family, write a maker and name it in ALL.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

from glm5_jax.environments.worlds.code import judge

_NUM_SHOWN = 2  # examples in the docstring
_NUM_TESTS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Draft:
    signature: str
    text: str  # what the function does
    body: str
    wrong: tuple[str, ...]  # bodies that differ from it on inputs of `draw`
    draw: Callable[[random.Random], tuple[Any, ...]]  # arguments


def make(family: str, number: int) -> judge.Problem:
    """Returns a family's problem of a number; the same number gives the same one."""
    rng = random.Random(f"{family}/{number}")
    draft = ALL[family](rng)
    entry = draft.signature.partition("(")[0]
    inputs = [draft.draw(rng) for _ in range(_NUM_SHOWN + _NUM_TESTS)]
    solve = _function(draft.signature, draft.body)
    cases = [(args, solve(*args)) for args in inputs]
    shown = "\n".join(
        f"    >>> {entry}({', '.join(map(repr, args))})\n    {value!r}"
        for args, value in cases[:_NUM_SHOWN]
    )
    head = f'def {draft.signature}:\n    """{draft.text}\n\n{shown}\n    """\n'
    asserts = "".join(f"    assert candidate(*{a!r}) == {v!r}\n" for a, v in cases)
    return judge.Problem(
        id=f"{family}/{number}",
        head=head,
        entry=entry,
        solution=draft.body,
        check=f"def check(candidate):\n{asserts}",
        tag=family,
        wrong=tuple(
            body
            for body in draft.wrong
            if any(_function(draft.signature, body)(*a) != v for a, v in cases)
        ),
    )


def _function(signature: str, body: str) -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(f"def {signature}:\n{body}", names)
    return names[signature.partition("(")[0]]


def _numbers(rng: random.Random, low: int = -20, high: int = 40) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(0, 9))]


def _word(rng: random.Random, letters: str = "aabbcde") -> str:
    return "".join(rng.choice(letters) for _ in range(rng.randint(0, 12)))


def _select(rng: random.Random) -> _Draft:
    """Makes a filter and a map over numbers."""
    modulus, factor, shift = rng.randint(2, 7), rng.randint(2, 9), rng.randint(-9, 9)
    rest = rng.randrange(modulus)
    body = (
        f"    return [x * {factor} + {shift} for x in numbers if x % {modulus} == "
        f"{rest}]\n"
    )
    return _Draft(
        signature="select(numbers)",
        text=(
            f"Returns {factor} times each number plus {shift}, of those whose remainder"
            f"\n    by {modulus}, as Python's % gives it, is {rest}."
        ),
        body=body,
        wrong=(body.replace("== ", "!= "), body.replace(f" + {shift}", "")),
        draw=lambda r: (_numbers(r),),
    )


def _encode_runs(rng: random.Random) -> _Draft:
    """Makes an encoding of runs of letters."""
    least, mark = rng.randint(2, 4), rng.choice("*#:x")
    body = (
        "    import itertools\n    parts = []\n"
        "    for letter, run in itertools.groupby(text):\n"
        "        size = len(list(run))\n"
        f"        long = f'{{letter}}{mark}{{size}}'\n"
        f"        parts.append(long if size >= {least} else letter * size)\n"
        "    return ''.join(parts)\n"
    )
    return _Draft(
        signature="encode_runs(text)",
        text=(
            f"Replaces each longest run of at least {least} equal letters by the "
            f"letter,\n    {mark!r} and the length of the run."
        ),
        body=body,
        wrong=(body.replace(f">= {least}", f"> {least}"), "    return text\n"),
        draw=lambda r: (_word(r, "aab"),),
    )


def _recurrence(rng: random.Random) -> _Draft:
    """Makes a sequence with two terms before each."""
    a, b, c = rng.randint(1, 4), rng.randint(1, 4), rng.randint(0, 9)
    first, second, modulus = rng.randint(0, 9), rng.randint(1, 9), rng.randint(97, 999)
    body = (
        f"    x, y = {first}, {second}\n    for _ in range(n):\n"
        f"        x, y = y, ({a} * y + {b} * x + {c}) % {modulus}\n    return x\n"
    )
    return _Draft(
        signature="term(n)",
        text=(
            f"Returns f(n), where f(0) = {first}, f(1) = {second} and\n    f(n) = "
            f"({a} * f(n - 1) + {b} * f(n - 2) + {c}) % {modulus}."
        ),
        body=body,
        wrong=(body.replace("range(n)", "range(n + 1)"), "    return n\n"),
        draw=lambda r: (r.randint(0, 60),),
    )


def _merge(rng: random.Random) -> _Draft:
    """Makes a union of intervals that may have gaps between them."""
    gap = rng.randint(0, 4)
    body = (
        "    merged = []\n    for low, high in sorted(intervals):\n"
        f"        if merged and low - merged[-1][1] <= {gap}:\n"
        "            merged[-1][1] = max(merged[-1][1], high)\n"
        "        else:\n            merged.append([low, high])\n"
        "    return [tuple(pair) for pair in merged]\n"
    )

    def draw(r: random.Random) -> tuple[Any, ...]:
        lows = [r.randint(0, 60) for _ in range(r.randint(0, 7))]
        return ([(low, low + r.randint(0, 9)) for low in lows],)

    return _Draft(
        signature="merge(intervals)",
        text=(
            f"Joins pairs (low, high) that overlap, or that {gap} or less lie "
            f"between.\n    Returns pairs in ascending order."
        ),
        body=body,
        wrong=(body.replace("<=", "<"), "    return sorted(intervals)\n"),
        draw=draw,
    )


def _totals(rng: random.Random) -> _Draft:
    """Makes a reader of records in a text."""
    between, within = rng.sample(";|,/", 2)
    least = rng.randint(2, 12)
    body = (
        f"    sums = {{}}\n    for part in text.split({between!r}):\n"
        f"        name, _, amount = part.strip().partition({within!r})\n"
        "        if amount.strip().isdigit():\n"
        "            sums[name] = sums.get(name, 0) + int(amount)\n"
        f"    return {{k: v for k, v in sums.items() if v >= {least}}}\n"
    )

    def draw(r: random.Random) -> tuple[Any, ...]:
        names = [r.choice(["ash", "elm", "fir"]) for _ in range(r.randint(0, 6))]
        amounts = [r.choice([r.randint(0, 9), r.randint(9, 99), "?"]) for _ in names]
        pairs = zip(names, amounts, strict=True)
        return (f"{between} ".join(f"{name}{within}{n}" for name, n in pairs),)

    return _Draft(
        signature="totals(text)",
        text=(
            f"Reads records NAME{within}AMOUNT, with {between!r} and perhaps blanks "
            f"between them.\n    Returns the sum of each name's amounts where it is at "
            f"least {least}. Records whose\n    amount is no whole number are left out."
        ),
        body=body,
        wrong=(body.replace(f">= {least}", ">= 0"), "    return {}\n"),
        draw=draw,
    )


def _walk(rng: random.Random) -> _Draft:
    """Makes a walk on a board whose edges meet."""
    width, height = rng.randint(3, 9), rng.randint(3, 9)
    body = (
        "    steps = {'n': (0, 1), 's': (0, -1), 'e': (1, 0), 'w': (-1, 0)}\n"
        "    x = y = 0\n    for letter in path:\n"
        "        dx, dy = steps[letter.lower()]\n"
        "        size = 2 if letter.isupper() else 1\n"
        f"        x, y = (x + size * dx) % {width}, (y + size * dy) % {height}\n"
        "    return (x, y)\n"
    )
    return _Draft(
        signature="walk(path)",
        text=(
            f"Returns where a path from (0, 0) ends on a board of {width} columns x and"
            f"\n    {height} rows y that is left on one side and entered on the other. "
            f"n adds 1 to y,\n    s takes 1 away, e and w do so with x; capital "
            f"letters count twice."
        ),
        body=body,
        wrong=(body.replace("2 if", "1 if"), body.replace(f" % {width}", "")),
        draw=lambda r: (_word(r, "nsewNSEW"),),
    )


def _stack(rng: random.Random) -> _Draft:
    """Makes a calculator that reads operators after their operands."""
    plus, times = rng.sample("@$&~", 2)
    modulus = rng.randint(50, 999)
    body = (
        "    stack = []\n    for word in text.split():\n"
        f"        if word in {plus + times!r}:\n"
        "            b, a = stack.pop(), stack.pop()\n"
        f"            value = a - b if word == {plus!r} else a * b\n"
        f"            stack.append(value % {modulus})\n"
        "        else:\n            stack.append(int(word))\n    return stack[-1]\n"
    )

    def draw(r: random.Random) -> tuple[Any, ...]:
        words, depth = [f"{r.randint(0, 99)}"], 1
        for _ in range(r.randint(0, 8)):
            if depth > 1 and r.random() < 0.5:
                words.append(r.choice(plus + times))
                depth -= 1
            else:
                words.append(f"{r.randint(0, 99)}")
                depth += 1
        return (
            " ".join([*words, *(r.choice(plus + times) for _ in range(depth - 1))]),
        )

    return _Draft(
        signature="calculate(text)",
        text=(
            f"Evaluates words from left to right with a stack: a number is put on it,\n"
            f"    {plus!r} takes b and then a from it and puts (a - b) % {modulus} on "
            f"it, and\n    {times!r} (a * b) % {modulus}. Returns the top at the end."
        ),
        body=body,
        wrong=(body.replace("b, a =", "a, b ="), body.replace(f" % {modulus}", "")),
        draw=draw,
    )


def _diagonals(rng: random.Random) -> _Draft:
    """Makes sums along the diagonals of a table."""
    sign, best = rng.choice("+-"), rng.choice(["max", "min"])
    body = (
        "    sums = {}\n    for i, row in enumerate(rows):\n"
        "        for j, value in enumerate(row):\n"
        f"            sums[i {sign} j] = sums.get(i {sign} j, 0) + value\n"
        f"    return {best}(sums.values(), default=0)\n"
    )

    def draw(r: random.Random) -> tuple[Any, ...]:
        width = r.randint(1, 5)
        rows = range(r.randint(0, 5))
        return ([[r.randint(-9, 9) for _ in range(width)] for _ in rows],)

    name = {"max": "largest", "min": "smallest"}[best]
    return _Draft(
        signature="diagonal(rows)",
        text=(
            f"Returns the {name} sum of the numbers in a table that have the same\n    "
            f"row {sign} column, or 0 for an empty table."
        ),
        body=body,
        wrong=(
            body.replace(f"i {sign} j", "i"),
            body.replace(best, {"max": "min", "min": "max"}[best]),
        ),
        draw=draw,
    )


ALL: Mapping[str, Callable[[random.Random], _Draft]] = {
    "calculate": _stack,
    "diagonal": _diagonals,
    "encode_runs": _encode_runs,
    "merge": _merge,
    "select": _select,
    "term": _recurrence,
    "totals": _totals,
    "walk": _walk,
}
