"""Cuts a stream of server-sent events where one of them ends."""

import json

_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_OPENING_TYPES = {"message_start", "ping", "response.created", "response.in_progress"}


class Events:
    """Returns only whole events, so that another event may follow at any time."""

    def __init__(self) -> None:
        """Begins before the first event."""
        self._rest = b""

    def feed(self, part: bytes) -> bytes:
        """Returns the events that end within a part of the stream."""
        text = self._rest + part
        end = max(
            (found + len(mark) for mark in _ENDS if (found := text.rfind(mark)) >= 0),
            default=0,
        )
        self._rest = text[end:]
        return text[:end]

    def close(self) -> bytes:
        """Returns what follows the last event at the end of the stream."""
        rest, self._rest = self._rest, b""
        return rest


def is_opening(events: bytes) -> bool:
    """Returns whether events hold nothing that was sampled.

    Streams begin with such events before the request has its turn. The router keeps
    them back, since until the first token another replica can answer instead.
    """
    data = [line for line in events.splitlines() if line.startswith(b"data:")]
    return all(_is_opening(line.removeprefix(b"data:")) for line in data)


def _is_opening(data: bytes) -> bool:
    try:
        fields = json.loads(data)
        if fields.get("type") in _OPENING_TYPES:
            return True
        if fields.get("object") != "chat.completion.chunk" or "usage" in fields:
            return False
        return all(
            choice.get("finish_reason") is None
            and not any(v for k, v in choice["delta"].items() if k != "role")
            and not choice.get("token_ids")
            for choice in fields["choices"]
        )
    except (ValueError, AttributeError, KeyError, TypeError):
        return False
