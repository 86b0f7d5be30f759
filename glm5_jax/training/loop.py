"""The loop of every stage of training.

The metrics of step n - 1 are read after step n is dispatched, so that the device never
waits for the host. They are read earlier in two cases: the batch of step n is sampled
with the weights of step n - 1; or an evaluation, a sample, a checkpoint or a copy is
due, which need a step that has been judged.
"""

import contextlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

from glm5_jax import config as config_lib
from glm5_jax.processes import together
from glm5_jax.training.reporting import (
    accounting,
    plot,
    profiling,
    sources,
    suites,
    trackers,
)
from glm5_jax.training.reporting import metrics as metrics_lib
from glm5_jax.training.run import clock as clock_lib
from glm5_jax.training.run import folder as run_folder
from glm5_jax.training.run import host_memory, hosts, signals
from glm5_jax.training.run import state as run_lib
from glm5_jax.training.run import watchdog as watchdog_lib
from glm5_jax.weights import loading


def train(config: config_lib.TrainConfig, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs or resumes a training run to its end.

    Returns:
      The content of summary.json.

    Raises:
      InputError: the config, the data or the folder is unusable.
      FloatingPointError: the run must end, see config.HealthConfig.
      SystemExit: 143, after a checkpoint, on SIGTERM or ctrl-C.
    """
    began = time.perf_counter()
    if not run_folder.has_checkpoint(workdir):
        loading.require_same_mathematics(config)
    trackers.require(config.trackers)  # checked before anything is written
    suites.require(config)
    mesh = run_lib.make_mesh(config)
    # Hears its signal from now on, which ends a process that does not.
    profiler = profiling.Profiler(config.profile_steps, workdir / "profile")
    with contextlib.closing(profiler), run_folder.locked(workdir):
        return _train(config, workdir, mesh, profiler, began)


def _train(
    config: config_lib.TrainConfig,
    workdir: pathlib.Path,
    mesh: Mesh,
    profiler: profiling.Profiler,
    began: float,
) -> dict[str, Any]:
    """Runs `train` in a folder that this run has locked."""
    if summary := run_folder.finished(workdir, config):
        logging.info(
            "The run in %s has done its %d steps: nothing is left to do. Raise "
            "num_steps to train it further.",
            workdir,
            summary["steps"],
        )
        return summary
    logging.info("glm5_jax of %s, jax %s.", sources.commit(), jax.__version__)
    with run_folder.claimed(workdir, config):
        run = run_lib.start(config, workdir, mesh)
        followers = trackers.make(config, workdir, run.step)
    writer = metrics_lib.MetricsWriter(workdir, config.num_steps, run.step, followers)
    watched = watchdog_lib.Watchdog(
        workdir / f"stacks_{jax.process_index()}.txt", config.health.watchdog_seconds
    )
    with (
        jax.set_mesh(mesh),
        contextlib.closing(writer),
        contextlib.closing(run.feed),
        signals.listening() as is_asked_to_end,
        watched as watchdog,
    ):
        loop = _Loop(run, writer, watchdog, profiler)
        results = loop.run_to_the_end(is_asked_to_end)
    summary = {
        "steps": run.step,
        **results,
        "parameters": accounting.count_parameters(config.model)["total"],
        "compile_seconds": round(run.compile_seconds, 2),
        "seconds": round(time.perf_counter() - began, 2),
        "peak_rss_gib": host_memory.peak_gib(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "commit": sources.commit(),
    }
    if together.is_first():
        plot.plot_losses(workdir / "metrics.jsonl", workdir / "loss.png")
        run_folder.write_json(workdir / "summary.json", summary)
    return summary


class _Loop:
    """The remaining steps of a run, and what is due between them."""

    def __init__(
        self,
        run: run_lib.Run,
        writer: metrics_lib.MetricsWriter,
        watchdog: watchdog_lib.Watchdog,
        profiler: profiling.Profiler,
    ) -> None:
        self._run, self._writer, self._watchdog = run, writer, watchdog
        self._profiler = profiler
        self._clock = clock_lib.Clock(run, writer.before)
        self._clock.lose(max(0, writer.before.get("step", 0) - run.step))
        self._pending: dict[str, Any] = {}  # metrics of run.step, not yet read
        self._advantages: jax.Array | None = None  # a critic's, of the last batch
        self._last: dict[str, float] = {}  # the last evaluation

    def run_to_the_end(self, is_asked_to_end: Callable[[int], bool]) -> dict[str, Any]:
        """Returns the last evaluation, the median speed and the goodput."""
        with self._saves_finished():
            return self._run_to_the_end(is_asked_to_end)

    def _run_to_the_end(self, is_asked_to_end: Callable[[int], bool]) -> dict[str, Any]:
        run, config = self._run, self._run.config
        while not config.is_over(run.step, run.evaluation):
            with self._profiler.step(run.step + 1):
                metrics = self._dispatch()
            if self._pending and not self._settle(set()):
                continue  # rolled back, which undoes the dispatched step as well
            run.step += 1
            self._pending = metrics
            self._profiler.end_step(run.step, metrics)
            with self._logged_if_it_fails(metrics):
                run.feed.keep(run.step, self._advantages)
                run.feed.check(metrics, run.step)
            # The position never falls, as the step does in a rollback.
            due, ends = _due(run.step, config), is_asked_to_end(run.position)
            due |= {"save"} if ends else set()
            if due or run.feed.is_on_policy:
                self._settle(due)
            if ends:
                with self._watchdog.paused():
                    run.close()
                logging.warning("Asked to end: step %d is saved, exiting.", run.step)
                sys.exit(signals.EXIT_TERMINATED)
        # A finished run that is started again returns the same evaluation.
        last = self._last or dict(run.evaluation) or evaluate(run)[0]
        with self._clock.paused("save"), self._watchdog.paused():
            run.close()
        return last | self._clock.medians() | self._clock.goodput()

    def _dispatch(self) -> dict[str, Any]:
        """Dispatches the next step; returns metrics that may not be ready yet."""
        run = self._run
        size = run.next_size
        if size != run.compiled_size:
            with self._clock.paused("compile"), self._watchdog.paused():
                run.compile()
        tells = run.feed.tells_of_stalls
        unwatched = self._watchdog.paused() if tells else contextlib.nullcontext()
        with unwatched, self._clock.waiting():
            batch, seen = run.feed.next(run.params, run.position)
        placed = run.with_reference(run.to_devices(batch, size))
        placed = run.with_teachers(placed)
        run.critic_state, placed, judged = run.critic.step(run.critic_state, placed)
        self._advantages = placed["advantages"] if judged else None
        run.params, run.opt_state, metrics = run.train_step(
            run.params, run.opt_state, placed
        )
        return {**metrics, **judged, **seen}

    def _settle(self, due: set[str]) -> bool:
        """Judges the pending step and does what is due; False: rolled back."""
        run, clock = self._run, self._clock
        metrics, self._pending = clock.read(self._pending), {}
        self._watchdog.beat(metrics["perf/step_seconds"])
        with self._logged_if_it_fails(metrics):
            run.checkpoints.check_for_errors()
            must_roll_back = run.health.must_roll_back(run.step, metrics)
        if must_roll_back:
            self._roll_back()
            return False
        if "evaluate" in due:
            if not self._last:
                logging.info("Evaluates for the first time ...")
            self._watchdog.beat()
            with clock.paused("evaluate"):
                found, is_whole = evaluate(run)
                if found:
                    self._last = run.evaluation = found
                    if is_whole:  # else figures that arrived with the step stay
                        metrics = _without_figures(metrics)
                    metrics |= found
            due |= self._end_if_reached()
        if due & {"save", "copy"}:
            with clock.paused("save"), self._watchdog.paused():
                if "save" in due:
                    run.save(metrics)
                else:
                    run.copy()
        is_due = _is_due(run.step, run.config.log_every)
        has_figures = metrics.keys() != _without_figures(metrics).keys()
        if is_due or "evaluate" in due or has_figures:
            counts = run.health.counts()
            own = hosts.tell(run.workdir, run.step, run.position, clock.recent())
            self._writer.write(run.step, metrics | counts | own | clock.goodput())
        if "sample" in due:  # last, so that nothing is lost if it fails
            self._watchdog.beat()
            with clock.paused("sample"):
                write_sample(run)
        self._watchdog.beat()
        return True

    def _end_if_reached(self) -> set[str]:
        """Returns what is due if the run has reached stop_at."""
        run, config = self._run, self._run.config
        if not config.stop_metric:
            return set()
        value = f"{config.stop_metric}={run.evaluation[config.stop_metric]:.3g}"
        if config.has_reached(run.evaluation):
            logging.info("%s: stops at step %d (stop_at).", value, run.step)
            return _due(config.num_steps, config)
        if run.step == config.num_steps:
            logging.warning(
                "%s has not reached stop_at=%g in num_steps=%d; raise num_steps to "
                "train it further.",
                value,
                config.stop_at,
                config.num_steps,
            )
        return set()

    def _roll_back(self) -> None:
        run = self._run
        with self._clock.paused("restore"), self._watchdog.paused():
            self._clock.lose(run.roll_back())
        self._writer.rewind(run.step)
        logging.error(
            "Rolled back to step %d; resumes with batch %d.", run.step, run.position
        )

    @contextlib.contextmanager
    def _logged_if_it_fails(self, metrics: dict[str, Any]) -> Iterator[None]:
        """Writes the line of a step that ends the run."""
        try:
            yield
        except Exception:
            self._writer.write(self._run.step, metrics)
            raise

    @contextlib.contextmanager
    def _saves_finished(self) -> Iterator[None]:
        """Waits for saves in progress before an error ends the run."""
        try:
            yield
        except Exception:
            with self._watchdog.paused():
                self._run.close(keeps_copies=True)
            raise


def evaluate(run: run_lib.Run) -> tuple[dict[str, float], bool]:
    """Returns figures of eval_suites and of the stage, and whether the latter came.

    Those of the stage may come with a later step's metrics instead.
    """
    figures: dict[str, float] = {}
    is_last = run.step == run.config.num_steps
    is_whole = is_last or not run.feed.evaluate_beside(run.params, run.position)
    if is_whole:
        figures = run.feed.evaluate(run.params, run.position, run.to_devices)
    figures |= suites.evaluate(run.config, run.params, run.feed.tokenizer)
    return figures, is_whole


def _without_figures(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns all but those of an evaluation, which may be of an earlier step."""
    return {k: value for k, value in metrics.items() if not k.startswith("eval/")}


def write_sample(run: run_lib.Run) -> str:
    """Writes a sample text of the stage to samples/STEP.txt."""
    text = run.feed.sample(run.params)
    folder = run.workdir / "samples"
    folder.mkdir(exist_ok=True)
    (folder / f"{run.step}.txt").write_text(text, encoding="utf-8")
    logging.info("Sample after step %d:\n%s", run.step, text)
    return text


def _due(step: int, config: config_lib.TrainConfig) -> set[str]:
    """Returns what is due after a step; all of it is due after the last one."""
    is_last = step == config.num_steps
    due = set()
    if is_last or _is_due(step, config.eval_every):
        due.add("evaluate")
    if config.sample_tokens and (is_last or _is_due(step, config.sample_every)):
        due.add("sample")
    if is_last or _is_due(step, config.checkpoint_every):
        due.add("save")
    if _is_due(step, config.host_copy_every):
        due.add("copy")
    return due


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
