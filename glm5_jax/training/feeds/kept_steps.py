"""The steps that a killed run did after its checkpoint, which are learnt again.

Their episodes are in the run's folder (rl/episode_files.py), so no engine needs to play
them a second time. The weights become those of before the kill, which drew what was
under way then: it goes on (rl/actors/journal.py).
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from absl import logging

from glm5_jax.processes import together
from glm5_jax.rl import episode_files


class KeptSteps:
    """The kept steps after a checkpoint, in order; all processes make each call."""

    def __init__(self, workdir: pathlib.Path, step: int, num_steps: int) -> None:
        """Reads nothing yet.

        Args:
          workdir: of the run.
          step: of its checkpoint; 0: there is none, and nothing is learnt again.
          num_steps: of the run's schedule; a step of another one gives other weights.
        """
        self._workdir, self._step, self._num_steps = workdir, step, num_steps
        self._first = step

    def take(self, position: int) -> episode_files.Step | None:
        """Returns what the step after the last one learnt from.

        Args:
          position: of its batch.

        Returns:
          None if no file gives the same weights again; later calls return None, too.

        Raises:
          OSError: the folder is not the same one for all processes.
        """
        if not self._step:
            return None
        self._step += 1
        kept = self._read(position)
        found = "kept" if kept is not None else ""
        if not together.from_first(f"kept_steps/{position}", lambda: found):
            self._step = 0
        elif kept is None:
            raise OSError(
                f"{self._workdir} must be one folder that all hosts of the run share: "
                f"process 0 finds the episodes of step {self._step} in it."
            )
        else:
            logging.info("Step %d learns again from its episodes.", self._step)
            return kept
        return None

    def end(self) -> None:
        """Learns nothing more again: a rollback has undone what was learnt."""
        self._step = 0

    def after_skipped(self, position: int) -> Mapping[str, Any] | None:
        """Returns the memory of who plays after batches that a rollback skipped.

        Args:
          position: of the first batch that was not skipped.

        Returns:
          None if the batch before it is of the checkpoint, or its file is gone.
        """
        later = (n for n in episode_files.numbers(self._workdir) if n > self._first)
        for step in sorted(later, reverse=True) if self._first else ():
            for kept in episode_files.read_whole(self._workdir, [step]):
                if kept.position < position:
                    return kept.memory if kept.position == position - 1 else None
        return None

    def _read(self, position: int) -> episode_files.Step | None:
        """Returns the kept step, if it is whole and the same one."""
        if self._step not in episode_files.numbers(self._workdir):
            return None
        for kept in episode_files.read_whole(self._workdir, [self._step]):
            is_next = kept.position == position and kept.num_steps == self._num_steps
            return kept if is_next and kept.memory is not None else None
        return None
