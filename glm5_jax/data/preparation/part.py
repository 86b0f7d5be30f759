"""One part of a corpus: read, tokenized, packed and written as shards, by one worker.

The result depends only on the part, the tokenizer and the settings. A record keeps the
digest of the content, so that a part whose files have changed but whose documents have
not is not made again.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import files
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.preparation import inputs, shards
from glm5_jax.data.rows import interleaving, packing
from glm5_jax.data.sources import documents as documents_lib
from glm5_jax.data.sources import formats

TOKENIZER = "tokenizer.json"
RECORDS = "parts"
_DOCUMENTS_AT_ONCE = 32  # tokenized together; a record's source_sha256 depends on it


@dataclasses.dataclass(frozen=True)
class Part:
    """Neighbouring spans of the source; parts can be made in any order.

    Attributes:
        number: position in the source, from 0.
        spans: the spans to read.
        files: the files of the spans, with their sizes and times.
    """

    number: int
    spans: tuple[formats.Span, ...]
    files: tuple[inputs.File, ...]

    @property
    def num_bytes(self) -> int:
        """Returns the approximate number of bytes to read."""
        return sum(span.num_bytes for span in self.spans)

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of this part."""
        whole = json.dumps(dataclasses.asdict(self))
        return hashlib.sha256(whole.encode()).hexdigest()

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "Part":
        """Returns the part that `dataclasses.asdict` and JSON wrote."""
        spans = tuple(formats.Span(**span) for span in tree["spans"])
        return cls(tree["number"], spans, tuple(tuple(f) for f in tree["files"]))


def make(
    config: config_lib.PrepareConfig,
    target: pathlib.Path,
    part: Part,
    *,
    check: bool,
) -> None:
    """Writes the shards of a part, and last the record that completes it.

    Keeps existing shards if their documents and tokenizer were the same.

    Args:
        config: the settings.
        target: the folder, with its tokenizer.
        part: the part to make.
        check: whether to read existing shards instead of trusting their sizes.

    Raises:
        config_lib.InputError: a document cannot be read.
    """
    tokenizer = tokenizer_lib.load(target / TOKENIZER)
    record = read_record(target, part.number, check=check)
    if record is not None and record["tokenizer"] == tokenizer.digest:
        content = _Content()
        for _ in content.batches(config, part):
            pass
        if content.digest == record["source_sha256"]:
            _write_record(target, part, record)
            return
    remove(config, target, part.number)
    content, found = _Content(), []
    for some in content.batches(config, part):
        found += inputs.tokenize(config, tokenizer, some)
    found.sort(key=lambda document: document.key)
    _write_record(
        target,
        part,
        {
            "tokenizer": tokenizer.digest,
            "source_sha256": content.digest,
            "documents": content.num_documents,
            "cut": sum(document.is_cut for document in found),
            "dropped": content.num_documents - len(found),
            "thoughtful": sum(document.is_thoughtful for document in found),
            "folders": _write_shards(config, target, part, tokenizer, found),
        },
    )


def is_current(
    target: pathlib.Path, part: Part, tokenizer: str, *, check: bool
) -> bool:
    """Tells whether a part is complete for this tokenizer and these files.

    Args:
        target: the folder.
        part: the part as planned now.
        tokenizer: digest of the tokenizer.
        check: whether to read the shards instead of trusting their sizes.
    """
    record = read_record(target, part.number, check=check)
    return (
        record is not None
        and record["part"] == part.digest
        and record["tokenizer"] == tokenizer
    )


def read_record(
    target: pathlib.Path, number: int, *, check: bool = False
) -> dict[str, Any] | None:
    """Returns the record of a part, or None if its shards are incomplete."""
    try:
        record = json.loads(_record_path(target, number).read_text(encoding="utf-8"))
        needed = ("part", "tokenizer", "source_sha256", "folders")
        *_, folders = (record[key] for key in needed)
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


def remove(config: config_lib.PrepareConfig, target: pathlib.Path, number: int) -> None:
    """Removes the files of a part."""
    _record_path(target, number).unlink(missing_ok=True)
    for folder, side in itertools.product(folder_names(config), inputs.SIDES):
        (target / folder / _shard_name(side, number)).unlink(missing_ok=True)


