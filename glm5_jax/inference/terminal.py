"""Holds a conversation in a terminal, or with a program line by line.

On a terminal the thought is dim, lines can be edited and pasted together, ctrl-C stops
an answer and ctrl-D ends the program. Where the output is no terminal, only contents
are written, without colours; where the input is none, each line is a message.
"""

import contextlib
import importlib
import io
import json
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from glm5_jax import config as config_lib
from glm5_jax.data.chat import parsing
from glm5_jax.inference import conversation as conversation_lib

HELP = """/reset        forgets the conversation
/think on     lets the model think before it answers
/think off    lets it answer at once
/help         shows this
/exit         ends, as ctrl-D does
"""
Stream = TextIO | io.TextIOBase
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_PROMPT = "> "
_PASTE_SECONDS = 0.05  # further lines of a paste arrive within it


class Terminal:
    """Reads messages and writes answers."""

    def __init__(
        self,
        conversation: conversation_lib.Conversation,
        source: Stream | None = None,
        sink: Stream | None = None,
    ) -> None:
        """Takes the program's own streams by default."""
        self._conversation = conversation
        self._source, self._sink = source or sys.stdin, sink or sys.stdout
        self._is_typed, self._is_shown = self._source.isatty(), self._sink.isatty()
        self._kind: type | None = None  # of the event that was written last

    def run(self) -> None:
        """Answers every message until the input ends."""
        if self._is_typed:
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # edits lines and recalls them
        for text in self._messages():
            if text.startswith("/"):
                if not self._obey(text):
                    return
            elif text.strip():
                self._answer(text)

    def _messages(self) -> Iterator[str]:
        """Yields the user's messages and commands."""
        while True:
            try:
                yield self._read()
            except KeyboardInterrupt:  # drops the line
                self._write("\n")
            except EOFError:
                if self._is_typed:
                    self._write("\n")
                return

    def _read(self) -> str:
        """Returns the next message; lines that were pasted together are one.

        Raises:
          EOFError: the input has ended.
        """
        if not self._is_typed:
            line = self._source.readline()
            if not line:
                raise EOFError
            return line.rstrip("\r\n")
        lines = [input(_PROMPT)]
        while select.select([self._source], [], [], _PASTE_SECONDS)[0]:
            try:
                lines.append(input())
            except EOFError:
                break
        return "\n".join(lines)

    def _obey(self, command: str) -> bool:
        """Carries out a command; returns whether to continue."""
        words = command.split()
        if words == ["/reset"]:
            self._conversation.reset()
        elif words in (["/think", "on"], ["/think", "off"]):
            self._conversation.is_thinking = words[1] == "on"
        elif words in (["/exit"], ["/quit"]):
            return False
        else:
            is_known = words == ["/help"]
            self._note(HELP if is_known else f"{words[0]} is no command.\n{HELP}")
        return True

    def _answer(self, text: str) -> None:
        """Writes the answer to a message as it comes."""
        self._kind = None
        with _interrupts() as is_interrupted:
            try:
                outcome = self._conversation.answer(text, self._show, is_interrupted)
            except config_lib.InputError as error:
                self._note(f"{error}\n")
                return
        self._leave_thought()
        rate = outcome.num_tokens / max(outcome.seconds, 1e-9)
        why = ", stopped" if outcome.is_stopped else ""
        why = ", cut off: no room is left" if outcome.is_cut else why
        figures = f"[{outcome.num_tokens} tokens, {rate:.0f} a second{why}]"
        self._write(f"\n{_DIM}{figures}{_PLAIN}\n" if self._is_shown else "\n")

    def _show(self, event: parsing.Event) -> None:
        """Writes a part of an answer."""
        if isinstance(event, parsing.Reasoning):
            if self._is_shown:
                self._write(f"{_DIM}{event.text}" if self._kind is None else event.text)
                self._kind = parsing.Reasoning
            return
        self._leave_thought()
        if isinstance(event, parsing.Content):
            self._write(event.text)
        else:
            arguments = json.dumps(event.arguments, ensure_ascii=False)
            self._write(f"\n{event.name}({arguments})")
        self._kind = type(event)

    def _leave_thought(self) -> None:
        if self._kind is parsing.Reasoning:
            self._write(f"{_PLAIN}\n")
            self._kind = None

    def _note(self, text: str) -> None:
        """Writes what is no answer, where programs do not read it."""
        sys.stderr.write(text)
        sys.stderr.flush()

    def _write(self, text: str) -> None:
        self._sink.write(text)
        self._sink.flush()


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Takes ctrl-C while it lasts; yields a function that tells whether it came."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)
