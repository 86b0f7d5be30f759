"""What is measured after a stage: suites of evals, each answered once and kept.

WORKDIR/measured/STAGE/ holds every answer as soon as it is there, and STAGE.json the
figures and the seconds that they took.
"""

import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from glm5_jax import config as config_lib
from glm5_jax import files
from glm5_jax.evals import report as evals_report
from glm5_jax.evals import runner as evals_runner
from glm5_jax.evals import subject as subject_lib
from glm5_jax.recipes import record

FOLDER = "measured"

Figures = dict[str, float]


def measure(
    measures: Sequence[record.Measure], folder: pathlib.Path, seed: int
) -> Mapping[str, Any]:
    """Measures the model of a finished stage, unless that is done.

    Args:
      measures: suites, lengths and numbers of tasks.
      folder: of the stage's run.
      seed: of the tasks.

    Returns:
      The content of the stage's file: figures by name, and seconds.
    """
    path = _path(folder)
    if path.is_file() or not measures:
        return read(folder)
    began, figures = time.perf_counter(), {}
    model = subject_lib.load(folder)
    for number, one in enumerate(measures, 1):
        logging.info("Measuring %s at %s ...", ", ".join(one.suites), one.lengths)
        results = evals_runner.run(
            model,
            one.suites,
            lengths=one.lengths,
            num_tasks=one.num_tasks,
            seed=seed,
            out=path.with_suffix("") / str(number),
        )
        for result in results:
            for name, interval in result.figures.items():
                figures[_name(result, name)] = [*interval]
    content = {"seconds": time.perf_counter() - began, "figures": figures}
    files.write_text(path, json.dumps(content, indent=2) + "\n")
    return content


def require(measures: Sequence[record.Measure], config: config_lib.ModelConfig) -> None:
    """Checks, before anything is trained, that suites fit a model.

    Raises:
      InputError: a suite does not exist, or does not fit the model or the length.
    """
    for one in measures:
        evals_runner.require(one.suites, config, True, one.lengths)


def read(folder: pathlib.Path) -> Mapping[str, Any]:
    """Returns what was measured after a stage; nothing if nothing was."""
    path = _path(folder)
    if not path.is_file():
        return {"seconds": 0.0, "figures": {}}
    return json.loads(path.read_text(encoding="utf-8"))


def _name(result: evals_report.Result, figure: str) -> str:
    """Returns SUITE/LENGTH, and more where a suite has more than one figure."""
    parts = [result.suite, result.length]
    if figure not in ("accuracy", result.suite):
        parts.append(figure.removeprefix(f"{result.suite}/"))
    return "/".join(str(part) for part in parts if part is not None)


def _path(folder: pathlib.Path) -> pathlib.Path:
    return folder.parent / FOLDER / f"{folder.name}.json"
