"""Continues text or token ids.

python -m glm5_jax.generate --checkpoint=runs/NAME --prompt="class" --max_new_tokens=64
"""

from absl import flags, logging

from glm5_jax import command_line, compile_cache

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Run, step or Hugging Face folder.", required=True
)
_PROMPT = flags.DEFINE_string("prompt", None, "Text to continue.")
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
_IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Goes on after the end of text.")
_TOKENS_OUT = flags.DEFINE_string(
    "tokens_out", None, "Where to write the ids of prompt and continuation: .npy."
)
flags.adopt_module_key_flags(compile_cache)  # --help shows them


def main(arguments: command_line.Arguments) -> None:
    """Prints each prompt with its continuation."""
    from glm5_jax.inference import commands, loading  # import jax: after the flags

    logging.set_verbosity(logging.INFO)  # on stderr
    compile_cache.enable()
    texts = commands.generate(
        _CHECKPOINT.value,
        loading.overrides_of(arguments),
        prompt=_PROMPT.value,
        tokens=_TOKENS.value,
        tokens_out=_TOKENS_OUT.value,
        ignore_eos=_IGNORE_EOS.value,
        max_new_tokens=_MAX_NEW_TOKENS.value,
        temperature=_TEMPERATURE.value,
        top_p=_TOP_P.value,
        seed=_SEED.value,
    )
    print(*texts, sep="\n")


if __name__ == "__main__":
    command_line.run(main, only_model=True)
