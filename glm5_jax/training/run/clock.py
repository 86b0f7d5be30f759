"""The seconds of a run: the speed of its steps, and goodput."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from glm5_jax.training.reporting import accounting
from glm5_jax.training.run import hosts
from glm5_jax.training.run import state as run_lib

SHARE = "goodput/share"  # seconds of steps that count over all seconds of the run
DATA_WAIT = "perf/data_wait"
LOST_STEPS = "goodput/lost_steps"  # done, then undone by a kill or a rollback
_KINDS = ("compile", "restore", "step", "data_wait", "evaluate", "sample", "save")


class Clock:
    """The speed of the steps, and the seconds of everything by kind.

    Seconds add up over the starts of a run. The seconds of a step include those of
    waiting for data. How long the device itself waits cannot be measured here.
    """

    def __init__(self, run: run_lib.Run, before: Mapping[str, Any] = {}) -> None:
        """Begins to count the first step.

        Args:
          run: that has been started.
          before: metrics of the last step of the previous start.
        """
        config = run.config
        self._flops = accounting.flops_per_token(
            config.model, config.data.sequence_length
        )
        # FLOPs of rollouts are not counted, so steps with rollouts have no utilisation.
        self._is_on_policy = run.feed.is_on_policy
        self._peak = None if self._is_on_policy else accounting.peak_flops()
        self._seconds = {k: before.get(_name(k)) or 0.0 for k in _KINDS}
        self._seconds["compile"] += run.compile_seconds
        self._seconds["restore"] += run.restore_seconds
        self._lost_seconds = before.get("goodput/lost_seconds") or 0.0
        self._lost_steps = before.get(LOST_STEPS) or 0
        self._step_seconds = before.get("perf/step_seconds") or 0.0  # of the last one
        self._since = time.perf_counter(), time.process_time()
        self._waited = 0.0  # for the batch of the step under way
        self._steps: list[tuple[float, ...]] = []  # what `_rates` takes
        self._recent: list[tuple[float, float]] = []  # seconds; without the devices'

    def read(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Waits for a step's metrics and adds the time since the one before."""
        asked = time.perf_counter()
        jax.block_until_ready(metrics["train/loss"])
        blocked = time.perf_counter() - asked
        now = time.perf_counter(), time.process_time()
        # Rows of rollouts are mostly padding, so only their tokens count.
        name = "rollout/tokens" if self._is_on_policy else "data/batch_tokens"
        tokens = float(metrics[name])
        seconds, cpu_seconds = now[0] - self._since[0], now[1] - self._since[1]
        flops = metrics.get("data/document_flops", 0.0)
        step = seconds, cpu_seconds, tokens, self._waited, flops
        self._seconds["data_wait"] += self._waited
        self._since, self._waited = now, 0.0
        self._seconds["step"] += step[0]
        self._step_seconds = step[0]
        self._steps.append(step)
        self._recent.append((step[0], step[0] - blocked))
        return metrics | self._rates(*step)

    @contextlib.contextmanager
    def paused(self, kind: str) -> Iterator[None]:
        """Counts the seconds of the block under a kind, not as part of a step."""
        before = time.perf_counter(), time.process_time()
        yield
        lost = time.perf_counter() - before[0], time.process_time() - before[1]
        self._since = self._since[0] + lost[0], self._since[1] + lost[1]
        self._seconds[kind] += lost[0]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the seconds of the block as waiting for data, except for rollouts."""
        before = time.perf_counter()
        yield
        if not self._is_on_policy:
            self._waited += time.perf_counter() - before

    def recent(self) -> hosts.Seconds:
        """Returns medians of the steps since the last call."""
        steps, self._recent = self._recent, []
        return hosts.Seconds(*np.median(steps, axis=0).round(5).tolist())

    def lose(self, num_steps: int) -> None:
        """Takes back the last steps: they will be done again."""
        self._lost_steps += num_steps
        self._lost_seconds += num_steps * self._step_seconds

    def goodput(self) -> dict[str, float]:
        """Seconds by kind, over all starts, and the share that brought the run on."""
        whole = sum(self._seconds.values()) - self._seconds["data_wait"]
        good = self._seconds["step"] - self._lost_seconds - self._seconds["data_wait"]
        out = {_name(kind): round(n, 3) for kind, n in self._seconds.items()}
        out |= {LOST_STEPS: self._lost_steps}
        out |= {"goodput/lost_seconds": round(self._lost_seconds, 3)}
        return out | {SHARE: round(good / whole, 4) if whole else 0.0}

    def medians(self) -> dict[str, Any]:
        """Returns median rates, without the first two steps, which warm up caches."""
        steps = self._steps[2:] or self._steps
        if not steps:
            return {}
        rates = self._rates(*np.median(steps, axis=0))
        if not self._is_on_policy:  # a mean: waits are rare and long
            total = np.sum(steps, axis=0)
            rates[DATA_WAIT] = round(float(total[3] / total[0]), 6)
        return {"perf/mfu": "unknown"} | rates

    def _rates(
        self,
        seconds: float,
        cpu_seconds: float,
        tokens: float,
        waited: float,
        document_flops: float,
    ) -> dict[str, float]:
        rates = {
            "perf/step_seconds": round(float(seconds), 5),
            "perf/tokens_per_second": round(tokens / seconds, 1),
        }
        if not self._is_on_policy:  # share of the step's seconds
            rates[DATA_WAIT] = round(float(waited / seconds), 6)
        if jax.process_count() == 1:  # CPU time of other processes is unknown
            rates["perf/tokens_per_cpu_second"] = round(tokens / cpu_seconds, 1)
        if self._peak:  # known for this kind of chip
            rates["perf/mfu"] = self._flops * tokens / seconds / self._peak
            if document_flops:  # without padding, and each token in its document
                rates["perf/mfu_documents"] = document_flops / seconds / self._peak
        return rates


def _name(kind: str) -> str:
    return f"goodput/{kind}_seconds"
