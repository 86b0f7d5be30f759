"""Messages from the objects of a JSONL file, in the forms of OpenAI and ShareGPT.

{"messages": [{"role", "content", ...}], "tools": [...]}, as messages.py has it; or
{"conversations": [{"from", "value"}], "system": text, "tools": [...]}.
"""

from collections.abc import Mapping
from typing import Any

from glm5_jax import config, messages

_SENDERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


def read(record: Any) -> tuple[list[messages.Message], messages.Tools]:
    """Returns the messages of a record, and their tools.

    Raises:
        config.InputError: the record is no conversation, or cannot be trained on.
    """
    found = record if isinstance(record, Mapping) else {}
    tools = found.get("tools") or ()
    if "messages" in found:
        turns = found["messages"]
    elif "conversations" in found:
        turns = _of_sharegpt(found["conversations"])
        if found.get("system"):
            turns.insert(0, {"role": "system", "content": found["system"]})
    else:
        got = sorted(record) if isinstance(record, Mapping) else type(record).__name__
        raise config.InputError(
            f'the field "messages" (or ShareGPT\'s "conversations") is missing; got '
            f"{got}."
        )
    messages.check(turns, tools)
    return list(turns), tools


def _of_sharegpt(turns: Any) -> list[messages.Message]:
    """Renames the fields of {"from", "value"}; the others stay."""
    if not isinstance(turns, list):
        raise config.InputError(f"conversations must be a list, got {turns!r}.")
    out: list[messages.Message] = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            raise config.InputError(
                f'conversations[{i}] must be {{"from": ..., "value": ...}}, got '
                f"{turn!r}."
            )
        sender = turn["from"]
        if not isinstance(sender, str) or sender not in _SENDERS:
            raise config.InputError(
                f"conversations[{i}]: from must be one of {', '.join(_SENDERS)}; got "
                f"{sender!r}."
            )
        rest = {k: v for k, v in turn.items() if k not in ("from", "value")}
        out.append({"role": _SENDERS[sender], "content": turn["value"], **rest})
    return out
