"""Documents of a source: Python's own texts, one file, or the files of a folder."""

import dataclasses
import hashlib
import itertools
import pathlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from glm5_jax import config
from glm5_jax.data.sources import formats
from glm5_jax.storage import copies

_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages"),
    *("test", "tests", "idle_test"),
    *("encodings", "idlelib", "turtledemo"),  # character tables, programs
    *("distutils", "lib2to3"),  # removed from later Pythons
}


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and its name, which decides whether it is held out."""

    name: str
    text: str


@runtime_checkable
class Named(Protocol):
    """A document of any kind, such as a text or a conversation."""

    @property
    def name(self) -> str:
        """Returns the name of the document."""
        ...

    @property
    def text(self) -> str:
        """Returns the text of the document."""
        ...


def read_documents(source: str) -> list[Document]:
    """Returns every document of `source` that is not empty, sorted by name.

    Args:
        source: "python" (the standard library's language reference and modules), a
            file, or a folder. Each .txt, .md or .py file is a document; .jsonl,
            .parquet, .arrow and .array_record files have documents in the field
            "text". The first four may be compressed (.txt.gz, .jsonl.zst). Hidden
            files are skipped.

    Raises:
        config.InputError: the source does not exist, is empty, or has a bad line.
    """
    documents = _python() if source == "python" else _folder(source)
    found = sorted((d for d in documents if d.text), key=lambda d: d.name)
    if not found:
        kinds = ", ".join(formats.SUFFIXES)
        raise config.InputError(
            f"data.source holds no text: {source!r}. Put {kinds} files there, or give "
            f"'python'."
        )
    return found


def folder_of(source: str) -> pathlib.Path:
    """Returns the folder `source`.

    Raises:
        config.InputError: it does not exist.
    """
    root = copies.local(source)
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise config.InputError(
            f"source must be 'python' or a folder; {source!r} {what}."
        )
    return root


def read_span(
    root: pathlib.Path, span: formats.Span, field: str = "text"
) -> Iterator[Document]:
    """Yields the documents of a span in order, including empty ones.

    Raises:
        config.InputError: a document is no text; names its file and number.
    """
    for name, text in formats.read(root, span, field):
        if not isinstance(text, str):
            raise config.InputError(
                f'{root / name} must have a string in the field "{field}", got '
                f"{type(text).__name__}."
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise config.InputError(
                f"{root / name} is not valid Unicode: {error}."
            ) from error
        yield Document(name, text)


def parted(document: Document, percent: int) -> list[Document]:
    """Splits a single document into a training and a held-out one, at a new line.

    Their names are chosen so that `is_held_out` puts them on these sides.
    """
    place = len(document.text) * (100 - percent) // 100
    place = document.text.rfind("\n", 0, place) + 1 or place
    parts = document.text[:place], document.text[place:]
    if not all(parts):
        return [document]

    def name(side: bool) -> str:
        names = (f"{document.name}#{i}" for i in itertools.count())
        return next(n for n in names if is_held_out(n, percent) == side)

    return [Document(name(bool(i)), text) for i, text in enumerate(parts)]


def is_held_out(name: str, percent: int) -> bool:
    """Tells whether a document is held out: sha256(name) % 100 < percent."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < percent


def shuffled(documents: Iterable[Document], seed: int) -> list[Document]:
    """Returns the documents in an order that depends on names and seed only."""
    return sorted(documents, key=lambda d: shuffle_key(d.name, seed))


def shuffle_key(name: str, seed: int) -> bytes:
    """Returns the key that sorts documents into a random order."""
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


def corpus_digest(documents: Iterable[Named]) -> str:
    """Returns the SHA-256 of the names and texts of documents."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.text):
            digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def _python() -> Iterator[Document]:
    """Yields the language reference in pydoc_data.topics and the modules, no tests."""
    from pydoc_data import topics  # half a megabyte, needed only here

    for name, text in topics.topics.items():
        yield Document(f"topics/{name}", text)
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in formats.files(root, skipped=_SKIPPED_FOLDERS):
        parts = path.relative_to(root).parts
        if (
            path.suffix == ".py"
            and parts[0].removesuffix(".py") in sys.stdlib_module_names
            and parts != ("pydoc_data", "topics.py")
            # Settings of the machine that built this Python.
            and not path.name.startswith("_sysconfigdata")
        ):
            yield Document("/".join(parts), formats.read_text(path))


def _folder(source: str) -> Iterator[Document]:
    path = copies.local(source)
    if path.is_file() and formats.is_document(path):
        root, paths = path.parent, [path]
    else:
        root = folder_of(source)
        paths = formats.document_files(root)
    for path in paths:
        for span in formats.cut(root, path, formats.WHOLE):
            yield from read_span(root, span)
