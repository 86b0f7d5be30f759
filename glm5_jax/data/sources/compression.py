"""Compressed files read as if they were not: gzip (.gz) and Zstandard (.zst)."""

import gzip
import importlib
import io
import pathlib
import zlib
from typing import Any

from glm5_jax import config

SUFFIXES = (".gz", ".zst")
ERRORS = (OSError, EOFError, zlib.error)  # of reading a damaged file
_CHUNK_BYTES = 2**18


def name_inside(path: pathlib.PurePath) -> str:
    """Returns the name of the file inside a compressed one: a.txt for a.txt.gz."""
    return path.stem if path.suffix in SUFFIXES else path.name


def open_file(path: pathlib.Path) -> io.BufferedIOBase:
    """Opens a file to read its uncompressed bytes from start to end.

    Reading raises one of ERRORS if the file is damaged or incomplete.

    Raises:
        config.InputError: zstandard is needed and not installed.
    """
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstandard(path), _CHUNK_BYTES)
    return path.open("rb")


def skip(file: io.BufferedIOBase, num_bytes: int) -> None:
    """Skips bytes of a file that has just been opened."""
    if file.seekable():
        file.seek(num_bytes)
        return
    while chunk := file.read(min(num_bytes, _CHUNK_BYTES)):
        num_bytes -= len(chunk)


class _Zstandard(io.RawIOBase):
    """The uncompressed bytes of a .zst file, which may have several frames.

    zstandard's own reader takes an incomplete file for a shorter one.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._library = _zstandard(path)
        self._file = path.open("rb")
        self._frame: Any = None  # decompressor of the current frame
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._compressed or self._file.read(_CHUNK_BYTES)
            if not data:
                if self._frame is not None:
                    raise EOFError("the file ends in the middle of a Zstandard frame")
                return 0
            self._ready = memoryview(self._decompress(data))
        num_bytes = min(len(buffer), len(self._ready))
        buffer[:num_bytes] = self._ready[:num_bytes]
        self._ready = self._ready[num_bytes:]
        return num_bytes

    def close(self) -> None:
        self._file.close()
        super().close()

    def _decompress(self, data: bytes) -> bytes:
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            ready = self._frame.decompress(data)
        except self._library.ZstdError as error:
            raise OSError(str(error)) from error
        self._compressed = b""
        if self._frame.eof:
            self._compressed, self._frame = self._frame.unused_data, None
        return ready


def _zstandard(path: pathlib.Path) -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise config.InputError(
            f"{path} is read with zstandard, which is not installed: pip install "
            f"'glm5_jax[zstd]', or decompress the file."
        ) from error
