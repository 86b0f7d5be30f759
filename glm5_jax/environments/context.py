"""Shows the model less of a long history: "context:5,100000:search:foldoc".

Two rules, after the paper's search agents (section 4.2.4):

    keep recent    results of tools before the last 5 are replaced by a short text
    discard all    if more than 100,000 characters are still shown, all turns and
                   results so far are left out, and the model begins again with the task

The second number may be missing: "context:5:search:foldoc" never begins again. The
environment sees every turn, and its state stays. A prompt that shows less does not
extend what was sampled, so the episode becomes several rows of training, one for each
rewriting (rollout/forks counts them).
"""

import re
from collections.abc import Callable, Sequence

from glm5_jax import config, messages
from glm5_jax.environments import protocol, wrapped

PREFIX = "context:"
OMITTED = "(left out: an earlier result)"
_NAME = re.compile(r"context:(\d{1,6})(?:,(\d{1,9}))?:(.+)")


class Context(wrapped.Wrapped):
    """The tasks of a taskset, played with a shortened history."""

    def __init__(self, name: str, make: Callable[[str], protocol.Taskset]) -> None:
        """Makes the taskset that is wrapped.

        Args:
            name: "context:KEPT:NAME" or "context:KEPT,CHARACTERS:NAME".
            make: returns the taskset of NAME.

        Raises:
            config.InputError: the name is malformed, or its taskset does not exist or
                brings agents of its own, which keep their histories.
        """
        found = _NAME.fullmatch(name)
        if found is None or int(found[2] or 1) < 1:
            raise config.InputError(
                f"rl.environment={name!r} must be {PREFIX}KEPT:NAME or "
                f"{PREFIX}KEPT,CHARACTERS:NAME, as in context:5,100000:search:foldoc."
            )
        self._kept, self._most = int(found[1]), int(found[2] or 0)
        super().__init__(name, found[3], make)
        if protocol.has_agents(self._inner):
            raise config.InputError(
                f"rl.environment={name!r}: {found[3]} is played by programs of its "
                f"own, which keep their histories; train on it without {PREFIX}."
            )

    def environment(self) -> protocol.Environment:
        """Returns an environment whose prompts are shortened."""
        return _Environment(super().environment(), self._kept, self._most)


class _Environment(wrapped.WrappedEpisode):
    """One episode, with the place from which its history is shown."""

    def __init__(self, inner: protocol.Environment, kept: int, most: int) -> None:
        super().__init__(inner)
        self._kept, self._most = kept, most
        self._num_first = self._begin = 0

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        first = await super().reset(task)
        self._num_first = self._begin = len(first)
        return first

    def shown(self, history: Sequence[messages.Message]) -> Sequence[messages.Message]:
        first = tuple(history[: self._num_first])
        rest = keep_recent(history[self._begin :], self._kept)
        if self._most and num_characters((*first, *rest)) > self._most:
            self._begin, rest = len(history), ()
        return (*first, *rest)


def keep_recent(
    history: Sequence[messages.Message], num: int
) -> tuple[messages.Message, ...]:
    """Returns a history in which results of tools before the last `num` are omitted."""
    places = [i for i, message in enumerate(history) if message["role"] == "tool"]
    omitted = set(places[: max(len(places) - num, 0)])
    return tuple(
        {**message, "content": OMITTED} if place in omitted else message
        for place, message in enumerate(history)
    )


def num_characters(history: Sequence[messages.Message]) -> int:
    """Returns the length of all that messages say: texts, thoughts and calls."""
    return sum(_length(value) for message in history for value in message.values())


def _length(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_length, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_length, value))
    return 0
