"""Tools in the chat form: schemas, checked calls, and the turns that call them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from glm5_jax import config, messages

SUBMIT = "submit"  # the tool that ends an episode, where there is one
_MAX_CALLS = 8  # of one turn
_TYPES = {"string": str, "integer": int}


class CallError(Exception):
    """A call that cannot be carried out; the model reads the message."""


def schema(
    name: str,
    description: str,
    /,
    optional: Sequence[str] = (),
    integers: Sequence[str] = (),
    **arguments: str,
) -> Mapping[str, Any]:
    """Returns the schema of a tool.

    Args:
        name: of the tool.
        description: of what it does.
        optional: arguments that may be left out.
        integers: arguments that are whole numbers.
        **arguments: descriptions of its arguments, the others of which are texts.
    """
    properties = {
        key: {
            "type": "integer" if key in integers else "string",
            "description": text,
        }
        for key, text in arguments.items()
    }
    required = [key for key in arguments if key not in optional]
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


SHELL = (
    schema(
        "shell",
        "Runs a command in a shell that keeps its folder and variables. There is no "
        "network.",
        command="The command.",
    ),
    schema(SUBMIT, "Ends the task."),
)


def read(
    call: Any, schemas: Sequence[Mapping[str, Any]]
) -> tuple[str, Mapping[str, Any]]:
    """Returns the name and the arguments of a call.

    Raises:
        CallError: the tool does not exist, or an argument is missing, unknown or of a
            wrong type.
    """
    try:
        name, arguments = messages.call_of(call)
    except config.InputError as error:
        raise CallError(str(error)) from error
    known = {tool["function"]["name"]: tool["function"] for tool in schemas}
    if name not in known:
        raise CallError(f"there is no tool {name[:40]!r}; use {', '.join(known)}.")
    parameters = known[name]["parameters"]
    if missing := [key for key in parameters["required"] if key not in arguments]:
        raise CallError(f"{name} needs {', '.join(missing)}.")
    for key, value in arguments.items():
        if key not in parameters["properties"]:
            raise CallError(f"{name} has no argument {key[:40]!r}.")
        kind = parameters["properties"][key]["type"]
        if type(value) is not _TYPES[kind]:
            raise CallError(f"{name}: {key} must be of type {kind}.")
        if isinstance(value, str) and not _is_text(value):
            raise CallError(f"{name}: {key} has zero bytes or half characters.")
    return name, arguments


async def answer(
    message: messages.Message,
    schemas: Sequence[Mapping[str, Any]],
    run: Callable[[str, Mapping[str, Any]], Awaitable[str]],
) -> tuple[tuple[messages.Message, ...], bool]:
    """Answers the calls of a turn, up to a call of `submit`.

    Args:
        message: the assistant's turn.
        schemas: of the tools.
        run: takes the name and the checked arguments of a call, and returns its result
            or raises CallError.

    Returns:
        the results, and whether the turn submits.
    """
    results = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        try:
            if number >= _MAX_CALLS:
                raise CallError(f"a turn has at most {_MAX_CALLS} calls.")
            name, arguments = read(call, schemas)
            if name == SUBMIT:
                return tuple(results), True
            text = await run(name, arguments)
        except CallError as error:
            text = f"error: {error}"
        results.append(result(call, text))
    return tuple(results), False


def taken(
    message: messages.Message, schemas: Sequence[Mapping[str, Any]]
) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns names and arguments of the calls that `answer` runs for a turn."""
    found = []
    for call in (message.get("tool_calls") or ())[:_MAX_CALLS]:
        try:
            name, arguments = read(call, schemas)
        except CallError:
            continue
        if name == SUBMIT:
            break
        found.append((name, arguments))
    return found


def _is_text(value: str) -> bool:
    """Returns whether a text can be written to a file and given to a program."""
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def result(call: Any, content: str) -> messages.Message:
    """Returns the message that answers a call."""
    message: dict[str, Any] = {"role": "tool", "content": content}
    key = call.get("id") if isinstance(call, Mapping) else None
    return message | ({"tool_call_id": key} if key else {})


def turn(name: str, /, **arguments: Any) -> messages.Message:
    """Returns an assistant's turn that calls a tool, for solutions that are played."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
