"""Checks that a tokenizer keeps every text, of which a few texts are no proof.

A text without "q" does not show that a tokenizer has no token for it. So the parts of a
tokenizer are checked too: none may change or drop characters, and there must be a token
for every byte, and one token for every id.
"""

import collections
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from glm5_jax import config

# The bytes of texts in UTF-8; no text has the others.
BYTES = frozenset({*range(0xF5)} - {0xC0, 0xC1})
TEXTS = (
    "Def  f(x):\r\n\treturn 'naïve' # 漢字 🙂 12345\n",
    "e\u0301 \u212b \ufb01 \uff46",  # which normal forms change
    "\U0010ffff \ue000",  # which no vocabulary has
)
_BLANK = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_BYTE_LEVEL = {"type": "ByteLevel"}
# What cuts texts without dropping characters; some do with behavior "Removed".
_CUTTING = (
    *("ByteLevel", "Digits", "FixedLength", "Metaspace", "Punctuation", "Split"),
    "UnicodeScripts",
)
_MODELS = ("BPE", "Unigram")  # others have one token for all unknown words
_MAX_SHOWN = 5


def require(
    backend: tokenizers.Tokenizer,
    pieces: Sequence[bytes],
    keep: Callable[[str], str],
) -> None:
    """Checks that ids spell every text.

    Args:
        backend: the tokenizer.
        pieces: the bytes that each id stands for; none for special tokens.
        keep: encodes a text and decodes the ids.

    Raises:
        config.InputError: some text is changed; the message says by what.
    """
    made = ((text, keep(text)) for text in TEXTS)
    found = [f"makes {got!r} of {text!r}" for text, got in made if got != text][:1]
    found += _faults(backend, pieces)
    if found:
        raise config.InputError(
            f"The tokenizer must keep text unchanged (byte-level ones such as GLM-5's "
            f"do), but {'; '.join(found)}. Correct its tokenizer.json, or give another "
            f"one, 'bpe' or 'byte'."
        )


def require_declared_ids(backend: tokenizers.Tokenizer, text: str) -> None:
    """Checks that added tokens have the ids of their file.

    The library moves a token whose id another token has, or that leaves a gap.

    Args:
        backend: the tokenizer.
        text: its tokenizer.json.

    Raises:
        config.InputError: a token has another id.
    """
    for token in json.loads(text).get("added_tokens") or ():
        name, declared = token["content"], token["id"]
        if (got := backend.token_to_id(name)) != declared:
            raise config.InputError(
                f"The added token {name} is declared as {declared} in tokenizer.json, "
                f"where another token or a gap is, and would be {got}; give each token "
                f"an id of its own, without gaps."
            )


def without_merges_to(
    backend: tokenizers.Tokenizer, names: Collection[str]
) -> tokenizers.Tokenizer:
    """Returns a BPE in which no merge makes or takes a special token.

    Training merges the letters of a text to a token that the vocabulary has already,
    the special one too.

    Args:
        backend: the tokenizer; returned itself if it has no such merge.
        names: its special tokens.
    """
    tree = json.loads(backend.to_str())
    merges = tree["model"]["merges"]
    kept = [(a, b) for a, b in merges if not {a, b, a + b}.intersection(names)]
    if len(kept) == len(merges):
        return backend
    tree["model"]["merges"] = kept
    return tokenizers.Tokenizer.from_str(json.dumps(tree))


def _faults(backend: tokenizers.Tokenizer, pieces: Sequence[bytes]) -> Iterator[str]:
    """Yields the parts that lose some text, with a remedy where there is one."""
    kind = type(backend.model).__name__
    if kind not in _MODELS:
        yield f"its model {kind} has no tokens for unknown words"
    for part in _parts(backend.normalizer, "normalizers"):
        if part not in (_BLANK, _BYTE_LEVEL):
            yield (
                f"its normalizer {part['type']} changes characters (set normalizer to "
                f"null)"
            )
    for part in _parts(backend.pre_tokenizer, "pretokenizers"):
        if part.get("behavior") == "Removed" or part["type"] not in _CUTTING:
            yield f"its pre_tokenizer {part['type']} drops characters"
    missing = sorted(BYTES - {piece[0] for piece in pieces if len(piece) == 1})
    if missing:
        yield f"no token stands for {_listed(map(hex, missing))} (add them to vocab)"
    yield from _shared_ids(backend.get_vocab(with_added_tokens=True))
    for token in backend.get_added_tokens_decoder().values():
        if not token.special and (token.lstrip or token.rstrip):
            yield (
                f"its token {token.content!r} takes blanks around it (set its lstrip "
                f"and rstrip to false)"
            )


def _shared_ids(vocab: Mapping[str, int]) -> Iterator[str]:
    """Yields a fault if an id has several tokens."""
    names = collections.defaultdict(list)
    for token, i in vocab.items():
        names[i].append(token)
    shared = sorted(i for i, tokens in names.items() if len(tokens) > 1)
    if shared:
        first = _listed(map(repr, sorted(names[shared[0]])))
        yield f"ids stand for several tokens: {_listed(shared)} (the first: {first})"


def _listed(names: Iterable[object]) -> str:
    """Returns the first few, and the number of the others."""
    shown = [str(name) for name in names]
    more = [f"and {len(shown) - _MAX_SHOWN} more"] * (len(shown) > _MAX_SHOWN)
    return ", ".join([*shown[:_MAX_SHOWN], *more])


def _parts(part: Any, name: str) -> list[dict[str, Any]]:
    """Returns the settings of a part, or of the parts that it joins.

    Args:
        part: a normalizer or pre-tokenizer, or None.
        name: field of a sequence's parts.
    """
    todo = [] if part is None else [json.loads(part.__getstate__())]
    found = []
    while todo:
        tree = todo.pop(0)
        if tree["type"] == "Sequence":
            todo = [*tree[name], *todo]
        else:
            found.append(tree)
    return found
