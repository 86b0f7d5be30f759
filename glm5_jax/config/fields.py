"""Builds typed configs from trees of values, and reports all errors at once."""

import ast
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from glm5_jax.config import checks

Config = TypeVar("Config")


# Errors that `ast` and `math` raise for malformed values and very large numbers.
_MISTYPED = (
    *(TypeError, ValueError, SyntaxError),
    *(OverflowError, RecursionError, MemoryError),
)
_MAX_LENGTH = 10_000  # characters of a number or a tuple
_MAX_SHOWN = 60  # characters of a value in a message


class Text(str):
    """A value from the command line, not yet converted to its field's type."""


def build(cls: type[Config], given: Mapping[str, Any]) -> Config:
    """Checks values and builds the dataclass `cls` from them.

    Args:
        cls: a dataclass whose sections are dataclasses.
        given: values by dotted path; a missing one takes its default.

    Raises:
        InputError: has a line for every unknown field, wrong type and broken rule.
    """
    hints = {path: hint for path, hint, _ in of(cls)}
    values, failed, errors = {}, set(), []
    for path, value in given.items():
        if path not in hints:
            errors.append(_unknown_field(path, list(hints)))
            continue
        try:
            values[path] = _typed(value, hints[path])
        except _MISTYPED:
            failed.add(path)
            errors.append(_wrong_type(path, value, hints[path]))
    config = _built(cls, "", values, failed, errors)
    if errors:
        raise checks.InputError("\n".join(errors))
    return config


def of(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields dotted path, type and default of every field; sections have none."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from of(hint, path + ".")
        else:
            yield path, hint, field.default


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted path and value of every leaf."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def without_none(hint: Any) -> Any:
    """Returns X for `X | None`, and any other type unchanged."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    (kind,) = (t for t in typing.get_args(hint) if t is not type(None))
    return kind


def describe(hint: Any) -> str:
    """Returns a type in words."""
    kind = without_none(hint)
    if typing.get_origin(kind) is Literal:
        words = "one of " + ", ".join(typing.get_args(kind))
    elif typing.get_origin(kind) is tuple:
        kinds = {int: "integers such as (1, 2)", str: "texts such as ('a', 'b')"}
        words = kinds.get(typing.get_args(kind)[0], "rows such as ((1, 2), (3, 4))")
    else:
        names = {bool: "true or false", int: "an integer", float: "a number"}
        words = names.get(kind, "text")
    return words if kind is hint else f"{words}, or None"


def did_you_mean(
    given: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6
) -> str:
    """Returns " Did you mean ...?" with the nearest name, or an empty text."""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {prefix}{close[0]}?" if close else ""


def _built(
    cls: type, prefix: str, values: dict[str, Any], failed: set[str], errors: list[str]
) -> Any:
    """Builds `cls` and its sections, and adds to `failed` and `errors`.

    A field or section that failed keeps its default, so that the rules of the others
    are checked too. Messages that mention it are dropped, as they may be about the
    default.
    """
    hints = typing.get_type_hints(cls)
    kwargs = {}
    for name, hint in hints.items():
        path = prefix + name
        if dataclasses.is_dataclass(hint):
            kwargs[name] = _built(hint, path + ".", values, failed, errors)
        elif path in values:
            kwargs[name] = values[path]
    suspects = [name for name in hints if prefix + name in failed]
    try:
        config = cls(**{k: v for k, v in kwargs.items() if k not in suspects})
    except checks.InputError as error:
        config = None
        failed.add(prefix[:-1])
        mentions = re.compile(rf"\b({'|'.join(suspects)})\b") if suspects else None
        for line in str(error).splitlines():
            if not (mentions and mentions.search(line)):
                errors.append(prefix + line)
    if suspects:
        failed.add(prefix[:-1])
    return config


def _typed(value: Any, hint: Any) -> Any:
    """Converts a value to a type; raises TypeError or ValueError if it cannot."""
    kind = without_none(hint)
    if isinstance(value, Text):
        value = _parsed(value, kind, is_optional=kind is not hint)
    if value is None and kind is not hint:
        return None
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        fits = value in options
    elif origin is tuple:  # tuple[int, ...]
        fits = isinstance(value, list | tuple)
        value = tuple(_typed(v, options[0]) for v in value) if fits else value
    elif kind is float:
        fits = type(value) in (int, float) and math.isfinite(value)
        value = float(value) if fits else value
    else:
        fits = type(value) is kind  # a bool is no int
        if kind is str and fits:
            value.encode()  # a lone surrogate is no text
        if kind is int and fits and abs(value) >= 2**63:
            raise OverflowError(value.bit_length())
    if not fits:
        raise TypeError(value)
    return value


def _parsed(text: str, kind: Any, is_optional: bool) -> Any:
    """Returns the Python value that a text spells."""
    if is_optional and text in ("None", "none", "null"):
        return None
    if kind is str or typing.get_origin(kind) is Literal:
        return str(text)
    if kind is bool:
        text = text.capitalize()
    if len(text) > _MAX_LENGTH:
        raise ValueError("too long")
    return ast.literal_eval(text.strip())


def _wrong_type(path: str, value: Any, hint: Any) -> str:
    """Returns a message with the type that a field expects and the value it got."""
    text = str(value) if isinstance(value, str) else _text_of(value)
    shown = repr(text) if isinstance(value, str) else text
    if len(shown) > _MAX_SHOWN:
        shown = f"{shown[:_MAX_SHOWN]}..."
    options = typing.get_args(without_none(hint))
    guess = did_you_mean(text[:_MAX_SHOWN], [o for o in options if isinstance(o, str)])
    return f"{path} must be {describe(hint)}, got {shown}.{guess}"


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _initials(path: str) -> str:
    """Returns the initials of a field's name: "lr" for optim.learning_rate."""
    return "".join(word[:1] for word in _leaf(path).split("_"))


def _text_of(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits
        return f"a large {type(value).__name__}"


def _unknown_field(path: str, known: list[str]) -> str:
    """Returns a message that a path names no field, with the nearest one."""
    inside = [k for k in known if k.startswith(path + ".")]
    if inside:
        return f"{path} is a section, not a value; set its fields, e.g. {inside[0]}."
    leaf = _leaf(path)
    same = [k for k in known if leaf in (_leaf(k), _initials(k))]
    guess = did_you_mean(path, same or known, cutoff=0.0 if same else 0.6)
    return f"{path} is no field of the config.{guess or ' --help lists them.'}"
