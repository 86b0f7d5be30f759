"""Batches of conversations for stage sft: rendered, masked, packed by best fit."""

import hashlib
import sys
from collections.abc import Sequence

import numpy as np
import tqdm
from absl import logging

from glm5_jax import config
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import conversations, templates
from glm5_jax.data.rows import mixture, packing
from glm5_jax.data.rows import pipeline as pipeline_lib
from glm5_jax.data.sources import documents as documents_lib

_Conversations = Sequence[conversations.Conversation]
_ORDER_VERSION = 1  # raise it when rendering, packing or shuffling changes


def make_pipeline(data: config.DataConfig, seed: int) -> pipeline_lib.Pipeline:
    """Reads, splits, renders and packs conversations.

    A conversation longer than a row is cut by templates.Template.truncate, and dropped
    if no trained token is left. The log counts both.

    Args:
        data: the data section of the config.
        seed: seeds the order of rows.

    Raises:
        config.InputError: the source or the tokenizer cannot be used.
    """
    found = conversations.read_conversations(data.source)
    ordered = sorted(found, key=lambda c: c.name)
    names = [conversation.name for conversation in ordered]
    sides = [documents_lib.is_held_out(name, data.held_out_percent) for name in names]
    held_out = [c for c, is_held_out in zip(ordered, sides, strict=True) if is_held_out]
    train = [
        c for c, is_held_out in zip(ordered, sides, strict=True) if not is_held_out
    ]
    tokenizer = tokenizer_lib.for_corpus(data, [c.text for c in train])
    template = templates.make_template(data, tokenizer)
    has_any = any(map(conversations.has_thought, train))
    conversations.warn_of_missing_thoughts(has_any, template)

    def pack(side: str, some: _Conversations) -> packing.FittedRows:
        documents = _render(some, template, data.sequence_length)
        if not documents:
            raise config.InputError(
                f"data.source {data.source!r} leaves nothing for the {side} side: "
                f"{len(some)} of its {len(ordered)} conversations are there, "
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
        **pipeline_lib.batch_settings(data),
        "seed": seed,
        "chat_template": data.chat_template,
        "enable_thinking": data.enable_thinking,
        "clear_thinking": data.clear_thinking,
        "order_version": _ORDER_VERSION,
    }
    return pipeline_lib.Pipeline(
        data,
        tokenizer,
        train=mixture.only(pack("training", train), seed),
        held_out={"": pack("held-out", held_out)},
        fingerprint=" ".join(f"{key}={value}" for key, value in settings.items()),
        template=template,
    )


def _render(
    some: _Conversations, template: templates.Template, length: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns tokens and mask of each conversation with trained tokens."""
    documents, num_cut, num_dropped = [], 0, 0
    for conversation in tqdm.tqdm(
        some,
        desc="render",
        unit=" conversations",
        disable=not sys.stderr.isatty(),
    ):
        rendered = conversations.render(conversation, template, length)
        if rendered is None:
            num_dropped += 1
        else:
            tokens, mask, is_cut = rendered
            documents.append((tokens, mask))
            num_cut += is_cut
    logging.info(
        "Of %d conversations %d are cut to %d tokens; %d have nothing to train.",
        len(some),
        num_cut,
        length,
        num_dropped,
    )
    return documents
