"""Continues text or token ids.

python -m glm5_jax.generate --checkpoint=runs/NAME --prompt="class" --max_new_tokens=64
python -m glm5_jax.generate --checkpoint=FOLDER --chat --prompt="What is 2 + 3?"

--chat alone holds a conversation: in a terminal, or a line of the input at a time.
"""

from collections.abc import Sequence
from typing import Any, cast

from absl import flags, logging

from glm5_jax import command_line, compile_cache, quantize_flag
from glm5_jax.processes import flags as process_flags

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Run, step or Hugging Face folder.", required=True
)
_PROMPT = flags.DEFINE_string("prompt", None, "Text to continue.")
_CHAT = flags.DEFINE_flag(
    command_line.OptionalEnum(
        "chat",
        ["auto", "glm5", "glm5.1", "glm5.2"],
        "Sends --prompt as a user's message and prints the answer; without a prompt, "
        "holds a conversation. The value is the chat template's; auto is the run's.",
    )
)
_SPECIAL_TOKENS = flags.DEFINE_bool(
    "special_tokens", False, "Reads <|user|> and the like in --prompt as their ids."
)
_TOKENS = flags.DEFINE_string("tokens", None, "Ids to continue: .npy, [T] or [N, T].")
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", None, "Tokens to add; default: 128, in a conversation what fits."
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", None, "0: the likeliest; default: generation_config.json's, or 1."
)
_TOP_P = flags.DEFINE_float(
    "top_p", None, "Share to sample from; default: generation_config.json's, or 1."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the random numbers.")
_NUM_DRAFTS = flags.DEFINE_integer("num_drafts", 0, "Tokens to draft in a round.")
_IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Continues after end of text.")
_OUT = flags.DEFINE_string("tokens_out", None, "Path for all ids: .npy.")
for module in (compile_cache, quantize_flag, process_flags):  # --help shows them
    flags.adopt_module_key_flags(module)


def main(arguments: command_line.Arguments) -> int | None:
    """Prints each prompt with its continuation, or holds a conversation."""
    from glm5_jax.weights import loading

    overrides = loading.overrides_of(arguments, alone=False)
    talks = bool(_CHAT.value) and _PROMPT.value is None and _TOKENS.value is None
    mesh = loading.mesh_config_of(overrides)
    return process_flags.run(lambda: _run(overrides, talks), mesh, alone=talks)


def _run(overrides: Sequence[command_line.Override], talks: bool) -> None:
    from glm5_jax.inference import commands

    logging.set_verbosity(logging.INFO)  # on stderr
    compile_cache.enable()
    sampling = commands.Sampling(
        max_new_tokens=_MAX_NEW_TOKENS.value,
        temperature=_TEMPERATURE.value,
        top_p=_TOP_P.value,
        seed=_SEED.value,
        ignore_eos=_IGNORE_EOS.value,
        num_drafts=_NUM_DRAFTS.value,
        scheme=quantize_flag.SCHEME.value,
    )
    where, chat = (_CHECKPOINT.value, overrides), cast(Any, _CHAT.value)
    if talks:
        commands.converse(*where, chat, sampling)
        return
    prompt = commands.Prompt(
        text=_PROMPT.value,
        tokens=_TOKENS.value,
        chat=chat,
        special_tokens=_SPECIAL_TOKENS.value,
    )
    show = lambda texts: print(*texts, sep="\n")
    commands.generate(*where, prompt, sampling, _OUT.value, show)


if __name__ == "__main__":
    command_line.run(main, only_model=True)
