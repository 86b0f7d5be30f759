"""Continues text or token ids.

python -m glm5_jax.generate --checkpoint=runs/NAME --prompt="class" --max_new_tokens=64
python -m glm5_jax.generate --checkpoint=FOLDER --chat=glm5 --prompt="What is 2 + 3?"
"""

from typing import cast

from absl import flags, logging

from glm5_jax import command_line, compile_cache

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Run, step or Hugging Face folder.", required=True
)
_PROMPT = flags.DEFINE_string("prompt", None, "Text to continue.")
_CHAT = flags.DEFINE_enum(
    "chat",
    None,
    ["glm5", "glm5.1", "glm5.2"],
    "Sends --prompt as a user's message in this version of the chat template, and "
    "prints the answer.",
)
_SPECIAL_TOKENS = flags.DEFINE_bool(
    "special_tokens", False, "Reads <|user|> and the like in --prompt as their ids."
)
_TOKENS = flags.DEFINE_string("tokens", None, "Ids to continue: .npy, [T] or [N, T].")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Tokens to add.")
_TEMPERATURE = flags.DEFINE_float(
    "temperature",
    None,
    "0 takes the likeliest token; default: generation_config.json's, or 1.",
)
_TOP_P = flags.DEFINE_float(
    "top_p",
    None,
    "Probability to sample from; default: generation_config.json's, or 1 (all).",
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the random numbers.")
_IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Continues after end of text.")
_TOKENS_OUT = flags.DEFINE_string(
    "tokens_out", None, "Path for the ids of prompt and continuation: .npy."
)
flags.adopt_module_key_flags(compile_cache)  # --help shows them


def main(arguments: command_line.Arguments) -> None:
    """Prints each prompt with its continuation."""
    from glm5_jax.data.chat import templates
    from glm5_jax.inference import commands
    from glm5_jax.weights import loading

    logging.set_verbosity(logging.INFO)  # on stderr
    compile_cache.enable()
    texts = commands.generate(
        _CHECKPOINT.value,
        loading.overrides_of(arguments),
        commands.Prompt(
            text=_PROMPT.value,
            tokens=_TOKENS.value,
            chat=cast(templates.Version | None, _CHAT.value),
            special_tokens=_SPECIAL_TOKENS.value,
        ),
        commands.Sampling(
            max_new_tokens=_MAX_NEW_TOKENS.value,
            temperature=_TEMPERATURE.value,
            top_p=_TOP_P.value,
            seed=_SEED.value,
            ignore_eos=_IGNORE_EOS.value,
        ),
        _TOKENS_OUT.value,
    )
    print(*texts, sep="\n")


if __name__ == "__main__":
    command_line.run(main, only_model=True)
