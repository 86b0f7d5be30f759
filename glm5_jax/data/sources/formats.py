"""Formats of files with documents, and spans of such files that fit into memory.

The formats are JSONL, Parquet, Arrow (Hugging Face datasets), ArrayRecord and plain
text. JSONL and text may be compressed.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

from array_record.python import array_record_module

from glm5_jax import config
from glm5_jax.data.sources import compression

TEXT_SUFFIXES = (".txt", ".md", ".py")
JSONL = ".jsonl"
_COMPRESSIBLE = (*TEXT_SUFFIXES, JSONL)
_CHUNK_BYTES = 2**24
WHOLE = sys.maxsize  # bytes of a span, to have a whole file in one
_ROWS_AT_ONCE = 256  # of a Parquet file, in memory
_ARROW_FILE_MAGIC = b"ARROW1"
_BOM = b"\xef\xbb\xbf"
_OF_DATA_SETS = ("state.json", "dataset_info.json")  # Hugging Face's


@dataclasses.dataclass(frozen=True)
class Span:
    """Some documents of one file.

    Attributes:
        path: the file, relative to the root of the source.
        start: the first byte of JSONL, row group of Parquet, batch of Arrow or record
            of ArrayRecord; 0 for a text.
        stop: the end, in the same unit.
        first: number of the first document in the file, from 1; 0 for a text.
        num_bytes: approximate number of bytes to read.
    """

    path: str
    start: int
    stop: int
    first: int
    num_bytes: int


def files(root: pathlib.Path, skipped: Collection[str] = ()) -> Iterator[pathlib.Path]:
    """Yields the files below `root`, without hidden ones and skipped folders.

    Links to folders are followed, but for those that lead back to a folder above them.
    """
    for folder, subfolders, names in os.walk(root, followlinks=True):
        above = {os.path.realpath(folder)} | _folders_above(folder, root)
        subfolders[:] = [
            name
            for name in subfolders
            if name[0] != "."
            and name not in skipped
            and os.path.realpath(os.path.join(folder, name)) not in above
        ]
        for name in names:
            if not name.startswith("."):
                yield pathlib.Path(folder, name)


def _folders_above(folder: str, root: pathlib.Path) -> set[str]:
    """Returns where the folders from `root` to one in it lie."""
    parents = pathlib.Path(folder).relative_to(root).parents
    return {os.path.realpath(root / parent) for parent in parents}


def document_files(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files below `root` that contain documents, sorted by name.

    Raises:
        config.InputError: `root` contains several splits of a Hugging Face data set, or
            a file that cannot be used.
    """
    found = [path for path in files(root) if is_document(path)]
    for path in found:
        if not path.is_file() and path.exists():  # reading a pipe would not end
            raise config.InputError(f"{path} is not a regular file; remove it.")
        try:
            path.name.encode()
        except UnicodeEncodeError as error:
            raise config.InputError(
                f"the name {str(path)!r} is not UTF-8; rename the file."
            ) from error
    for path in files(root):
        if path.name == "dataset_dict.json":
            splits = sorted(p.name for p in path.parent.iterdir() if p.is_dir())
            raise config.InputError(
                f"{path.parent} contains the splits {', '.join(splits)} of a data set; "
                f"give the folder of one: {path.parent / (splits or ['train'])[0]}."
            )
        if path.name == "state.json" and (names := _data_files(path)):
            # A Hugging Face data set lists its own files.
            own = {path.parent / name for name in names}
            found = [p for p in found if p.parent != path.parent or p in own]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def other_files(root: pathlib.Path) -> list[str]:
    """Returns the names of the files below `root` of no known format."""
    paths = (path for path in files(root) if not is_document(path))
    names = (path.relative_to(root).as_posix() for path in paths)
    return sorted(name for name in names if not name.endswith(_OF_DATA_SETS))


def cut(root: pathlib.Path, path: pathlib.Path, num_bytes: int) -> list[Span]:
    """Returns a file as spans of about `num_bytes`; texts and row groups stay whole."""
    name = path.relative_to(root).as_posix()
    with _readable(path):
        spans = _KINDS[suffix_of(path)][0](path, num_bytes)
        return [Span(name, *span) for span in spans]


def read(root: pathlib.Path, span: Span, field: str) -> Iterator[tuple[str, Any]]:
    """Yields name and value of the field of each document of a span.

    The name is PATH:NUMBER, counted from 1, or the path of a text.

    Args:
        root: folder of the source.
        span: documents to read.
        field: key of a JSON object, or column; "" if the records of ArrayRecord are
            texts.

    Raises:
        config.InputError: a document cannot be read; names its file and number.
    """
    path = root / span.path
    with _readable(path):
        records = _KINDS[suffix_of(path)][1](path, span, field)
        for number, value in enumerate(records, start=span.first):
            if value is not None:  # an empty line counts but is no document
                yield f"{span.path}:{number}" if number else span.path, value


