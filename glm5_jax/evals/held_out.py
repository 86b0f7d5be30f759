"""Rows of held-out text, which suites score and probes read.

A row is one task. Rows are packed as in training, each from the documents of one
domain: the top folder of a document's name, or the kind of a file without a folder.
"""

import collections
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator, Sequence

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.rows import packing
from glm5_jax.data.sources import documents
from glm5_jax.evals import record

Batch = dict[str, np.ndarray]
_PLACE = re.compile(r"#.*|:\d+$")  # of a document in its file
_COMPRESSED = (".gz", ".zst")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of packed documents, and the domain that they are of."""

    domain: str
    arrays: Batch  # [T] each, see data/rows/packing.py; and num_bytes of the targets


def rows(setting: record.Setting, subject: record.Subject) -> list[Row]:
    """Returns up to num_tasks rows; domains take turns, from a random one on.

    Raises:
      InputError: the source cannot be read, or nothing in it is held out.
    """
    tokenizer = subject.words
    texts = _texts(setting.corpus)
    order = [*texts]
    record.generator("rows", setting, 0).shuffle(order)
    packed = {name: _packed(texts[name], tokenizer, setting) for name in order}
    sizes = np.array([len(piece) for piece in tokenizer.pieces])
    found: list[Row] = []
    for index in range(setting.num_tasks):
        alive = [name for name in order if index < len(packed[name])]
        for name in alive[: setting.num_tasks - len(found)]:
            row = packed[name][index]
            num_bytes = sizes[row["targets"]] * row["loss_mask"]
            found.append(Row(name, {**row, "num_bytes": num_bytes}))
    return found


def batches(
    tasks: record.Tasks, size: int
) -> Iterator[tuple[list[int], list[Row], Batch]]:
    """Yields numbers, rows and stacked arrays of `size` rows; the last are padding."""
    for first in range(0, len(tasks), size):
        numbers, part = zip(*tasks[first : first + size], strict=True)
        arrays = [row.arrays for row in part]
        empty = {name: np.zeros_like(x) for name, x in arrays[0].items()}
        arrays += [empty] * (size - len(arrays))
        stacked = {name: np.stack([row[name] for row in arrays]) for name in empty}
        yield [*numbers], [*part], stacked


@functools.lru_cache(maxsize=2)
def digest(corpus: record.Corpus) -> str:
    """Returns the SHA-256 of the held-out documents of each domain, in their order.

    Raises:
      InputError: the source cannot be read, or nothing in it is held out.
    """
    return documents.corpus_digest(
        documents.Document(name, text)
        for name, texts in _texts(corpus).items()
        for text in texts
    )


def _packed(
    texts: Sequence[str], tokenizer: tokenizer_lib.Tokenizer, setting: record.Setting
) -> packing.Rows:
    """Packs documents, as many as num_tasks rows can hold."""
    ids, size = [], 0
    for text in texts:
        if size >= setting.num_tasks * setting.length:
            break
        ids.append(np.asarray(tokenizer.encode(text), np.int32))
        size += ids[-1].size
    return packing.pack(ids, eos_id=tokenizer.eos_id, sequence_length=setting.length)


@functools.lru_cache(maxsize=2)
def _texts(corpus: record.Corpus) -> dict[str, list[str]]:
    """Returns the held-out documents of each domain in a fixed random order."""
    every = documents.read_documents(corpus.source)
    if len(every) == 1:
        every = documents.parted(every[0], corpus.percent)
    found: dict[str, list[str]] = collections.defaultdict(list)
    for document in documents.shuffled(every, seed=0):
        if documents.is_held_out(document.name, corpus.percent):
            found[domain(document.name)].append(document.text)
    if not found:
        raise config_lib.InputError(
            f"No document of {corpus.source!r} is held out ({corpus.percent}% are, by "
            f"their names); give a source with more documents in --source."
        )
    return dict(sorted(found.items()))


def domain(name: str) -> str:
    """Returns a document's domain, e.g. "topics" of topics/if, "py" of ast.py."""
    path = pathlib.PurePosixPath(_PLACE.sub("", name))
    if len(path.parts) > 1:
        return path.parts[0]
    path = path.with_suffix("") if path.suffix in _COMPRESSED else path
    return path.suffix.removeprefix(".") or "text"
