"""The hundred procedural tasks of PyPI's reasoning-gym, an extra.

Its scores give some credit to many wrong answers (0.01 for any number, for example), so
one wrong answer of a group would look better than the others. Here the reward is 1 for
a full score and 0 otherwise; the reward's parts contain the score itself.
"""

import asyncio
import functools
import hashlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import config, messages
from glm5_jax.environments import protocol
from glm5_jax.environments.tasks import problems

PREFIX = "reasoning_gym:"

_MAX_DRAWS = 1000  # entries tried to find one of the split
_SIZE = 2**31 - 1  # of a dataset, which makes its entries on demand


class ReasoningGym:
    """The taskset "reasoning_gym:NAME"."""

    def __init__(self, name: str) -> None:
        """Takes the name of a dataset, e.g. "reasoning_gym:chain_sum".

        Raises:
            config.InputError: the extra is not installed, or has no such dataset.
        """
        self.name = name
        self._dataset = name.removeprefix(PREFIX)
        self._gym = _imported()
        self._at = functools.lru_cache(maxsize=4)(self._make)
        self._scorer = self._at(0)  # an unknown name raises now

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns the first entry of the split in the index-th block of a dataset.

        A hash of its question decides which split an entry is in.
        """
        if split not in problems.SPLITS:
            raise config.InputError(
                f"split must be one of {problems.SPLITS}, got {split!r}."
            )
        dataset = self._at(seed)
        for i in range(index * _MAX_DRAWS, (index + 1) * _MAX_DRAWS):
            entry = dataset[i % _SIZE]
            if problems.split_of(f"{self.name} {entry['question']}") == split:
                id = f"{self.name}/{split}/{seed}/{index}"
                messages = ({"role": "user", "content": entry["question"]},)
                return protocol.Task(id, messages, entry)
        raise config.InputError(
            f"{self.name} has no {split} entry among {_MAX_DRAWS}: its questions "
            f"hardly differ. Choose another dataset."
        )

    def environment(self) -> protocol.Environment:
        """Returns an environment that scores one turn."""
        return _SingleTurn(self._scorer)

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message] | None:
        """Returns question and answer; None if the entry's answer does not score 1."""
        answer = task.answer["answer"]
        if answer is None or self._scorer.score_answer(answer, task.answer) != 1:
            return None
        return (*task.messages, {"role": "assistant", "content": str(answer)})

    def _make(self, seed: int) -> Any:
        # Entry i of a dataset has the seed `seed + i`, so neighbouring seeds would
        # share almost all entries.
        digest = hashlib.sha256(str(seed).encode()).digest()
        start = int.from_bytes(digest[:4], "big")
        try:
            return self._gym.create_dataset(self._dataset, seed=start, size=_SIZE)
        except ValueError as error:
            raise config.InputError(
                f"reasoning-gym makes no dataset {self._dataset!r}: {error}"
            ) from error


class _SingleTurn:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._entry: Mapping[str, Any] = {}

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        self._entry = task.answer
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        content = message.get("content")
        answer = content.strip() if isinstance(content, str) else None
        try:  # some scorers search for seconds
            score = await asyncio.to_thread(
                self._dataset.score_answer, answer=answer, entry=self._entry
            )
        except Exception as error:  # one of a hundred scorers may fail
            raise protocol.RewardError(str(error)) from error
        correct = float(score == 1)
        reward = protocol.Reward(correct, {"correct": correct, "score": float(score)})
        return protocol.StepResult((), reward, terminated=True, truncated=False)

    async def close(self) -> None:
        pass


def _imported() -> Any:
    try:
        return importlib.import_module("reasoning_gym")  # takes seconds
    except ImportError as error:
        raise config.InputError(
            "Tasks named 'reasoning_gym:...' need the extra: pip install "
            "'glm5_jax[reasoning_gym]'."
        ) from error
