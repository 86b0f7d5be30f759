"""Judges the code of an answer by hidden tests, in a sandbox made for one run."""

import dataclasses
import json
import pathlib
import re
import secrets

from glm5_jax.environments import sandbox
from glm5_jax.environments.worlds.code import checked_run

_SECONDS = 10.0  # of all tests
_LIMITS = sandbox.Limits(
    seconds=_SECONDS, memory_bytes=2**30, num_processes=32, disk_bytes=2**24
)
_FENCED = re.compile(
    r"^[^`\n]*`{3,}[ \t]*([^\s`]*)[^\n`]*\n(.*?)`{3,}", re.DOTALL | re.MULTILINE
)
_OF_PYTHON = re.compile(r"(?:py(?:thon)?[\d.]*)?", re.IGNORECASE)
_MAX_CHARACTERS = 2**17  # of an answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A function to write.

    Attributes:
        id: of the task.
        head: code up to the end of the function's docstring.
        entry: name of the function.
        solution: the body, which continues the head.
        check: code that defines check(candidate), which raises if a test fails.
        tag: kind of the task.
        wrong: bodies that come near.
    """

    id: str
    head: str
    entry: str
    solution: str
    check: str
    tag: str = ""
    wrong: tuple[str, ...] = ()


def code_of(text: str) -> str:
    """Returns the last fenced block of an answer, or all of it if there is none.

    Blocks that are named for another language than Python count if all are.
    """
    found = _FENCED.findall(text.replace("\r\n", "\n"))
    codes = [code for name, code in found if _OF_PYTHON.fullmatch(name)]
    return [text, *(code for _, code in found), *codes][-1]


def program(problem: Problem, code: str) -> str:
    """Returns the program of an answer: a whole function, or a body for the head."""
    if re.search(rf"^def {re.escape(problem.entry)}\b", code, re.MULTILINE):
        return f"{problem.head.rstrip()}\n    pass\n\n\n{code}\n"
    return f"{problem.head}{code}\n"


async def passes(problem: Problem, code: str) -> bool:
    """Returns whether the code of an answer passes all tests of a problem."""
    if len(code) > _MAX_CHARACTERS:
        return False
    token = secrets.token_hex(16)
    tests = {
        "token": token,
        "entry": problem.entry,
        "setup": f"{problem.head.rstrip()}\n    pass\n",
        "check": problem.check,
    }
    files = {
        "run.py": pathlib.Path(checked_run.__file__).read_bytes(),
        "tests.json": json.dumps(tests).encode(),
        "answer.py": program(problem, code).encode(errors="replace"),
    }
    box = await sandbox.start(sandbox.Image(files), _LIMITS)
    try:
        done = await box.run("python3 -I run.py .")
    finally:
        await box.close()
    return token in done.stdout.split("\n")
