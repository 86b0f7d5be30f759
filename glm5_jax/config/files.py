"""Finds and runs the config file that --config names.

The name is first taken as a path, then looked up among the files that come with the
package: configs/ in the repository, glm5_jax/configs/ in a wheel.
"""

import pathlib
import runpy
import traceback
from typing import Any

import ml_collections

from glm5_jax.config import checks, fields

_PACKAGE = pathlib.Path(__file__).parents[1]


def bundled() -> pathlib.Path:
    """Returns the folder of the config files that come with the package."""
    wheel = _PACKAGE / "configs"
    return wheel if wheel.is_dir() else _PACKAGE.parent / "configs"


def load(spec: str) -> ml_collections.ConfigDict:
    """Runs get_config of a config file.

    Args:
        spec: "path/to/file.py" or "path/to/file.py:variant"; for a file that comes
            with the package, "configs/NAME.py", "NAME.py" or "NAME" suffices.

    Raises:
        InputError: no such file, no such variant, or an exception inside the file.
    """
    given, _, variant = spec.partition(":")
    path = str(_find(given))
    try:
        config = _get_config(path, variant)
    except checks.InputError as error:
        lines = [f"{spec}: {line}" for line in str(error).splitlines()]
        raise checks.InputError("\n".join(lines)) from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        numbers = [frame.lineno for frame in frames if frame.filename == path]
        where = f" (line {numbers[-1]})" if numbers else ""
        raise checks.InputError(
            f"{spec}: {type(error).__name__}: {error}{where}"
        ) from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise checks.InputError(
            f"{spec}: get_config must return a ConfigDict, made by "
            f"command_line.to_config_dict; got {type(config).__name__}."
        )
    return config


def those_in(folder: str | pathlib.Path, given: str = "") -> str:
    """Returns a sentence with the config files of a folder, or else the package's."""
    folder = pathlib.Path(folder)
    if str(folder) in (".", "configs") and not _names(folder):
        folder = bundled()
    names = _names(folder)
    if not names:
        return f" {folder}/ holds no config files."
    guess = fields.did_you_mean(given, names, f"{folder}/")
    return f"{guess} {folder}/ holds {', '.join(names)}."


def _names(folder: pathlib.Path) -> list[str]:
    """Returns the names of a folder's config files."""
    return sorted(p.name for p in folder.glob("*.py") if not p.name.startswith("_"))


def _find(given: str) -> pathlib.Path:
    """Returns the path of the config file with a name."""
    file = pathlib.Path(given)
    if file.is_file():
        return file
    if file.parent in (pathlib.Path(), pathlib.Path("configs")):
        ours = bundled() / pathlib.Path(file.name).with_suffix(".py")
        if file.suffix in ("", ".py") and ours.is_file():
            return ours
    raise checks.InputError(
        f"there is no config file {given}.{those_in(file.parent, file.name)}"
    )


def _get_config(path: str, variant: str) -> Any:
    """Returns what get_config of a config file returns."""
    namespace = runpy.run_path(path)
    if "get_config" not in namespace:
        raise checks.InputError(
            'the file has no get_config; define get_config(variant: str = "") that '
            "returns a ConfigDict."
        )
    variants = namespace.get("VARIANTS", (variant,))
    if variant and variant not in variants:
        names = ", ".join(sorted(filter(None, variants))) or "none"
        raise checks.InputError(
            f"there is no variant {variant!r}.{fields.did_you_mean(variant, variants)} "
            f"Variants: {names}."
        )
    return namespace["get_config"](*([variant] if variant else []))
