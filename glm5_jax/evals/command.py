"""Implements the suites of the command evaluate."""

import dataclasses
import json
import sys
from collections.abc import Sequence

from absl import logging

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.evals import report, runner, subject
from glm5_jax.inference import placement
from glm5_jax.weights import loading


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suites:
    """The flags of evaluate that are about suites.

    Attributes:
      names: of suites.
      lengths: of tasks; () takes the length that the model was trained with.
      num_tasks: of a suite and length.
      seed: of the tasks.
      out: folder for answers and results; None takes evals/ in the model's folder.
      source: held-out text; None takes that of the training run.
      questions: file of suite multiple_choice.
      scheme: of quantization.
    """

    names: Sequence[str]
    lengths: Sequence[str] = ()
    num_tasks: int = runner.NUM_TASKS
    seed: int = 0
    out: str | None = None
    source: str | None = None
    questions: str | None = None
    scheme: str = config_lib.STORED


def evaluate(
    checkpoint: str, overrides: Sequence[command_line.Override], suites: Suites
) -> None:
    """Prints one JSON line a suite and length, and writes the table.

    Raises:
      InputError: see `loading.load_model` and `runner.run`; nothing is compiled then.
    """
    mesh, overrides = loading.mesh_of(overrides)
    source = loading.find(checkpoint)
    config = loading.read_config(source, overrides)
    lengths = _lengths(suites.lengths) or [loading.context_length(checkpoint, config)]
    has_tokenizer = (source.folder / "tokenizer.json").exists()
    runner.require(suites.names, config, has_tokenizer, lengths, suites.questions)
    out = source.folder / "evals" if suites.out is None else suites.out
    model = subject.load(checkpoint, overrides, mesh, suites.scheme)
    logging.info("Compiling and answering ...")
    with placement.using(mesh):
        results = runner.run(
            model,
            suites.names,
            lengths=lengths,
            num_tasks=suites.num_tasks,
            seed=suites.seed,
            out=out,
            source=suites.source,
            questions=suites.questions,
            on_result=_print,
        )
    logging.info("The table is in %s/table.md:\n%s", out, report.table(results))


def _print(result: report.Result) -> None:
    sys.stdout.write(json.dumps(result.to_json()) + "\n")
    sys.stdout.flush()


def _lengths(texts: Sequence[str]) -> list[int]:
    try:
        return [int(text) for text in texts]
    except ValueError as error:
        raise config_lib.InputError(
            f"--suite_lengths must be numbers of tokens, as 256,512; got "
            f"{','.join(texts)}."
        ) from error
