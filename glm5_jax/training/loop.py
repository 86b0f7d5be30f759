"""The loop that every stage of training uses.

The metrics of step n - 1 are read after step n is dispatched, so that the device never
waits for the host (before it, where step n's batch needs their weights); then come
evaluation, sample and checkpoint, each where it is due.
"""

import contextlib
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from glm5_jax import config as config_lib
from glm5_jax.processes import together
from glm5_jax.training import accounting, host_memory, plot, run_folder
from glm5_jax.training import metrics as metrics_lib
from glm5_jax.training import run as run_lib

EXIT_TERMINATED = 143  # after a checkpoint on SIGTERM


def train(config: config_lib.TrainConfig, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs or resumes a training run to its end.

    Returns:
      What summary.json holds.

    Raises:
      InputError: the config, the data or the folder cannot be used.
      FloatingPointError: too many updates in a row were not finite.
      SystemExit: 143, after a checkpoint, on SIGTERM.
    """
    began = time.perf_counter()
    run_folder.claim(workdir, config)
    run = run_lib.start(config, workdir)
    writer = metrics_lib.MetricsWriter(workdir, config.num_steps, run.step)
    with (
        jax.set_mesh(run.mesh),
        contextlib.closing(writer),
        _sigterm() as is_terminated,
    ):
        results = _steps(run, writer, is_terminated)
        run.save()
        run.checkpoints.close()
    summary = {
        "steps": run.step,
        **results,
        "parameters": accounting.count_parameters(config.model)["total"],
        "compile_seconds": round(run.compile_seconds, 2),
        "seconds": round(time.perf_counter() - began, 2),
        "peak_rss_gib": host_memory.peak_gib(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
    }
    if together.is_first():
        plot.plot_losses(workdir / "metrics.jsonl", workdir / "loss.png")
        run_folder.write_json(workdir / "summary.json", summary)
    return summary


def _steps(
    run: run_lib.Run,
    writer: metrics_lib.MetricsWriter,
    is_terminated: Callable[[int], bool],
) -> dict[str, Any]:
    """All steps that are left; returns the last evaluation and the median speed."""
    config, clock = run.config, _Clock(run)
    pending: dict[str, Any] = {}
    last = {}
    while run.step < config.num_steps:
        if pending and run.feed.is_on_policy:
            _log(writer, run.step, clock.read(pending), config)
            pending = {}
        batch, seen = run.feed.next(run.params, run.step)
        run.params, run.opt_state, metrics = run.train_step(
            run.params, run.opt_state, run.place(batch)
        )
        if pending:
            _log(writer, run.step, clock.read(pending), config)
        run.step += 1
        pending = {**metrics, **seen}
        _check(run, writer, pending)
        due = _due(run.step, config)
        if due:
            with clock.paused(pending):
                if "evaluate" in due:
                    last = evaluate(run)
                    pending |= last
                if "sample" in due:
                    write_sample(run)
                if "save" in due:
                    run.save(pending)
        if is_terminated(run.step):
            _log(writer, run.step, clock.read(pending), config)
            run.save()
            run.checkpoints.close()
            logging.warning("SIGTERM: step %d is saved, exiting.", run.step)
            sys.exit(EXIT_TERMINATED)
    if pending:
        _log(writer, run.step, clock.read(pending), config)
    # A finished run that is started again reports the same evaluation.
    return (last or evaluate(run)) | clock.medians()


def evaluate(run: run_lib.Run) -> dict[str, float]:
    """What the stage says of held-out data, now."""
    return run.feed.evaluate(run.params, run.step, run.place)


def write_sample(run: run_lib.Run) -> str:
    """Writes what the stage has to show to samples/STEP.txt."""
    text = run.feed.sample(run.params, run.step)
    folder = run.workdir / "samples"
    folder.mkdir(exist_ok=True)
    (folder / f"{run.step}.txt").write_text(text, encoding="utf-8")
    logging.info("Sample after step %d:\n%s", run.step, text)
    return text


def _check(
    run: run_lib.Run, writer: metrics_lib.MetricsWriter, metrics: dict[str, Any]
) -> None:
    """Lets the stage end the run, with the step's line as the last one."""
    try:
        run.feed.check(metrics, run.step)
    except Exception:
        writer.write(run.step, metrics)
        run.checkpoints.close()  # those of earlier steps may be under way
        raise


def _log(
    writer: metrics_lib.MetricsWriter,
    step: int,
    metrics: dict[str, Any],
    config: config_lib.TrainConfig,
) -> None:
    """Writes one step's line; ends the run where updates keep failing."""
    skipped = int(metrics["optim/skipped_in_a_row"])
    is_due = _is_due(step, config.log_every) or step == config.num_steps
    if is_due or any(name.startswith("eval/") for name in metrics):
        writer.write(step, metrics)
    if skipped >= config.optim.max_skipped_in_a_row:
        raise FloatingPointError(
            f"the gradients of {skipped} steps in a row, the last being {step}, were "
            f"not finite; nothing of them was applied. Lower optim.learning_rate, set "
            f"optim.clip_norm, or go on from an earlier checkpoint."
        )


def _due(step: int, config: config_lib.TrainConfig) -> set[str]:
    """What comes after a step; the last one is evaluated and sampled in any case."""
    is_last = step == config.num_steps
    due = set()
    if is_last or _is_due(step, config.eval_every):
        due.add("evaluate")
    if config.sample_tokens and (is_last or _is_due(step, config.sample_every)):
        due.add("sample")
    if is_last or _is_due(step, config.checkpoint_every):
        due.add("save")
    return due


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextlib.contextmanager
def _sigterm() -> Iterator[Callable[[int], bool]]:
    """Whether SIGTERM has come, asked after each step.

    To any of several processes: jax.distributed listens for it and names the step at
    which all of them stop. Only the main thread may ask for signals.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: event.is_set()
        return
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield lambda step: event.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


class _Clock:
    """Speed of the steps alone: evaluation, samples and checkpoints do not count."""

    def __init__(self, run: run_lib.Run) -> None:
        config, self._tokens = run.config, run.feed.tokens_per_step
        self._flops = accounting.flops_per_token(
            config.model, config.data.sequence_length
        )
        # What rollouts compute is not counted, so their steps have no utilisation.
        self._peak = None if run.feed.is_on_policy else accounting.peak_flops()
        self._since = time.perf_counter(), time.process_time()
        self._steps: list[tuple[float, float, float]] = []

    def read(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Waits for a step's metrics and adds the time since the one before."""
        jax.block_until_ready(metrics["train/loss"])
        now = time.perf_counter(), time.process_time()
        # Rows of rollouts are mostly padding, so there the tokens are counted.
        tokens = float(metrics.get("rollout/tokens", self._tokens))
        step = now[0] - self._since[0], now[1] - self._since[1], tokens
        self._since = now
        self._steps.append(step)
        return metrics | self._rates(*step)

    @contextlib.contextmanager
    def paused(self, metrics: dict[str, Any]) -> Iterator[None]:
        """While this lasts time stands still; a step under way is waited for first."""
        jax.block_until_ready(metrics["train/loss"])
        before = time.perf_counter(), time.process_time()
        yield
        lost = time.perf_counter() - before[0], time.process_time() - before[1]
        self._since = self._since[0] + lost[0], self._since[1] + lost[1]

    def medians(self) -> dict[str, Any]:
        """Median rates, without the first two steps, which warm caches up."""
        steps = self._steps[2:] or self._steps
        if not steps:
            return {}
        return {"perf/mfu": "unknown"} | self._rates(*np.median(steps, axis=0))

    def _rates(
        self, seconds: float, cpu_seconds: float, tokens: float
    ) -> dict[str, float]:
        rates = {
            "perf/step_seconds": round(float(seconds), 5),
            "perf/tokens_per_second": round(tokens / seconds, 1),
        }
        if jax.process_count() == 1:  # the others' CPU time is theirs
            rates["perf/tokens_per_cpu_second"] = round(tokens / cpu_seconds, 1)
        if self._peak:  # of a chip whose peak is known
            rates["perf/mfu"] = self._flops * tokens / seconds / self._peak
        return rates
