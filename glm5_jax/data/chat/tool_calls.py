"""Reads one tool call from ids that arrive one by one.

<tool_call>NAME(<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>)*</tool_call>
"""

import json
from collections.abc import Mapping
from typing import Any

from glm5_jax import messages
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import text_stream

Types = Mapping[tuple[str, str], Any]  # declared type of each (function, argument)

_MAX_DEPTH = 64  # of an argument's brackets
# The part of a call that a special token begins, by the part before it.
_NEXT = {
    ("name", "<arg_key>"): "key",
    ("name", "</tool_call>"): "end",
    ("key", "</arg_key>"): "gap",
    ("gap", "<arg_value>"): "value",
    ("value", "</arg_value>"): "gap after a value",
    ("gap after a value", "<arg_key>"): "key",
    ("gap after a value", "</tool_call>"): "end",
}


class PartialCall:
    """A tool call of which some ids have been read.

    Attributes:
        ids: all ids so far, with <tool_call>.
        name: the function's name, once it is complete.
        arguments: the arguments that are complete.
    """

    def __init__(self, tokenizer: tokenizer_lib.Tokenizer, types: Types) -> None:
        """Starts after <tool_call>.

        Args:
            tokenizer: the tokenizer of the ids.
            types: of `types_of`.
        """
        self._tokenizer, self._types = tokenizer, types
        self._names = {i: name for name, i in tokenizer.special_ids.items()}
        self.ids = [tokenizer.special_ids["<tool_call>"]]
        self.name, self._key = "", ""
        self.arguments: dict[str, Any] = {}
        self._part = "name"
        self._begin_text()

    @property
    def is_closed(self) -> bool:
        """Returns whether </tool_call> was read."""
        return self._part == "end"

    def feed(self, id: int) -> str | None:
        """Reads one more id; returns what makes the call malformed, or None."""
        self.ids.append(id)
        token = self._names.get(id)
        if token is None:
            self._text += self._stream.feed(id)
            return None
        part, after = self._part, _NEXT.get((self._part, token))
        if after is None and token == "</tool_call>":
            return f"an argument of the call of {self.name!r} is not complete"
        if after is None:
            return f"{token} does not belong into a tool call where it stands"
        self._part, text = after, self._text + self._stream.close()
        self._begin_text()
        return self._finish(part, text)

    def _begin_text(self) -> None:
        self._text, self._stream = "", text_stream.TextStream(self._tokenizer)

    def _finish(self, part: str, text: str) -> str | None:
        """Takes in the text of a part; returns what is wrong with it."""
        if part == "name":
            self.name = text.strip()
            return None if self.name else "a tool call has no name"
        if part == "key":
            self._key = text.strip()
            is_new = self._key not in self.arguments
            twice = f"the argument {self._key!r} of {self.name!r} is given twice"
            return None if is_new else twice
        if part == "value":
            kind = self._types.get((self.name, self._key))
            is_string = kind in ("string", ["string"])
            self.arguments[self._key] = text if is_string else _value(text)
            return None
        between = f"there is text between the arguments of {self.name!r}"
        return between if text.strip() else None


def types_of(tools: messages.Tools) -> Types:
    """Returns the declared type of each (function, argument)."""
    found = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters")
        has_any = isinstance(parameters, Mapping)
        properties = parameters.get("properties") if has_any else None
        if not isinstance(properties, Mapping):
            continue
        for key, schema in properties.items():
            if isinstance(schema, Mapping):  # it may also be true or false
                found[function.get("name"), key] = schema.get("type")
    return found


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