def read_lines(root: pathlib.Path, span: Span) -> Iterator[tuple[str, str]]:
    """Yields place (PATH:NUMBER) and text of each line of JSONL that is not blank.

    Args:
        root: folder of the source.
        span: lines to read.

    Raises:
        config.InputError: the file cannot be read, or a line is not UTF-8.
    """
    path = root / span.path
    with _readable(path):
        for number, line in _lines(path, span):
            place = f"{path}:{number}"
            if line.strip():
                yield place, _decoded(line, place)


def read_text(path: pathlib.Path) -> str:
    """Returns the text of a file with its line ends unchanged.

    Raises:
        config.InputError: the file cannot be read as UTF-8.
    """
    try:
        with compression.open_file(path) as file:
            return file.read().decode("utf-8-sig")
    except (*compression.ERRORS, UnicodeDecodeError) as error:
        raise config.InputError(
            f"{path} cannot be read as UTF-8 text: {error}. Convert or remove it."
        ) from error


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    """Names the file in the errors of the library that reads it."""
    try:
        yield
    except config.InputError:
        raise
    except (*compression.ERRORS, ValueError, RuntimeError) as error:
        raise config.InputError(f"{path} cannot be read: {error}.") from error


def is_document(path: pathlib.Path) -> bool:
    """Tells by its name whether a file contains documents."""
    return suffix_of(path) in _KINDS


def suffix_of(path: pathlib.PurePath) -> str:
    """Returns the suffix of the uncompressed file: .jsonl for a.jsonl.gz."""
    inner = pathlib.PurePath(compression.name_inside(path)).suffix
    return inner if inner in _COMPRESSIBLE else path.suffix


def _data_files(state: pathlib.Path) -> list[str]:
    """Returns the files that the state.json of a Hugging Face data set lists."""
    try:
        return [
            entry["filename"] for entry in json.loads(read_text(state))["_data_files"]
        ]
    except (ValueError, KeyError, TypeError):
        return []


def _parsed(record: bytes, place: str, field: str) -> Any:
    """Returns the field of a JSON object."""
    text = _decoded(record, place)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise config.InputError(f"{place} is not JSON: {error}.") from error
    if not isinstance(value, dict) or field not in value:
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise config.InputError(
            f'{place} must be an object with a string in the field "{field}", got '
            f"{got}. Correct it, or prepare the corpus with another --field."
        )
    if value[field] is None:
        raise config.InputError(f'{place} has null in the field "{field}".')
    return value[field]


def _decoded(record: bytes, place: str) -> str:
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as error:
        raise config.InputError(
            f"{place} cannot be read as UTF-8 text: {error}."
        ) from error


def _cut_text(path: pathlib.Path, num_bytes: int) -> list[tuple[int, ...]]:
    size = path.stat().st_size
    return [(0, size, 0, size)]


def _read_text(path: pathlib.Path, span: Span, field: str) -> Iterator[str]:
    yield read_text(path)


def _cut_jsonl(path: pathlib.Path, num_bytes: int) -> Iterator[tuple[int, ...]]:
    """Cuts a file at line ends and counts its lines."""
    start, first = 0, 1
    with compression.open_file(path) as file:
        while True:
            num_lines, size = 0, 0
            while chunk := file.read(min(num_bytes - size, _CHUNK_BYTES)):
                num_lines += chunk.count(b"\n")
                size += len(chunk)
            rest = file.readline()
            num_lines += rest.endswith(b"\n")
            size += len(rest)
            if not size:
                return
            yield start, start + size, first, size
            start, first = start + size, first + num_lines


def _read_jsonl(path: pathlib.Path, span: Span, field: str) -> Iterator[Any]:
    for number, line in _lines(path, span):
        yield _parsed(line, f"{path}:{number}", field) if line.strip() else None


def _lines(path: pathlib.Path, span: Span) -> Iterator[tuple[int, bytes]]:
    """Yields number and bytes of each line of a span."""
    with compression.open_file(path) as file:
        compression.skip(file, span.start)
        place, number = span.start, span.first
        while place < span.stop and (line := file.readline()):
            place += len(line)
            yield number, line.removeprefix(_BOM) if number == 1 else line
            number += 1


