"""GLM-5's chat template: messages to token ids with a loss mask.

A turn has no end token of its own. The role token of the next turn ends it, and is
therefore trained as part of the turn.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Collection, Sequence
from typing import Any, Literal

from glm5_jax import config
from glm5_jax import messages as messages_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import parsing

Version = Literal["glm5", "glm5.1", "glm5.2"]

PREFIX = ("[gMASK]", "<sop>")
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
OBSERVATION = "<|observation|>"
STOP_TOKENS = (tokenizer_lib.END_OF_TEXT, USER, OBSERVATION)
SPECIAL_TOKENS = (
    *(*PREFIX, SYSTEM, ASSISTANT, *STOP_TOKENS),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<tool_response>", "</tool_response>"),
)

_TOOLS_BEFORE = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_AFTER = """</tools>

For each function call, output the function name and arguments within the following \
XML format:
"""
_CALL_FORM = (
    *("<tool_call>", "{function-name}"),
    *("<arg_key>", "{arg-key-1}", "</arg_key>"),
    *("<arg_value>", "{arg-value-1}", "</arg_value>"),
    *("<arg_key>", "{arg-key-2}", "</arg_key>"),
    *("<arg_value>", "{arg-value-2}", "</arg_value>"),
    *("...", "</tool_call>"),
)


@dataclasses.dataclass(frozen=True)
class Rendered:
    """Token ids, and a mask of those that are training targets."""

    tokens: list[int]
    mask: list[bool]


@dataclasses.dataclass(frozen=True)
class Template:
    """The template in one version, with its options.

    Attributes:
        tokenizer: must have SPECIAL_TOKENS.
        version: 5.1 shows only a tool's function, and the last turn's empty thought;
            5.2 shows every empty thought, and begins with the reasoning effort.
        enable_thinking: asks the model for a thought before each answer.
        clear_thinking: drops the thoughts before the last user message; False is
            preserved thinking.
        reasoning_effort: shown by 5.2 if thinking is enabled.
    """

    tokenizer: tokenizer_lib.Tokenizer
    version: Version = "glm5"
    enable_thinking: bool = True
    clear_thinking: bool = True
    reasoning_effort: Literal["high", "max"] = "max"

    def __post_init__(self) -> None:
        """Checks the tokenizer."""
        check(self.tokenizer.special_ids, "data.tokenizer")

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an assistant's turn."""
        return frozenset(self.tokenizer.special_ids[name] for name in STOP_TOKENS)

    def render(
        self,
        messages: Sequence[messages_lib.Message],
        tools: messages_lib.Tools = (),
        add_generation_prompt: bool = False,
        *,
        end: bool = False,
    ) -> Rendered:
        """Renders a conversation as token ids and a loss mask.

        The mask trains an assistant's thought, </think>, content, calls and the role
        token (or <|endoftext|>) after them, but not a generation prompt's tokens.

        Args:
            messages: the conversation.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: appends the prompt of an assistant's turn.
            end: appends <|endoftext|> if the last message is an assistant's.

        Raises:
            config.InputError: a message is malformed.
        """
        writer = _Writer(self.tokenizer)
        writer.special(*PREFIX)
        if self.version == "glm5.2" and self.enable_thinking:
            writer.special(SYSTEM)
            writer.text(f"Reasoning Effort: {self.reasoning_effort.capitalize()}")
        if tools:
            self._write_tools(writer, tools)
        is_trained = self._write(writer, messages)
        if end and messages and messages[-1]["role"] == "assistant":
            writer.special(tokenizer_lib.END_OF_TEXT, trained=is_trained)
        if add_generation_prompt:
            self._write_prompt(writer, messages)
        return Rendered(writer.tokens, writer.mask)

    def bridge(
        self,
        messages: Sequence[messages_lib.Message],
        last: int | None,
        *,
        is_thinking: bool = False,
    ) -> list[int]:
        """Returns the ids between two sampled turns: new messages and the next prompt.

        Earlier ids stay unchanged, thoughts included. A role token that was sampled
        as the stop is not repeated; a turn without a stop is ended first.

        Args:
            messages: the messages after the turn, none of them an assistant's.
            last: the turn's last id; None if the turn is empty.
            is_thinking: the turn was cut off within its thought, which is closed first.

        Raises:
            config.InputError: a message is malformed, or is an assistant's.
        """
        if any(messages_lib.role_of(message) == "assistant" for message in messages):
            raise config.InputError(
                "a bridge takes the messages after a sampled turn, which must not have "
                "the role 'assistant'."
            )
        writer = _Writer(self.tokenizer)
        is_stopped = last in self.stop_ids
        if not is_stopped:
            writer.special(*["</think>"] * is_thinking, tokenizer_lib.END_OF_TEXT)
        self._write(writer, messages)
        self._write_prompt(writer, messages)
        return writer.tokens[is_stopped and writer.tokens[0] == last :]

    def parse(
        self, ids: Sequence[int], tools: messages_lib.Tools = ()
    ) -> dict[str, Any]:
        """Parses sampled ids into an assistant's message; see parsing.parse."""
        return parsing.parse(
            ids,
            self.tokenizer,
            is_thinking=self.enable_thinking,
            tools=tools,
            stop_ids=self.stop_ids,
        )

    def truncate(self, rendered: Rendered, length: int) -> Rendered:
        """Returns the longest allowed prefix of at most `length` tokens.

        A cut may fall between two text tokens, after a trained role token (the turn's
        stop) or before any other role token. It never falls within a call or a tool's
        response, nor between a special token and the text that it introduces.
        """
        if len(rendered.tokens) <= length:
            return rendered
        ends = self._cuts(rendered)
        end = max((e for e in ends if e <= length), default=0)
        return Rendered(rendered.tokens[:end], rendered.mask[:end])

    def _cuts(self, rendered: Rendered) -> list[int]:
        """Returns the lengths to which a rendered conversation may be cut."""
        ids = self.tokenizer.special_ids
        special = frozenset(ids.values())
        roles = {ids[name] for name in (SYSTEM, USER, ASSISTANT, OBSERVATION)}
        opening = {ids["<tool_call>"], ids["<tool_response>"]}
        closing = {ids["</tool_call>"], ids["</tool_response>"]}
        cuts, is_open = [], False
        for i, (before, after) in enumerate(itertools.pairwise(rendered.tokens), 1):
            is_open = (is_open or before in opening) and before not in closing
            is_text = before not in special and after not in special
            is_stop = before in roles and rendered.mask[i - 1]
            is_turn = after in roles and before not in roles
            if not is_open and (is_text or is_stop or is_turn):
                cuts.append(i)
        return cuts

    def _write(
        self, writer: "_Writer", messages: Sequence[messages_lib.Message]
    ) -> bool:
        """Writes the messages; returns whether the last one is a trained turn."""
        users = [i for i, m in enumerate(messages) if m.get("role") == "user"]
        is_trained, before = False, None
        for i, message in enumerate(messages):
            role = messages_lib.role_of(message)
            if role == "system":
                writer.special(SYSTEM)
                writer.text(messages_lib.text_of(message, "content"))
            elif role == "user":
                writer.special(USER, trained=is_trained)
                writer.text(messages_lib.text_of(message, "content"))
            elif role == "tool":
                if before != "tool":
                    writer.special(OBSERVATION, trained=is_trained)
                for result in messages_lib.results_of(message):
                    writer.special("<tool_response>")
                    writer.text(result)
                    writer.special("</tool_response>")
            else:
                thinking = self._is_thinking(messages[: i + 1])
                is_current = not users or i > users[-1]
                is_trained = self._write_turn(writer, message, thinking, is_current)
            is_trained = is_trained and role == "assistant"
            before = role
        return is_trained

    def _write_turn(
        self,
        writer: "_Writer",
        message: messages_lib.Message,
        thinking: bool,
        is_current: bool,
    ) -> bool:
        """Writes an assistant's turn; returns whether it is trained."""
        is_52 = self.version == "glm5.2"
        trained = not message.get("is_masked", False)
        thought, content = messages_lib.thought_and_content(message)
        is_shown = bool(thought) and (is_current or not self.clear_thinking)
        if is_52 and thought and not is_shown:
            trained = False  # the model sampled it with its thought
        writer.special(ASSISTANT)
        if is_shown:
            writer.special("<think>")
            writer.text(thought if is_52 else thought.strip(), trained)
            writer.special("</think>", trained=trained)
        elif is_52 or (self.version == "glm5.1" and is_current and thinking):
            writer.special("<think>")
            writer.special("</think>", trained=trained and thinking)
        else:
            writer.special("</think>")
        writer.text(content.strip(), trained)
        for call in messages_lib.calls_in(message):
            self._write_call(writer, call, trained)
        return trained

    def _write_call(self, writer: "_Writer", call: Any, trained: bool) -> None:
        name, arguments = messages_lib.call_of(call)
        writer.special("<tool_call>", trained=trained)
        writer.text(name, trained)
        for key, value in arguments.items():
            text = value if isinstance(value, str) else _json(value)
            writer.special("<arg_key>", trained=trained)
            writer.text(key, trained)
            writer.special("</arg_key>", "<arg_value>", trained=trained)
            writer.text(text, trained)
            writer.special("</arg_value>", trained=trained)
        writer.special("</tool_call>", trained=trained)

    def _write_prompt(
        self, writer: "_Writer", messages: Sequence[messages_lib.Message]
    ) -> None:
        """Writes the prompt of the next turn."""
        thinking = self._is_thinking(messages)
        if thinking or self.version == "glm5.2":
            writer.special(ASSISTANT, "<think>", *["</think>"] * (not thinking))
        else:
            writer.special(ASSISTANT, "</think>")

    def _is_thinking(self, messages: Sequence[messages_lib.Message]) -> bool:
        """Tells whether the messages' last turn (or the next turn) has a thought."""
        for message in reversed(messages):
            if "enable_thinking" in message:
                return bool(message["enable_thinking"])
            if message.get("role") == "user":
                break
        return self.enable_thinking

    def _write_tools(self, writer: "_Writer", tools: messages_lib.Tools) -> None:
        """Writes the tools block: schemas, and the form of a call in special tokens."""
        writer.special(SYSTEM)
        writer.text(_TOOLS_BEFORE + self._schemas(tools) + _TOOLS_AFTER)
        for part in _CALL_FORM:
            if part in SPECIAL_TOKENS:
                writer.special(part)
            else:
                writer.text(part)

    def _schemas(self, tools: messages_lib.Tools) -> str:
        """Returns one line of JSON per tool."""
        if self.version == "glm5":
            return "".join(_json(tool) + "\n" for tool in tools)
        hidden = ("defer_loading", "strict")
        functions = [tool.get("function", tool) for tool in tools]
        if self.version == "glm5.2":
            functions = [f for f in functions if not f.get("defer_loading")]
        shown = [{k: v for k, v in f.items() if k not in hidden} for f in functions]
        return "".join(_json(function) + "\n" for function in shown)


