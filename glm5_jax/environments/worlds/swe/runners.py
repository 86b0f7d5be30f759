"""Test runners that a box reads besides /usr: pytest of Python, tape and mocha of Node.

Each is copied into a folder of its own, so that a box sees it and nothing else.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import pathlib
import re
import secrets
import shutil
import subprocess
import tempfile

from glm5_jax import config
from glm5_jax.environments.worlds.swe import records

_PYTEST = "pytest"
# What npm installs for each runner. Mocha's tests import the others; tsx loads
# TypeScript.
_NPM = {
    "tape": ("tape@5.7.5",),
    "mocha": ("mocha@10.8.2", "chai@4.5.0", "expect@29.7.0", "tsx@4.20.6"),
}
# Modules that tests of Jest and Vitest import; runner/mocha_ui.cjs has the functions.
_STUBS = ("vitest", "@jest/globals")
_STUBBED = (
    *("describe", "it", "test", "expect", "beforeAll", "afterAll"),
    *("beforeEach", "afterEach"),
)
_REMEDIES = {"pytest": "`pip install pytest`"}
_SECONDS = 300


def name(recipe: records.Recipe) -> str:
    """Returns the runner whose folder a recipe needs, "" if it needs none."""
    if is_typed(recipe):
        return "mocha"
    return recipe.runner if recipe.runner in (_PYTEST, *_NPM) else ""


def is_typed(recipe: records.Recipe) -> bool:
    """Returns whether Node loads TypeScript, for which it needs tsx."""
    runs = recipe.runner in ("mocha", "node", "node-test")
    return recipe.language == "typescript" and runs


@functools.cache
def folder(name: str) -> pathlib.Path:
    """Returns a folder with a runner, which ends with this process.

    Args:
        name: of the runner.

    Raises:
        config.InputError: the runner cannot be installed.
    """
    target = pathlib.Path(tempfile.mkdtemp(prefix=f"glm5_jax_{name}_"))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    if name == _PYTEST:
        _copy_pytest(target)
    else:
        _copy_npm(name, target)
    if not any(target.iterdir()):
        remedy = _REMEDIES.get(name, "npm needs the network once")
        raise config.InputError(
            f"the tests of this task run with {name}, which could not be installed: "
            f"{remedy}."
        )
    for path in (target, *target.rglob("*")):  # a box runs as another user
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    return target


def _copy_pytest(target: pathlib.Path) -> None:
    for name in _needed("pytest"):
        for file in importlib.metadata.files(name) or ():
            path = pathlib.Path(file.locate())
            if file.suffix in (".py", ".pyc") and ".." not in file.parts:
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                if path.is_file():  # with its time, so that its byte code is taken
                    shutil.copy2(path, target / file)


def _copy_npm(name: str, target: pathlib.Path) -> None:
    wanted = _NPM[name]
    digest = hashlib.sha256(repr((wanted, _STUBS)).encode()).hexdigest()[:8]
    folder = pathlib.Path.home() / ".cache" / "glm5_jax" / "swe"
    cache = folder / f"{name}-{digest}"
    if not cache.is_dir():
        partial = cache.with_name(f"{cache.name}.{secrets.token_hex(4)}")
        command = [
            *("npm", "install", "--silent", "--ignore-scripts", "--prefix"),
            *(str(partial), *wanted),
        ]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, check=True, timeout=_SECONDS)
            if name == "mocha":
                _write_stubs(partial / "node_modules")
            partial.rename(cache)
    if cache.is_dir():
        shutil.copytree(cache, target, dirs_exist_ok=True)


def _write_stubs(modules: pathlib.Path) -> None:
    lines = [f"exports.{function} = globalThis.{function};" for function in _STUBBED]
    for stub in _STUBS:
        (modules / stub).mkdir(parents=True, exist_ok=True)
        path = modules / stub / "index.js"
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _needed(name: str) -> set[str]:
    """Returns a distribution and those that it requires, as they are installed."""
    found, todo = set(), [name]
    while todo:
        current = todo.pop()
        try:
            requires = importlib.metadata.requires(current) or ()
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system or version
        found.add(current)
        names = [
            re.split(r"[^\w.-]", need)[0] for need in requires if "extra" not in need
        ]
        todo += [need for need in names if need not in found]
    return found
