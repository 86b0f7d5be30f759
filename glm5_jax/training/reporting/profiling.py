"""A profile of some steps of a run, by jax's profiler: config.profile_steps.

The profile is in RUN/profile/. To read it: `pip install xprof`, then
`xprof --logdir=RUN/profile`.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import logging


class Profiler:
    """Records a range of steps; each process records its own devices."""

    def __init__(self, steps: Sequence[int], folder: pathlib.Path) -> None:
        """Records nothing yet.

        Args:
          steps: the first and the last one, counted from 1; empty: none.
          folder: where the profile goes.
        """
        self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
        self._folder = folder
        self._is_recording = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Wraps the dispatch of a step; the first of the range starts recording."""
        if number not in self._steps:
            yield
            return
        if not self._is_recording:
            logging.info("Profiling steps %d to %d ...", number, self._steps[-1])
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python: large and slow
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._is_recording = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield

    def end_step(self, number: int, outputs: Any) -> None:
        """Ends the profile after the last step of the range, once it has `outputs`."""
        if self._is_recording and number >= self._steps[-1]:
            jax.block_until_ready(outputs)
            self.close()

    def close(self) -> None:
        """Writes a profile that is being recorded, if any."""
        if self._is_recording:
            jax.profiler.stop_trace()
            self._is_recording, self._steps = False, range(0)
            logging.info("... profiled: xprof --logdir=%s", self._folder)
