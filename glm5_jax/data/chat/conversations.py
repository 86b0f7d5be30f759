"""Conversations from files or tasks, as token ids with a loss mask."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from glm5_jax import config, environments, messages
from glm5_jax.config import user_classes
from glm5_jax.data.chat import records, templates
from glm5_jax.data.sources import formats
from glm5_jax.environments import demonstrations, mixture
from glm5_jax.storage import copies

_MAX_DEMONSTRATIONS = 4096  # of one task
_MAX_PLAYED = 1024  # of them, where a world must say what its tools answer
_DEMONSTRATIONS_SEED = 0


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages to train on, and the tools that they may call."""

    messages: Sequence[messages.Message]
    tools: messages.Tools = ()

    @functools.cached_property
    def name(self) -> str:
        """Returns the SHA-256 of the content; equal ones are on the same side."""
        whole = json.dumps([self.messages, self.tools], sort_keys=True)
        return hashlib.sha256(whole.encode()).hexdigest()

    @property
    def text(self) -> str:
        """Returns the text of the conversation, to train a tokenizer on."""
        parts = [json.dumps(tool, ensure_ascii=False) for tool in self.tools]
        for message in self.messages:
            parts += messages.thought_and_content(message)
            for name, arguments in map(messages.call_of, messages.calls_in(message)):
                parts += [name, json.dumps(arguments, ensure_ascii=False)]
        return "\n".join(filter(None, parts))


def read_conversations(source: str) -> list[Conversation]:
    """Returns every conversation of `source`.

    Args:
        source: a .jsonl file (also .gz, .zst), or a folder, with a conversation a line:
            {"messages": [...], "tools": [...]}, tools being optional, or ShareGPT's
            {"conversations": [{"from", "value"}]}; or "tasks:NAME", the demonstrations
            of a taskset's training split: any that environments.make knows, your own
            as module:Class, or several in turn, "2*reverse:3-6+gcd". What the tools of
            a world answer is played (environments/demonstrations.py).

    Raises:
        config.InputError: there are none, the task does not exist, or a line is bad.
    """
    scheme, _, name = source.partition(":")
    if scheme == "tasks":
        return _demonstrations(name)
    found = [
        conversation
        for path in files_of(source)
        for span in formats.cut(path.parent, path, formats.WHOLE)
        for conversation in read_span(path.parent, span)
    ]
    if not found:
        raise _no_conversations(source)
    return found


def files_of(source: str) -> list[pathlib.Path]:
    """Returns the .jsonl file `source`, or those below the folder.

    Raises:
        config.InputError: there are none.
    """
    root = copies.local(source)
    paths = sorted(formats.files(root)) if root.is_dir() else [root]
    paths = [p for p in paths if formats.suffix_of(p) == formats.JSONL and p.is_file()]
    if not paths:
        raise _no_conversations(source)
    return paths


def read_span(root: pathlib.Path, span: formats.Span) -> Iterator[Conversation]:
    """Yields the conversations of a span of JSONL.

    Raises:
        config.InputError: a line is bad; names its file and number.
    """
    named: set[str] = set()
    for place, line in formats.read_lines(root, span):
        try:
            conversation = _conversation(line)
            unread = set().union(*map(messages.unread_keys, conversation.messages))
            if unread - named:
                logging.warning(
                    "%s: messages have keys that are not read: %s.",
                    place,
                    ", ".join(sorted(unread - named)),
                )
                named |= unread
            yield conversation
        except config.InputError as error:
            raise config.InputError(f"{place}: {error}") from error


def has_thought(conversation: Conversation) -> bool:
    """Tells whether any turn has a thought."""
    return any(
        messages.thought_and_content(message)[0] for message in conversation.messages
    )


def render(
    conversation: Conversation, template: templates.Template, sequence_length: int
) -> tuple[np.ndarray, np.ndarray, bool] | None:
    """Returns token ids that fit a row, their loss mask, and whether they were cut.

    Returns None if no trained token is left.
    """
    whole = template.render(conversation.messages, conversation.tools, end=True)
    # The last token is only a target.
    rendered = template.truncate(whole, sequence_length + 1)
    if not any(rendered.mask):
        return None
    tokens = np.array(rendered.tokens, np.int32)
    return tokens, np.array(rendered.mask, bool), rendered is not whole


def warn_of_missing_thoughts(has_any: bool, template: templates.Template) -> None:
    """Warns if data without thoughts is rendered for prompts that ask for them."""
    if template.version == "glm5" and template.enable_thinking and not has_any:
        logging.warning(
            "No turn has a thought (reasoning_content), so none is trained behind the "
            "prompt <|assistant|><think>, which data.enable_thinking=True samples from:"
            " set it to False."
        )


def pick(source: str, index: int) -> Conversation:
    """Returns conversation `index` of `source`, counted from 0 in file order.

    Raises:
        config.InputError: it does not exist.
    """
    found = read_conversations(source)
    if not 0 <= index < len(found):
        raise config.InputError(
            f"index must lie in 0..{len(found) - 1}: {source!r} has {len(found)} "
            f"conversations; got {index}."
        )
    return found[index]


def _demonstrations(name: str) -> list[Conversation]:
    """Returns demonstrations of the first training problems of a task, each once.

    Those of a mixture keep their shares: small tasks repeat.

    Raises:
        config.InputError: the task does not exist, or lacks a demonstration.
    """
    is_own = environments.is_own(name)
    taskset: Any = (
        user_classes.make(name, ("task", "demonstration"))
        if is_own
        else environments.make(name)
    )
    found: list[tuple[Any, Conversation]] = []
    num_to_play = 0
    for index in range(_MAX_DEMONSTRATIONS):
        task = taskset.task("train", _DEMONSTRATIONS_SEED, index)
        shown = taskset.demonstration(task)
        if shown is None:
            raise config.InputError(
                f"{name!r} has no demonstration of its task {task.id!r}; stage "
                f"'sft' needs one of each."
            )
        found.append((task, Conversation(tuple(shown), tuple(task.tools))))
        num_to_play += not demonstrations.is_whole(shown)
        if num_to_play == _MAX_PLAYED:
            break
    if mixture.SEPARATOR not in name:
        found = [*{c.name: (task, c) for task, c in found}.values()]
    if not num_to_play:
        return [conversation for _, conversation in found]
    logging.info("Playing demonstrations of %s ...", name)
    taskset = environments.make(name) if is_own else taskset  # one that can be played
    whole = demonstrations.whole(taskset, [(t, c.messages) for t, c in found])
    return [
        dataclasses.replace(conversation, messages=tuple(shown))
        for (_, conversation), shown in zip(found, whole, strict=True)
    ]


def _no_conversations(source: str) -> config.InputError:
    return config.InputError(
        f"data.source holds no conversations: {source!r}. In stage sft it is a .jsonl "
        f'file, or a folder of such, with lines {{"messages": [...]}}; or '
        f"'tasks:NAME', which is not prepared."
    )


def _conversation(line: str) -> Conversation:
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise config.InputError(f"this is not JSON in Unicode: {error}.") from error
    return Conversation(*records.read(record))
