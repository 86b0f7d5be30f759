"""Shows people a rendered conversation: which tokens are special or trained."""

import itertools

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates

_RESET, _TRAINED, _SPECIAL = "\x1b[0m", "\x1b[32m", "\x1b[1;4m"


def view(
    rendered: templates.Rendered,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    in_color: bool,
    with_ids: bool,
) -> str:
    """Returns the text of a rendered conversation.

    In colour, trained tokens are green, special ones bold and underlined. Without
    colour, each line is a run of trained tokens ("+ ") or of untrained ones ("  "),
    with line ends and other control characters escaped.

    Args:
        rendered: tokens and mask.
        tokenizer: the tokenizer of these tokens.
        in_color: uses ANSI escapes.
        with_ids: writes "·ID " after each token.
    """
    names = set(tokenizer.special_ids.values())
    tokens = zip(rendered.tokens, rendered.mask, strict=True)
    lines = []
    for trained, run in itertools.groupby(tokens, lambda token: token[1]):
        line = ""
        ids = [token for token, _ in run]
        for is_special, group in itertools.groupby(ids, names.__contains__):
            text = _text(list(group), tokenizer, with_ids, kept="\n\t" * in_color)
            if in_color:
                text = _TRAINED * trained + _SPECIAL * is_special + text + _RESET
            line += text
        lines.append(line if in_color else ("+ " if trained else "  ") + line)
    return "".join(lines) if in_color else "\n".join(lines)


def _text(
    ids: list[int], tokenizer: tokenizer_lib.Tokenizer, with_ids: bool, *, kept: str
) -> str:
    pieces = [(tokenizer.spell([i]), f"·{i} ") for i in ids]
    if not with_ids:
        pieces = [(tokenizer.spell(ids), "")]
    return "".join(_escaped(t, kept) + end for t, end in pieces)


def _escaped(text: str, kept: str) -> str:
    """Escapes control characters, except those to keep."""
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)
