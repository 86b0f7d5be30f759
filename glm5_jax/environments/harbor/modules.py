"""Modules of Python that a Dockerfile installs, in a folder that boxes see.

pip fetches wheels alone, once on this machine, and runs nothing of theirs; a box has no
network. Folders are kept in ~/.cache/glm5_jax/harbor.
"""

import atexit
import functools
import hashlib
import pathlib
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection

from glm5_jax import config

PYTHON = "/usr/bin/python3"
_VERSIONS = r"[=<>!~]=?[\w.*+!]+"
_REQUIREMENT = re.compile(
    rf"[A-Za-z0-9][\w.-]*(?:\[[\w,.-]*\])?(?:{_VERSIONS}(?:,{_VERSIONS})*)?"
)
_SECONDS = 300


def is_requirement(text: str) -> bool:
    """Returns whether a text names a module of a registry, perhaps with versions."""
    return _REQUIREMENT.fullmatch(text) is not None


def folder(requirements: Collection[str]) -> pathlib.Path:
    """Returns a folder with modules, which ends with this process.

    Args:
        requirements: as pip takes them.

    Raises:
        config.InputError: pip cannot install them for the box's Python.
    """
    return _folder(tuple(sorted(set(requirements))))


@functools.cache
def _folder(requirements: tuple[str, ...]) -> pathlib.Path:
    version = python_version().rpartition(".")[0]
    key = hashlib.sha256(repr((version, requirements)).encode()).hexdigest()[:16]
    cache = pathlib.Path.home() / ".cache" / "glm5_jax" / "harbor" / key
    if not cache.is_dir():
        _install(requirements, version, cache)
    target = pathlib.Path(tempfile.mkdtemp(prefix="glm5_jax_modules_"))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    shutil.copytree(cache, target, dirs_exist_ok=True)
    for path in (target, *target.rglob("*")):  # a box runs as another user
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
    return target


def _install(requirements: tuple[str, ...], version: str, cache: pathlib.Path) -> None:
    partial = cache.with_name(f"{cache.name}.{secrets.token_hex(4)}")
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"),
        *("--only-binary", ":all:", "--python-version", version),
        *("--target", str(partial), *requirements),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        told = (getattr(error, "stderr", b"") or b"").decode(errors="replace")
        reason = (told.strip().splitlines() or [str(error)])[-1]
        raise config.InputError(
            f"pip cannot install {', '.join(requirements)} for {PYTHON}: {reason}"
        ) from error
    for script in (partial / "bin").glob("*"):
        text = script.read_bytes()
        if text.startswith(b"#!"):  # of this process's Python, which a box lacks
            script.write_bytes(f"#!{PYTHON}\n".encode() + text.partition(b"\n")[2])
    partial.rename(cache)


@functools.cache
def python_version() -> str:
    """Returns the version of the box's Python, "" if there is none."""
    try:
        done = subprocess.run([PYTHON, "--version"], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.split()[-1] if done.stdout else ""
