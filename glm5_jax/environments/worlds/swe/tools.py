"""The tools of an agent: shell, view, edit and submit, in the chat form."""

import posixpath
import shlex
from collections.abc import Mapping
from typing import Any

from glm5_jax import config, messages
from glm5_jax.environments.worlds.swe import trials

HOME = f"/work/{trials.ROOT}"
_MAX_CHARACTERS = 16_000  # of an answer
_MAX_LINES = 400  # of a view
_SECONDS = 30.0  # of a command


def _schema(name: str, description: str, **arguments: str) -> Mapping[str, Any]:
    kinds = {"start": "integer", "end": "integer"}
    optional = ("start", "end")
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": kinds.get(key, "string"), "description": text}
                    for key, text in arguments.items()
                },
                "required": [key for key in arguments if key not in optional],
            },
        },
    }


SCHEMAS = (
    _schema(
        "shell",
        f"Runs a command in a shell that keeps its folder and variables; it begins in "
        f"{HOME}. There is no network.",
        command="The command.",
    ),
    _schema(
        "view",
        "Shows a file with line numbers, or the names in a folder.",
        path="The file or folder.",
        start="The first line, 1 if left out.",
        end="The last line.",
    ),
    _schema(
        "edit",
        "Replaces a text that occurs once in a file. An empty old text makes a file.",
        path="The file.",
        old="The text to replace, with its blanks.",
        new="The text that takes its place.",
    ),
    _schema("submit", "Ends the task: the package is tested as it is."),
)
_NAMES = tuple(schema["function"]["name"] for schema in SCHEMAS)


NO_OUTPUT = "(no output)"


def call(name: str, arguments: Mapping[str, Any]) -> messages.Message:
    """Returns an assistant's turn with one tool call."""
    function = {"name": name, "arguments": dict(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


class CallError(Exception):
    """A call that cannot be carried out; the model reads the message."""


def read_call(call: Any) -> tuple[str, Mapping[str, Any]]:
    """Returns the name and the checked arguments of a call.

    Raises:
        CallError: there is no such tool, or an argument is missing or of a wrong type.
    """
    try:
        name, arguments = messages.call_of(call)
    except config.InputError as error:
        raise CallError(str(error)) from error
    if name not in _NAMES:
        raise CallError(f"there is no tool {name[:40]!r}; use {', '.join(_NAMES)}.")
    parameters = SCHEMAS[_NAMES.index(name)]["function"]["parameters"]
    if missing := [key for key in parameters["required"] if key not in arguments]:
        raise CallError(f"{name} needs {', '.join(missing)}.")
    types = {"string": str, "integer": int}
    for key, value in arguments.items():
        known = parameters["properties"].get(key)
        if known is None or type(value) is not types[known["type"]]:
            kind = known["type"] if known else "no argument of this tool"
            raise CallError(f"{name}: {key[:40]} is {kind}.")
    return name, arguments


async def answer(box: Any, name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the result of a checked call, or a message of what went wrong."""
    try:
        if name == "shell":
            return _cut(await _shell(box, arguments["command"]))
        path = posixpath.join(HOME, arguments["path"])
        if name == "view":
            lines = (arguments.get("start", 1), arguments.get("end"))
            return _cut(await _view(box, path, *lines))
        return await _edit(box, path, arguments["old"], arguments["new"])
    except CallError as error:
        return f"error: {error}"


async def _shell(box: Any, command: str) -> str:
    result = await box.run(command, seconds=_SECONDS)
    if result.is_timeout:
        return f"error: stopped after {_SECONDS:.0f} seconds; the shell is a new one."
    text = result.stdout + result.stderr
    ending = f"\n[exit code {result.exit_code}]" if result.exit_code else ""
    return (text + ending).strip("\n") or NO_OUTPUT


async def _view(box: Any, path: str, start: int, end: int | None) -> str:
    quoted = shlex.quote(path)
    result = await box.run(f"/usr/bin/test -d {quoted} && /bin/ls -p {quoted}")
    if result.exit_code == 0:
        return result.stdout or "(an empty folder)"
    lines = (await _text(box, path)).split("\n")
    end = min(end or len(lines), start + _MAX_LINES - 1, len(lines))
    if not 1 <= start <= end:
        raise CallError(f"{path} has lines 1 to {len(lines)}.")
    shown = enumerate(lines[start - 1 : end], start)
    rest = len(lines) - end
    return "\n".join(f"{i}\t{line}" for i, line in shown) + (
        f"\n({rest} more lines; give start and end)" if rest else ""
    )


async def _edit(box: Any, path: str, old: str, new: str) -> str:
    if not old:
        if await _is_there(box, path):
            raise CallError(f"{path} exists; give the old text.")
        await box.run(f"/bin/mkdir -p {shlex.quote(posixpath.dirname(path))}")
        await box.write(path, new.encode())
        return f"made {path}"
    text = await _text(box, path)
    count = text.count(old)
    if count != 1:
        raise CallError(
            f"the old text occurs {count} times in {path}; it must be once."
        )
    await box.write(path, text.replace(old, new).encode())
    return f"changed {path}"


async def _is_there(box: Any, path: str) -> bool:
    result = await box.run(f"/usr/bin/test -e {shlex.quote(path)}")
    return result.exit_code == 0


async def _text(box: Any, path: str) -> str:
    if not path.startswith(HOME + "/") or not await _is_there(box, path):
        raise CallError(f"there is no file {path} below {HOME}.")
    try:
        return (await box.read(path)).decode()
    except UnicodeDecodeError as error:
        raise CallError(f"{path} is no text in UTF-8.") from error


def _cut(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2
    middle = len(text) - 2 * half
    return f"{text[:half]}\n({middle} characters left out)\n{text[-half:]}"
