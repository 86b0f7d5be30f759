"""Parses the command line of all entry points, and builds typed configs from it.

    --config=configs/NAME.py[:variant] --config.a.b=value --flag=value

A config file defines `get_config(variant: str = "")` and returns a ConfigDict made by
`to_config_dict`; if it has a mapping VARIANTS, a variant must be one of its keys.
`resolve` turns a ConfigDict and the overrides into a frozen dataclass, and reports all
errors at once.
"""

import dataclasses
import functools
import json
import logging as stdlib_logging
import os
import pathlib
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import ml_collections
from absl import app, flags, logging
from ml_collections import config_dict

from glm5_jax import backends
from glm5_jax import config as config_lib
from glm5_jax.config import explanations, failures, fields, files

Config = TypeVar("Config")
_SOURCES = pathlib.Path(__file__).parent
_LOG_LINE, _LOG_TIME = "%(levelname).1s%(asctime)s %(message)s", "%m%d %H:%M:%S"
Override = tuple[str, str]  # dotted path below --config, text of its value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """The config's part of the command line; other flags are in absl's FLAGS."""

    config: str | None = None  # "configs/x.py:variant"
    overrides: tuple[Override, ...] = ()
    words: tuple[str, ...] = ()  # that belong to no flag

    @property
    def name(self) -> str:
        """Returns the config file's name, without folder, suffix and variant."""
        return pathlib.Path(str(self.config).partition(":")[0]).stem

    def train_config(self) -> config_lib.TrainConfig:
        """Loads the config file and applies the overrides.

        Raises:
            InputError: --config is missing, or something in it is wrong.
        """
        if self.config is None:
            raise config_lib.InputError(
                "--config is missing; name a config file, e.g. "
                f"--config=configs/NAME.py.{files.those_in('configs')}"
            )
        return resolve(files.load(self.config), self.overrides)


def to_config_dict(config: Any) -> ml_collections.ConfigDict:
    """Converts frozen dataclasses to a locked ConfigDict, for config files."""
    hints = typing.get_type_hints(type(config))
    out = ml_collections.ConfigDict()
    for name, hint in hints.items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            value = to_config_dict(value)
        elif value is None:
            value = config_dict.placeholder(fields.without_none(hint))
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
        InputError: has a line for every unknown field, wrong type and broken rule.
    """
    if isinstance(tree, ml_collections.ConfigDict):
        tree = tree.to_dict()
    given = dict(fields.flatten(tree))
    given |= {path: fields.Text(text) for path, text in overrides}
    return fields.build(cls, given)


def to_json_dict(config: Any) -> dict[str, Any]:
    """Converts dataclasses to the values of JSON; `resolve` is the inverse."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def parse_command_line(argv: Sequence[str]) -> tuple[Arguments, list[str]]:
    """Separates --config and --config.a.b=v (or --config.a.b v) from other flags.

    Returns:
        The config's arguments, and the rest of `argv`: the flags that absl parses.

    Raises:
        InputError: a value is missing, or --config is given twice.
    """
    configs, overrides, rest = [], [], []
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
            configs.append(value)
        else:
            overrides.append((path, value))
    if len(configs) > 1:
        given = " and ".join(configs)
        raise config_lib.InputError(f"--config is given twice: {given}.")
    config = configs[0] if configs else None
    return Arguments(config=config, overrides=tuple(overrides)), rest


class OptionalEnum(flags.Flag):
    """A flag with one of several values; without a value, --NAME means "auto"."""

    def __init__(self, name: str, values: Sequence[str], help: str) -> None:
        """Makes a flag whose default is None."""
        super().__init__(
            _OptionalEnumParser(values), None, name, None, help, boolean=True
        )


class _OptionalEnumParser(flags.EnumParser):
    """Reads "true", which absl takes for a flag without a value, as "auto"."""

    def parse(self, argument: str) -> str:
        """Returns the value."""
        return super().parse("auto" if argument == "true" else argument)


