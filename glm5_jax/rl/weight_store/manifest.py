"""What a version of the weights says about itself: shapes, places and digests."""

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

FILE = "manifest.json"
_FOLDER = re.compile(r"i(\d{4,})-v(\d{9,})")
_FORMAT = 1


class StoreError(RuntimeError):
    """A version cannot be used; the message says why."""


class Name(NamedTuple):
    """A version's name; later ones compare as greater."""

    incarnation: int  # starts of the trainer: one that resumes may go back in versions
    version: int

    @property
    def folder(self) -> str:
        """Returns the name of its folder."""
        return f"i{self.incarnation:04d}-v{self.version:09d}"


@dataclasses.dataclass(frozen=True)
class Window:
    """The bytes of a block of a leaf."""

    start: tuple[int, ...]  # of the block in the leaf
    shape: tuple[int, ...]  # of the block
    file: str
    offset: int  # in the file
    num_bytes: int  # in the file
    coding: str  # see coding.py
    digest: str  # SHA-256 of the decoded bytes


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array and the windows that cover it."""

    shape: tuple[int, ...]
    dtype: str
    windows: tuple[Window, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A complete version."""

    name: Name
    base: Name | None  # the version that differences refer to; None if there are none
    leaves: dict[str, Leaf]

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the version takes."""
        return sum(w.num_bytes for leaf in self.leaves.values() for w in leaf.windows)


def names(root: pathlib.Path) -> list[Name]:
    """Returns the complete versions in a folder, the latest last."""
    try:
        found = [name_of(path.name) for path in root.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(name for name in found if name is not None)


def name_of(folder: str) -> Name | None:
    """Returns the version that a folder of this name holds; None if it is none's."""
    match = _FOLDER.fullmatch(folder)
    return Name(int(match[1]), int(match[2])) if match else None


def read(root: pathlib.Path, name: Name) -> Manifest:
    """Reads the manifest of a version.

    Raises:
      FileNotFoundError: there is no such version, or it was deleted meanwhile.
      StoreError: it is damaged.
    """
    path = root / name.folder / FILE
    return from_text(path.read_text(encoding="utf-8", errors="replace"), str(path))


def to_text(manifest: Manifest) -> str:
    """Returns the text of a manifest, which begins with the digest of the rest."""
    body = json.dumps({"format": _FORMAT, **dataclasses.asdict(manifest)})
    return f"{_digest(body)}\n{body}\n"


def from_text(text: str, where: str) -> Manifest:
    """Reads what `to_text` wrote.

    Args:
      text: of the file.
      where: names it in errors.

    Raises:
      StoreError: the text is damaged, or of a later format.
    """
    digest, _, body = text.partition("\n")
    body = body.removesuffix("\n")
    if digest != _digest(body):
        raise StoreError(f"{where} is damaged: its text does not have its digest.")
    fields = json.loads(body)
    if fields["format"] != _FORMAT:
        raise StoreError(
            f"{where} has format {fields['format']}, and this version of glm5_jax "
            f"reads format {_FORMAT}."
        )
    base = fields["base"]
    return Manifest(
        name=Name(*fields["name"]),
        base=None if base is None else Name(*base),
        leaves=leaves_from(fields["leaves"]),
    )


def leaves_from(fields: dict[str, Any]) -> dict[str, Leaf]:
    """Returns leaves from `dataclasses.asdict` of them, through JSON."""
    return {
        name: Leaf(
            tuple(leaf["shape"]),
            leaf["dtype"],
            tuple(_window(window) for window in leaf["windows"]),
        )
        for name, leaf in fields.items()
    }


def merged(parts: Sequence[dict[str, Leaf]]) -> dict[str, Leaf]:
    """Returns the leaves of which each process has written some windows."""
    whole: dict[str, Leaf] = {}
    for part in parts:
        for name, leaf in part.items():
            before = whole.get(name, dataclasses.replace(leaf, windows=()))
            windows = before.windows + leaf.windows
            whole[name] = dataclasses.replace(leaf, windows=windows)
    return whole


def _window(fields: dict[str, Any]) -> Window:
    start, shape = tuple(fields.pop("start")), tuple(fields.pop("shape"))
    return Window(start=start, shape=shape, **fields)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
