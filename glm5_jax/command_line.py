"""The command line that every entry point shares, and typed configs behind it.

    --config=configs/NAME.py[:variant] --config.a.b=value --flag=value

A config file defines `get_config(variant: str = "")` and returns a ConfigDict made by
`to_config_dict`; where it has a mapping VARIANTS, a variant must be one of its keys.
`resolve` turns a ConfigDict and the overrides into a frozen dataclass and reports
everything that is wrong with them at once.
"""

import ast
import dataclasses
import difflib
import json
import math
import pathlib
import re
import runpy
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import ml_collections
from absl import app, flags, logging
from ml_collections import config_dict

from glm5_jax import config as config_lib

Config = TypeVar("Config")
Override = tuple[str, str]  # dotted path below --config, text of its value


class _Text(str):
    """A value as the command line gave it: not yet of its field's type."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What the command line says about the config; other flags are in absl's FLAGS."""

    config: str | None = None  # "configs/x.py:variant"
    overrides: tuple[Override, ...] = ()

    def train_config(self) -> config_lib.TrainConfig:
        """Loads the config file and applies the overrides.

        Raises:
            InputError: --config is missing, or something in it is wrong.
        """
        if self.config is None:
            raise config_lib.InputError(
                "--config is missing; name a config file, e.g. "
                f"--config=configs/NAME.py.{_configs_in(pathlib.Path('configs'))}"
            )
        return resolve(load_config_file(self.config), self.overrides)


def to_config_dict(config: Any) -> ml_collections.ConfigDict:
    """Frozen dataclasses as a locked ConfigDict, which a config file can adjust."""
    hints = typing.get_type_hints(type(config))
    out = ml_collections.ConfigDict()
    for name, hint in hints.items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            value = to_config_dict(value)
        elif value is None:
            value = config_dict.placeholder(_without_none(hint))
        out[name] = value
    return out.lock()


def resolve(
    tree: ml_collections.ConfigDict | Mapping[str, Any],
    overrides: Iterable[Override] = (),
    cls: type[Config] = config_lib.TrainConfig,
) -> Config:
    """Checks values and overrides, and builds the dataclass `cls` from them.

    Args:
        tree: values by field name, nested by section; a missing one takes its default.
        overrides: pairs of a dotted path and the text of its value; the last one wins.
        cls: the dataclass to build.

    Raises:
        InputError: with a line for every unknown field, wrong type and broken rule.
    """
    if isinstance(tree, ml_collections.ConfigDict):
        tree = tree.to_dict()
    given = dict(_flatten(tree)) | {path: _Text(text) for path, text in overrides}
    hints = {path: hint for path, hint, _ in _fields(cls)}
    values, failed, errors = {}, set(), []
    for path, value in given.items():
        if path not in hints:
            errors.append(_unknown_field(path, list(hints)))
            continue
        try:
            values[path] = _typed(value, hints[path])
        except (TypeError, ValueError, SyntaxError):
            failed.add(path)
            errors.append(_wrong_type(path, value, hints[path]))
    config = _build(cls, "", values, failed, errors)
    if errors:
        raise config_lib.InputError("\n".join(errors))
    return config


