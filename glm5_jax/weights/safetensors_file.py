"""Reads and writes safetensors files in windows, so that no tensor is ever in memory.

The file starts with 8 bytes that hold the length of a JSON header (dtype, shape and
offsets of each tensor); the tensors follow without gaps. The JSON is untrusted: every
number in it is checked against the file before use. Windows are read, not mapped:
mapped pages count as the process's memory, and a file that shrinks would kill it.
"""

import dataclasses
import json
import math
import os
import pathlib
import stat
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from glm5_jax import config as config_lib

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
METADATA = "__metadata__"
_ALIGNMENT = 8  # of the first tensor, in bytes
_READ_BYTES = 2**24  # rows read at once where only some of their columns are wanted
_SPARSE = 4  # bands narrower than 1/4 of the columns are read row by row


class DamagedError(config_lib.InputError):
    """The file has no valid header, or contradicts it."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `tensor[rows, columns]` reads a window."""

    path: pathlib.Path
    dtype: str  # in the format's own spelling, such as "BF16"
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    def __getitem__(self, window: tuple[slice, ...]) -> np.ndarray:
        """Reads a window of consecutive elements along each dim.

        Raises:
          DamagedError: the file has become shorter.
        """
        cuts = [
            range(*c.indices(n)) for c, n in zip(window, self.shape, strict=True)
        ] or [range(1)]
        shape, rows, rest = [len(cut) for cut in cuts], cuts[0], cuts[1:]
        if math.prod(shape) == 0:
            return np.empty(shape, DTYPES[self.dtype])
        row_bytes = self._row_bytes
        with self.path.open("rb", buffering=0) as file:
            if math.prod(shape[1:]) == math.prod(self.shape[1:]):
                file.seek(self.offset + rows.start * row_bytes)
                out = self._read(file, shape)
            elif len(rest) == 1 and _SPARSE * len(rest[0]) < self.shape[1]:
                out = self._read_columns(file, rows, rest[0])
            else:
                out = self._read_rows(file, rows, rest)
        return out.reshape([len(c) for c in cuts] if self.shape else [])

    def write(self, row: int, values: np.ndarray) -> None:
        """Writes whole rows from `row` on into a file that `create` made."""
        assert values.dtype == DTYPES[self.dtype]
        assert values.shape[1:] == self.shape[1:]
        data = np.ascontiguousarray(values).ravel().view(np.uint8).data
        with self.path.open("r+b", buffering=0) as file:
            file.seek(self.offset + row * self._row_bytes)
            while data:
                data = data[file.write(data) :]

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    def _read(self, file: Any, shape: Sequence[int]) -> np.ndarray:
        """Reads the next elements of the file into an array of this shape."""
        kind = DTYPES[self.dtype]
        buffer = np.empty(math.prod(shape) * kind.itemsize, np.uint8)
        left = buffer.data
        while left:
            count = file.readinto(left)
            if not count:
                raise DamagedError(
                    f"{self.path} became shorter while it was read; stop the program "
                    f"that writes it."
                )
            left = left[count:]
        return buffer.view(kind).reshape(shape)

    def _read_rows(self, file: Any, rows: range, rest: list[range]) -> np.ndarray:
        """Reads whole rows, some at a time, and keeps the columns."""
        out = np.empty([len(rows), *map(len, rest)], DTYPES[self.dtype])
        step = max(1, _READ_BYTES // self._row_bytes)
        columns = tuple(slice(c.start, c.stop) for c in rest)
        file.seek(self.offset + rows.start * self._row_bytes)
        for start in range(0, len(rows), step):
            count = min(step, len(rows) - start)
            block = self._read(file, [count, *self.shape[1:]])
            out[start : start + count] = block[(slice(None), *columns)]
        return out

    def _read_columns(self, file: Any, rows: range, columns: range) -> np.ndarray:
        """Reads a narrow band of columns, one read a row."""
        kind = DTYPES[self.dtype]
        out = np.empty([len(rows), len(columns)], kind)
        start = self.offset + columns.start * kind.itemsize
        for i, row in enumerate(rows):
            file.seek(start + row * self._row_bytes)
            out[i] = self._read(file, [len(columns)])
        return out


def read_header(path: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by name.

    Symlinks are followed, since huggingface_hub's cache consists of them.

    Raises:
      DamagedError: says what is wrong with the file.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DamagedError(f"{path.name} is not a regular file.")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise DamagedError(
                    f"{path.name} has {size:,} bytes, but claims a header of "
                    f"{length:,}; at most {MAX_HEADER_BYTES:,} are allowed."
                )
            entries = json.loads(
                file.read(length).decode("utf-8"), object_pairs_hook=unique
            )
        tensors = {
            name: _tensor(path, name, entry, 8 + length)
            for name, entry in entries.items()
            if name != METADATA
        }
    except OSError as error:
        raise DamagedError(f"{path.name}: {error.strerror}.") from error
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"{path.name} has a broken header: {error!r:.200}.") from (
            error
        )
    _require_no_gaps(path, tensors, entries, 8 + length, size)
    return tensors


def create(
    path: pathlib.Path, entries: Mapping[str, tuple[np.dtype, Sequence[int]]]
) -> dict[str, Tensor]:
    """Creates a file with the header of these tensors; their bytes follow by `write`.

    The largest elements come first, so that every tensor is aligned.
    """
    kinds = {name: kind for name, (kind, _) in entries.items()}
    order = sorted(entries, key=lambda name: -kinds[name].itemsize)
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name in order:
        kind, shape = entries[name]
        start, end = end, end + math.prod(shape) * kind.itemsize
        header[name] = {
            "dtype": NAMES[kind],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return {
        name: Tensor(
            path,
            header[name]["dtype"],
            tuple(header[name]["shape"]),
            8 + len(text) + header[name]["data_offsets"][0],
        )
        for name in entries
    }


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object and refuses repeated names, of which json keeps the last.

    Raises:
      ValueError: a name occurs twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} occurs twice")
    return found


def _tensor(path: pathlib.Path, name: str, entry: Any, start: int) -> Tensor:
    if set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} has keys {sorted(entry)}")
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, begin, end]
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise ValueError(f"{name} has a bad entry {entry}")
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or begin > end:
        raise ValueError(f"{name} has a bad entry {entry}")
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{name} has offsets that contradict its shape: {entry}")
    return Tensor(path, dtype, tuple(shape), start + begin)


def _require_no_gaps(
    path: pathlib.Path,
    tensors: dict[str, Tensor],
    entries: dict[str, Any],
    start: int,
    size: int,
) -> None:
    """Checks that the tensors neither overlap nor leave bytes unused."""
    here = start
    for name in sorted(tensors, key=lambda n: tuple(entries[n]["data_offsets"])):
        begin, end = entries[name]["data_offsets"]
        if start + begin != here:
            raise DamagedError(
                f"{path.name}: {name} begins at byte {begin:,} of the data, but the "
                f"tensor before it ends at {here - start:,}."
            )
        here = start + end
    if here != size:
        raise DamagedError(
            f"{path.name} has {size:,} bytes, but its header describes {here:,}."
        )
