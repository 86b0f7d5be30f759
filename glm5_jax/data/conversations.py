"""Batches of conversations for SFT: JSONL to rendered, masked, best-fit packed rows."""

import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import tqdm
from absl import logging

from glm5_jax import config
from glm5_jax.data import (
    chat,
    formats,
    messages,
    mixture,
    packing,
    pipeline,
    sources,
    tasks,
)
from glm5_jax.data import tokenizer as tokenizer_lib

_ORDER_VERSION = 1  # raise it when rendering, packing or shuffling changes
_MAX_DEMONSTRATIONS = 4096  # of a task
_DEMONSTRATIONS_SEED = 0


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages to learn from, and the tools that they may call."""

    messages: Sequence[messages.Message]
    tools: messages.Tools = ()

    @property
    def name(self) -> str:
        """SHA-256 of what is said: equal ones are on the same side of the split."""
        whole = json.dumps([self.messages, self.tools], sort_keys=True)
        return hashlib.sha256(whole.encode()).hexdigest()

    @property
    def text(self) -> str:
        """What is said, for a tokenizer to learn from."""
        parts = [json.dumps(tool, ensure_ascii=False) for tool in self.tools]
        for message in self.messages:
            parts += messages.thought_and_content(message)
            for name, arguments in map(messages.call_of, messages.calls_in(message)):
                parts += [name, json.dumps(arguments, ensure_ascii=False)]
        return "\n".join(filter(None, parts))


def make_pipeline(data: config.DataConfig, seed: int) -> pipeline.Pipeline:
    """Reads, splits, renders and packs conversations.

    One that is longer than a row is cut by chat.Template.truncate; where nothing that
    is trained is left of it, it is dropped. Both are counted in the log.

    Args:
        data: the section of the config.
        seed: of the order of rows.

    Raises:
        config.InputError: the source or the tokenizer cannot be used.
    """
    ordered = sorted(read_conversations(data.source), key=lambda c: c.name)
    names = [conversation.name for conversation in ordered]
    sides = [sources.is_held_out(name, data.held_out_percent) for name in names]
    held_out = [c for c, is_held_out in zip(ordered, sides, strict=True) if is_held_out]
    train = [
        c for c, is_held_out in zip(ordered, sides, strict=True) if not is_held_out
    ]
    tokenizer = tokenizer_lib.for_corpus(data, [c.text for c in train])
    template = chat.make_template(data, tokenizer)
    _warn_of_missing_thoughts(train, template)

    def pack(side: str, conversations: Sequence[Conversation]) -> packing.FittedRows:
        documents = _render(conversations, template, data.sequence_length)
        if not documents:
            raise config.InputError(
                f"data.source {data.source!r} leaves nothing for the {side} side: "
                f"{len(conversations)} of its {len(ordered)} conversations are there, "
                f"by their hashes, and none has a trained token among its first "
                f"data.sequence_length = {data.sequence_length}. Add conversations, or "
                f"change data.held_out_percent or data.sequence_length."
            )
        return packing.fit(
            documents, eos_id=tokenizer.eos_id, sequence_length=data.sequence_length
        )

    settings = {
        "corpus": hashlib.sha256("".join(names).encode()).hexdigest()[:16],
        "tokenizer": tokenizer.digest[:16],
        "held_out_percent": data.held_out_percent,
        "sequence_length": data.sequence_length,
        "batch_size": data.batch_size,
        "seed": seed,
        "chat_template": data.chat_template,
        "enable_thinking": data.enable_thinking,
        "clear_thinking": data.clear_thinking,
        "order_version": _ORDER_VERSION,
    }
    return pipeline.Pipeline(
        data,
        tokenizer,
        train=mixture.only(pack("training", train), seed),
        held_out={"": pack("held-out", held_out)},
        fingerprint=" ".join(f"{key}={value}" for key, value in settings.items()),
        template=template,
    )


def read_conversations(source: str) -> list[Conversation]:
    """Every conversation of `source`.

    Args:
        source: a .jsonl file, or a folder of such, with a conversation a line:
            {"messages": [...], "tools": [...]}, tools being optional; or "tasks:NAME",
            the demonstrations of a task of data/tasks.py, of its training split alone.

    Raises:
        config.InputError: there is none, no such task, or a bad line, by file and line.
    """
    scheme, _, name = source.partition(":")
    if scheme == "tasks":
        return _demonstrations(name)
    root = pathlib.Path(source).expanduser()
    paths = sorted(formats.files(root)) if root.is_dir() else [root]
    paths = [path for path in paths if path.suffix == ".jsonl" and path.is_file()]
    found = [conversation for path in paths for conversation in _read_lines(path)]
    if not found:
        raise config.InputError(
            f"data.source holds no conversations: {source!r}. In stage sft it is a "
            f'.jsonl file, or a folder of such, with lines {{"messages": [...]}}; or '
            f"'tasks:NAME'."
        )
    return found


def pick(source: str, index: int) -> Conversation:
    """Conversation `index` of `source`, counted from 0 in the order of the files.

    Raises:
        config.InputError: there is none.
    """
    found = read_conversations(source)
    if not 0 <= index < len(found):
        raise config.InputError(
            f"index must lie in 0..{len(found) - 1}: {source!r} has {len(found)} "
            f"conversations; got {index}."
        )
    return found[index]


def _demonstrations(name: str) -> list[Conversation]:
    """What solves the first training problems of a task, each problem once."""
    problems = [
        tasks.problem(name, "train", _DEMONSTRATIONS_SEED, index)
        for index in range(_MAX_DEMONSTRATIONS)
    ]
    found = [Conversation(p.demonstration, p.tools) for p in problems]
    return list({conversation.name: conversation for conversation in found}.values())


def _read_lines(path: pathlib.Path) -> Iterator[Conversation]:
    for number, line in enumerate(formats.read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield _conversation(line)
        except config.InputError as error:
            raise config.InputError(f"{path}:{number}: {error}") from error


def _conversation(line: str) -> Conversation:
    try:
        record = json.loads(line)
        line.encode()
        json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise config.InputError(f"this is not JSON in Unicode: {error}.") from error
    if not isinstance(record, dict) or "messages" not in record:
        got = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise config.InputError(f'the field "messages" is missing; got {got}.')
    tools = record.get("tools") or ()
    messages.check(record["messages"], tools)
    return Conversation(record["messages"], tools)


def _render(
    conversations: Sequence[Conversation], template: chat.Template, length: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and mask of each conversation that has something to train."""
    documents, num_cut, num_dropped = [], 0, 0
    for conversation in tqdm.tqdm(
        conversations,
        desc="render",
        unit=" conversations",
        disable=not sys.stderr.isatty(),
    ):
        whole = template.render(conversation.messages, conversation.tools, end=True)
        # The last token is a target alone.
        rendered = template.truncate(whole, length + 1)
        if any(rendered.mask):
            tokens = np.array(rendered.tokens, np.int32)
            documents.append((tokens, np.array(rendered.mask, bool)))
            num_cut += rendered is not whole
        else:
            num_dropped += 1
    logging.info(
        "Of %d conversations %d are cut to %d tokens; %d have nothing to train.",
        len(conversations),
        num_cut,
        length,
        num_dropped,
    )
    return documents


def _warn_of_missing_thoughts(
    conversations: Sequence[Conversation], template: chat.Template
) -> None:
    """GLM-5 shows a turn without a thought as if none had been asked for."""
    is_asked = template.version == "glm5" and template.enable_thinking
    if is_asked and not any(
        messages.thought_and_content(message)[0]
        for conversation in conversations
        for message in conversation.messages
    ):
        logging.warning(
            "No turn has a thought (reasoning_content), so none is trained behind the "
            "prompt <|assistant|><think>, which data.enable_thinking=True samples from:"
            " set it to False."
        )
