"""Tools in the chat form: their schemas, and calls that are checked against them."""

from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import config, messages


class CallError(Exception):
    """A call that cannot be carried out; the model reads the message."""


def schema(
    name: str, description: str, optional: Sequence[str] = (), **arguments: str
) -> Mapping[str, Any]:
    """Returns the schema of a tool.

    Args:
        name: of the tool.
        description: of what it does.
        optional: arguments that may be left out.
        **arguments: descriptions of its arguments, which are texts.
    """
    properties = {
        key: {"type": "string", "description": text} for key, text in arguments.items()
    }
    required = [key for key in arguments if key not in optional]
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


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
        if not isinstance(value, str):
            raise CallError(f"{name}: {key} must be a text.")
    return name, arguments


def result(call: Any, content: str) -> messages.Message:
    """Returns the message that answers a call."""
    message: dict[str, Any] = {"role": "tool", "content": content}
    key = call.get("id") if isinstance(call, Mapping) else None
    return message | ({"tool_call_id": key} if key else {})


def turn(name: str, **arguments: Any) -> messages.Message:
    """Returns an assistant's turn that calls a tool, for solutions that are played."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
