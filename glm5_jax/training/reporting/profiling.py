"""A profile of some steps of a run, by jax's profiler: config.profile_steps.

It goes to RUN/profile/, which xprof reads: `pip install xprof`, then
`xprof --logdir=RUN/profile`.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import logging


class Profiler:
    """Records the steps from one to another, each process its own devices."""

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
        """Inside, a step is set going; the first one of them begins the profile."""
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
        """Ends the profile after its last step, when its `outputs` are there."""
        if self._is_recording and number >= self._steps[-1]:
            jax.block_until_ready(outputs)
            self.close()

    def close(self) -> None:
        """Writes a profile that has begun; a run may end in the middle of it."""
        if self._is_recording:
            jax.profiler.stop_trace()
            self._is_recording, self._steps = False, range(0)
            logging.info("... profiled: xprof --logdir=%s", self._folder)