def _cut_parquet(path: pathlib.Path, num_bytes: int) -> Iterator[tuple[int, ...]]:
    with _opened(path, "parquet", "ParquetFile") as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    yield from _joined(sizes, num_bytes)


def _read_parquet(path: pathlib.Path, span: Span, field: str) -> Iterator[Any]:
    with _opened(path, "parquet", "ParquetFile") as file:
        _require_column(path, file.schema_arrow.names, field)
        batches = file.iter_batches(
            _ROWS_AT_ONCE, range(span.start, span.stop), columns=[field]
        )
        for batch in batches:
            yield from _values(path, batch, field)


def _cut_arrow(path: pathlib.Path, num_bytes: int) -> Iterator[tuple[int, ...]]:
    sizes = [(batch.num_rows, batch.nbytes) for batch in _arrow_batches(path)]
    yield from _joined(sizes, num_bytes)


def _read_arrow(path: pathlib.Path, span: Span, field: str) -> Iterator[Any]:
    for i, batch in enumerate(_arrow_batches(path)):
        if i >= span.stop:
            return
        if i >= span.start:
            _require_column(path, batch.schema.names, field)
            yield from _values(path, batch, field)


def _arrow_batches(path: pathlib.Path) -> Iterator[Any]:
    """Yields the batches of an Arrow stream (Hugging Face's) or file, memory-mapped."""
    with _opened(path, "", "memory_map") as source:
        ipc = importlib.import_module("pyarrow.ipc")
        magic = source.read(len(_ARROW_FILE_MAGIC))
        source.seek(0)
        if magic == _ARROW_FILE_MAGIC:
            reader = ipc.open_file(source)
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from ipc.open_stream(source)


def _cut_array_record(path: pathlib.Path, num_bytes: int) -> Iterator[tuple[int, ...]]:
    with _array_record(path) as reader:
        num_records = reader.num_records()
    size = path.stat().st_size
    step = max(1, num_records * num_bytes // max(size, 1))
    for start in range(0, num_records, step):
        stop = min(start + step, num_records)
        yield start, stop, start + 1, (stop - start) * size // num_records


def _read_array_record(path: pathlib.Path, span: Span, field: str) -> Iterator[Any]:
    with _array_record(path) as reader:
        reader.seek(span.start)
        for number in range(span.start + 1, span.stop + 1):
            place, record = f"{path}:{number}", reader.read()
            yield _parsed(record, place, field) if field else _decoded(record, place)


def _array_record(path: pathlib.Path) -> Any:
    return contextlib.closing(array_record_module.ArrayRecordReader(str(path)))


def _opened(path: pathlib.Path, module: str, name: str) -> Any:
    """Opens a file with pyarrow, an extra."""
    try:
        arrow = importlib.import_module(".".join(filter(None, ("pyarrow", module))))
    except ImportError as error:
        raise config.InputError(
            f"{path} is read with pyarrow, which is not installed: pip install "
            f"'glm5_jax[arrow]'."
        ) from error
    return getattr(arrow, name)(str(path))


def _joined(sizes: list[tuple[int, int]], limit: int) -> Iterator[tuple[int, ...]]:
    """Joins neighbours of (rows, bytes) until they have `limit` bytes."""
    start, first, rows, size = 0, 1, 0, 0
    for i, (num_rows, num_bytes) in enumerate(sizes):
        rows, size = rows + num_rows, size + num_bytes
        if size >= limit or i + 1 == len(sizes):
            yield start, i + 1, first, size
            start, first, rows, size = i + 1, first + rows, 0, 0


def _require_column(path: pathlib.Path, names: list[str], field: str) -> None:
    if field not in names:
        raise config.InputError(
            f"{path} has no column {field!r} but {', '.join(names)}; name one as field."
        )


def _values(path: pathlib.Path, batch: Any, field: str) -> Iterator[Any]:
    for value in batch.column(field).to_pylist():
        if value is None:
            raise config.InputError(f"{path} has null in the column {field!r}.")
        yield value


_Cut = Callable[[pathlib.Path, int], Iterator[tuple[int, ...]] | list[tuple[int, ...]]]
_Read = Callable[[pathlib.Path, Span, str], Iterator[Any]]
_KINDS: dict[str, tuple[_Cut, _Read]] = {
    **dict.fromkeys(TEXT_SUFFIXES, (_cut_text, _read_text)),
    ".jsonl": (_cut_jsonl, _read_jsonl),
    ".parquet": (_cut_parquet, _read_parquet),
    ".arrow": (_cut_arrow, _read_arrow),
    ".array_record": (_cut_array_record, _read_array_record),
}
SUFFIXES = tuple(_KINDS)
