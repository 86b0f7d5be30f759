"""A conversation with a model: its messages, and the engine that answers them."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from glm5_jax import config as config_lib
from glm5_jax.data.chat import parsing, templates
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference.requests import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How answers are drawn.

    Attributes:
      stop_ids: ids that end an answer.
      max_new_tokens: of an answer; None takes what there is room for.
      temperature: 0 takes the most likely token.
      top_p: of `Request`.
      seed: of the first answer's random numbers; each later one takes the next.
    """

    stop_ids: frozenset[int]
    max_new_tokens: int | None = None
    temperature: float
    top_p: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an answer ended.

    Attributes:
      num_tokens: drawn.
      seconds: that it took.
      is_cut: whether the room or max_new_tokens ended it.
      is_stopped: whether the user did.
    """

    num_tokens: int
    seconds: float
    is_cut: bool
    is_stopped: bool


class Conversation:
    """Messages so far; `answer` adds a user's message and the model's answer.

    Attributes:
        messages: so far.
        is_thinking: whether the next answer begins with a thought.
    """

    def __init__(
        self,
        engine: engine_lib.Engine,
        template: templates.Template,
        settings: Settings,
    ) -> None:
        """Starts without messages.

        Args:
          engine: that nobody else uses.
          template: of the chat.
          settings: of the answers.
        """
        self._engine, self._template, self._settings = engine, template, settings
        self.messages: list[dict[str, Any]] = []
        self.is_thinking = template.enable_thinking
        self._num_answers = 0

    def reset(self) -> None:
        """Forgets all messages."""
        self.messages = []

    def answer(
        self,
        text: str,
        on_event: Callable[[parsing.Event], None],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Answers a user's message.

        Args:
          text: of the user.
          on_event: called with thought, content and calls as they come.
          is_stopped: asked between two dispatches; true ends the answer, and what it
            said remains part of the conversation.

        Raises:
          InputError: there is no room; the conversation stays as it was.
        """
        said = [*self.messages, {"role": "user", "content": text}]
        switches = {"enable_thinking": self.is_thinking}
        template = dataclasses.replace(self._template, **switches)
        prompt = template.render(said, add_generation_prompt=True).tokens
        completion = self._engine.submit(self._request(prompt))
        self._num_answers += 1
        parser = parsing.Parser(
            template.tokenizer,
            is_thinking=prompt[-1] == template.tokenizer.special_ids["<think>"],
            stop_ids=template.stop_ids | self._settings.stop_ids,
        )
        began, number, events = time.perf_counter(), 0, list[parsing.Event]()

        def hear(found: list[parsing.Event]) -> None:
            events.extend(found)
            for event in found:
                on_event(event)

        try:
            while self._engine.num_pending and not is_stopped():
                self._engine.step()
                hear(parser.feed(completion.tokens[number:]))
                number = len(completion.tokens)
        finally:
            if self._engine.num_pending:
                self._engine.abort(self._num_answers)
        hear(parser.close())
        self.messages = [*said, _message(events)]
        reason = completion.finish_reason
        seconds = time.perf_counter() - began
        return Outcome(number, seconds, reason == "length", reason is None)

    def _request(self, prompt: list[int]) -> Request:
        """Returns the request of the next answer.

        Raises:
          InputError: the prompt leaves no room.
        """
        settings, room = self._settings, self._engine.capacity - len(prompt)
        if room < 1:
            raise config_lib.InputError(
                f"The conversation has {len(prompt)} tokens, and the model takes "
                f"{self._engine.capacity}; begin a new one with /reset."
            )
        return Request(
            id=self._num_answers + 1,
            prompt=prompt,
            max_new_tokens=min(settings.max_new_tokens or room, room),
            stop_ids=settings.stop_ids | self._template.stop_ids,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed + self._num_answers,
        )


def _message(events: list[parsing.Event]) -> dict[str, Any]:
    """Returns an assistant's message of its events."""
    thought = [e.text for e in events if isinstance(e, parsing.Reasoning)]
    content = [e.text for e in events if isinstance(e, parsing.Content)]
    calls = [
        {"name": e.name, "arguments": dict(e.arguments)}
        for e in events
        if isinstance(e, parsing.Call)
    ]
    texts = {"reasoning_content": "".join(thought), "content": "".join(content)}
    return {"role": "assistant", **texts, **({"tool_calls": calls} if calls else {})}
