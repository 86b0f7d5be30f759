"""Suites of evals in a run's evaluations: config.eval_suites."""

from collections.abc import Sequence

import jax

from glm5_jax import config as config_lib
from glm5_jax.config import checks
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.evals import record, report, runner, subject
from glm5_jax.training import computed


def require(config: config_lib.TrainConfig) -> None:
    """Checks, before anything is compiled, that the suites fit the run.

    Raises:
      InputError: one does not exist or does not fit the model or the length.
    """
    if not config.eval_suites:
        return
    checks.require(
        (
            jax.process_count() == 1,
            "eval_suites needs a run of one process; evaluate the checkpoints of a "
            "larger one by python -m glm5_jax.evaluate --suite=NAME.",
        )
    )
    runner.require(config.eval_suites, config.model, True, _lengths(config))


def evaluate(
    config: config_lib.TrainConfig, params: dict, tokenizer: tokenizer_lib.Tokenizer
) -> dict[str, float]:
    """Returns the figures of every suite as eval/SUITE/LENGTH/FIGURE.

    LENGTH is left out of those of suites without one.
    """
    if not config.eval_suites:
        return {}
    model = record.Subject(
        config=config.model,
        params=computed.measured(params, config),
        tokenizer=tokenizer,
        corpus=subject.corpus_of(config),
    )
    results = runner.run(
        model,
        config.eval_suites,
        lengths=_lengths(config),
        num_tasks=config.eval_suite_tasks,
        seed=config.seed,
    )
    return {
        _name(result, figure): interval.mean
        for result in results
        for figure, interval in result.figures.items()
    }


def _name(result: report.Result, figure: str) -> str:
    """Returns the name of a figure in the metrics."""
    parts = "eval", result.suite, result.length, figure
    return "/".join(str(part) for part in parts if part is not None)


def _lengths(config: config_lib.TrainConfig) -> Sequence[int]:
    return config.eval_suite_lengths or (config.data.sequence_length,)
