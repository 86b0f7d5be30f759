"""Shards: packed rows written as records of ArrayRecord files, and read back."""

import bisect
import dataclasses
import hashlib
import itertools
import os
import pathlib
import re
import resource
from collections.abc import Iterable, Sequence

import numpy as np
from array_record.python import array_record_data_source, array_record_module

from glm5_jax import config, files
from glm5_jax.data.rows import packing

SUFFIX = ".array_record"
# Each record is a chunk with its own checksum, which reading checks.
_WRITER_OPTIONS = "group_size:1"
_ALL_TRAINED, _MASKED = 0, 1
_OTHER_FILES = 256  # that a process has open
_END_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of rows.

    Attributes:
        name: name of the file.
        rows: number of rows.
        size: size of the file in bytes.
        sha256: SHA-256 of its content.
        targets: number of trained targets.
        num_bytes: UTF-8 bytes of the trained targets.
        filled: number of tokens that are not padding.
        ends: SHA-256 of its first and last bytes, which every training run can afford
            to check at its start; "" if an earlier version wrote the shard.
    """

    name: str
    rows: int
    size: int
    sha256: str
    targets: int
    num_bytes: int
    filled: int
    ends: str = ""

    def require_plain_name(self) -> None:
        """Raises ValueError if its name leads to another folder, or to no shard."""
        if not re.fullmatch(rf"[\w-]+{re.escape(SUFFIX)}", self.name, re.ASCII):
            raise ValueError(f"{self.name!r} is no name of a shard")


class ShardRows:
    """The rows of several shards in order; reads only the requested rows.

    Any number of threads may read.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        shards: Sequence[Shard],
        *,
        eos_id: int,
        sequence_length: int,
    ) -> None:
        """Checks the sizes and the ends of the files.

        Raises:
            config.InputError: a file is missing or differs.
        """
        for shard in shards:
            _require_whole(folder, shard)
        self._eos_id, self._sequence_length = eos_id, sequence_length
        self._paths = [folder / shard.name for shard in shards]
        self._ends = list(itertools.accumulate(shard.rows for shard in shards))
        self._num_rows = sum(shard.rows for shard in shards)
        _allow_open_files(len(shards))
        self._records = array_record_data_source.ArrayRecordDataSource(
            [_Instruction.of(folder, shard) for shard in shards]
        )

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self._num_rows

    def __getitem__(self, index: int) -> packing.Row:
        """Returns row `index`; rows after the last are padding.

        Raises:
            config.DamagedError: the row fails its checksum.
        """
        record = _EMPTY
        if index < len(self):
            try:
                record = self._records[index]
            except RuntimeError as error:  # the checksum of its chunk
                path = self._paths[bisect.bisect_right(self._ends, index)]
                raise config.DamagedError(
                    f"{path} is damaged ({error}). Run the glm5_jax.prepare of its "
                    f"folder again with --check: only damaged shards are made anew."
                ) from error
        return decode(record, self._sequence_length, self._eos_id)


def write(
    path: pathlib.Path, rows: Iterable[packing.Row], pieces: Sequence[int]
) -> Shard:
    """Writes rows into a new file, atomically.

    Args:
        path: path of the file.
        rows: packed rows.
        pieces: UTF-8 bytes of each token id.
    """
    num_rows = targets = num_bytes = filled = 0
    sizes = np.asarray(pieces)

    def write_to(temporary: pathlib.Path) -> None:
        nonlocal num_rows, targets, num_bytes, filled
        try:
            writer = array_record_module.ArrayRecordWriter(
                str(temporary), _WRITER_OPTIONS
            )
            for row in rows:
                writer.write(encode(row))
                is_trained = row["loss_mask"] > 0
                num_rows += 1
                targets += int(is_trained.sum())
                num_bytes += int(sizes[row["targets"][is_trained]].sum())
                filled += int((row["segment_ids"] > 0).sum())
            writer.close()
        except RuntimeError as error:  # such as a full disk
            raise OSError(f"{path} cannot be written: {error}") from error

    files.write_atomically(path, write_to)
    return Shard(
        name=path.name,
        rows=num_rows,
        size=path.stat().st_size,
        sha256=digest(path),
        targets=targets,
        num_bytes=num_bytes,
        filled=filled,
        ends=ends(path),
    )


def digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ends(path: pathlib.Path) -> str:
    """Returns the SHA-256 of the first and last bytes of a file."""
    with path.open("rb") as file:
        first = file.read(_END_BYTES)
        file.seek(max(file.seek(0, os.SEEK_END) - _END_BYTES, 0))
        return hashlib.sha256(first + file.read(_END_BYTES)).hexdigest()


def encode(row: packing.Row) -> bytes:
    """Encodes a row: for each document its length, its tokens, and one more.

    Targets are the next tokens, so only the last target of a document is added.
    Little-endian: version of the mask (uint16), bytes of an id (uint16), documents
    (uint32), their lengths (uint32), ids (uint16 or uint32), and the mask in bits if
    some targets are not trained.
    """
    segments = row["segment_ids"]
    used = int((segments > 0).sum())
    lengths = np.bincount(segments[:used])[1:]
    ends = np.cumsum(lengths)
    last = row["targets"][ends - 1]
    ids = np.insert(row["tokens"][:used], ends, last)
    kind = "<u4" if (ids >= 2**16).any() else "<u2"
    is_trained = row["loss_mask"][:used] > 0
    mask = b"" if is_trained.all() else np.packbits(is_trained).tobytes()
    header = np.array([_MASKED if mask else _ALL_TRAINED, int(kind[-1])], "<u2")
    counts = np.array([lengths.size, *lengths], "<u4")
    return header.tobytes() + counts.tobytes() + ids.astype(kind).tobytes() + mask


def decode(record: bytes, sequence_length: int, eos_id: int) -> packing.Row:
    """Decodes a row that `encode` wrote."""
    is_masked, width = np.frombuffer(record, "<u2", 2)
    num_segments = int(np.frombuffer(record, "<u4", 1, 4)[0])
    lengths = np.frombuffer(record, "<u4", num_segments, 8).astype(np.int64)
    used, offset = int(lengths.sum()), 8 + 4 * num_segments
    ids = np.frombuffer(record, f"<u{width}", used + num_segments, offset)
    ends = np.cumsum(lengths)
    # A document of n tokens has n + 1 ids: the last is no token, the first no target.
    is_last = np.zeros(ids.size, bool)
    is_last[ends + np.arange(num_segments)] = True
    is_first = np.zeros(ids.size, bool)
    is_first[ends - lengths + np.arange(num_segments)] = True
    mask = np.ones(used, np.float32)
    if is_masked:
        bits = np.frombuffer(record, np.uint8, offset=offset + int(width) * ids.size)
        mask = np.unpackbits(bits, count=used).astype(np.float32)
    starts = np.repeat(ends - lengths, lengths)

    def padded(values: np.ndarray, filler: int = 0) -> np.ndarray:
        whole = np.full(sequence_length, filler, np.int32)
        whole[:used] = values
        return whole

    loss_mask = np.zeros(sequence_length, np.float32)
    loss_mask[:used] = mask
    return {
        "tokens": padded(ids[~is_last], eos_id),
        "targets": padded(ids[~is_first], eos_id),
        "loss_mask": loss_mask,
        "segment_ids": padded(np.repeat(np.arange(1, num_segments + 1), lengths)),
        "positions": padded(np.arange(used) - starts),
    }


_EMPTY = np.array([_ALL_TRAINED, 2, 0, 0], "<u2").tobytes()


@dataclasses.dataclass  # not frozen: their protocol has mutable attributes
class _Instruction:
    """A whole file of known length, in the form that ArrayRecord takes."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int

    @classmethod
    def of(cls, folder: pathlib.Path, shard: Shard) -> "_Instruction":
        return cls(str(folder / shard.name), 0, shard.rows, shard.rows)


def _require_whole(folder: pathlib.Path, shard: Shard) -> None:
    path, size, what = folder / shard.name, shard.size, ""
    got = path.stat().st_size if path.is_file() else None
    if got != size:
        what = "is missing" if got is None else f"has {got:,} bytes of {size:,}"
    elif shard.ends and ends(path) != shard.ends:
        what = "is not the file that was written under this name"
    if what:
        raise config.InputError(
            f"{path} {what}; prepare the folder again with --check, which makes only "
            f"that anew, or copy it whole."
        )


def _allow_open_files(count: int) -> None:
    """Raises the limit of open files: rows come in random order, so all stay open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        if limit < wanted:
            raise config.InputError(
                f"a folder of {count} shards needs {wanted} open files, and this "
                f"system allows {hard}; prepare it with a larger shard_mib."
            )
