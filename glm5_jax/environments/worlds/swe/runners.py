"""Test runners that a box reads besides /usr: pytest of Python, tape of JavaScript.

Each is copied into a folder of its own, so that a box sees it and nothing else.
"""

import atexit
import contextlib
import functools
import importlib.metadata
import pathlib
import re
import secrets
import shutil
import subprocess
import tempfile

from glm5_jax import config

PATHS = {"pytest": "pytest", "tape": "node_modules/tape"}  # in their folders
_TAPE = "5.7.5"
_REMEDIES = {"pytest": "`pip install pytest`", "tape": "npm needs the network once"}
_SECONDS = 300


@functools.cache
def folder(name: str) -> pathlib.Path:
    """Returns a folder with a runner, which ends with this process.

    Args:
        name: of PATHS.

    Raises:
        config.InputError: the runner cannot be installed.
    """
    target = pathlib.Path(tempfile.mkdtemp(prefix=f"glm5_jax_{name}_"))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    target.chmod(0o755)  # a box runs as another user
    (_copy_pytest if name == "pytest" else _copy_tape)(target)
    if not (target / PATHS[name]).is_dir():
        raise config.InputError(
            f"the tests of this task run with {name}, which could not be installed: "
            f"{_REMEDIES[name]}."
        )
    return target


def _copy_pytest(target: pathlib.Path) -> None:
    for name in _needed("pytest"):
        for file in importlib.metadata.files(name) or ():
            path = pathlib.Path(file.locate())
            if file.suffix in (".py", ".pyc") and ".." not in file.parts:
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                if path.is_file():  # with its time, so that its byte code is taken
                    shutil.copy2(path, target / file)


def _copy_tape(target: pathlib.Path) -> None:
    cache = pathlib.Path.home() / ".cache" / "glm5_jax" / "swe" / f"tape-{_TAPE}"
    if not cache.is_dir():
        partial = cache.with_name(f"{cache.name}.{secrets.token_hex(4)}")
        command = [
            "npm",
            "install",
            "--silent",
            "--ignore-scripts",
            "--prefix",
            partial,
        ]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([*command, f"tape@{_TAPE}"], check=True, timeout=_SECONDS)
            partial.rename(cache)
    if cache.is_dir():
        shutil.copytree(cache, target, dirs_exist_ok=True)


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
