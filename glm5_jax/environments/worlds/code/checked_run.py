"""Tests a function in a process of its own; runs inside the sandbox.

The tests, their expectations and the token that confirms them stay in the first
process, which no other may look into. The second has the answer. Between the two go
literals of Python alone: an answer cannot read what is expected, nor return an object
that equals everything.

    python3 -I checked_run.py FOLDER     with answer.py and tests.json in FOLDER
"""

import ast
import ctypes
import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

_NOT_DUMPABLE = 4, 0  # prctl: memory and descriptors are hidden from the same user
_MAX_BYTES = 2**22  # of a result
_ATOMS = (type(None), bool, int, complex, str, bytes)


class WrongError(Exception):
    """Raised in a test when the answer raised, or returned no plain value."""


def test(folder: pathlib.Path) -> None:
    """Runs the tests of a folder, and prints the token if they pass."""
    path = folder / "tests.json"
    tests = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    ctypes.CDLL(None).prctl(*_NOT_DUMPABLE)
    sys.set_int_max_str_digits(0)
    ask_read, ask_write = os.pipe()
    say_read, say_write = os.pipe()
    command = [sys.executable, "-I", __file__, str(folder), tests["entry"]]
    subprocess.Popen(
        [*command, str(ask_read), str(say_write)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(ask_read, say_write),
    )
    os.close(say_write)
    asks, says = os.fdopen(ask_write, "wb"), os.fdopen(say_read, "rb")

    def candidate(*args: Any) -> Any:
        asks.write(_text(args) + b"\n")
        asks.flush()
        line = says.readline(_MAX_BYTES)
        if not line.startswith(b"ok ") or not line.endswith(b"\n"):
            raise WrongError(line[:80])
        return ast.literal_eval(line[3:].decode())

    names: dict[str, Any] = {"__name__": "tests"}
    random.seed(0)
    exec(tests["setup"], names)
    names[tests["entry"]] = candidate  # some tests call it by its name
    exec(tests["check"], names)
    names["check"](candidate)
    sys.stdout.write(f"\n{tests['token']}\n")


def answer(folder: pathlib.Path, entry: str, ask: int, say: int) -> None:
    """Calls the answer's function with each line of arguments."""
    sys.set_int_max_str_digits(0)
    asks, says = os.fdopen(ask, "rb"), os.fdopen(say, "wb")
    names: dict[str, Any] = {"__name__": "answer"}
    try:
        exec((folder / "answer.py").read_text(encoding="utf-8"), names)
        function: Callable[..., Any] = names[entry]
    except BaseException as error:
        says.write(f"error {type(error).__name__}\n".encode())
        return
    for line in asks:
        try:
            said = b"ok " + _text(function(*ast.literal_eval(line.decode())))
        except Exception as error:
            said = f"error {type(error).__name__}".encode()
        says.write(said + b"\n")
        says.flush()


def _text(value: Any) -> bytes:
    """Returns a literal of a value.

    Raises:
        TypeError: it has no literal.
    """
    return _literal(value).encode("ascii", "backslashreplace")


def _literal(value: Any) -> str:
    if isinstance(value, _ATOMS):
        kind: Any = next(kind for kind in _ATOMS if isinstance(value, kind))
        return ascii(value if kind in (bool, type(None)) else kind(value))
    if isinstance(value, float):
        text = float.__repr__(value)
        if "nan" in text:
            raise TypeError("not a number")
        return text.replace("inf", "1e999")
    if isinstance(value, dict):
        items = (f"{_literal(k)}: {_literal(v)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{_literal(item)}, ' for item in value)})"
    if isinstance(value, set | frozenset):
        items = ", ".join(map(_literal, value))
        return f"{{{items}}}" if items else "set()"
    raise TypeError(f"a {type(value).__name__} is no plain value")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        test(pathlib.Path(sys.argv[1]))
    else:
        answer(pathlib.Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
