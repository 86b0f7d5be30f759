"""Reads one answer from the engine's events: texts, tool calls and counts."""

import dataclasses
import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

from glm5_jax import messages
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import parsing, templates, text_stream
from glm5_jax.inference import service as service_lib
from glm5_jax.serving import stop_strings


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call, as clients know it."""

    id: str
    name: str
    arguments: str  # JSON


@dataclasses.dataclass(frozen=True)
class Delta:
    """The part that some tokens add to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()
    first: int = 0  # the tokens are turn.tokens[first:end]
    end: int = 0


@runtime_checkable
class Reader(Protocol):
    """Turns ids into events, as parsing.Parser does."""

    @property
    def is_thinking(self) -> bool:
        """Returns whether the next id belongs to the thought."""
        ...

    def feed(self, ids: Iterable[int]) -> list[parsing.Event]:
        """Returns the events of more ids."""
        ...

    def close(self) -> list[parsing.Event]:
        """Returns the events that the end completes."""
        ...


class TextReader:
    """Reads all ids as content, without special tokens."""

    is_thinking = False

    def __init__(self, tokenizer: tokenizer_lib.Tokenizer) -> None:
        """Starts an empty text."""
        self._text = text_stream.TextStream(tokenizer)

    def feed(self, ids: Iterable[int]) -> list[parsing.Event]:
        """Returns the text of more ids."""
        return [parsing.Content("".join(map(self._text.feed, ids)))]

    def close(self) -> list[parsing.Event]:
        """Returns the rest of the text."""
        return [parsing.Content(self._text.close())]


class Turn:
    """One answer under way.

    Attributes:
        tokens: ids so far, with the stop id, up to a stop string's last.
        logprobs: of the tokens, in the distribution that they were drawn from.
        versions: of the weights that drew them.
        raw_logprobs: of the tokens, in the model's own distribution.
        alternatives: the likeliest tokens in each place, with such log-probs.
        num_reasoning: tokens of the thought.
        reasoning: text of the thought so far.
        content: text of the answer so far.
        calls: tool calls so far.
        end: the engine's last event, once it has come.
    """

    def __init__(
        self, reader: Reader, stop: Sequence[str] = (), trims_content: bool = False
    ) -> None:
        """Starts an empty answer.

        Args:
            reader: of its ids.
            stop: strings before which it ends.
            trims_content: whether to remove the blanks at the end of the content,
                after the search for stop strings, which may have blanks.
        """
        self._reader, self._stop = reader, stop_strings.StopStrings(stop)
        self._trimmed = parsing.Trimmed() if trims_content else None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.raw_logprobs: list[float] = []
        self.alternatives: list[list[tuple[int, float]]] = []
        self.num_reasoning = 0
        self.reasoning = self.content = ""
        self.calls: list[Call] = []
        self.end: service_lib.End | None = None

    @property
    def stop_string(self) -> str | None:
        """Returns the stop string that ended the answer, or None."""
        return self._stop.found

    @property
    def reason(self) -> Literal["stop", "length", "abort"]:
        """Returns why the answer ended."""
        if self.stop_string is not None:
            return "stop"
        assert self.end is not None
        assert self.end.reason != "error"
        return self.end.reason

    @property
    def num_cached(self) -> int:
        """Returns the tokens of the prompt that the engine had in its cache."""
        return self.end.completion.num_cached if self.end else 0

    def feed(self, event: service_lib.Event) -> Delta:
        """Reads an event; returns what it adds. Events after a stop string add nothing.

        Args:
            event: of the service, in order.
        """
        first, found = len(self.tokens), list[parsing.Event]()
        if isinstance(event, service_lib.End):
            self.end = event
            if self.stop_string is None:
                found = self._cut(self._reader.close())
                found.append(parsing.Content(self._stop.close()))
        else:
            for place, id in enumerate(event.ids):
                if self.stop_string is not None:
                    break
                self._record(event, place)
                found += self._cut(self._reader.feed([id]))
        return self._add(found, first)

    def _record(self, event: service_lib.Tokens, place: int) -> None:
        """Records one token of an event."""
        self.tokens.append(event.ids[place])
        self.logprobs.append(event.logprobs[place])
        self.versions.append(event.versions[place])
        self.raw_logprobs.append(event.raw_logprobs[place])
        self.alternatives.append(event.alternatives[place])
        self.num_reasoning += self._reader.is_thinking

    def _cut(self, events: Iterable[parsing.Event]) -> list[parsing.Event]:
        """Returns the events before a stop string, as far as the text decides it."""
        kept: list[parsing.Event] = []
        for event in events:
            if self.stop_string is not None:
                break
            if isinstance(event, parsing.Content):
                kept.append(parsing.Content(self._stop.feed(event.text)))
                continue
            if isinstance(event, parsing.Call):  # no stop string spans a call
                kept.append(parsing.Content(self._stop.close()))
            kept.append(event)
        return kept

    def _add(self, events: Iterable[parsing.Event], first: int) -> Delta:
        """Adds events to the answer; returns them as one."""
        reasoning, content, calls = "", "", []
        for event in events:
            if isinstance(event, parsing.Reasoning):
                reasoning += event.text
            elif isinstance(event, parsing.Content):
                trimmed = self._trimmed
                content += trimmed.feed(event.text) if trimmed else event.text
            else:
                arguments = json.dumps(event.arguments, ensure_ascii=False)
                id = f"call_{uuid.uuid4().hex[:24]}"
                calls.append(Call(id, event.name, arguments))
        self.reasoning += reasoning
        self.content += content
        self.calls += calls
        return Delta(reasoning, content, tuple(calls), first, len(self.tokens))


def chat(
    template: templates.Template,
    prompt: Sequence[int],
    tools: messages.Tools,
    stop: Sequence[str],
) -> Turn:
    """Returns the turn of an assistant after a generation prompt."""
    parser = parsing.Parser(
        template.tokenizer,
        is_thinking=prompt[-1] == template.tokenizer.special_ids["<think>"],
        tools=tools,
        stop_ids=template.stop_ids,
        trims_content=False,
    )
    return Turn(parser, stop, trims_content=True)
