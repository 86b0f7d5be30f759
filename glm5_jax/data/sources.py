"""Documents: what every Python carries, or a folder of text and JSONL files."""

import dataclasses
import hashlib
import json
import os
import pathlib
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator

from glm5_jax import config

TEXT_SUFFIXES = (".txt", ".md", ".py")

_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages"),
    *("test", "tests", "idle_test"),
    *("encodings", "idlelib", "turtledemo"),  # character tables, programs
    *("distutils", "lib2to3"),  # gone from later Pythons
}


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and the name that decides on its side of the split."""

    name: str
    text: str


def read_documents(source: str) -> list[Document]:
    """Every document of `source` that is not empty, sorted by name.

    Args:
        source: "python" (the standard library's language reference and modules), or a
            folder with .txt, .md, .py files (a document each) and .jsonl files (a
            document a line, in the field "text"). Hidden files are not read.

    Raises:
        config.InputError: there is no such folder, nothing in it, or a bad line.
    """
    documents = _python() if source == "python" else _folder(source)
    found = sorted((d for d in documents if d.text), key=lambda d: d.name)
    if not found:
        kinds = ", ".join((*TEXT_SUFFIXES, ".jsonl"))
        raise config.InputError(
            f"data.source holds no text: {source!r}. Put {kinds} files there, or give "
            f"'python'."
        )
    return found


def is_held_out(name: str, percent: int) -> bool:
    """Whether the document is kept from training: sha256(name) % 100 < percent."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < percent


def shuffled(documents: Iterable[Document], seed: int) -> list[Document]:
    """The documents in an order that depends on their names and the seed alone."""
    return sorted(
        documents, key=lambda d: hashlib.sha256(f"{seed}:{d.name}".encode()).digest()
    )


def corpus_digest(documents: Iterable[Document]) -> str:
    """SHA-256 of the names and the texts."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.text):
            digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def files(root: pathlib.Path, skipped: Collection[str] = ()) -> Iterator[pathlib.Path]:
    """Every file below `root` that is not hidden nor in a folder of a skipped name."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name[0] != "." and name not in skipped
        ]
        for name in names:
            if not name.startswith("."):
                yield pathlib.Path(folder, name)


def read_text(path: pathlib.Path) -> str:
    """The text of a file, line ends as they are.

    Raises:
        config.InputError: it cannot be read as UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise config.InputError(
            f"{path} cannot be read as UTF-8 text: {error}. Convert or remove it."
        ) from error


def _python() -> Iterator[Document]:
    """The language reference in pydoc_data.topics and the modules without tests."""
    from pydoc_data import topics  # half a megabyte that folders do without

    for name, text in topics.topics.items():
        yield Document(f"topics/{name}", text)
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in files(root, skipped=_SKIPPED_FOLDERS):
        parts = path.relative_to(root).parts
        if (
            path.suffix == ".py"
            and parts[0].removesuffix(".py") in sys.stdlib_module_names
            and parts != ("pydoc_data", "topics.py")
            # Settings of the machine that built this Python.
            and not path.name.startswith("_sysconfigdata")
        ):
            yield Document("/".join(parts), read_text(path))


def _folder(source: str) -> Iterator[Document]:
    root = pathlib.Path(source).expanduser()
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise config.InputError(
            f"data.source must be 'python' or a folder; {source!r} {what}."
        )
    for path in files(root):
        name = path.relative_to(root).as_posix()
        if path.suffix in TEXT_SUFFIXES:
            yield Document(name, read_text(path))
        elif path.suffix == ".jsonl":
            for number, line in enumerate(read_text(path).split("\n"), start=1):
                if line.strip():
                    text = _text_field(line, f"{path}:{number}")
                    yield Document(f"{name}:{number}", text)


def _text_field(line: str, place: str) -> str:
    """The field "text" of a line of JSONL."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise config.InputError(f"{place} is not JSON: {error}.") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        got = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise config.InputError(
            f'{place} must be an object with a string in the field "text", got {got}.'
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise config.InputError(f"{place} is not valid Unicode: {error}.") from error
    return text
