"""Rewards of kept episodes, computed again by the present environment.

An episode is played again with the recorded tokens in the place of an engine's, through
the same code as in a run. So limits, labels and agents are what they are in a run, too,
and every prompt must be the recorded one, token for token.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence

from glm5_jax.data.chat import templates
from glm5_jax.environments import protocol
from glm5_jax.inference import requests
from glm5_jax.rl import at_once, calls, completer, entrance, trajectories
from glm5_jax.rl import episodes as episodes_lib


class DivergedError(completer.EngineError):
    """Raised if an episode asks for a turn that was not recorded."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the present environment says of an episode."""

    before: episodes_lib.Episode  # as it was kept
    now: episodes_lib.Episode | None  # None: another way, or not to be played
    reason: str  # why there is none, or ""

    @property
    def is_same(self) -> bool:
        """Returns whether label and reward are those that were kept."""
        return (
            self.now is not None
            and self.now.label == self.before.label
            and self.now.reward == self.before.reward
        )


def rescore(
    taskset: protocol.Taskset,
    template: templates.Template,
    settings: episodes_lib.Settings,
    capacity: int,
    episodes: Sequence[episodes_lib.Episode],
) -> list[Verdict]:
    """Returns a verdict on each episode, in their order.

    Args:
      taskset: that plays them; tasks and right answers are those that were kept.
      template: of the run.
      settings: the limits of the run.
      capacity: most tokens of an episode.
      episodes: that were kept.

    Raises:
      InputError: the taskset has agents, and the extra serve is missing.
    """
    nobody = _Recorded((), capacity)
    context = episodes_lib.Context(nobody, taskset, template, settings)
    return calls.run(_all(context, episodes))


async def _all(
    context: episodes_lib.Context, episodes: Sequence[episodes_lib.Episode]
) -> list[Verdict]:
    """Plays so many at once as the settings say."""
    room = at_once.Room(context.settings)

    async def one(
        opened: episodes_lib.Context, episode: episodes_lib.Episode
    ) -> Verdict:
        async with room.place(episode.task):
            return await _verdict(opened, episode)

    async with entrance.of(context) as opened:
        return [*await asyncio.gather(*(one(opened, e) for e in episodes))]


async def _verdict(
    context: episodes_lib.Context, episode: episodes_lib.Episode
) -> Verdict:
    if isinstance(episode.task.answer, trajectories.Unkept):
        return Verdict(episode, None, "the right answer of its task is no JSON")
    turns = _turns(episode, context.template.stop_ids)
    recorded = _Recorded(turns, context.engine.capacity)
    played = dataclasses.replace(context, engine=recorded)
    try:
        now = await episodes_lib.run(
            played, episodes_lib.Job(episode.task, episode.group, request_id=0)
        )
    except DivergedError as error:
        return Verdict(episode, None, str(error))
    if recorded.num_left:
        return Verdict(episode, None, f"it ends {recorded.num_left} turns earlier")
    return Verdict(episode, now, "")


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A prompt, and what was sampled."""

    prompt: list[int]
    completion: requests.Completion


class _Recorded:
    """A `completer.Completer` that answers as the engine did."""

    def __init__(self, turns: Sequence[_Turn], capacity: int) -> None:
        self.capacity = capacity
        self._turns = [*turns]
        self._num_asked = 0

    @property
    def num_left(self) -> int:
        """Returns the turns that nobody asked for."""
        return len(self._turns)

    async def complete(self, request: requests.Request) -> requests.Completion:
        """Returns what followed this very prompt.

        Raises:
          DivergedError: nothing did.
        """
        self._num_asked += 1
        prompt = [*request.prompt]
        for place, turn in enumerate(self._turns):
            if turn.prompt == prompt:
                return self._turns.pop(place).completion
        raise DivergedError(
            f"the prompt of turn {self._num_asked} is not the recorded one"
            if self._turns
            else f"it goes on after its {self._num_asked - 1} recorded turns"
        )


def _turns(episode: episodes_lib.Episode, stop_ids: frozenset[int]) -> list[_Turn]:
    """Returns the turns of an episode: what was sampled without a break."""
    turns = []
    for sample in episode.samples:
        begin = 0
        for is_sampled, same in itertools.groupby(sample.mask):
            end = begin + len([*same])
            if is_sampled:
                tokens = sample.tokens[begin:end]
                completion = requests.Completion(
                    tokens,
                    sample.logprobs[begin:end],
                    "stop" if tokens[-1] in stop_ids else "length",
                    sample.versions[begin:end],
                    sample.cache_versions[begin:end],
                )
                turns.append(_Turn(sample.tokens[:begin], completion))
            begin = end
    return turns
