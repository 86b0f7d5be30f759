"""Shows a conversation as a model is trained on it: its tokens and its loss mask.

python -m glm5_jax.chat --tokenizer=byte_chat --messages=FILE.jsonl --template=glm5.2

On a terminal trained tokens are green, special ones bold and underlined. Elsewhere a
line is a run of trained ("+ ") or of other ("  ") tokens.
"""

import sys
from typing import cast

from absl import flags

from glm5_jax import command_line

_TOKENIZER = flags.DEFINE_string(
    "tokenizer", "byte_chat", "byte_chat, or the path of a tokenizer.json."
)
_MESSAGES = flags.DEFINE_string(
    "messages", None, "JSONL file, or folder, of conversations.", required=True
)
_INDEX = flags.DEFINE_integer("index", 0, "Which conversation, from 0.")
_TEMPLATE = flags.DEFINE_enum(
    "template", "glm5", ["glm5", "glm5.1", "glm5.2"], "Version of the template."
)
_ENABLE_THINKING = flags.DEFINE_bool(
    "enable_thinking", True, "Asks for turns with a thought."
)
_CLEAR_THINKING = flags.DEFINE_bool(
    "clear_thinking", True, "Drops thoughts before the last user message."
)
_LENGTH = flags.DEFINE_integer(
    "length", 0, "Truncates to a training row of N tokens; 0: no truncation.", 0
)
_COLOR = flags.DEFINE_enum("color", "auto", ["auto", "always", "never"], "Colours.")
_IDS = flags.DEFINE_bool("ids", False, "Shows the id of each token.")


def main(arguments: command_line.Arguments) -> None:
    """Prints one conversation."""
    del arguments
    from glm5_jax.data import tokenizer as tokenizer_lib
    from glm5_jax.data.chat import conversations, templates, view

    used = tokenizer_lib.named(_TOKENIZER.value)
    version = cast(templates.Version, _TEMPLATE.value)
    template = templates.Template(
        used, version, _ENABLE_THINKING.value, _CLEAR_THINKING.value
    )
    shown = conversations.pick(_MESSAGES.value, _INDEX.value)
    rendered = template.render(shown.messages, shown.tools, end=True)
    if _LENGTH.value:
        rendered = template.truncate(rendered, _LENGTH.value + 1)
    is_terminal = _COLOR.value == "auto" and sys.stdout.isatty()
    in_color = _COLOR.value == "always" or is_terminal
    print(view.view(rendered, used, in_color=in_color, with_ids=_IDS.value))
    size, trained = len(rendered.tokens), sum(rendered.mask)
    print(f"{size} tokens, {trained} of them trained", file=sys.stderr)


if __name__ == "__main__":
    command_line.run(main, takes_config=False)
