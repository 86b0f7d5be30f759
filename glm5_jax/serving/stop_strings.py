"""Finds stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Passes a text on until one of some strings occurs in it.

    A part that may be the beginning of a stop string is held back until the text
    decides. Of several strings the one that ends first counts, then the longest.

    Attributes:
        found: the string that ended the text, or None.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """Starts an empty text; the strings must not be empty."""
        self._strings = tuple(strings)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Returns the text that more text sets free."""
        if self.found is not None:
            return ""
        self._held += text
        ends = [
            (self._held.find(stop) + len(stop), -len(stop), stop)
            for stop in self._strings
            if stop in self._held
        ]
        if ends:
            end, _, self.found = min(ends)
            free, self._held = self._held[: end - len(self.found)], ""
            return free
        size = max(map(self._overlap, self._strings), default=0)
        free = self._held[: len(self._held) - size]
        self._held = self._held[len(free) :]
        return free

    def close(self) -> str:
        """Returns what was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text

    def _overlap(self, stop: str) -> int:
        """Returns how many characters at the end may begin a stop string."""
        longest = min(len(stop) - 1, len(self._held))
        sizes = range(longest, 0, -1)
        return next((n for n in sizes if self._held.endswith(stop[:n])), 0)
