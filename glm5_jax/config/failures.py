"""Turns errors into a one-line message and an exit code, instead of a traceback."""

import errno
import os
import pathlib
import resource
import traceback

from absl import logging

from glm5_jax.config import checks

INPUT, FAILED = 2, 1  # exit codes: the user's input is wrong; anything else
TRACEBACK = "GLM5_JAX_TRACEBACK"  # if it is set, errors keep their tracebacks
_MAX_SHOWN = 600  # characters of a message; some libraries write pages
# Errors of a path that the user gave; a full or failing disk is no input error.
_OF_PATHS = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST),
    *(errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP),
}
_EXPECTED = (
    *(OSError, ValueError, FloatingPointError, OverflowError),
    *(MemoryError, RecursionError),
)
_WORDS = {
    MemoryError: "too little memory",
    RecursionError: "something that was read is nested too deeply",
    OverflowError: "a number is too large",
}
_PACKAGE = pathlib.Path(__file__).parent.parent


def describe(error: BaseException) -> tuple[int, str] | None:
    """Returns exit code and message of an error, or None if it needs its traceback.

    InputError and DamagedError keep their message. Other errors of input, system and
    arithmetic become one line, with the place in this package where they arose.
    """
    if isinstance(error, checks.InputError):
        return INPUT, str(error)
    if isinstance(error, checks.DamagedError):
        return FAILED, str(error)
    if os.environ.get(TRACEBACK):
        return None
    if _is_out_of_device_memory(error):
        return FAILED, f"the device has too little memory: {_short(error)}"
    if not isinstance(error, _EXPECTED):
        return None
    if isinstance(error, FloatingPointError):
        return FAILED, _short(error)
    if isinstance(error, OSError):
        code = INPUT if error.filename and error.errno in _OF_PATHS else FAILED
        return code, _short(error)
    what = next((text for kind, text in _WORDS.items() if isinstance(error, kind)), "")
    words = ": ".join(filter(None, (what, _short(error))))
    code = FAILED if isinstance(error, MemoryError) else INPUT
    return code, f"{words}{_place(error)}"


def warn_of_aborts() -> None:
    """Warns of a limit of addresses: XLA ends the process where it finds no more.

    Such an end is a SIGABRT in C++, which nothing in Python can turn into a message.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        logging.warning(
            "The address space of this process is limited to %.1f GiB (ulimit -v); if "
            "it needs more, it ends with an abort in C++. configs/quickstart.py, of a "
            "million parameters, aborts at 2.9 GiB and trains at 3.8. Lift the limit "
            "with ulimit -v unlimited.",
            limit / 2**30,
        )


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _place(error: BaseException) -> str:
    """Returns the innermost line of this package, and how to see the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if _PACKAGE in pathlib.Path(f.filename).parents]
    if not own:
        return ""
    name = pathlib.Path(own[-1].filename).relative_to(_PACKAGE.parent)
    return f" ({name}:{own[-1].lineno}; {TRACEBACK}=1 shows the traceback)"


def _is_out_of_device_memory(error: BaseException) -> bool:
    """Recognises jax's error by its name and text, without importing jax."""
    return type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(
        error
    )
