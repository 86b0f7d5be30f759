"""Batches of a run; the rows of a step are a pure function of (seed, step)."""

import hashlib
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np
import tqdm
from absl import logging

from glm5_jax import config, files
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.data.rows import mixture, packing
from glm5_jax.data.sources import documents as documents_lib

Batch = dict[str, np.ndarray]

_ORDER_VERSION = 1  # raise it when packing or shuffling changes
_NUM_PREFETCH = 2  # batches that a thread makes ahead
_DOCUMENTS_AT_ONCE = 32  # between two updates of the progress bar


class Pipeline:
    """Training and held-out batches of one corpus.

    A batch has tokens, targets, segment_ids, positions (int32 [B, T]) and loss_mask
    (float32 [B, T]), as in the rows of packing.py. Each process makes only its own rows
    (`take`); the order of rows does not depend on the number of processes.

    Attributes:
        tokenizer: made the token ids.
        fingerprint: corpus, tokenizer and settings; equal ones give equal batches.
        held_out_names: the sources that have held-out rows.
        template: rendered the conversations; None for texts.
    """

    def __init__(
        self,
        data: config.DataConfig,
        tokenizer: tokenizer_lib.Tokenizer,
        *,
        train: mixture.Mixture,
        held_out: Mapping[str, packing.Rows],
        fingerprint: str,
        template: templates.Template | None = None,
    ) -> None:
        """Takes the rows that a make_pipeline (here, sft.py, prepared.py) made."""
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.template = template
        self._held_out = held_out
        self._batches = data.batches
        self._piece_sizes = np.array([len(piece) for piece in tokenizer.pieces])
        self._train = train
        self.held_out_names = tuple(held_out)
        self.restrict_to({size: range(size) for size in self._batches.sizes})

    def restrict_to(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Makes only these rows of each batch from now on, in this order.

        Args:
            rows: for each size of a batch, the numbers of the rows in it.
        """
        self._rows = {size: tuple(some) for size, some in rows.items()}
        # Element k is batch k: the shuffle differs from epoch to epoch, and a batch
        # may hold the end of one epoch and the beginning of the next.
        self._steps = grain.MapDataset.range(sys.maxsize).map(self._make_batch)

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of step `step`, counted from 0."""
        batch = self._steps[step]
        assert batch is not None  # only a filter gives None
        return batch

    def train_iterator(self, start_step: int = 0) -> Iterator[Batch]:
        """Returns endless batches from `start_step` on, made ahead by a thread."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_NUM_PREFETCH)
        return iter(self._steps[start_step:].to_iter_dataset(options))

    def epochs(self, num_steps: int) -> dict[str, float]:
        """Returns how often each source has been read after so many steps."""
        return self._train.epochs(self._batches.rows_before(num_steps))

    def eval_batches(self, n: int, name: str | None = None) -> Iterator[Batch]:
        """Yields the first `n` held-out batches, or all if there are fewer.

        They are the same for every seed. `num_bytes` (float32 [B, T]) has the
        UTF-8 bytes of every target (0 for eos and padding), so that bits per byte is
        sum(nll) / ln 2 / sum(num_bytes).

        Args:
            n: number of batches.
            name: name of the source; the first one by default.
        """
        size = self._batches.sizes[-1]
        rows = self._held_out[self.held_out_names[0] if name is None else name]
        for first in range(0, min(n * size, len(rows)), size):
            batch = _stack([rows[first + row] for row in self._rows[size]])
            num_bytes = self._piece_sizes[batch["targets"]] * batch["loss_mask"]
            yield batch | {"num_bytes": num_bytes.astype(np.float32)}

    def _make_batch(self, step: int) -> Batch:
        first = self._batches.rows_before(step)
        rows = self._rows[self._batches.size(step)]
        return _stack([self._train[first + row] for row in rows])


def make_pipeline(data: config.DataConfig, seed: int) -> Pipeline:
    """Reads, splits, tokenizes and packs the corpus.

    Args:
        data: the data section of the config.
        seed: seeds the order of documents and of rows.

    Raises:
        config.InputError: the source or the tokenizer cannot be used.
    """
    documents = documents_lib.read_documents(data.source)
    if len(documents) == 1:
        documents = documents_lib.parted(documents[0], data.held_out_percent)
    # The tokenizer must not depend on the seed of the run: it is shared.
    ordered = documents_lib.shuffled(documents, seed=0)
    held_out = [d.name for d in ordered if _is_held_out(d, data)]
    train = [d for d in ordered if not _is_held_out(d, data)]
    _check_split(len(train), len(held_out), data)
    tokenizer = tokenizer_lib.for_corpus(data, [d.text for d in train])
    corpus = documents_lib.corpus_digest(documents)
    ids = _tokenize(documents, tokenizer, corpus, data.cache_dir)

    def pack(names: Sequence[str]) -> packing.PackedRows:
        return packing.pack(
            [ids[name] for name in names],
            eos_id=tokenizer.eos_id,
            sequence_length=data.sequence_length,
        )

    settings = {
        "corpus": corpus[:16],
        "tokenizer": tokenizer.digest[:16],
        "held_out_percent": data.held_out_percent,
        "sequence_length": data.sequence_length,
        **batch_settings(data),
        "seed": seed,
        "order_version": _ORDER_VERSION,
    }
    return Pipeline(
        data,
        tokenizer,
        train=mixture.only(
            pack([d.name for d in documents_lib.shuffled(train, seed)]), seed
        ),
        held_out={"": pack(held_out)},
        fingerprint=" ".join(f"{key}={value}" for key, value in settings.items()),
    )


def batch_settings(data: config.DataConfig) -> dict[str, Any]:
    """Returns what a fingerprint says of the sizes of batches."""
    batches, settings = data.batches, {"batch_size": data.batch_size}
    if batches.is_constant:  # as in fingerprints of earlier versions
        return settings
    sizes, firsts = (",".join(map(str, x)) for x in (batches.sizes, batches.firsts))
    return settings | {"batch_sizes": sizes, "batch_firsts": firsts}


def _stack(rows: Sequence[Batch]) -> Batch:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def _is_held_out(document: documents_lib.Document, data: config.DataConfig) -> bool:
    return documents_lib.is_held_out(document.name, data.held_out_percent)


def _check_split(num_train: int, num_held_out: int, data: config.DataConfig) -> None:
    """Checks that both sides have a document."""
    if num_train and num_held_out:
        return
    side = "held-out" if num_train else "training"
    raise config.InputError(
        f"data.source {data.source!r} leaves no {side} document: its "
        f"{num_train + num_held_out} are split by the hash of their names, "
        f"{data.held_out_percent}% held out. Cut it into more documents (a line of "
        f"JSONL each) or change data.held_out_percent."
    )


def _tokenize(
    documents: Sequence[documents_lib.Document],
    tokenizer: tokenizer_lib.Tokenizer,
    corpus: str,
    cache_dir: str,
) -> dict[str, np.ndarray]:
    """Returns the token ids of each document by name; caches them on disk."""
    key = hashlib.sha256(f"{corpus} {tokenizer.digest}".encode()).hexdigest()[:16]
    path = pathlib.Path(cache_dir).expanduser() / f"tokens-{key}.npz"
    flat, lengths = files.cached(
        path,
        make=lambda: _encode(documents, tokenizer),
        load=_load_tokens,
        save=lambda arrays, file: np.savez(file, tokens=arrays[0], lengths=arrays[1]),
    )
    pieces = np.split(flat, np.cumsum(lengths)[:-1])
    return {d.name: ids for d, ids in zip(documents, pieces, strict=True)}


def _encode(
    documents: Sequence[documents_lib.Document], tokenizer: tokenizer_lib.Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the token ids of all documents, joined, and their lengths."""
    logging.info("Tokenizing %d documents ...", len(documents))
    ids = []
    with tqdm.tqdm(
        desc="tokenize",
        unit=" documents",
        total=len(documents),
        disable=not sys.stderr.isatty(),
    ) as bar:
        for first in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            some = documents[first : first + _DOCUMENTS_AT_ONCE]
            encoded = tokenizer.encode_batch([d.text for d in some])
            ids.extend(np.array(document, np.int32) for document in encoded)
            bar.update(len(some))
    lengths = np.array([document.size for document in ids], np.int64)
    logging.info("... %d tokens.", lengths.sum())
    return np.concatenate(ids), lengths


def _load_tokens(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path) as arrays:
        return arrays["tokens"], arrays["lengths"]