def run(
    main: Callable[[Arguments], int | None],
    takes_config: bool = True,
    only_model: bool = False,
    interrupted: int = 130,
    num_words: int = 0,
) -> None:
    """Runs an entry point: parses the command line, calls `main`, exits.

    The exit code is the value that `main` returns. Errors print one message instead of
    a traceback (config/failures.py): 2 for wrong input; 1 for a failure of disk, memory
    or arithmetic, and for damaged data; `interrupted` for ctrl-C.

    Args:
        main: the entry point.
        takes_config: whether --config is accepted, and explained by --help.
        only_model: whether --config sets the model's fields only, those of a folder.
        interrupted: exit code on ctrl-C.
        num_words: words beside the flags that it takes at most.
    """
    backends.skip_absent()
    handler = logging.get_absl_handler()
    handler.addFilter(_is_ours_or_serious)
    handler.setFormatter(stdlib_logging.Formatter(_LOG_LINE, _LOG_TIME))
    try:
        kind = "model" if only_model else "run" if takes_config else ""
        parse = functools.partial(_parse_flags, kind=kind, num_words=num_words)
        app.run(main, flags_parser=parse)
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted.\n")
        sys.stderr.flush()
        if "jax" in sys.modules:  # its threads would crash while Python shuts down
            os._exit(interrupted)
        sys.exit(interrupted)
    except Exception as error:
        described = failures.describe(error)
        if described is None:
            raise
        code, message = described
        sys.stderr.write("".join(f"error: {line}\n" for line in message.splitlines()))
        sys.exit(code)


def _is_ours_or_serious(record: stdlib_logging.LogRecord) -> bool:
    """Returns whether a line of the log is shown.

    Libraries' warnings and errors are shown; of those that log through absl (Orbax: a
    page a checkpoint), errors only.
    """
    if pathlib.Path(record.pathname).is_relative_to(_SOURCES):
        return True
    is_absl = record.name == logging.get_absl_logger().name
    return record.levelno >= (
        stdlib_logging.ERROR if is_absl else stdlib_logging.WARNING
    )


def _parse_flags(argv: Sequence[str], kind: str, num_words: int) -> Arguments:
    """Parses the whole command line; absl's flags end up in FLAGS."""
    arguments, rest = parse_command_line(argv)
    if not kind and (arguments.config or arguments.overrides):
        raise config_lib.InputError(
            "--config has no effect here; omit it. --help lists the flags."
        )
    if {"--help", "-help", "-h"} & set(rest):
        app.usage(shorthelp=True, writeto_stdout=True)
        sys.stdout.write(_CONFIG_HELP[kind]())
        sys.exit(0)
    flags.FLAGS.set_gnu_getopt()  # accepts flags after a stray word
    try:
        _, *extra = flags.FLAGS(rest, known_only=True)
    except flags.Error as error:
        raise config_lib.InputError(f"{error} (--help lists the flags)") from error
    names = ["config", *flags.FLAGS]
    errors, words = [], []
    for word in extra:
        if word.startswith("-"):
            name = word.lstrip("-").partition("=")[0]
            guess = fields.did_you_mean(name, names, "--")
            errors.append(f"there is no flag --{name}.{guess} --help lists the flags.")
        elif len(words) < num_words:
            words.append(word)
        else:
            errors.append(f"{word!r} belongs to no flag; write --flag=value.")
    if errors:
        raise config_lib.InputError("\n".join(errors))
    return dataclasses.replace(arguments, words=tuple(words))


def _run_help() -> str:
    """Explains --config, and lists every field with default, type and meaning."""
    lines = [
        "\nThe config:",
        "  --config=FILE.py[:variant]: what get_config of that file returns",
        "  --config.a.b=VALUE: sets one field; those of train.py, with defaults:",
    ]
    return "\n".join([*lines, *_field_lines(config_lib.TrainConfig, "")]) + "\n"


def _model_help() -> str:
    """Explains --config for a model whose folder has the config."""
    return (
        "\nThe config is that of the model's folder; one field of it is set by\n"
        "  --config.model.X=VALUE, e.g. --config.model.index_topk=64\n"
        "Several devices share the model where generate or evaluate is given\n"
        "  --config.mesh.X=VALUE, e.g. --config.mesh.fsdp=8\n"
        "(python -m glm5_jax train --help lists them).\n"
    )


def _field_lines(cls: type, prefix: str) -> Iterator[str]:
    """Yields a line with default and type for each field, and its explanation."""
    texts = explanations.of(cls, prefix)
    for path, hint, default in fields.of(cls, prefix):
        yield f"    --config.{path}={default}  ({fields.describe(hint)})"
        text = f"{texts[path]}."
        yield textwrap.fill(text, 80, initial_indent=" " * 8, subsequent_indent=" " * 8)


_CONFIG_HELP = {"run": _run_help, "model": _model_help, "": str}
