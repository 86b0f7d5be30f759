"""Classes of the user's own, by the name module:Class."""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from glm5_jax import config
from glm5_jax.config import fields

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_own(name: str) -> bool:
    """Returns whether a name is one of module:Class, and not "kind:SIZE"."""
    return _NAME.fullmatch(name) is not None


def make(name: str, methods: Sequence[str]) -> Any:
    """Imports a class and makes an object of it, without arguments.

    Args:
        name: module:Class; the module is looked for in the current folder too.
        methods: that the object must have.

    Raises:
        config.InputError: it cannot be imported or made, or lacks methods.
    """
    module_name, _, class_name = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name not in _parents(module_name):
            raise _failed(name, f"importing {module_name} raised", error) from error
        raise config.InputError(
            f"{name!r} names a class of the module {module_name}, and there is none. "
            f"Run the command in the folder that holds it, or put that on PYTHONPATH."
        ) from error
    except Exception as error:
        raise _failed(name, f"importing {module_name} raised", error) from error
    made = getattr(module, class_name, None)
    if not inspect.isclass(made):
        names = [n for n, x in vars(module).items() if inspect.isclass(x)]
        guess = fields.did_you_mean(class_name, names)
        raise config.InputError(
            f"{name!r}: {module.__file__} has no class {class_name}.{guess}"
        )
    try:
        taskset = made()
    except Exception as error:
        raise _failed(name, f"{class_name}() raised", error) from error
    require_methods(name, taskset, methods)
    return taskset


def require_methods(name: str, made: object, methods: Sequence[str]) -> None:
    """Checks that an object has methods.

    Raises:
        config.InputError: it lacks some.
    """
    missing = [m for m in methods if not callable(getattr(made, m, None))]
    if missing:
        raise config.InputError(
            f"{name!r}: {type(made).__name__} lacks {', '.join(missing)}; docs/rl.md "
            f"shows a whole environment."
        )


def _failed(name: str, what: str, error: Exception) -> config.InputError:
    return config.InputError(f"{name!r}: {what} {type(error).__name__}: {error}")


def _parents(module: str) -> list[str]:
    """The module and the packages that it is in."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
