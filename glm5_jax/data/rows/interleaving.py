"""Interleaved rows: similar documents take turns, in chunks, and see each other.

A row is one document to the model, with one range of positions. What a chunk continues
lies several chunks back, among chunks of texts that resemble it, so that the model has
to tell them apart over long distances. GLM-5's report names "interleaved packing" of
similar texts (arXiv 2602.15763, section 2.3) and no details: the measure of similarity,
the order of chunks and their length are ours.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from glm5_jax.data.rows import packing, similarity
from glm5_jax.data.rows import schedule as schedule_lib


def interleave(
    documents: Sequence[Int[np.ndarray, " _"]],
    *,
    eos_id: int,
    sequence_length: int,
    chunk_tokens: int,
) -> packing.FittedRows:
    """Packs documents, each with those most like it.

    A document longer than a row is cut into pieces first. Rows that find no companion
    hold one document, as with `packing.fit`.

    Args:
        documents: token ids, each ending with eos.
        eos_id: fills padding.
        sequence_length: tokens in a row.
        chunk_tokens: tokens of a document before the next one's turn.
    """
    pieces = [
        piece for ids in documents for piece in packing.pieces(ids, sequence_length)
    ]
    # All tokens of a document but the row's last are inputs: eos tells where it ends.
    groups = similarity.groups(
        similarity.vectors(pieces),
        [min(piece.size, sequence_length) for piece in pieces],
        sequence_length,
    )
    rows = [alternate([pieces[i] for i in group], chunk_tokens) for group in groups]
    sizes = [tokens.size for tokens, _ in rows]
    return packing.FittedRows(
        tokens=np.concatenate([tokens for tokens, _ in rows]),
        mask=np.concatenate([mask for _, mask in rows]),
        starts=np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))),
        bins=[[i] for i in range(len(rows))],
        eos_id=eos_id,
        sequence_length=sequence_length,
    )


def alternate(
    documents: Sequence[Int[np.ndarray, " _"]], chunk_tokens: int
) -> tuple[Int[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Returns documents in alternating chunks, and the tokens that are targets.

    A document of twice as many chunks has twice as many turns, spread evenly. The first
    token after a change of document cannot be known from the one before it and is no
    target.
    """
    chunks = [
        [ids[at : at + chunk_tokens] for at in range(0, ids.size, chunk_tokens)]
        for ids in documents
    ]
    turns = schedule_lib.even_order([len(some) for some in chunks]).tolist()
    queues = [iter(some) for some in chunks]
    tokens, mask, before = [], [], None
    for turn in turns:
        tokens.append(next(queues[turn]))
        mask.append(np.ones(tokens[-1].size, bool))
        mask[-1][0] = turn == before
        before = turn
    return np.concatenate(tokens), np.concatenate(mask)
