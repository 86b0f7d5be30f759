"""What a model is asked for, and how its answer becomes a draft of a task."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import messages
from glm5_jax.environments import endpoint
from glm5_jax.environments.worlds.terminal import draft as draft_lib

_MOST_CHARACTERS = 100_000  # of a draft
_MOST_CHECKS = 16
_FEWEST_WRONG = 2
_KEYS = ("instruction", "files", "setup", "solution", "checks", "wrong")
_SYSTEM = """You write tasks for an agent that works at a shell of Debian without a \
network, in the folder /work. A task is one JSON object in a ```json block:

{
  "instruction": "what the agent must do, exact enough that one result is right",
  "files": {"path below /work": "content at the start"},
  "setup": "shell commands that run before the agent, or \\"\\"",
  "solution": "shell commands that do what is asked",
  "checks": [{"command": "a shell command", "stdout": "what it must print"}],
  "wrong": ["shell commands that come near a solution but must not pass", "..."]
}

Every command runs in /work, with bash and the programs of a small Debian system: \
coreutils, findutils, grep, sed, awk, tar, git, make, python3. The checks run after \
the agent, who never sees them. All of them must pass after the solution, and not all \
after any of the wrong commands or after nothing; give at least two wrong ones. The \
results must be the same every time."""
_DRAFT = "Write a task about: {topic}."
_REFINE = """The task was built and played, and it is not right:

{problems}

Write the whole JSON object again, mended."""


def first(topic: str) -> list[messages.Message]:
    """Returns the messages that ask for a draft."""
    return [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _DRAFT.format(topic=topic)},
    ]


def refinement(problems: Sequence[str]) -> messages.Message:
    """Returns the message that asks for a mended draft."""
    told = "\n".join(f"- {problem}" for problem in problems)
    return {"role": "user", "content": _REFINE.format(problems=told)}


def read(text: str) -> draft_lib.Draft:
    """Returns the draft of an answer: its last JSON block, or all of it.

    Raises:
        ValueError: it has no such object, or a field is wrong.
    """
    fields = endpoint.json_object(text, _MOST_CHARACTERS, "the draft")
    if unknown := sorted(set(fields) - set(_KEYS)):
        raise ValueError(f"the draft has unknown keys: {', '.join(unknown)}")
    solution = _text(fields, "solution")
    return draft_lib.Draft(
        instruction=_text(fields, "instruction"),
        files=_files(fields.get("files", {})),
        setup=_text(fields, "setup", optional=True),
        solution=solution,
        wrong=_wrong(fields.get("wrong"), solution),
        expects=_expects(fields.get("checks")),
    )


def _text(fields: Mapping[str, Any], key: str, optional: bool = False) -> str:
    value = fields.get(key, "" if optional else None)
    if not isinstance(value, str) or not (optional or value.strip()):
        raise ValueError(f"the draft's {key} must be a text")
    if "\0" in value:
        raise ValueError(f"the draft's {key} has a zero byte")
    return value


def _files(given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        raise ValueError("the draft's files must be an object of texts by path")
    for path in given:
        parts = pathlib.PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
            raise ValueError(f"the draft's file {path!r} is not below /work")
        _text(given, path, optional=True)
    return dict(given)


def _wrong(given: Any, solution: str) -> tuple[str, ...]:
    is_list = isinstance(given, list) and all(isinstance(x, str) for x in given)
    if not is_list or len(given) < _FEWEST_WRONG:
        raise ValueError(f"the draft's wrong must be {_FEWEST_WRONG} commands or more")
    if any(text.strip() in ("", solution.strip()) or "\0" in text for text in given):
        raise ValueError("one of the draft's wrong commands is empty or the solution")
    return tuple(given)


def _expects(given: Any) -> tuple[draft_lib.Expect, ...]:
    if not isinstance(given, list) or not 0 < len(given) <= _MOST_CHECKS:
        raise ValueError(f"the draft's checks must be a list of 1 to {_MOST_CHECKS}")
    found = []
    for number, check in enumerate(given, 1):
        if not isinstance(check, dict) or set(check) != {"command", "stdout"}:
            raise ValueError(f"the draft's check {number} needs command and stdout")
        command = _text(check, "command")
        found.append(draft_lib.Expect(command, _text(check, "stdout", optional=True)))
    return tuple(found)
