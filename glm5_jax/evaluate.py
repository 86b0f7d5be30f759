"""Scores token ids or a text, and prints one JSON line.

python -m glm5_jax.evaluate --checkpoint=runs/NAME --text=README.md

nll: mean negative log-likelihood of a token in nats; num_tokens: tokens scored;
bits_per_byte: of a text, as in training; num_bytes: UTF-8 bytes scored.
"""

import json

from absl import flags, logging

from glm5_jax import command_line, compile_cache

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Run, step or Hugging Face folder.", required=True
)
_TOKENS = flags.DEFINE_string("tokens", None, "Ids to score: .npy, [T] or [N, T].")
_TEXT = flags.DEFINE_string("text", None, "Text file to score.")
_LOGITS_OUT = flags.DEFINE_string(
    "logits_out", None, "Path for the logits: .npy, float32 [N, T, V]."
)
flags.adopt_module_key_flags(compile_cache)  # --help shows them


def main(arguments: command_line.Arguments) -> None:
    """Prints the scores."""
    from glm5_jax.inference import commands
    from glm5_jax.weights import loading

    logging.set_verbosity(logging.INFO)  # on stderr
    compile_cache.enable()
    scores = commands.evaluate(
        _CHECKPOINT.value,
        loading.overrides_of(arguments),
        tokens=_TOKENS.value,
        text=_TEXT.value,
        logits_out=_LOGITS_OUT.value,
    )
    print(json.dumps(scores))


if __name__ == "__main__":
    command_line.run(main, only_model=True)
