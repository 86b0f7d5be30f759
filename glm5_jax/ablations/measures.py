"""Metrics that studies share, and measures of checkpoints by suites of evals."""

from collections.abc import Mapping

from glm5_jax.ablations import study

SPEED = study.Metric(
    label="speed",
    key="perf/tokens_per_cpu_second",  # which other programs do not slow down
    unit="tokens per CPU second",
    better="higher",
    digits=0,
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

    All arms and seeds get the same tasks.

    Args:
      *names: of suites, or of groups of them.
      length: tokens of a task or of a row of held-out text.
      num_tasks: tasks, or rows.
    """

    def measure(checkpoint: study.Checkpoint) -> Mapping[str, float]:
        from glm5_jax.evals import runner, subject  # jax: after the input is checked

        model = subject.load(checkpoint.path, checkpoint.overrides)
        results = runner.run(model, names, lengths=[length], num_tasks=num_tasks)
        return {
            f"{result.suite}/{name}": interval.mean
            for result in results
            for name, interval in result.figures.items()
        }

    return measure
