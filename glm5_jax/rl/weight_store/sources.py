"""Where a reader finds versions: a folder of this machine, or a URL."""

import http.client
import json
import os
import pathlib
import urllib.error
import urllib.parse
import urllib.request
from typing import Protocol, runtime_checkable

import numpy as np

from glm5_jax.rl.weight_store import coding, manifest

_TIMEOUT = 60.0  # seconds without a byte


@runtime_checkable
class Blob(Protocol):
    """A file of a version."""

    def read(self, offset: int, size: int) -> coding.Bytes:
        """Returns bytes of the file, fewer if it ends before."""
        ...


@runtime_checkable
class Source(Protocol):
    """A store that can be read."""

    def names(self) -> list[manifest.Name]:
        """Returns the complete versions, the latest last."""
        ...

    def read(self, name: manifest.Name) -> manifest.Manifest:
        """Reads the manifest of a version.

        Raises:
          FileNotFoundError: there is no such version.
          StoreError: it is damaged.
        """
        ...

    def open(self, name: manifest.Name, file: str) -> Blob:
        """Opens a file of a version.

        Raises:
          FileNotFoundError: there is no such file.
        """
        ...


class Folder:
    """A store's folder, whose files are mapped, not copied."""

    def __init__(self, root: str | os.PathLike) -> None:
        """Takes the folder, which may not exist yet."""
        self._root = pathlib.Path(root)

    def names(self) -> list[manifest.Name]:
        """Returns the complete versions, the latest last."""
        return manifest.names(self._root)

    def read(self, name: manifest.Name) -> manifest.Manifest:
        """Reads the manifest of a version."""
        return manifest.read(self._root, name)

    def open(self, name: manifest.Name, file: str) -> Blob:
        """Maps a file, which stays readable if it is deleted."""
        path = self._root / name.folder / file
        if path.stat().st_size == 0:  # cannot be mapped
            return _Memory(np.frombuffer(b"", np.uint8))
        return _Memory(np.memmap(path, np.uint8, mode="r"))


class Url:
    """A store behind files.py, read in ranges of bytes."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """Takes the URL that the other end printed, and its key."""
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def names(self) -> list[manifest.Name]:
        """Returns the complete versions, the latest last."""
        return [manifest.Name(*name) for name in json.loads(self.get("versions"))]

    def read(self, name: manifest.Name) -> manifest.Manifest:
        """Reads the manifest of a version."""
        path = f"{name.folder}/{manifest.FILE}"
        text = self.get(path).decode(errors="replace")
        return manifest.from_text(text, f"{self._url}/{path}")

    def open(self, name: manifest.Name, file: str) -> Blob:
        """Returns a file, of which each read is a request."""
        return _Remote(self, f"{name.folder}/{urllib.parse.quote(file)}")

    def get(self, path: str, span: tuple[int, int] | None = None) -> bytes:
        """Returns the body of an answer.

        Args:
          path: below the URL.
          span: the first byte to return, and the one after the last; None for all.

        Raises:
          FileNotFoundError: there is nothing at the path.
          StoreError: the other end does not answer, or refuses.
        """
        headers = dict(self._headers)
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        request = urllib.request.Request(f"{self._url}/{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            if error.code == http.client.NOT_FOUND:
                raise FileNotFoundError(request.full_url) from error
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                return b""
            raise manifest.StoreError(f"{request.full_url}: {error}.") from error
        except (OSError, http.client.HTTPException) as error:
            raise manifest.StoreError(f"{request.full_url}: {error}.") from error


class _Memory:
    """Bytes of this process."""

    def __init__(self, values: coding.Bytes) -> None:
        self._values = values

    def read(self, offset: int, size: int) -> coding.Bytes:
        return self._values[offset : offset + size]


class _Remote:
    """A file behind a URL."""

    def __init__(self, source: Url, path: str) -> None:
        self._source, self._path = source, path

    def read(self, offset: int, size: int) -> coding.Bytes:
        span = (offset, offset + size)
        found = self._source.get(self._path, span) if size else b""
        return np.frombuffer(found, np.uint8)