def to_json_dict(config: Any) -> dict[str, Any]:
    """Dataclasses as what `json.load` would give back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json_dict(
    tree: Mapping[str, Any], cls: type[Config] = config_lib.TrainConfig
) -> Config:
    """Inverse of `to_json_dict`; checks like `resolve`."""
    return resolve(tree, (), cls)


def load_config_file(spec: str) -> ml_collections.ConfigDict:
    """Runs get_config of "path/to/file.py" or "path/to/file.py:variant".

    Raises:
        InputError: no such file, no such variant, or an exception inside the file.
    """
    path, _, variant = spec.partition(":")
    file = pathlib.Path(path)
    if not file.is_file():
        raise config_lib.InputError(
            f"there is no config file {path}.{_configs_in(file.parent, file.name)}"
        )
    try:
        config = _get_config(path, variant)
    except config_lib.InputError as error:
        lines = [f"{spec}: {line}" for line in str(error).splitlines()]
        raise config_lib.InputError("\n".join(lines)) from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        numbers = [frame.lineno for frame in frames if frame.filename == path]
        where = f" (line {numbers[-1]})" if numbers else ""
        raise config_lib.InputError(
            f"{spec}: {type(error).__name__}: {error}{where}"
        ) from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise config_lib.InputError(
            f"{spec}: get_config must return a ConfigDict, made by "
            f"command_line.to_config_dict; got {type(config).__name__}."
        )
    return config


def parse_command_line(argv: Sequence[str]) -> tuple[Arguments, list[str]]:
    """Takes --config and --config.a.b=v (or --config.a.b v) out of `argv`.

    Returns:
        What was taken, and the rest of `argv`: the flags that absl parses.

    Raises:
        InputError: a value is missing, or --config is given twice.
    """
    files, overrides, rest = [], [], []
    words = iter(argv)
    for word in words:
        found = re.fullmatch(r"--?config(?:\.([^=]+))?(?:=(.*))?", word, re.DOTALL)
        if not found:
            rest.append(word)
            continue
        path, value = found.groups()
        if value is None:
            value = next(words, "--")
            if value.startswith("--"):
                raise config_lib.InputError(f"{word} needs a value: {word}=VALUE.")
        if path is None:
            files.append(value)
        else:
            overrides.append((path, value))
    if len(files) > 1:
        raise config_lib.InputError(f"--config is given twice: {' and '.join(files)}.")
    config = files[0] if files else None
    return Arguments(config=config, overrides=tuple(overrides)), rest


def run(main: Callable[[Arguments], int | None]) -> None:
    """Runs an entry point: parses the command line, calls `main`, exits.

    Exit code: what `main` returns, or 2 with one message where the user's input is
    wrong (InputError), be it found here or in `main`.
    """
    logging.get_absl_logger().addFilter(_is_ours_or_serious)
    try:
        app.run(main, flags_parser=_parse_flags)
    except config_lib.InputError as error:
        lines = "".join(f"error: {line}\n" for line in str(error).splitlines())
        sys.stderr.write(lines)
        sys.exit(2)


def _is_ours_or_serious(record: Any) -> bool:
    """Leaves out what libraries (Orbax: a page a checkpoint) say through absl."""
    return record.levelno >= 40 or "glm5_jax" in record.pathname  # 40: ERROR


def _parse_flags(argv: Sequence[str]) -> Arguments:
    """Parses the whole command line; absl's flags end up in FLAGS."""
    arguments, rest = parse_command_line(argv)
    if {"--help", "-help", "-h"} & set(rest):
        app.usage(shorthelp=True, writeto_stdout=True)
        sys.stdout.write(_config_help())
        sys.exit(0)
    flags.FLAGS.set_gnu_getopt()  # a stray word does not end the flags
    try:
        _, *extra = flags.FLAGS(rest, known_only=True)
    except flags.Error as error:
        raise config_lib.InputError(f"{error} (--help lists the flags)") from error
    names = ["config", *flags.FLAGS]
    errors = []
    for word in extra:
        if word.startswith("-"):
            name = word.lstrip("-").partition("=")[0]
            guess = _did_you_mean(name, names, "--")
            errors.append(f"there is no flag --{name}.{guess} --help lists the flags.")
        else:
            errors.append(f"{word!r} belongs to no flag; write --flag=value.")
    if errors:
        raise config_lib.InputError("\n".join(errors))
    return arguments


def _get_config(path: str, variant: str) -> Any:
    """What get_config of a config file returns."""
    namespace = runpy.run_path(path)
    if "get_config" not in namespace:
        raise config_lib.InputError(
            'the file has no get_config; define get_config(variant: str = "") that '
            "returns a ConfigDict."
        )
    variants = namespace.get("VARIANTS", (variant,))
    if variant and variant not in variants:
        names = ", ".join(sorted(filter(None, variants))) or "none"
        raise config_lib.InputError(
            f"there is no variant {variant!r}.{_did_you_mean(variant, variants)} "
            f"Variants: {names}."
        )
    return namespace["get_config"](*([variant] if variant else []))


