"""Grammars as constraints: JSON schemas, regular expressions, Lark and fixed choices.

The library llguidance (extra `structured`) finds the tokens that a grammar allows.
"""

import collections
import dataclasses
import functools
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.inference import constraints

Kind = Literal["json_schema", "regex", "lark", "grammar", "choice"]

# Blanks between the values of a JSON text: one, or a new line with an indent. Without a
# bound, a model that always prefers a blank would never end.
_BLANKS = {"whitespace_pattern": r"\x20?|\x0A\x20{0,32}"}
_MAX_KEPT = 64  # compiled grammars
_MAX_SHOWN = 300  # characters of an error


class Source(NamedTuple):
    """A grammar, before it is compiled.

    Attributes:
      kind: "grammar" is a text in Lark's form or in GBNF.
      value: a JSON schema, a text, or for "choice" a list of texts.
    """

    kind: Kind
    value: Any


class GrammarError(config_lib.InputError):
    """Raised if a grammar cannot be used."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The constraint that the texts of a grammar make.

    Attributes:
      vocab_size: ids that masks have bits for.
      ends: ids that end a complete text.
    """

    vocab_size: int
    ends: frozenset[int]
    _matcher: Any  # llguidance.LLMatcher, before the first token

    def start(self) -> constraints.Matcher:
        """Returns a matcher of the empty text."""
        return _Matcher(self, self._matcher.deep_copy())


class Grammars:
    """Compiles grammars for one tokenizer; any thread may."""

    def __init__(self, tokenizer: tokenizer_lib.Tokenizer, vocab_size: int) -> None:
        """Compiles nothing yet.

        Args:
          tokenizer: of the ids.
          vocab_size: of the model, at least the tokenizer's.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._kept: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def compile(self, sources: Sequence[Source], ends: frozenset[int]) -> Grammar:
        """Returns the constraint of texts that follow one of several grammars.

        Args:
          sources: at least one.
          ends: ids that end a complete text.

        Raises:
          GrammarError: a source is no such grammar, or llguidance is missing.
        """
        key = json.dumps(sources)
        with self._lock:
            matcher = self._kept.get(key)
        if matcher is None:
            matcher = self._compiled(sources)
            with self._lock:
                self._kept[key] = matcher
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
        return Grammar(self._vocab_size, ends, matcher)

    def _compiled(self, sources: Sequence[Source]) -> Any:
        """Returns llguidance's matcher of the empty text."""
        library = _library()
        parts = [_part(library, source) for source in sources]
        if len(parts) > 1:
            named = [{**part, "name": f"part_{i}"} for i, part in enumerate(parts)]
            rule = " | ".join(f"@{part['name']}" for part in named)
            parts = [{"name": "main", "lark_grammar": f"start: {rule}"}, *named]
        text = json.dumps({"grammars": parts})
        matcher = library.LLMatcher(self._library_tokenizer, text, log_level=0)
        if matcher.is_error():
            raise GrammarError(_shown(matcher.get_error()))
        return matcher

    @functools.cached_property
    def _library_tokenizer(self) -> Any:
        """Returns the vocabulary as llguidance knows it."""
        library = _library()
        wrapper = library.TokenizerWrapper(_Vocabulary(self._tokenizer))
        return library.LLTokenizer(wrapper)


