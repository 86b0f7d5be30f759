"""JSON of long records, in pieces between which other threads run.

`json.dumps` holds Python's lock until its whole text is there: 0.1 s for an episode of
tens of thousands of tokens, seconds for the groups of a step. An event loop in another
thread stands still meanwhile.
"""

import json
from collections.abc import Iterator
from typing import Any

_MOST = 512  # items of a list in a piece


def dumps(value: Any) -> str:
    """Returns json.dumps(value, default=repr)."""
    return "".join(pieces(value))


def pieces(value: Any) -> Iterator[str]:
    """Yields the text of `dumps`.

    A piece has a text, a number, or 512 items of a list at most, which should be short:
    a list of more is not looked into, unless it begins with a dict.
    """
    if isinstance(value, dict):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            name = _whole({key: 0})[1:-2]  # "key": and a blank
            yield f", {name}" if number else name
            yield from pieces(item)
        yield "}"
    elif not isinstance(value, list | tuple) or not value:
        yield _whole(value)
    elif len(value) > _MOST and not isinstance(value[0], dict):
        for start in range(0, len(value), _MOST):
            some = _whole(value[start : start + _MOST])[1:-1]
            yield f", {some}" if start else f"[{some}"
        yield "]"
    elif any(isinstance(item, dict | list | tuple) for item in value):
        yield "["
        for number, item in enumerate(value):
            if number:
                yield ", "
            yield from pieces(item)
        yield "]"
    else:
        yield _whole(value)


def _whole(value: Any) -> str:
    return json.dumps(value, default=repr)
