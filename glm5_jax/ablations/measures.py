"""Metrics that studies share, and measures of checkpoints by suites of evals."""

import dataclasses
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

# Suites of `Suites`, and their figures. A model of scale tiny finds no needles.
TEXT = ("bits_per_byte",)
TEXT_AND_NEEDLE = ("bits_per_byte", "needle")
BITS_PER_BYTE = study.Metric(
    label="held-out",
    key="bits_per_byte/all",
    unit="bits per byte",
    better="lower",
    plot="arms",
)
NEEDLE = study.Metric(
    label="needle",
    key="needle/accuracy",
    unit="share found",
    better="higher",
    digits=2,
)

ATTENTION_LOGIT = study.Metric(
    label="largest attention logit",
    key="attention_logits/largest",
    unit="nats",
    better="lower",
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suites:
    """A measure by suites of evals, whose keys are SUITE/FIGURE.

    All arms and seeds get the same tasks. A suite that does not fit an arm's model,
    such as recall without an indexer, has no figures there.
    """

    names: tuple[str, ...]
    length: int  # tokens of a task, or of a row of held-out text
    num_tasks: int = 16

    def require_known(self) -> None:
        """Checks, before anything is trained, that the suites exist.

        Raises:
          InputError: one does not.
        """
        from glm5_jax.evals import catalogue  # jax

        catalogue.find(self.names)

    def __call__(self, checkpoint: study.Checkpoint) -> Mapping[str, float]:
        """Returns the mean of every figure."""
        from glm5_jax.evals import runner, subject  # jax: after the input is checked

        figures: dict[str, float] = {}
        if not self.names:
            return figures
        model = subject.load(checkpoint.path, checkpoint.overrides)
        for name in self.names:
            try:
                runner.require([name], model.config, True, [self.length])
            except config_lib.InputError as error:
                logging.warning("%s: %s", checkpoint.path, error)
                continue
            [result] = runner.run(
                model, [name], lengths=[self.length], num_tasks=self.num_tasks
            )
            for figure, interval in result.figures.items():
                figures[f"{name}/{figure}"] = interval.mean
        return figures
