"""Watches what environments pay for; puts kinds of tasks in quarantine that pay junk.

A poisoned reward is one that junk earns, by a mistake of the environment or because the
policy has found a way around it. Canaries (canaries.py) prove it by an experiment, and
only their proof pauses the tag of the tasks.

Three figures show what may come of it, each by tag: the length of the answers that earn
the full reward, how far they can be compressed, and the share of tasks for which the
same one was paid. A policy that learns changes them too, so a change of the first two
is a warning and no more, and the third one says what canaries play.
"""

import dataclasses
import time
from collections.abc import Sequence

from absl import logging

from glm5_jax import config
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl.actors import answers as answers_lib
from glm5_jax.rl.actors import canaries as canaries_lib
from glm5_jax.rl.actors import failing as failing_lib
from glm5_jax.rl.actors import levels

_REMEDY = (
    "Look at its last episodes (python -m glm5_jax.episodes --run=RUN --html=FILE) and "
    "at its scorer (python -m glm5_jax.environments validate NAME)."
)


class PoisonedError(RuntimeError):
    """Raised, with rl.quarantine='end', if an environment pays for junk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is done about rewards for junk: see config.RLConfig."""

    quarantine: config.Quarantine = config.RLConfig.quarantine
    canary_every: int = config.RLConfig.canary_every


class Monitor:
    """The groups of a run, by tag; every method runs in one event loop."""

    def __init__(
        self,
        context: episodes_lib.Context,
        failing: failing_lib.Failing,
        settings: Settings,
    ) -> None:
        """Knows no group yet.

        Args:
          context: of all episodes.
          failing: pauses tags.
          settings: of the run.
        """
        self._failing, self._settings = failing, settings
        limits = context.settings
        self._canaries = canaries_lib.Canaries(
            context.taskset,
            settings.canary_every,
            limits.call_timeout + limits.episode_timeout,
            self._found,
        )
        self._answers: dict[str, answers_lib.Answers] = {}
        self._levels: dict[tuple[str, str], levels.Level] = {}  # by tag and figure
        self._until: dict[str, float] = {}  # when a quarantine ends, by tag
        self._told: dict[str, float] = {}  # when a tag without one is named again

    async def run(self) -> None:
        """Plays canaries until it is cancelled.

        Raises:
          PoisonedError: one was paid too often, with rl.quarantine='end'.
        """
        await self._canaries.run()

    async def settle(self) -> None:
        """Waits until no canary is under way."""
        await self._canaries.settle()

    def note(self, group: Sequence[episodes_lib.Episode]) -> None:
        """Notes a group that was scored; in a quarantine, one that began before it."""
        task = group[0].task
        if self.is_quarantined(task.tag):
            return
        answers = self._answers.setdefault(task.tag, answers_lib.Answers())
        self._canaries.ended(task, answers.commonest)
        answers.note(group)
        paid = [e for e in group if answers_lib.is_paid(e)]
        if paid:
            counts = [levels.num_tokens(episode) for episode in paid]
            self._compare(task.tag, "answer_tokens", 1 + sum(counts) / len(counts))
        if (share := levels.compressed(paid)) is not None:
            self._compare(task.tag, "compressed_to", share)

    def is_quarantined(self, tag: str) -> bool:
        """Tells whether groups of a tag are not to be learnt from now."""
        return time.monotonic() < self._until.get(tag, 0.0)

    def figures(self) -> dict[str, float]:
        """Returns metrics, most of them by tag."""
        shares = {t: round(a.share, 4) for t, a in self._answers.items()}
        return {
            "monitor/quarantined": float(sum(map(self.is_quarantined, self._until))),
            **{f"monitor/same_answer/{_name(t)}": s for t, s in shares.items()},
            **{
                f"monitor/{figure}/{_name(tag)}": round(level.now, 4)
                for (tag, figure), level in self._levels.items()
            },
            **{
                f"monitor/{kind}_paid/{_name(tag)}": share
                for (tag, kind), share in self._canaries.shares().items()
            },
        }

    def _compare(self, tag: str, figure: str, value: float) -> None:
        """Warns, once, if a figure has left its usual level, which is then the new."""
        level = self._levels.setdefault((tag, figure), levels.Level())
        if level.note(value):
            logging.warning(
                "The answers of the tag %r that earn the full reward have changed: "
                "monitor/%s is %.3g in its last %d groups, and was %.3g. That may be "
                "learnt, or junk that is paid. %s",
                tag,
                figure,
                level.now,
                levels.LAST,
                level.usual,
                _REMEDY,
            )
            self._levels[tag, figure] = levels.Level()

    def _found(self, tag: str, said: str) -> None:
        """Acts on canaries that were paid.

        Raises:
          PoisonedError: the run is to end.
        """
        if self.is_quarantined(tag):
            return
        self._answers.pop(tag, None)  # for a new beginning after the pause
        self._canaries.forget(tag)
        words = (
            f"the environment of the tag {tag!r} pays for junk: it gave the full "
            f"reward for {said}. {_REMEDY}"
        )
        if self._settings.quarantine == "end":
            raise PoisonedError(
                f"{words} The same command resumes; without the steps that learnt from "
                f"it, if later checkpoints are deleted."
            )
        if self._settings.quarantine == "pause" and self._failing.pause(tag):
            self._until[tag] = time.monotonic() + failing_lib.PAUSE_SECONDS
            logging.warning(
                "Groups of the tag %r are skipped for %g s, and those that no step has "
                "taken are dropped: %s",
                tag,
                failing_lib.PAUSE_SECONDS,
                words,
            )
        elif time.monotonic() >= self._told.get(tag, 0.0):
            self._told[tag] = time.monotonic() + failing_lib.PAUSE_SECONDS
            is_off = self._settings.quarantine == "off"
            why = "rl.quarantine='off'" if is_off else "no other tag would be played"
            logging.error("Steps learn from it, as %s: %s", why, words)


def _name(tag: str) -> str:
    return tag or "untagged"
