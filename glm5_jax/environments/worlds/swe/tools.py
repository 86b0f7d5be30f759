"""The tools of an agent: shell, view, edit and submit, in the chat form."""

import posixpath
import shlex
from collections.abc import Mapping
from typing import Any

from glm5_jax.environments import sandbox, tool_calls
from glm5_jax.environments.worlds.swe import drivers

HOME = f"/work/{drivers.ROOT}"
_MAX_CHARACTERS = 16_000  # of an answer
_MAX_LINES = 400  # of a view
_SECONDS = 30.0  # of a command
_SEARCH_SECONDS = 240.0  # of a search of the whole box


SCHEMAS = (
    tool_calls.schema(
        "shell",
        f"Runs a command in a shell that keeps its folder and variables; it begins in "
        f"{HOME}. There is no network.",
        command="The command.",
    ),
    tool_calls.schema(
        "view",
        "Shows a file with line numbers, or the names in a folder.",
        optional=("start", "end"),
        integers=("start", "end"),
        path="The file or folder.",
        start="The first line, 1 if left out.",
        end="The last line.",
    ),
    tool_calls.schema(
        "edit",
        "Replaces a text that occurs once in a file. An empty old text makes a file.",
        path="The file.",
        old="The text to replace, with its blanks.",
        new="The text that takes its place.",
    ),
    tool_calls.schema(
        tool_calls.SUBMIT, "Ends the task: the package is tested as it is."
    ),
)


async def run(box: Any, name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the result of a checked call.

    Raises:
        CallError: it cannot be carried out.
    """
    if name == "shell":
        done = await box.run(arguments["command"], seconds=_SECONDS)
        if done.exit_code is None:  # the next shell is a new one
            await box.run(f"cd {HOME}")
        return _cut(done.text())
    path = posixpath.join(HOME, arguments["path"])
    try:
        if name == "view":
            lines = (arguments.get("start", 1), arguments.get("end"))
            return _cut(await _view(box, path, *lines))
        return await _edit(box, path, arguments["old"], arguments["new"])
    except sandbox.FileError as error:
        raise tool_calls.CallError(str(error)) from error


async def search(box: Any, command: str) -> list[str]:
    """Returns the lines of a proof's command, which may take long.

    Raises:
        TimeoutError: it took too long.
    """
    done = await box.run(command, seconds=_SEARCH_SECONDS)
    if done.is_timeout:
        raise TimeoutError(f"the search took more than {_SEARCH_SECONDS:g} s")
    return done.stdout.splitlines()


async def _view(box: Any, path: str, start: int, end: int | None) -> str:
    quoted = shlex.quote(path)
    result = await box.run(f"/usr/bin/test -d {quoted} && /bin/ls -p {quoted}")
    if result.exit_code == 0:
        return result.stdout or "(an empty folder)"
    lines = (await _text(box, path)).split("\n")
    end = min(end or len(lines), start + _MAX_LINES - 1, len(lines))
    if not 1 <= start <= end:
        raise tool_calls.CallError(f"{path} has lines 1 to {len(lines)}.")
    shown = enumerate(lines[start - 1 : end], start)
    rest = len(lines) - end
    return "\n".join(f"{i}\t{line}" for i, line in shown) + (
        f"\n({rest} more lines; give start and end)" if rest else ""
    )


async def _edit(box: Any, path: str, old: str, new: str) -> str:
    if not old:
        if await _is_there(box, path):
            raise tool_calls.CallError(f"{path} exists; give the old text.")
        await box.run(f"/bin/mkdir -p {shlex.quote(posixpath.dirname(path))}")
        await box.write(path, new.encode())
        return f"made {path}"
    text = await _text(box, path)
    count = text.count(old)
    if count != 1:
        raise tool_calls.CallError(
            f"the old text occurs {count} times in {path}; it must be once."
        )
    await box.write(path, text.replace(old, new).encode())
    return f"changed {path}"


async def _is_there(box: Any, path: str) -> bool:
    result = await box.run(f"/usr/bin/test -e {shlex.quote(path)}")
    return result.exit_code == 0


async def _text(box: Any, path: str) -> str:
    if not path.startswith(HOME + "/") or not await _is_there(box, path):
        raise tool_calls.CallError(f"there is no file {path} below {HOME}.")
    try:
        return (await box.read(path)).decode()
    except UnicodeDecodeError as error:
        raise tool_calls.CallError(f"{path} is no text in UTF-8.") from error


def _cut(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2
    middle = len(text) - 2 * half
    return f"{text[:half]}\n({middle} characters left out)\n{text[-half:]}"
