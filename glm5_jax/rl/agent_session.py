"""The turns of an agent that is a program of its own: messages in, a message out.

The program keeps the conversation and sends all of it each time, as to any server. What
it repeats of our answers is replaced by what was sampled, so that prompts extend the
sampled ids and thoughts are not lost (gateway.py). A conversation that was changed
forks, as does one with other tools.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import config
from glm5_jax import messages as messages_lib
from glm5_jax.data.chat import templates
from glm5_jax.inference import requests
from glm5_jax.rl import completer, gateway

_ENDED = "The episode of this address is over."


class OverError(Exception):
    """Raised if the episode has no further turn; says why."""


class AgentSession:
    """The sampled ids of one agent, with the counts of a `gateway.Session`."""

    def __init__(
        self,
        engine: completer.Completer,
        template: templates.Template,
        *,
        request_id: int,
        max_turns: int,
        max_new_tokens: int,
        temperature: float,
    ) -> None:
        """Begins without a turn.

        Args:
          engine: that samples.
          template: of the conversations.
          request_id: of the first turn; the next turns count on.
          max_turns: after which there is no further one.
          max_new_tokens: of a turn.
          temperature: of sampling, whatever the agent asks for.
        """
        self._engine, self._template = engine, template
        self._request_id, self._max_turns = request_id, max_turns
        self._max_new_tokens, self._temperature = max_new_tokens, temperature
        self._sessions: list[tuple[str, gateway.Session]] = []  # with their tools
        self._answers: list[dict[str, Any]] = []  # as they were sampled
        self._turn = asyncio.Lock()  # an agent may ask twice at the same time
        self._asked: set[asyncio.Task] = set()  # turns that are under way
        self._has_ended = False
        self.over = ""  # why there is no further turn
        self.error: Exception | None = None  # of the engine, or of what it completed
        self.transcript: list[Mapping[str, Any]] = []

    async def answer(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()
    ) -> tuple[dict[str, Any], requests.Completion]:
        """Samples the next turn; returns its message and its completion.

        Args:
          messages: the whole conversation, in OpenAI's form.
          tools: JSON schemas of functions.

        Raises:
          OverError: there is no further turn.
          InputError: a message or a tool is malformed.
          EngineError: the engine failed, as `error` tells; the episode does not count.
        """
        if self._has_ended:
            raise OverError(_ENDED)
        asked = asyncio.create_task(self._answer(messages, tools))
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        try:
            await asyncio.wait({asked})
        finally:
            asked.cancel()  # it goes on only if this is cancelled
        if asked.cancelled():
            raise OverError(_ENDED)
        return asked.result()

    async def end(self) -> None:
        """Cancels the turns that are under way, whoever waits for them; none follows.

        A server does not learn that a client has left, so an agent that is gone may
        leave turns behind, which would change a finished episode.
        """
        self._has_ended = True
        if asked := [*self._asked]:
            for turn in asked:
                turn.cancel()
            await asyncio.wait(asked)

    async def _answer(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> tuple[dict[str, Any], requests.Completion]:
        """Samples a turn once those before it have ended: see `answer`."""
        async with self._turn:
            if self.num_turns >= self._max_turns:
                self.over = f"no end in {self._max_turns} turns"
            if self.over:
                raise OverError(self.over)
            said = self._said(messages)
            session = self._session(tools)
            prompt = session.prompt(said)
            room = self._engine.capacity - len(prompt)
            if room < 1:
                size = len(prompt)
                self.over = f"a prompt of {size} tokens does not fit the cache"
                raise OverError(self.over)
            request = requests.Request(
                id=self._request_id + self.num_turns,
                prompt=prompt,
                max_new_tokens=min(self._max_new_tokens, room),
                stop_ids=self._template.stop_ids,
                temperature=self._temperature,
                session=self._request_id,
            )
            try:
                completion = await self._engine.complete(request)
                message = session.record(completion)
            except Exception as error:  # none of these is the agent's fault
                self.error = error
                raise completer.EngineError(str(error)) from error
            self._answers.append(message)
            self.transcript = [*said, message]
            return message, completion

    @property
    def num_turns(self) -> int:
        """Returns the turns that were sampled."""
        return sum(session.num_turns for _, session in self._sessions)

    @property
    def num_forks(self) -> int:
        """Returns the prompts that did not continue what was sampled."""
        forks = sum(session.num_forks for _, session in self._sessions)
        return forks + max(len(self._sessions) - 1, 0)

    @property
    def num_drift_tokens(self) -> int:
        """Returns the sampled tokens that tokenising their texts would change."""
        return sum(session.num_drift_tokens for _, session in self._sessions)

    @property
    def num_truncated(self) -> int:
        """Returns the turns that were cut off by their length."""
        return sum(session.num_truncated for _, session in self._sessions)

    def samples(self) -> list[gateway.Sample]:
        """Returns all conversations in token ids."""
        return [s for _, session in self._sessions for s in session.samples()]

    def _session(self, tools: Sequence[Any]) -> gateway.Session:
        """Returns the session with these tools, which may be a new one."""
        messages_lib.tool_names(tools)
        key = json.dumps([*tools], sort_keys=True)
        if not self._sessions or self._sessions[-1][0] != key:
            made = gateway.Session(self._template, tuple(tools))
            self._sessions.append((key, made))
        return self._sessions[-1][1]

    def _said(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the conversation in our form, with our answers as sampled.

        They are looked for from the end on: examples, which are not ours, come first,
        and may have the words of an answer.

        Raises:
          InputError: a message is malformed.
        """
        if not messages:
            raise config.InputError("messages must have at least one message.")
        said = [*map(_plain, messages)]
        ours = [*map(_words, self._answers)]
        for place in reversed(range(len(said))):
            words = _words(said[place])
            if said[place]["role"] == "assistant" and words in ours:
                while ours.pop() != words:
                    pass
                said[place] = self._answers[len(ours)]
        return said


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message with what we read of it.

    Raises:
      InputError: it is malformed.
    """
    role = message.get("role")
    plain = {"role": "system" if role == "developer" else role}
    plain["content"] = messages_lib.text_of(message, "content")
    if role == "assistant":
        calls = [*map(messages_lib.call_of, messages_lib.calls_in(message))]
        if calls:
            functions = [{"name": n, "arguments": a} for n, a in calls]
            plain["tool_calls"] = [{"function": f} for f in functions]
    messages_lib.role_of(plain)
    return plain


def _words(message: Mapping[str, Any]) -> tuple[str, list]:
    """Returns what an agent repeats of an answer: its content and its calls."""
    calls = [*map(messages_lib.call_of, messages_lib.calls_in(message))]
    return messages_lib.text_of(message, "content"), calls
