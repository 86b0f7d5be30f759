"""The taskset of every kind of problem, each with the score of its answers."""

import re
from collections.abc import Callable, Sequence

from glm5_jax import messages
from glm5_jax.environments import proofs, protocol
from glm5_jax.environments.tasks import calculator, expressions, maths, problems

Score = Callable[[str, str], float]  # (right answer, given answer) -> 0 to 1


class Ladder:
    """The taskset of a kind of problem."""

    def __init__(self, name: str) -> None:
        """Takes a name with or without a size.

        Raises:
            config.InputError: the task does not exist.
        """
        self.name = name
        self._kind, _, _ = problems.parse(name)

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns problem `index` of the list that `seed` gives for the split."""
        p = problems.problem(self.name, split, seed, index)
        asked = p.messages[0]["content"]  # a countdown has several right answers
        return protocol.Task(p.id, p.messages, p.answer, p.tools, asked, p.tag)

    def environment(self) -> protocol.Environment:
        """Returns a calculator if the task has one, else one scored turn."""
        if problems.tool(self.name) != "none":
            return calculator.Calculator()
        return SingleTurn(_SCORES.get(self._kind, exact))

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message]:
        """Returns the question, the tool's call and result if any, and the answer."""
        split, seed, index = task.id.split("/")[-3:]
        return problems.problem(self.name, split, int(seed), int(index)).demonstration

    def attempts(self, task: protocol.Task) -> proofs.Attempts:
        """Returns the demonstration's turns, and answers that are wrong."""
        shown = self.demonstration(task)
        right = [turn for turn in shown if turn["role"] == "assistant"]
        wrong, said = ["\n", "?"], f"{right[-1].get('content')}"
        if re.fullmatch(r"-?\d+", said):
            wrong.append(f"{int(said) + 1}")
        turns = [({"role": "assistant", "content": text},) for text in wrong]
        return proofs.Attempts(right, tuple(turns))

    def program(self, task: protocol.Task) -> str | None:
        """Returns a Python program that prints the answer; None: there is none."""
        write = _PROGRAMS.get(self._kind.removesuffix("_dense"))
        return write(task.messages[0]["content"]) if write else None


class SingleTurn:
    """An environment that scores the one answer to its task."""

    def __init__(self, score: Score) -> None:
        """Takes the score to pay; it must be fast and must not raise."""
        self._score = score
        self._answer = ""

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Returns the task's messages."""
        self._answer = task.answer
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Scores the content; ignores reasoning and tool calls."""
        content = message.get("content")
        said = content if isinstance(content, str) else ""
        score = self._score(self._answer, said)
        reward = protocol.Reward(score, {"correct": float(score == 1)})
        return protocol.StepResult((), reward, terminated=True, truncated=False)

    async def close(self) -> None:
        """Does nothing: there are no resources to free."""


def exact(right: str, said: str) -> float:
    """Returns 1 for the same text, else 0."""
    return float(said.strip() == right)


def by_position(right: str, said: str) -> float:
    """Returns the fraction of positions with the right letter; extra ones are wrong."""
    said = said.strip()
    same = sum(a == b for a, b in zip(right, said, strict=False))
    return same / max(len(right), len(said))


def same_number(right: str, said: str) -> float:
    """Returns 1 for the same number in any notation, else 0."""
    return float(maths.is_equal(right, said))


def same_countdown(right: str, said: str) -> float:
    """Returns 1 for an expression of the same numbers with the same value, else 0."""
    try:
        is_right = expressions.evaluate(said) == expressions.evaluate(right)
        same = expressions.integers(said) == expressions.integers(right)
        return float(is_right and same)
    except expressions.ExpressionError:
        return 0.0


_SCORES: dict[str, Score] = {
    "reverse_dense": by_position,
    "arithmetic": same_number,
    "chain_sum": same_number,
    "gcd": same_number,
    "calculator_without_tool": same_number,
    "countdown": same_countdown,
}

_PROGRAMS: dict[str, Callable[[str], str]] = {
    "reverse": lambda said: f"print({said.split()[1]!r}[::-1])",
    "sort": lambda said: f"print(''.join(sorted({said.split()[1]!r})))",
    "arithmetic": lambda said: f"print({said})",
    "chain_sum": lambda said: f"print({said})",
    "gcd": lambda said: f"import math\nprint(math.gcd({','.join(said.split()[1:])}))",
    "calculator_without_tool": lambda said: f"print({said})",
}
