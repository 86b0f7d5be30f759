"""Problems whose answers are expressions, compared by math-verify: "algebra", "math".

"algebra" makes problems from seeds: derivatives, roots and crossings.
"math:FILE.jsonl" reads a file of one's own, {"problem": TEXT, "answer": LATEX} a line.
"""

import asyncio
import functools
import json
import pathlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from glm5_jax import config, messages
from glm5_jax.environments import proofs, protocol
from glm5_jax.environments.tasks import problems, symbolic

FILE_PREFIX = "math:"
_INSTRUCTION = "Give the answer as LaTeX in \\boxed{}."


class _Draft(NamedTuple):
    """A question, its answer in LaTeX, one that comes near, and the question as one."""

    question: str
    answer: str
    near: str = ""
    asked: str = ""


class Algebra:
    """Problems of all kinds in turn, of one ("algebra:roots"), or of a file."""

    def __init__(self, name: str) -> None:
        """Takes the kinds, or reads the file.

        Raises:
            config.InputError: the extra is missing, there is no such kind or file, or a
                line is no problem.
        """
        self.name = name
        self._pool = _pool()
        self._rows: Mapping[str, list[_Draft]] = {}
        wanted = name.partition(":")[2]
        if name.startswith(FILE_PREFIX):
            self._rows = _read(pathlib.Path(wanted))
        elif wanted and wanted not in _KINDS:
            raise config.InputError(
                f"{name!r}: there is no kind {wanted!r}; there are {', '.join(_KINDS)}."
            )
        self._kinds = [wanted] if wanted else [*_KINDS]

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task; a hash of its question decides which split it is in.

        Raises:
            config.InputError: the file has no problem in the split.
        """
        if self._rows:
            rows = self._rows.get(split)
            if not rows:
                raise config.InputError(f"{self.name} has no problem in {split}.")
            turn, place = divmod(index, len(rows))
            order = [*rows]
            random.Random(f"{seed}/{split}/{turn}").shuffle(order)
            return self._task(f"{split}/{seed}/{index}", order[place], "file")
        turn, place = divmod(index, len(self._kinds))
        kind = self._kinds[place]
        rng = random.Random(f"{split}/{seed}/{kind}/{turn}")
        draft = _KINDS[kind](rng)
        while problems.split_of(draft.question) != split:
            draft = _KINDS[kind](rng)
        return self._task(f"{split}/{seed}/{index}", draft, kind)

    def environment(self) -> "Episode":
        """Returns an environment that scores one turn."""
        return Episode(self._pool)

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message]:
        """Returns question and answer."""
        return (*task.messages, _boxed(task.answer[0]))

    def attempts(self, task: protocol.Task) -> proofs.Attempts:
        """Returns the answer, one that comes near, the question as one, and none."""
        answer, *wrong = task.answer
        said = [text for text in (*wrong, "?") if text]
        return proofs.Attempts(
            [_boxed(answer)], tuple((_boxed(text),) for text in said)
        )

    def _task(self, place: str, draft: _Draft, tag: str) -> protocol.Task:
        said = {"role": "user", "content": f"{draft.question} {_INSTRUCTION}"}
        answer = (draft.answer, draft.near, draft.asked)
        key = f"{self.name}/{place}"
        return protocol.Task(key, (said,), answer, problem=draft.question, tag=tag)


class Episode:
    """An episode of one turn."""

    def __init__(self, pool: symbolic.Pool) -> None:
        """Takes the processes that compare."""
        self._pool, self._answer = pool, ""

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Returns the task's messages."""
        self._answer = task.answer[0]
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Scores the content."""
        given = message.get("content")
        equal = await asyncio.to_thread(self._pool.is_equal, self._answer, given)
        reward = protocol.Reward(float(equal), {"correct": float(equal)})
        return protocol.StepResult((), reward, terminated=True, truncated=False)

    async def close(self) -> None:
        """Does nothing: the processes are shared."""


@functools.cache
def _pool() -> symbolic.Pool:
    """Returns the processes that all tasksets share."""
    return symbolic.Pool()


def _boxed(latex: str) -> messages.Message:
    return {"role": "assistant", "content": f"\\boxed{{{latex}}}"}


def _read(path: pathlib.Path) -> Mapping[str, list[_Draft]]:
    """Returns the problems of a file by split."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise config.InputError(f"{FILE_PREFIX}{path} is not readable: {error}.") from (
            error
        )
    rows: dict[str, list[_Draft]] = {split: [] for split in protocol.SPLITS}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            draft = _Draft(row["problem"], str(row["answer"]))
            rows[problems.split_of(draft.question)].append(draft)
        except (ValueError, KeyError, TypeError) as error:
            raise config.InputError(
                f"{path}:{number} is no problem; write it as "
                f'{{"problem": "...", "answer": "\\\\frac{{1}}{{2}}"}}.'
            ) from error
    return rows