class _Vocabulary:
    """The attributes that llguidance reads of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: tokenizer_lib.Tokenizer) -> None:
        """Takes the bytes of all ids; those without bytes have names."""
        self._tokenizer, self.eos_token_id = tokenizer, tokenizer.eos_id
        names = {id: name for name, id in tokenizer.special_ids.items()}
        pieces = tokenizer.pieces
        self.special_token_ids = [id for id, piece in enumerate(pieces) if not piece]
        self.tokens = [
            piece or names.get(id, f"<|unused_{id}|>").encode()
            for id, piece in enumerate(pieces)
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        """Returns the ids of a text."""
        text = text.decode() if isinstance(text, bytes) else text
        return self._tokenizer.encode(text)


class _Matcher:
    """A matcher of `Grammar`."""

    pause = None

    def __init__(self, grammar: Grammar, matcher: Any) -> None:
        """Takes the library's matcher."""
        self._grammar, self._matcher = grammar, matcher
        self._ends = constraints.mask_of(grammar.ends, grammar.vocab_size)

    def allowed(self) -> constraints.Mask:
        """Returns the tokens that may follow."""
        if self._matcher.is_stopped():
            self._check()
            return self._ends
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check()
        mask = np.zeros_like(self._ends)
        size = min(len(mask), len(found))
        mask[:size] = found[:size]
        mask &= ~self._ends
        if self._matcher.is_accepting():
            mask |= self._ends
        if not mask.any():
            raise constraints.ConstraintError("The grammar leaves no token to draw.")
        return mask

    def consume(self, ids: Sequence[int]) -> None:
        """Appends tokens to the text."""
        ids = [id for id in ids if id not in self._grammar.ends]
        self._matcher.consume_tokens(ids)
        self._check()

    def rollback(self, number: int) -> None:
        """Removes the last tokens from the text."""
        self._matcher.rollback(number)
        self._check()

    def _check(self) -> None:
        """Raises ConstraintError if the library cannot continue."""
        if self._matcher.is_error():
            why = _shown(self._matcher.get_error())
            raise constraints.ConstraintError(f"The grammar cannot be followed: {why}")


def _part(library: Any, source: Source) -> dict[str, Any]:
    """Returns one grammar in llguidance's form.

    Raises:
      GrammarError: it has another type than its kind says.
    """
    kind, value = source
    if kind == "json_schema":
        return {"json_schema": with_blanks(value)}
    if kind == "choice":
        return {"lark_grammar": f"start: {alternatives(value)}"}
    if not isinstance(value, str):
        raise GrammarError(f"it must be a text, got {_shown(repr(value))}")
    if kind == "regex":
        return {"lark_grammar": f"start: {regex(value)}"}
    try:
        text = value if kind == "lark" else library.grammar_from(kind, value)
    except ValueError as error:
        raise GrammarError(_shown(error)) from error
    return {"lark_grammar": text}


def with_blanks(schema: Any) -> Any:
    """Returns a JSON schema that bounds the blanks between values.

    Raises:
      GrammarError: it is neither an object nor a bool.
    """
    if not isinstance(schema, Mapping | bool):
        raise GrammarError(
            f"a JSON schema must be an object, got {_shown(repr(schema))}"
        )
    return {**schema, "x-guidance": _BLANKS} if isinstance(schema, Mapping) else schema


def alternatives(texts: Any) -> str:
    """Returns the texts as alternatives of a Lark rule.

    Raises:
      GrammarError: there is none, or one is empty or no text.
    """
    if not (isinstance(texts, list | tuple) and texts) or not all(
        isinstance(text, str) and text for text in texts
    ):
        raise GrammarError("it must list at least one text, none of them empty")
    return " | ".join(literal(text) for text in dict.fromkeys(texts))


def literal(text: str) -> str:
    """Returns a text as a string of Lark's form."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """Returns a regular expression as one of Lark's form.

    Raises:
      GrammarError: its characters have no UTF-8.
    """
    try:
        return f"/{_library().regex_to_lark(pattern)}/"
    except ValueError as error:
        raise GrammarError(_shown(error)) from error


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """Returns a Lark expression for the JSON texts of a schema."""
    return f"%json {json.dumps(with_blanks(schema), ensure_ascii=False)}"


def _shown(error: Any) -> str:
    """Returns an error in few characters."""
    text = str(error).strip()
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _library() -> Any:
    """Returns llguidance.

    Raises:
      GrammarError: it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise GrammarError(
            "grammars need llguidance; install it with pip install "
            "'glm5_jax[structured]'"
        ) from error
    return llguidance
