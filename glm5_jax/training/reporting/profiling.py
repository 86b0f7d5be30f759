"""A profile of some steps of a run, by jax's profiler.

Of those that config.profile_steps names, or of the next few of a process that gets
SIGUSR2. The profile is in RUN/profile/. To read it: `pip install xprof`, then
`xprof --logdir=RUN/profile`.
"""

import contextlib
import pathlib
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import logging

STEPS_ON_DEMAND = 3


class Profiler:
    """Records ranges of steps; each process records its own devices."""

    def __init__(self, steps: Sequence[int], folder: pathlib.Path) -> None:
        """Records nothing yet.

        Args:
          steps: the first and the last one, counted from 1; empty: none.
          folder: where the profile goes.
        """
        self._named = range(steps[0], steps[1] + 1) if steps else range(0)
        self._steps = self._named  # that are recorded next, or now
        self._folder = folder
        self._is_recording = False
        self._is_asked = False
        # Only a main thread can receive signals.
        self._hears = threading.current_thread() is threading.main_thread()
        if self._hears:
            self._before = signal.signal(signal.SIGUSR2, self._ask)

    def _ask(self, *_: object) -> None:
        self._is_asked = True

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Wraps the dispatch of a step; the first of a range starts recording."""
        if self._is_asked and not self._is_recording:
            self._steps = range(number, number + STEPS_ON_DEMAND)
        self._is_asked = False
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
            self._write()

    def close(self) -> None:
        """Writes a profile that is being recorded, if any, and hears no signal more."""
        self._write()
        if self._hears:
            signal.signal(signal.SIGUSR2, self._before)
            self._hears = False

    def _write(self) -> None:
        if self._is_recording:
            jax.profiler.stop_trace()
            self._is_recording = False
            if self._steps == self._named:  # once, even if they are rolled back
                self._named = range(0)
            self._steps = self._named
            logging.info("... profiled: xprof --logdir=%s", self._folder)