def make_template(
    data: config.DataConfig | config.PrepareConfig, tokenizer: tokenizer_lib.Tokenizer
) -> Template:
    """Returns the template that `data` names."""
    return Template(
        tokenizer,
        version=data.chat_template,
        enable_thinking=data.enable_thinking,
        clear_thinking=data.clear_thinking,
    )


def released_version(text: str) -> Version | None:
    """Returns the version of a released chat_template.jinja; None if it is none.

    Args:
        text: the file's content. Of those known only 5.2 has efforts, and 5 alone shows
            all of a tool. 5.3, which is not known, has references to tools.
    """
    if PREFIX[0] not in text or "tool_reference" in text:
        return None
    if "Reasoning Effort" in text:
        return "glm5.2"
    return "glm5.1" if "defer_loading" in text else "glm5"


def check(special_tokens: Collection[str], field: str) -> None:
    """Checks that a tokenizer has every special token of the template.

    Args:
        special_tokens: the tokenizer's special tokens.
        field: the option that names the tokenizer, for the message.

    Raises:
        config.InputError: a token is missing.
    """
    missing = [name for name in SPECIAL_TOKENS if name not in special_tokens]
    if missing:
        raise config.InputError(
            f"The chat template needs special tokens that the tokenizer lacks: "
            f"{' '.join(missing)}. Use {field}='byte_chat' or 'bpe_chat', or a "
            f"tokenizer.json that has them among its added_tokens."
        )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class _Writer:
    """Collects ids: special tokens by name, and texts, each tokenized by itself."""

    def __init__(self, tokenizer: tokenizer_lib.Tokenizer) -> None:
        self.tokens: list[int] = []
        self.mask: list[bool] = []
        self._tokenizer = tokenizer

    def special(self, *names: str, trained: bool = False) -> None:
        self._add([self._tokenizer.special_ids[name] for name in names], trained)

    def text(self, text: str, trained: bool = False) -> None:
        self._add(self._tokenizer.encode(text), trained)

    def _add(self, ids: Sequence[int], trained: bool) -> None:
        self.tokens.extend(ids)
        self.mask.extend([trained] * len(ids))
