"""Metrics that studies share, and measures of checkpoints by suites of evals."""

from collections.abc import Mapping

from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.ablations import study

SPEED = study.Metric(
    label="speed",
    key="perf/tokens_per_cpu_second",  # which other programs do not slow down
    unit="tokens per CPU second",
    better="higher",
    digits=0,
)

ATTENTION_LOGIT = study.Metric(
    label="largest attention logit",
    key="attention_logits/largest",
    unit="nats",
    plot="curve",
    digits=1,
)


def held_out(plot: study.Plot) -> study.Metric:
    """Returns bits per byte of held-out text, from the evaluations of a run."""
    return study.Metric(
        label="held-out",
        key="eval/bits_per_byte",
        unit="bits per byte",
        better="lower",
        plot=plot,
    )


def suites(*names: str, length: int, num_tasks: int = 16) -> study.Measure:
    """Returns a measure whose keys are SUITE/FIGURE.

    All arms and seeds get the same tasks. A suite that does not fit an arm's model,
    such as recall without an indexer, has no figures there.

    Args:
      *names: of suites.
      length: tokens of a task or of a row of held-out text.
      num_tasks: tasks, or rows.
    """

    def measure(checkpoint: study.Checkpoint) -> Mapping[str, float]:
        from glm5_jax.evals import runner, subject  # jax: after the input is checked

        model = subject.load(checkpoint.path, checkpoint.overrides)
        figures = {}
        for name in names:
            try:
                runner.require([name], model.config, True, [length])
            except config_lib.InputError as error:
                logging.warning("%s is not measured: %s", checkpoint.path, error)
                continue
            for result in runner.run(
                model, [name], lengths=[length], num_tasks=num_tasks
            ):
                for figure, interval in result.figures.items():
                    figures[f"{name}/{figure}"] = interval.mean
        return figures

    return measure
