"""Parses sampled ids into a message with its tool calls."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from glm5_jax import messages
from glm5_jax.data import tokenizer as tokenizer_lib

_MAX_DEPTH = 64  # of an argument's brackets


def parse(
    ids: Sequence[int],
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    is_thinking: bool,
    tools: messages.Tools = (),
) -> dict[str, Any]:
    """Returns an assistant's message: content, reasoning_content, tool_calls.

    An argument is a string if its tool's schema says so or if it is not JSON. A
    malformed call stays in the content with its special tokens spelt out. `errors`
    explains malformed calls and thoughts that are not closed.

    Args:
        ids: the ids after the generation prompt, without the stop.
        tokenizer: the tokenizer of the ids.
        is_thinking: whether the prompt ended with <think>.
        tools: JSON schemas of the functions.
    """
    special = tokenizer.special_ids
    ids, errors = list(ids), []
    if ids and ids[0] == special["<think>"]:
        ids, is_thinking = ids[1:], True
    thought: list[int] = []
    if is_thinking:
        thought, is_closed, ids = _cut(ids, special["</think>"])
        if not is_closed:
            errors.append("the thought is not closed by </think>")
    content, calls = "", []
    for piece in _pieces(ids, special):
        if piece[0] != special["<tool_call>"]:
            content += tokenizer.spell(piece)
            continue
        try:
            calls.append(_call(piece, tokenizer, _types(tools)))
        except ValueError as error:
            errors.append(str(error))
            content += tokenizer.spell(piece)
    message: dict[str, Any] = {
        "role": "assistant",
        # Always present, so that a </think> in the content stays there.
        "reasoning_content": tokenizer.spell(thought).strip(),
        "content": content.strip(),
    }
    if calls:
        message["tool_calls"] = calls
    if errors:
        message["errors"] = errors
    return message


def _pieces(ids: list[int], special: Mapping[str, int]) -> Iterator[list[int]]:
    """Yields texts, and calls from <tool_call> to </tool_call> or the next call."""
    opening, closing = special["<tool_call>"], special["</tool_call>"]
    piece: list[int] = []
    for i in ids:
        if i == opening and piece:
            yield piece
            piece = []
        piece.append(i)
        if i == closing and piece[0] == opening:
            yield piece
            piece = []
    if piece:
        yield piece


def _call(
    ids: list[int],
    tokenizer: tokenizer_lib.Tokenizer,
    types: Mapping[tuple[str, str], Any],
) -> dict[str, Any]:
    """Returns one call; raises ValueError if it is malformed."""
    special = tokenizer.special_ids
    if ids[-1] != special["</tool_call>"]:
        raise ValueError("a tool call is not closed by </tool_call>")
    head, has_arguments, rest = _cut(ids[1:-1], special["<arg_key>"])
    name = _text(head, tokenizer).strip()
    if not name:
        raise ValueError("a tool call has no name")
    arguments: dict[str, Any] = {}
    while has_arguments:
        key_ids, has_key, rest = _cut(rest, special["</arg_key>"])
        gap, has_value, rest = _cut(rest, special["<arg_value>"])
        value_ids, is_closed, rest = _cut(rest, special["</arg_value>"])
        between, has_arguments, rest = _cut(rest, special["<arg_key>"])
        if not (has_key and has_value and is_closed):
            raise ValueError(f"an argument of the call of {name!r} is not complete")
        if _text([*gap, *between], tokenizer).strip():
            raise ValueError(f"there is text between the arguments of {name!r}")
        key = _text(key_ids, tokenizer).strip()
        if key in arguments:
            raise ValueError(f"the argument {key!r} of {name!r} is given twice")
        value = _text(value_ids, tokenizer)
        is_string = types.get((name, key)) in ("string", ["string"])
        arguments[key] = value if is_string else _value(value)
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _cut(ids: list[int], at: int) -> tuple[list[int], bool, list[int]]:
    """Returns the ids before `at`, whether `at` occurs, and the ids after it."""
    if at not in ids:
        return ids, False, []
    i = ids.index(at)
    return ids[:i], True, ids[i + 1 :]


def _text(ids: list[int], tokenizer: tokenizer_lib.Tokenizer) -> str:
    """Returns the text of ids; raises ValueError if one is a special token."""
    strange = set(ids) & set(tokenizer.special_ids.values())
    if strange:
        raise ValueError(
            f"{tokenizer.spell(sorted(strange))} does not belong into a tool call "
            f"where it stands"
        )
    return tokenizer.decode(ids)


def _value(text: str) -> Any:
    """Returns the JSON value of the text, or the text.

    A value that JSON cannot write again also stays text (half of a surrogate pair,
    1e999, endless brackets), so that no sampled text can break later code.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return value if _depth(value) <= _MAX_DEPTH else text


def _depth(value: Any) -> int:
    """Returns the nesting depth of lists and objects, without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [x.values() if isinstance(x, dict) else x for x in level if _is_box(x)]
        level = [x for values in inner for x in values]
    return depth


def _is_box(value: Any) -> bool:
    return isinstance(value, dict | list)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _types(tools: messages.Tools) -> dict[tuple[str, str], Any]:
    """Returns the declared type of each (function, argument)."""
    found = {}
    for tool in tools:
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties") or {}
        for key, schema in properties.items():
            if isinstance(schema, Mapping):  # it may also be true or false
                found[function.get("name"), key] = schema.get("type")
    return found