def numbers(target: pathlib.Path) -> set[int]:
    """Returns the numbers of the parts that have files."""
    names = [path.stem for path in (target / RECORDS).glob("*.json")]
    for side in inputs.SIDES:
        found = target.rglob(f"{side}-*{shards.SUFFIX}")
        names += [path.stem.rpartition("-")[2] for path in found]
    return {int(name) for name in names if name.isdecimal()}


def folder_names(config: config_lib.PrepareConfig) -> list[str]:
    """Returns the folders by document length, or "." without buckets."""
    if not config.buckets:
        return ["."]
    return [*(f"up_to_{length}" for length in config.buckets), "longer"]


class _Content:
    """Reads the documents of a part, and keeps their digest and number."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.num_documents = 0

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def batches(
        self, config: config_lib.PrepareConfig, part: Part
    ) -> Iterator[list[inputs.Document]]:
        stream = inputs.read(config, part.spans)
        while some := list(itertools.islice(stream, _DOCUMENTS_AT_ONCE)):
            self._digest.update(bytes.fromhex(documents_lib.corpus_digest(some)))
            self.num_documents += len(some)
            yield some


def _write_record(target: pathlib.Path, part: Part, record: dict[str, Any]) -> None:
    text = json.dumps(record | {"part": part.digest})
    files.write_text(_record_path(target, part.number), text)


def _record_path(target: pathlib.Path, number: int) -> pathlib.Path:
    return target / RECORDS / f"{number:05d}.json"


def _shard_name(side: str, number: int) -> str:
    return f"{side}-{number:05d}{shards.SUFFIX}"


def _write_shards(
    config: config_lib.PrepareConfig,
    target: pathlib.Path,
    part: Part,
    tokenizer: tokenizer_lib.Tokenizer,
    found: Sequence[inputs.Tokenized],
) -> dict[str, dict[str, Any]]:
    """Writes the shards; returns their data by folder and side."""
    sizes = [len(piece) for piece in tokenizer.pieces]
    folders: dict[str, dict[str, Any]] = {}
    for folder, side in itertools.product(folder_names(config), inputs.SIDES):
        chosen = [
            document
            for document in found
            if document.side == side and _folder(config, document) == folder
        ]
        if chosen:
            (target / folder).mkdir(exist_ok=True)
            path = target / folder / _shard_name(side, part.number)
            rows = _pack(chosen, side, config, tokenizer.eos_id)
            shard = shards.write(path, map(rows.__getitem__, range(len(rows))), sizes)
            folders.setdefault(folder, {})[side] = dataclasses.asdict(shard)
    return folders


def _folder(config: config_lib.PrepareConfig, document: inputs.Tokenized) -> str:
    """Returns the first bucket that is long enough."""
    names = folder_names(config)
    length = document.ids.size - 1
    return names[sum(length > limit for limit in config.buckets)]


def _pack(
    found: Sequence[inputs.Tokenized],
    side: str,
    config: config_lib.PrepareConfig,
    eos_id: int,
) -> packing.Rows:
    length = config.sequence_length
    if config.packing == "truncate":
        return packing.pack(
            [document.ids[:-1] for document in found],
            eos_id=eos_id,
            sequence_length=length,
        )
    if config.packing == "interleaved" and side == inputs.SIDES[0]:
        # Held-out texts stay apart, so that bits per byte are comparable.
        return interleaving.interleave(
            [document.ids for document in found],
            eos_id=eos_id,
            sequence_length=length,
            chunk_tokens=config_lib.INTERLEAVE_TOKENS,
        )
    pieces = []
    for document in found:
        if document.mask is not None:  # a conversation, which fits a row
            pieces.append((document.ids, document.mask))
            continue
        cut = packing.pieces(document.ids, length)
        pieces += [(ids, np.ones(ids.size, bool)) for ids in cut]
    return packing.fit(pieces, eos_id=eos_id, sequence_length=length)