def _polynomial(terms: Mapping[int, int]) -> str:
    """Returns the LaTeX of coefficients by power, without those that are 0."""
    text = ""
    for power, factor in sorted(terms.items(), reverse=True):
        if factor:
            size = f"{factor:+d}"
            if power and abs(factor) == 1:
                size = size[0]
            text += size + {0: "", 1: "x"}.get(power, f"x^{{{power}}}")
    return text.removeprefix("+")


def _factor(rng: random.Random) -> int:
    return rng.choice([-1, 1]) * rng.randint(1, 9)


def _derivative(rng: random.Random) -> _Draft:
    terms = {power: _factor(rng) for power in rng.sample(range(6), 3)}
    slope = {power - 1: power * factor for power, factor in terms.items() if power}
    near = {**slope, min(slope): slope[min(slope)] + 1}
    return _Draft(
        f"Differentiate ${_polynomial(terms)}$ with respect to $x$.",
        _polynomial(slope),
        _polynomial(near),
        f"\\frac{{d}}{{dx}}({_polynomial(terms)})",
    )


def _antiderivative(rng: random.Random) -> _Draft:
    terms = {power: _factor(rng) for power in rng.sample(range(1, 6), 3)}
    slope = {power - 1: power * factor for power, factor in terms.items()}
    start = _factor(rng)
    return _Draft(
        f"Give $F(x)$ with $F'(x)={_polynomial(slope)}$ and $F(0)={start}$.",
        _polynomial({**terms, 0: start}),
        _polynomial(terms),
        f"\\int_0^x {_polynomial(slope)} dx + {start}".replace("x^", "t^"),
    )


def _roots(rng: random.Random) -> _Draft:
    p, q = rng.sample(range(-9, 10), 2)
    terms = {2: 1, 1: -(p + q), 0: p * q}
    return _Draft(
        f"Give the set of real solutions of ${_polynomial(terms)}=0$.",
        f"\\{{{p}, {q}\\}}",
        f"\\{{{p}, {q + 1 if q + 1 != p else q + 2}\\}}",
        f"\\{{x : {_polynomial(terms)}=0\\}}",
    )


def _crossing(rng: random.Random) -> _Draft:
    a, c = rng.sample(range(-9, 10), 2)
    b, d = _factor(rng), _factor(rng)
    top, bottom = d - b, a - c
    left, right = _polynomial({1: a, 0: b}), _polynomial({1: c, 0: d})
    return _Draft(
        f"At which $x$ do the lines $y={left}$ and $y={right}$ cross?",
        f"\\frac{{{top}}}{{{bottom}}}",
        f"\\frac{{{top + 1}}}{{{bottom}}}",
        f"{left}={right}",
    )


_KINDS: Mapping[str, Callable[[random.Random], _Draft]] = {
    "antiderivative": _antiderivative,
    "crossing": _crossing,
    "derivative": _derivative,
    "roots": _roots,
}
