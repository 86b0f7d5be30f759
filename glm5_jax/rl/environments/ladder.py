"""Tasks of one turn with one right answer: the rungs of glm5_jax/data/tasks.py."""

from collections.abc import Callable, Sequence

from glm5_jax.data import tasks
from glm5_jax.rl.environments import expressions, maths, protocol

Score = Callable[[str, str], float]  # of (what is right, what was said), 0 to 1

DENSE = "reverse_dense"


class Ladder:
    """A taskset over data.tasks, or "reverse_dense", which pays by the letter."""

    def __init__(self, name: str) -> None:
        """Takes a name of data.tasks, with its size or without.

        Raises:
            config.InputError: there is no such task.
        """
        kind, _, size = name.partition(":")
        self.name = name
        self._problems = f"reverse:{size}".rstrip(":") if kind == DENSE else name
        tasks.parse(self._problems)
        self._score = _SCORES.get(kind, exact)

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Problem `index` of the list that `seed` makes of the split."""
        problem = tasks.problem(self._problems, split, seed, index)
        id = f"{self.name}/{split}/{seed}/{index}"
        return protocol.Task(id, problem.messages, problem.answer)

    def environment(self) -> protocol.Environment:
        """Takes one turn and scores it."""
        return SingleTurn(self._score)

    def demonstration(self, task: protocol.Task) -> Sequence[protocol.Message]:
        """The question and the answer."""
        return (*task.messages, {"role": "assistant", "content": task.answer})


class SingleTurn:
    """An environment that scores the one answer to its task."""

    def __init__(self, score: Score) -> None:
        """Pays what `score` gives; it must be quick and must not raise."""
        self._score = score
        self._answer = ""

    async def reset(self, task: protocol.Task) -> tuple[protocol.Message, ...]:
        """The task's messages."""
        self._answer = task.answer
        return task.messages

    async def step(self, message: protocol.Message) -> protocol.StepResult:
        """Scores the content; reasoning and tool calls do not count."""
        content = message.get("content")
        said = content if isinstance(content, str) else ""
        score = self._score(self._answer, said)
        reward = protocol.Reward(score, {"correct": float(score == 1)})
        return protocol.StepResult((), reward, terminated=True, truncated=False)

    async def close(self) -> None:
        """Nothing to free."""


def exact(right: str, said: str) -> float:
    """1 for the same text."""
    return float(said.strip() == right)


def by_position(right: str, said: str) -> float:
    """The share of places with the right letter; a place too many counts as wrong."""
    said = said.strip()
    same = sum(a == b for a, b in zip(right, said, strict=False))
    return same / max(len(right), len(said), 1)


def same_number(right: str, said: str) -> float:
    """1 for the same number, however it is written."""
    return float(maths.is_equal(right, said))


def same_countdown(right: str, said: str) -> float:
    """1 for an expression of the same numbers, each used once, with the same value."""
    try:
        is_right = expressions.evaluate(said) == expressions.evaluate(right)
        same = expressions.integers(said) == expressions.integers(right)
        return float(is_right and same)
    except expressions.ExpressionError:
        return 0.0


_SCORES: dict[str, Score] = {
    DENSE: by_position,
    "arithmetic": same_number,
    "chain_sum": same_number,
    "gcd": same_number,
    "calculator": same_number,
    "countdown": same_countdown,
}
