"""The answers that a kind of tasks has paid, and the one paid for the most tasks.

Where junk earns the reward, the same junk earns it for many tasks. The same answer may
also be right for many of them, as "yes" is for half. So that alone proves nothing; it
says which answer canaries.py should play to other tasks.

Only answers of one turn count. With tools the same commands may be right for all tasks
of a kind, as their files differ.
"""

import collections
import dataclasses
import json
from collections.abc import Sequence

from glm5_jax import messages
from glm5_jax.environments import protocol
from glm5_jax.rl import advantages
from glm5_jax.rl import episodes as episodes_lib

_QUESTIONS = 128  # the last different ones that are looked at
_FEW = 16  # of fewer, an answer has a share as if there were so many


@dataclasses.dataclass(frozen=True)
class Paid:
    """An answer that earned the full reward."""

    message: messages.Message
    key: int  # of its content and calls
    asked: int  # of what a task asked that it was paid for
    answer: int  # of that task's own answer, the one of most such tasks

    def is_foreign_to(self, task: protocol.Task) -> bool:
        """Tells whether a task asks something else, and has another answer."""
        return self.asked != asked_by(task) and self.answer != _answer_of(task)


class Answers:
    """The paid answers of the last different tasks of a tag."""

    def __init__(self) -> None:
        """Knows none yet."""
        # By what the tasks ask, the oldest first: their own answer, and those paid.
        self._tasks: dict[int, tuple[int, frozenset[int]]] = {}
        self._messages: dict[int, messages.Message] = {}  # of answers paid repeatedly
        self.commonest: Paid | None = None  # paid for the most tasks, lately if several
        self._num_paid = 0  # tasks that it was paid for

    @property
    def share(self) -> float:
        """Returns the share of the tasks for which the commonest answer was paid."""
        return self._num_paid / max(len(self._tasks), _FEW)

    def note(self, group: Sequence[episodes_lib.Episode]) -> None:
        """Notes the episodes of a task."""
        task = group[0].task
        new = {
            key_of(e.transcript[-1]): e.transcript[-1]
            for e in group
            if is_paid(e) and e.num_turns == 1
        }
        asked = asked_by(task)
        self._tasks.pop(asked, None)
        self._tasks[asked] = _answer_of(task), frozenset(new)
        if len(self._tasks) > _QUESTIONS:
            del self._tasks[next(iter(self._tasks))]
        counts = collections.Counter(
            key for _, keys in self._tasks.values() for key in keys
        )
        self._messages = {
            key: message
            for key, message in (self._messages | new).items()
            if counts[key] > 1
        }
        most = max(counts.values(), default=0)
        if most > 1:
            key = next(key for key in reversed(counts) if counts[key] == most)
            self._know(key, self._messages[key], most)
        elif new:
            self._know(*new.popitem(), 1)

    def _know(self, key: int, message: messages.Message, count: int) -> None:
        """Notes the commonest answer, with the task that it is at home in."""
        own = {
            answer: asked
            for asked, (answer, keys) in self._tasks.items()
            if key in keys
        }
        homes = collections.Counter(
            answer for answer, keys in self._tasks.values() if key in keys
        )
        ((home, _),) = homes.most_common(1)
        self.commonest = Paid(message, key, own[home], home)
        self._num_paid = count


def is_paid(episode: episodes_lib.Episode) -> bool:
    """Tells whether an episode earned the full reward."""
    reward = episode.reward
    return advantages.is_valid(episode) and reward is not None and reward.total >= 1


def key_of(message: messages.Message) -> int:
    """Returns what two answers have in common that an environment cannot tell apart."""
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    said = message.get("content") or ""
    said = said.strip() if isinstance(said, str) else said
    return hash(json.dumps([said, calls], sort_keys=True, default=repr))


def asked_by(task: protocol.Task) -> int:
    """Returns what two tasks have in common that ask the same."""
    return hash(task.problem or repr(task.messages))


def _answer_of(task: protocol.Task) -> int:
    """Returns what two tasks have in common whose scorers get the same answer."""
    return asked_by(task) if task.answer is None else hash(repr(task.answer))
