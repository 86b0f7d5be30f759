"""Copies of the messages that an environment returns, which may be of any size."""

import copy
from collections.abc import Mapping
from typing import Any

_MAX_PARTS = 16  # of a message, each as large as the cache may be


def of_message(message: Any, limit: int) -> dict[str, Any]:
    """Returns a deep copy of a message; its texts are cut to `limit` characters.

    Raises:
        TypeError: it is no mapping.
        ValueError: it is larger than any message may be.
    """
    if not isinstance(message, Mapping):
        raise TypeError(f"a message must be a mapping, got {type(message).__name__}")
    return _Copy(limit).of(message)


class _Copy:
    """Copies a message; texts are cut to `limit` characters, which no cache can fit."""

    def __init__(self, limit: int) -> None:
        self._limit, self._left = limit, _MAX_PARTS * limit

    def of(self, value: Any) -> Any:
        """Returns a deep copy.

        Raises:
            ValueError: it has more than _MAX_PARTS * limit characters.
        """
        if isinstance(value, str):
            value = value[: self._limit]
        self._left -= len(value) if isinstance(value, str) else 1
        if self._left < 0:
            size = _MAX_PARTS * self._limit
            raise ValueError(f"a message of more than {size} characters")
        if isinstance(value, Mapping):
            return {self.of(key): self.of(x) for key, x in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(x) for x in value]
        return copy.deepcopy(value)