def _config_help() -> str:
    """Explains --config, and lists every field with its type and default."""
    lines = [
        "\nThe config:\n  --config=FILE.py[:variant]: what get_config there returns",
        "  --config.a.b=VALUE: sets one field; those of train.py, with defaults:",
    ]
    for path, hint, default in _fields(config_lib.TrainConfig):
        lines.append(f"    --config.{path}={default}  ({_describe(hint)})")
    return "\n".join(lines) + "\n"


def _fields(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted path, type and default of every field that is no section."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _fields(hint, path + ".")
        else:
            yield path, hint, field.default


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every leaf."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _build(
    cls: type, prefix: str, values: dict[str, Any], failed: set[str], errors: list[str]
) -> Any:
    """Builds `cls` and its sections; adds to `failed` and `errors`.

    A field or section that failed is left at its default, so that the rules for the
    others are checked as well; messages that mention it could be about the default.
    """
    hints = typing.get_type_hints(cls)
    kwargs = {}
    for name, hint in hints.items():
        path = prefix + name
        if dataclasses.is_dataclass(hint):
            kwargs[name] = _build(hint, path + ".", values, failed, errors)
        elif path in values:
            kwargs[name] = values[path]
    suspects = [name for name in hints if prefix + name in failed]
    try:
        config = cls(**{k: v for k, v in kwargs.items() if k not in suspects})
    except config_lib.InputError as error:
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
    """`value` as `hint` wants it; raises TypeError or ValueError where it cannot be."""
    kind = _without_none(hint)
    if isinstance(value, _Text):
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
    if not fits:
        raise TypeError(value)
    return value


def _parsed(text: str, kind: Any, is_optional: bool) -> Any:
    """The Python value that the text spells."""
    if is_optional and text in ("None", "none", "null"):
        return None
    if kind is str or typing.get_origin(kind) is Literal:
        return str(text)
    if kind is bool:
        text = text.capitalize()
    return ast.literal_eval(text.strip())


def _without_none(hint: Any) -> Any:
    """X of `X | None`; any other type as it is."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    (kind,) = (t for t in typing.get_args(hint) if t is not type(None))
    return kind


def _describe(hint: Any) -> str:
    """A type in words."""
    kind = _without_none(hint)
    if typing.get_origin(kind) is Literal:
        words = "one of " + ", ".join(typing.get_args(kind))
    elif typing.get_origin(kind) is tuple:
        kinds = {int: "integers such as (1, 2)", str: "texts such as ('a', 'b')"}
        words = kinds.get(typing.get_args(kind)[0], "rows such as ((1, 2), (3, 4))")
    else:
        names = {bool: "true or false", int: "an integer", float: "a number"}
        words = names.get(kind, "text")
    return words if kind is hint else f"{words}, or None"


def _wrong_type(path: str, value: Any, hint: Any) -> str:
    """Says what the field expects and what it got."""
    shown = repr(str(value) if isinstance(value, _Text) else value)
    options = typing.get_args(_without_none(hint))
    guess = _did_you_mean(str(value), [o for o in options if isinstance(o, str)])
    return f"{path} must be {_describe(hint)}, got {shown}.{guess}"


def _unknown_field(path: str, known: list[str]) -> str:
    """Says that a path names no field, and which one may be meant."""
    inside = [k for k in known if k.startswith(path + ".")]
    if inside:
        return f"{path} is a section, not a value; set its fields, e.g. {inside[0]}."
    leaf = path.rpartition(".")[2]
    same = [k for k in known if k.rpartition(".")[2] == leaf]
    guess = _did_you_mean(path, same or known, cutoff=0.0 if same else 0.6)
    return f"{path} is no field of the config.{guess or ' --help lists them.'}"


def _did_you_mean(
    given: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6
) -> str:
    """A blank and the question whether the nearest name is meant, or nothing."""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {prefix}{close[0]}?" if close else ""


def _configs_in(folder: pathlib.Path, given: str = "") -> str:
    """Says which config files a folder holds."""
    names = sorted(p.name for p in folder.glob("*.py") if not p.name.startswith("_"))
    if not names:
        return f" {folder}/ holds no config files."
    guess = _did_you_mean(given, names, f"{folder}/")
    return f"{guess} {folder}/ holds {', '.join(names)}."
