"""The input of a preparation: its files, its documents, and their token ids.

Documents are texts or conversations. data/sources and data/chat read them, for training
from memory too.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import conversations, templates
from glm5_jax.data.rows import infill
from glm5_jax.data.sources import documents as documents_lib
from glm5_jax.data.sources import formats

PYTHON = "python"  # path of the span of Python's own corpus
SIDES = ("train", "held_out")
File = tuple[str, int, int | str]  # path from the root, size, time of modification
Document = documents_lib.Document | conversations.Conversation


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """A document as token ids; the first one is never a target.

    Attributes:
        key: sorts the documents.
        side: one of SIDES.
        ids: token ids; those of a text end with <|endoftext|>.
        mask: which ids are trained; None for all.
        is_cut: whether the end of the document is missing.
        is_thoughtful: whether it is a training conversation with a thought.
    """

    key: str | bytes
    side: str
    ids: np.ndarray
    mask: np.ndarray | None = None
    is_cut: bool = False
    is_thoughtful: bool = False


def check_tokenizer(config: config_lib.PrepareConfig) -> None:
    """Checks that the tokenizer exists and has the special tokens that it needs.

    Raises:
        config_lib.InputError: it does not exist, or lacks a token.
    """
    names = tokenizer_lib.BPE_NAMES.get(config.tokenizer)
    if names is None:
        names = tuple(tokenizer_lib.named(config.tokenizer).special_ids)
    if config.fim_rate:
        infill.check(names)
    if config.kind == "conversations":
        templates.check(names, "tokenizer")


def root_of(config: config_lib.PrepareConfig) -> pathlib.Path:
    """Returns the folder that paths of files start from; "python" has none."""
    path = pathlib.Path(config.source).expanduser()
    if path.is_file() and formats.is_document(path):
        return path.parent
    return documents_lib.folder_of(config.source)


def files_of(config: config_lib.PrepareConfig) -> list[File]:
    """Returns every file to read, sorted by name.

    Raises:
        config_lib.InputError: there are none.
    """
    if config.kind == "conversations":
        paths = conversations.files_of(config.source)
    elif config.source == PYTHON:
        found = documents_lib.read_documents(config.source)
        return [(PYTHON, len(found), documents_lib.corpus_digest(found))]
    else:
        path = pathlib.Path(config.source).expanduser()
        paths = [path] if path.is_file() else formats.document_files(root_of(config))
    if not paths:
        kinds = ", ".join(formats.SUFFIXES)
        raise config_lib.InputError(
            f"source holds no documents: {config.source!r}. Put {kinds} files there, "
            f"or give 'python'."
        )
    root = root_of(config)
    return [_file(root, path) for path in paths]


def read(
    config: config_lib.PrepareConfig, spans: Iterable[formats.Span]
) -> Iterator[Document]:
    """Yields the documents of spans of the source, without empty texts.

    A source with a single text gives two documents: its end is held out.

    Raises:
        config_lib.InputError: a document cannot be read; names its file and number.
    """
    if config.source == PYTHON:
        yield from documents_lib.read_documents(PYTHON)  # its only span
        return
    root, spans = root_of(config), tuple(spans)
    is_lone_text = _is_lone_text(config, spans)
    for span in spans:
        if config.kind == "conversations":
            yield from conversations.read_span(root, span)
            continue
        for document in documents_lib.read_span(root, span, config.field):
            if is_lone_text:
                yield from documents_lib.parted(document, config.held_out_percent)
            elif document.text:
                yield document


def is_held_out(config: config_lib.PrepareConfig, document: Document) -> bool:
    """Tells whether a document is held out; the same as without a preparation."""
    return documents_lib.is_held_out(document.name, config.held_out_percent)


def tokenize(
    config: config_lib.PrepareConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    some: Sequence[Document],
) -> Iterator[Tokenized]:
    """Yields documents as ids, without conversations that have nothing to train."""
    texts = [
        document for document in some if isinstance(document, documents_lib.Document)
    ]
    yield from _texts(config, tokenizer, texts)
    if config.kind == "conversations":
        template = templates.make_template(config, tokenizer)
        for document in some:
            assert isinstance(document, conversations.Conversation)
            packable = conversations.render(document, template, config.sequence_length)
            if packable is not None:
                is_kept = is_held_out(config, document)
                yield Tokenized(
                    document.name,  # a digest, so that sorting shuffles
                    SIDES[is_kept],
                    *packable,
                    is_thoughtful=not is_kept and conversations.has_thought(document),
                )


def _is_lone_text(
    config: config_lib.PrepareConfig, spans: Sequence[formats.Span]
) -> bool:
    """Tells whether the whole source is one text, as one file of text is."""
    paths = [pathlib.PurePath(span.path) for span in spans]
    return (
        config.kind == "text"
        and len(paths) == 1
        and formats.suffix_of(paths[0]) in formats.TEXT_SUFFIXES
        and len(files_of(config)) == 1
    )


def _file(root: pathlib.Path, path: pathlib.Path) -> File:
    try:
        stat = path.stat()
    except OSError as error:  # a broken link
        raise config_lib.InputError(
            f"{path} cannot be read: {error.strerror}. Correct or remove it."
        ) from error
    return path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns


def _texts(
    config: config_lib.PrepareConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    some: Sequence[documents_lib.Document],
) -> Iterator[Tokenized]:
    arrange = infill.Infill(config.fim_rate, seed=config.seed).arrange
    arranged = [
        # Held-out texts stay unchanged, so that bits per byte are comparable.
        [(None, document.text)]
        if is_held_out(config, document)
        else arrange(document.name, document.text)
        for document in some
    ]
    texts = [text for parts in arranged for _, text in parts]
    encoded = iter(tokenizer.encode_batch(texts))
    for document, parts in zip(some, arranged, strict=True):
        whole = []
        for special, _ in parts:
            if special is not None:
                whole.append(tokenizer.special_ids[special])
            whole += next(encoded)
        yield Tokenized(
            documents_lib.shuffle_key(document.name, config.seed),
            SIDES[is_held_out(config, document)],
            np.array([*whole, tokenizer.eos_id], np.int32),
        )
