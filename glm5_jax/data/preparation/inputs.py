"""What is prepared: texts, or conversations; where they are, and as token ids.

`sources` and `conversations` read them, for training from memory too.
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

PYTHON = "python"  # path of a span of the corpus that every Python carries
SIDES = ("train", "held_out")
File = tuple[str, int, int | str]  # path from the root, size, time of change
Document = documents_lib.Document | conversations.Conversation


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """A document as token ids, of which the first is never a target.

    Attributes:
        key: what documents are put in order by.
        side: of SIDES.
        ids: of a text with <|endoftext|> as the last.
        mask: which ids are trained; None: all of them.
        is_cut: whether its end is missing.
        is_thoughtful: whether it is a conversation to train on with a thought.
    """

    key: str | bytes
    side: str
    ids: np.ndarray
    mask: np.ndarray | None = None
    is_cut: bool = False
    is_thoughtful: bool = False


def check_tokenizer(config: config_lib.PrepareConfig) -> None:
    """Checks that the tokenizer can be had and has the special tokens that it needs.

    Raises:
        config_lib.InputError: there is none, or it lacks one.
    """
    names = tokenizer_lib.BPE_NAMES.get(config.tokenizer)
    if names is None:
        names = tuple(tokenizer_lib.named(config.tokenizer).special_ids)
    if config.fim_rate:
        infill.check(names)
    if config.kind == "conversations":
        templates.check(names, "tokenizer")


def root_of(config: config_lib.PrepareConfig) -> pathlib.Path:
    """The folder that the paths of files are below; "python" has none."""
    path = pathlib.Path(config.source).expanduser()
    if config.kind == "conversations" and path.is_file():
        return path.parent
    return documents_lib.folder_of(config.source)


def files_of(config: config_lib.PrepareConfig) -> list[File]:
    """Every file that will be read, by name.

    Raises:
        config_lib.InputError: there is none.
    """
    if config.kind == "conversations":
        paths = conversations.files_of(config.source)
    elif config.source == PYTHON:
        found = documents_lib.read_documents(config.source)
        return [(PYTHON, len(found), documents_lib.corpus_digest(found))]
    else:
        paths = formats.document_files(documents_lib.folder_of(config.source))
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
    """The documents of spans of the source one by one, without empty texts.

    Raises:
        config_lib.InputError: by file and number, what cannot be read.
    """
    if config.source == PYTHON:
        yield from documents_lib.read_documents(PYTHON)  # of one span
        return
    root = root_of(config)
    for span in spans:
        if config.kind == "conversations":
            yield from conversations.read_span(root, span)
        else:
            found = documents_lib.read_span(root, span, config.field)
            yield from (document for document in found if document.text)


def is_held_out(config: config_lib.PrepareConfig, document: Document) -> bool:
    """Returns whether the document is kept from training, prepared or not."""
    return documents_lib.is_held_out(document.name, config.held_out_percent)


def tokenize(
    config: config_lib.PrepareConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    some: Sequence[Document],
) -> Iterator[Tokenized]:
    """Documents as ids; conversations of which nothing is trained are left out."""
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
                    document.name,  # a digest: in order of those they are shuffled
                    SIDES[is_kept],
                    *packable,
                    is_thoughtful=not is_kept and conversations.has_thought(document),
                )


def _file(root: pathlib.Path, path: pathlib.Path) -> File:
    try:
        stat = path.stat()
    except OSError as error:  # a link to nowhere
        raise config_lib.InputError(
            f"{path} cannot be read: {error.strerror}. Mend or remove it."
        ) from error
    return path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns


def _texts(
    config: config_lib.PrepareConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    some: Sequence[documents_lib.Document],
) -> Iterator[Tokenized]:
    arrange = infill.Infill(config.fim_rate, config.fim_spm_rate, config.seed).arrange
    arranged = [
        # What is held out stays as it is: its bits per byte are comparable.
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
