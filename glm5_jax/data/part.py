"""One part of a corpus: read, tokenized, packed and written as shards, by one worker.

What is written depends on the part and the settings alone.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.data import cache, formats, infill, packing, shards, sources
from glm5_jax.data import tokenizer as tokenizer_lib

SIDES = ("train", "held_out")
PYTHON = "python"  # path of a span of the corpus that every Python carries
TOKENIZER = "tokenizer.json"
_DOCUMENTS_AT_ONCE = 32  # that the tokenizer sees together


class _Tokenized(NamedTuple):
    """A document as ids, with <|endoftext|> as the last."""

    name: str
    side: str
    ids: np.ndarray


@dataclasses.dataclass(frozen=True)
class Part:
    """Neighbouring spans of the source; parts can be made in any order.

    Attributes:
        number: from 0, in the order of the source.
        spans: what is read.
    """

    number: int
    spans: tuple[formats.Span, ...]

    @property
    def num_bytes(self) -> int:
        """About so many are read."""
        return sum(span.num_bytes for span in self.spans)


def make(config: config_lib.PrepareConfig, target: pathlib.Path, part: Part) -> None:
    """Writes the shards of a part, and last a record that they are whole.

    Raises:
        config_lib.InputError: a document cannot be read.
    """
    tokenizer = tokenizer_lib.load(target / TOKENIZER)
    sizes = [len(piece) for piece in tokenizer.pieces]
    digest = hashlib.sha256()
    found = list(_tokenized(config, part, tokenizer, digest.update))
    found.sort(key=lambda d: sources.shuffle_key(d.name, config.seed))
    folders: dict[str, dict[str, Any]] = {}
    for folder, side in itertools.product(folder_names(config), SIDES):
        chosen = [
            document.ids
            for document in found
            if document.side == side and _folder(config, document) == folder
        ]
        if chosen:
            (target / folder).mkdir(exist_ok=True)
            path = target / folder / f"{side}-{part.number:05d}{shards.SUFFIX}"
            rows = _pack(chosen, config, tokenizer.eos_id)
            shard = shards.write(path, _each(rows), sizes)
            folders.setdefault(folder, {})[side] = dataclasses.asdict(shard)
    record = {
        "documents": len(found),
        "source_sha256": digest.hexdigest(),
        "folders": folders,
    }
    cache.write_text(record_path(target, part.number), json.dumps(record, indent=1))


def record_path(target: pathlib.Path, number: int) -> pathlib.Path:
    """Where it stands that a part is whole."""
    return target / "parts" / f"{number:05d}.json"


def read_record(
    target: pathlib.Path, number: int, *, check: bool = False
) -> dict[str, Any] | None:
    """What `make` left of a part, or None where that is not whole.

    Args:
        target: the folder.
        number: of the part.
        check: whether to read the shards again, and not to trust their sizes.
    """
    try:
        record = json.loads(record_path(target, number).read_text(encoding="utf-8"))
        folders = record["folders"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for folder, sides in folders.items():
        for entry in sides.values():
            path = target / folder / entry["name"]
            if not path.exists() or path.stat().st_size != entry["size"]:
                return None
            if check and shards.digest(path) != entry["sha256"]:
                return None
    return record


def folder_names(config: config_lib.PrepareConfig) -> list[str]:
    """Below the target, by the length of the documents; "." where there is but one."""
    if not config.buckets:
        return ["."]
    return [*(f"up_to_{length}" for length in config.buckets), "longer"]


def documents(
    config: config_lib.PrepareConfig, spans: Iterable[formats.Span]
) -> Iterator[sources.Document]:
    """The documents of spans of the source that are not empty, one by one."""
    for span in spans:
        if span.path == PYTHON and config.source == PYTHON:
            found = iter(sources.read_documents(PYTHON)[span.start : span.stop])
        else:
            root = sources.folder_of(config.source)
            found = sources.read_span(root, span, config.field)
        yield from (document for document in found if document.text)


def _tokenized(
    config: config_lib.PrepareConfig,
    part: Part,
    tokenizer: tokenizer_lib.Tokenizer,
    update: Callable[[bytes], None],
) -> Iterator[_Tokenized]:
    """Documents as ids; `update` is given the names and texts."""
    arrange = infill.Infill(config.fim_rate, config.fim_spm_rate, config.seed).arrange
    stream = documents(config, part.spans)
    while some := list(itertools.islice(stream, _DOCUMENTS_AT_ONCE)):
        update(bytes.fromhex(sources.corpus_digest(some)))
        arranged = []
        for document in some:
            is_held_out = sources.is_held_out(document.name, config.held_out_percent)
            # What is held out stays as it is: its bits per byte are comparable.
            parts = arrange(document.name, document.text)
            parts = [(None, document.text)] if is_held_out else parts
            arranged.append((document.name, SIDES[is_held_out], parts))
        texts = [text for _, _, parts in arranged for _, text in parts]
        ids = iter(tokenizer.encode_batch(texts))
        for name, side, parts in arranged:
            whole = []
            for special, _ in parts:
                if special is not None:
                    whole.append(tokenizer.special_ids[special])
                whole += next(ids)
            yield _Tokenized(name, side, np.array([*whole, tokenizer.eos_id], np.int32))


def _folder(config: config_lib.PrepareConfig, document: _Tokenized) -> str:
    """The first bucket that is long enough."""
    names = folder_names(config)
    length = document.ids.size - 1
    return names[sum(length > limit for limit in config.buckets)]


def _pack(
    found: Sequence[np.ndarray], config: config_lib.PrepareConfig, eos_id: int
) -> packing.Rows:
    """Rows of documents that end with eos."""
    length = config.sequence_length
    if config.packing == "truncate":
        return packing.pack(
            [ids[:-1] for ids in found], eos_id=eos_id, sequence_length=length
        )
    pieces = [piece for ids in found for piece in packing.pieces(ids, length)]
    trained = [np.ones(piece.size, bool) for piece in pieces]
    return packing.fit(
        list(zip(pieces, trained, strict=True)), eos_id=eos_id, sequence_length=length
    )


def _each(rows: packing.Rows) -> Iterator[packing.Row]:
    return map(rows.__getitem__, range(len(rows)))
