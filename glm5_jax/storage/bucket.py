"""A folder of a bucket, read and written through fsspec (gcsfs and s3fs)."""

import contextlib
import dataclasses
import errno
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any

from glm5_jax import config as config_lib
from glm5_jax.config import checks

_ADDRESS = re.compile(r"(gs|s3):/+([^/].*?)/*")  # pathlib makes gs:/ of gs://
_MAX_ERROR = 300
_TRIES = 3


@dataclasses.dataclass(frozen=True)
class Stored:
    """An object of a bucket.

    Attributes:
      size: in bytes.
      version: a text that changes with the content.
      modified: seconds since 1970 when it was written.
    """

    size: int
    version: str
    modified: float


def is_address(path: str | os.PathLike) -> bool:
    """Returns whether a path is in a bucket of Cloud Storage or S3."""
    return _ADDRESS.fullmatch(str(path)) is not None


def require_path(path: str | os.PathLike, name: str = "") -> None:
    """Checks that a path is in a bucket or on a file system.

    Raises:
      InputError: it is the address of another kind of store, or empty.
    """
    if not is_address(path):
        checks.require_local(str(path), name)


class Bucket:
    """The objects below an address."""

    def __init__(self, address: str | os.PathLike) -> None:
        """Opens an address. Credentials are found as Google's and AWS's tools do.

        Raises:
          InputError: it is no address, or the library that reads it is missing.
        """
        match = _ADDRESS.fullmatch(str(address))
        if match is None:
            raise config_lib.InputError(f"{address} is no gs:// or s3:// address.")
        self.address = "{}://{}".format(*match.groups())
        # Of what it writes: botocore sends checksums by itself, but ten parts at once.
        self._options = (
            {"consistency": "md5"} if match[1] == "gs" else {"max_concurrency": 2}
        )
        # gcsfs would ask by gRPC whether the bucket is zonal, which takes a minute
        # where gRPC is not answered.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        try:
            import fsspec

            with self._named_errors("opened"):
                self._system, self._root = fsspec.url_to_fs(self.address)
        except ImportError as error:
            raise config_lib.InputError(
                f"{self.address} is read with gcsfs or s3fs, which are not installed: "
                f"pip install 'glm5_jax[buckets]'."
            ) from error

    @property
    def local_name(self) -> pathlib.PurePath:
        """Returns scheme, bucket and folder as a relative path."""
        return pathlib.PurePath(self.address.replace("://", "/"))

    def objects(self) -> dict[str, Stored]:
        """Returns the objects by their names below the address.

        The name is "" for an object at the address itself. A bucket that does not
        exist holds none.

        Raises:
          InputError: the bucket refuses.
        """
        self._system.invalidate_cache()
        try:
            with self._named_errors("listed"):
                found = self._system.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {
            path.removeprefix(self._root).lstrip("/"): _stored(entry)
            for path, entry in found.items()
            if entry["type"] == "file" and not path.endswith("/")
            if path == self._root or path.startswith(f"{self._root}/")
        }

    def download(self, name: str, path: pathlib.Path) -> None:
        """Writes an object to a file, which appears complete.

        Raises:
          InputError: the bucket refuses, or the object ended early.
          FileNotFoundError: there is no such object.
          OSError: the disk is full.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp("", ".download-", path.parent)
        os.close(handle)
        try:
            size = got = 0
            for _ in range(_TRIES):  # a file of a run that goes on grows meanwhile
                self._system.invalidate_cache()
                with self._named_errors("read"):
                    size = self._system.info(self._path(name))["size"]
                    self._system.get_file(self._path(name), partial)
                if (got := os.path.getsize(partial)) == size:
                    break
            else:
                raise config_lib.InputError(
                    f"{self.address}/{name}: {got:,} of {size:,} bytes came, {_TRIES} "
                    f"times."
                )
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
            os.chmod(partial, 0o644)  # mkstemp's files are readable only by their owner
            os.replace(partial, path)
        finally:
            pathlib.Path(partial).unlink(missing_ok=True)

    def upload(self, path: pathlib.Path, name: str) -> None:
        """Writes a file to an object, which appears complete.

        Raises:
          InputError: the bucket refuses, does not exist, or got other bytes.
          FileNotFoundError: there is no such file.
        """
        path.stat()  # a missing file is no error of the bucket
        with self._named_errors("written"):
            self._system.put_file(str(path), self._path(name), **self._options)

    def read_text(self, name: str) -> str | None:
        """Returns a small object as text, or None if there is none."""
        try:
            with self._named_errors("read"):
                return self._system.cat_file(self._path(name)).decode()
        except FileNotFoundError:
            return None

    def write_text(self, name: str, text: str) -> None:
        """Writes a small object.

        Raises:
          InputError: the bucket refuses, or does not exist.
        """
        with self._named_errors("written"):
            self._system.pipe_file(self._path(name), text.encode(), **self._options)

    def delete(self, name: str) -> None:
        """Deletes an object; a missing one is no error."""
        with contextlib.suppress(FileNotFoundError), self._named_errors("deleted"):
            self._system.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def _named_errors(self, done: str) -> Iterator[None]:
        """Says which address could not be read or written, and why."""
        try:
            yield
        except (config_lib.InputError, ImportError):
            raise
        except Exception as error:  # each library has its own
            is_missing = isinstance(error, FileNotFoundError) and done != "written"
            if is_missing or getattr(error, "errno", None) == errno.ENOSPC:
                raise
            raise config_lib.InputError(
                f"{self.address} cannot be {done}: {str(error)[:_MAX_ERROR]} "
                f"({type(error).__name__}). Check the bucket's name and this machine's "
                f"credentials."
            ) from error


def _stored(entry: dict[str, Any]) -> Stored:
    version = entry.get("generation") or entry["ETag"]
    modified = entry.get("mtime") or entry["LastModified"]
    return Stored(int(entry["size"]), str(version), modified.timestamp())
