"""Parses sampled ids into thought, content and tool calls while they arrive.

A `Parser` is one state machine for the whole of an assistant's turn:

    thought --</think>--> content --<tool_call>--> call --</tool_call>--> content

A well-formed call within the thought ends the thought, because models sometimes leave
</think> out there. Special tokens are recognised by their ids, so a text that merely
looks like one stays text. The parser reads each id by itself, so the events do not
depend on where the stream of ids was cut.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from glm5_jax import messages
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import text_stream, tool_calls

_UNCLOSED_THOUGHT = "the thought is not closed by </think>"
_UNCLOSED_CALL = "a tool call is not closed by </tool_call>"


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """More text of the thought."""

    text: str


@dataclasses.dataclass(frozen=True)
class Content:
    """More text of the answer."""

    text: str


@dataclasses.dataclass(frozen=True)
class Call:
    """A whole tool call; an unfinished or malformed one is text instead."""

    name: str
    arguments: Mapping[str, Any]


Event = Reasoning | Content | Call
Emit = Callable[[Event], None]


class Trimmed:
    """Holds back the blanks at the end of a text that arrives in pieces."""

    def __init__(self) -> None:
        """Starts an empty text."""
        self._blanks = ""

    def feed(self, text: str) -> str:
        """Returns more of the text, up to its last character that is no blank."""
        text = self._blanks + text
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        return kept


class Parser:
    """Reads the ids of one assistant's turn.

    The texts of thought and content have no blanks at their ends, as in the chat
    template; the content may keep those after it, for who looks for them. A malformed
    call, or one that the end cuts off, stays text with its special tokens spelt out. An
    argument is a string if its tool's schema says so or if it is not JSON.

    Attributes:
        errors: explanations of malformed calls and of a thought that is not closed.
        is_stopped: whether a stop id ended the turn; later ids are ignored.
    """

    def __init__(
        self,
        tokenizer: tokenizer_lib.Tokenizer,
        *,
        is_thinking: bool,
        tools: messages.Tools = (),
        stop_ids: Iterable[int] = (),
        trims_content: bool = True,
    ) -> None:
        """Starts before the first id after the generation prompt.

        Args:
            tokenizer: the tokenizer of the ids, with the template's special tokens.
            is_thinking: whether the prompt ended with <think>.
            tools: JSON schemas of the functions.
            stop_ids: ids that end the turn.
            trims_content: whether to remove the blanks at the end of the content.
        """
        self._tokenizer, self._types = tokenizer, tool_calls.types_of(tools)
        self._special, self._stop_ids = tokenizer.special_ids, frozenset(stop_ids)
        self.errors: list[str] = []
        self.is_stopped = False
        self._is_first = True
        self._kind: type[Reasoning] | type[Content] = Content
        self._has_open_thought = False
        if is_thinking:
            self._begin_thought()
        self._text = text_stream.TextStream(tokenizer, is_spelt=True)
        self._begun: set[type] = set()  # kinds of text with a character, not blank
        self._trimmed: dict[type, Trimmed] = {Reasoning: Trimmed()}
        if trims_content:
            self._trimmed[Content] = Trimmed()
        self._call: tool_calls.PartialCall | None = None

    @property
    def is_thinking(self) -> bool:
        """Returns whether the next id belongs to the thought."""
        return self._kind is Reasoning

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """Returns the events of more ids."""
        events: list[Event] = []
        for id in ids:
            if not self.is_stopped:
                self._read(int(id), events.append)
            self._is_first = False
        return events

    def close(self) -> list[Event]:
        """Returns the events that the end of the ids completes."""
        events: list[Event] = []
        self._leave_call(_UNCLOSED_CALL, events.append)
        self._write(self._text.close(), events.append)
        if self._has_open_thought:
            self.errors.insert(0, _UNCLOSED_THOUGHT)
        return events

    def _read(self, id: int, emit: Emit) -> None:
        """Reads one id."""
        if id in self._stop_ids:
            self.is_stopped = True
        elif id == self._special["<think>"] and self._is_first:
            self._begin_thought()
        elif id == self._special["</think>"] and self._kind is Reasoning:
            self._leave_call(_UNCLOSED_CALL, emit)
            self._begin_content(emit)
            self._has_open_thought = False
        elif id == self._special["<tool_call>"]:
            self._leave_call(_UNCLOSED_CALL, emit)
            self._call = tool_calls.PartialCall(self._tokenizer, self._types)
        elif self._call is None:
            self._write(self._text.feed(id), emit)
        elif wrong := self._call.feed(id):
            self._leave_call(wrong, emit)
        elif self._call.is_closed:
            call, self._call = self._call, None
            self._begin_content(emit)
            emit(Call(call.name, call.arguments))

    def _begin_thought(self) -> None:
        self._kind, self._has_open_thought = Reasoning, True

    def _begin_content(self, emit: Emit) -> None:
        """Ends the text so far; later text is content."""
        self._write(self._text.close(), emit)
        self._kind = Content

    def _leave_call(self, wrong: str, emit: Emit) -> None:
        """Turns a call under way back into text."""
        if self._call is not None:
            self.errors.append(wrong)
            ids, self._call = self._call.ids, None
            for id in ids:
                self._write(self._text.feed(id), emit)

    def _write(self, text: str, emit: Emit) -> None:
        """Emits text; blanks at its end wait until another character follows them."""
        if self._kind not in self._begun:
            text = text.lstrip()
        if text:
            self._begun.add(self._kind)
        if self._kind in self._trimmed:
            text = self._trimmed[self._kind].feed(text)
        if text:
            emit(self._kind(text))


def parse(
    ids: Sequence[int],
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    is_thinking: bool,
    tools: messages.Tools = (),
    stop_ids: Iterable[int] = (),
) -> dict[str, Any]:
    """Returns an assistant's message: content, reasoning_content, tool_calls, errors.

    Args:
        ids: the ids after the generation prompt.
        tokenizer: the tokenizer of the ids.
        is_thinking: whether the prompt ended with <think>.
        tools: JSON schemas of the functions.
        stop_ids: ids that end the turn.
    """
    parser = Parser(tokenizer, is_thinking=is_thinking, tools=tools, stop_ids=stop_ids)
    events = [*parser.feed(ids), *parser.close()]
    texts = dict.fromkeys((Reasoning, Content), "")
    calls = []
    for event in events:
        if isinstance(event, Call):
            function = {"name": event.name, "arguments": event.arguments}
            calls.append({"type": "function", "function": function})
        else:
            texts[type(event)] += event.text
    message: dict[str, Any] = {
        "role": "assistant",
        # Always present, so that a </think> in the content stays there.
        "reasoning_content": texts[Reasoning],
        "content": texts[Content],
    }
    if calls:
        message["tool_calls"] = calls
    if parser.errors:
        message["errors"] = parser.errors
    return message
