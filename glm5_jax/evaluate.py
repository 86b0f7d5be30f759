"""Scores token ids or a text, or runs suites of tasks, and prints JSON lines.

python -m glm5_jax.evaluate --checkpoint=runs/NAME --text=README.md
python -m glm5_jax.evaluate --checkpoint=runs/NAME --suite=needle --suite_lengths=256

nll: mean negative log-likelihood of a token in nats; num_tokens: tokens scored;
bits_per_byte: of a text, as in training; num_bytes: UTF-8 bytes scored. A suite has one
line a length, with the mean and the 95% interval of each figure.
"""

import json
from collections.abc import Sequence

from absl import flags, logging

from glm5_jax import command_line, compile_cache, quantize_flag
from glm5_jax.processes import flags as process_flags

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Run, step or Hugging Face folder.", required=True
)
_TOKENS = flags.DEFINE_string("tokens", None, "Ids to score: .npy, [T] or [N, T].")
_TEXT = flags.DEFINE_string("text", None, "Text file to score.")
_LOGITS_OUT = flags.DEFINE_string(
    "logits_out", None, "Path for the logits: .npy, float32 [N, T, V]."
)
_SUITE = flags.DEFINE_list("suite", None, "Suites; docs/evaluation.md lists them.")
_SUITE_LENGTHS = flags.DEFINE_list(
    "suite_lengths", [], "Tokens of a task; default: the length of training."
)
_NUM_TASKS = flags.DEFINE_integer(
    "num_tasks", 100, "Tasks of a suite and length.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the tasks.", lower_bound=0)
_OUT = flags.DEFINE_string(
    "out", None, "Folder of answers and tables; default: evals/ in the model's folder."
)
_SOURCE = flags.DEFINE_string(
    "source", None, "Held-out text: python, a file or a folder; default: the run's."
)
_QUESTIONS = flags.DEFINE_string(
    "questions", None, "JSONL file of suite multiple_choice."
)
flags.mark_flags_as_mutual_exclusive(["suite", "tokens", "text"])
for module in (compile_cache, quantize_flag, process_flags):  # --help shows them
    flags.adopt_module_key_flags(module)


def main(arguments: command_line.Arguments) -> int | None:
    """Prints the scores."""
    from glm5_jax.weights import loading

    overrides, alone = loading.overrides_of(arguments, alone=False), bool(_SUITE.value)
    mesh = loading.mesh_config_of(overrides)
    return process_flags.run(lambda: _run(overrides), mesh, alone=alone)


def _run(overrides: Sequence[command_line.Override]) -> None:
    from glm5_jax.evals import command
    from glm5_jax.inference import commands

    logging.set_verbosity(logging.INFO)  # on stderr
    compile_cache.enable()
    if _SUITE.value is not None:
        suites = command.Suites(
            names=_SUITE.value,
            lengths=_SUITE_LENGTHS.value,
            num_tasks=_NUM_TASKS.value,
            seed=_SEED.value,
            out=_OUT.value,
            source=_SOURCE.value,
            questions=_QUESTIONS.value,
            scheme=quantize_flag.SCHEME.value,
        )
        command.evaluate(_CHECKPOINT.value, overrides, suites)
        return
    scores = commands.evaluate(
        _CHECKPOINT.value,
        overrides,
        tokens=_TOKENS.value,
        text=_TEXT.value,
        logits_out=_LOGITS_OUT.value,
        scheme=quantize_flag.SCHEME.value,
    )
    if scores:
        print(json.dumps(scores))


if __name__ == "__main__":
    command_line.run(main, only_model=True)
