"""Text to token ids and back, for tokenizer.json files that lose no text."""

import hashlib
import itertools
import operator
import pathlib
import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import tokenizers
from absl import logging
from tokenizers import decoders, models, pre_tokenizers, trainers

from glm5_jax import config, files
from glm5_jax.data import lossless
from glm5_jax.storage import copies

END_OF_TEXT = "<|endoftext|>"
# GLM-5's, in the order of its ids 154820 to 154855.
SPECIAL_TOKENS = (
    *(END_OF_TEXT, "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>"),
    *("<|begin_of_audio|>", "<|end_of_audio|>"),
    *("<|begin_of_transcription|>", "<|end_of_transcription|>"),
    *("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "/nothink"),
    *("<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>"),
)
# Ids of the released tokenizers, which the released weights were trained with.
RELEASED_IDS = {name: 154820 + i for i, name in enumerate(SPECIAL_TOKENS)}
_OF_GLM = "[gMASK]"  # only GLM's tokenizers have it
_MAX_SHOWN = 5
_MAX_IDS = 10_000_000  # larger ids come from damaged files and fill the memory
_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')
_PANIC = "PanicException"  # a Rust panic of the library, which exports no class

# Cuts text into words, within which BPE merges bytes; GLM-5's pattern.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Names of the tokenizers trained on the source, with their special tokens.
BPE_NAMES = {"bpe": (END_OF_TEXT,), "bpe_chat": SPECIAL_TOKENS}
MAX_TRAINING_BYTES = 4_000_000  # more text compresses only 1% better
_REPLACEMENT = "\ufffd".encode()
# End of a document in other families (Llama 3, DeepSeek, SentencePiece, Gemma).
_DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_ENDS = (END_OF_TEXT, "<|end_of_text|>", _DEEPSEEK, "</s>", "<eos>")


class Tokenizer:
    """A tokenizer of the `tokenizers` library whose ids spell their text exactly.

    Byte-level tokenizers do, such as GLM-5's. SentencePiece tokenizers do if they spell
    unknown characters by bytes and add no leading blank, such as Gemma's.

    Attributes:
        pieces: the bytes that each id stands for; none for special tokens.
        eos_id: the id that ends a document: <|endoftext|>, or another family's.
        special_ids: the ids of SPECIAL_TOKENS, as far as the tokenizer has them.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Wraps `backend`.

        Raises:
            config.InputError: it loses text, or has no token that ends a document.
        """
        ends = filter(lambda i: i is not None, map(backend.token_to_id, _ENDS))
        eos_id = next(ends, None)
        if eos_id is None:
            raise config.InputError(
                f"The tokenizer has no {END_OF_TEXT} token to end a document (nor "
                f"{', '.join(_ENDS[1:])}); add it to the added_tokens of its "
                f"tokenizer.json."
            )
        backend.no_truncation()
        backend.no_padding()
        # A document that spells a special token stays text: it must not end itself.
        backend.encode_special_tokens = True
        added = backend.get_added_tokens_decoder().items()
        ids = {token.content: i for i, token in added}
        self.special_ids = {name: ids[name] for name in SPECIAL_TOKENS if name in ids}
        # The released file does not declare <think>, <tool_call> and others special.
        backend.add_special_tokens([_special(name) for name in self.special_ids])
        self._backend = backend
        self.eos_id: int = eos_id
        self.pieces: tuple[bytes, ...] = _pieces(backend)
        keep = lambda text: self.decode(self.encode(text))
        lossless.require(backend, self.pieces, keep)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, special tokens included."""
        return len(self.pieces)

    @property
    def text(self) -> str:
        """The tokenizer.json as a string; transformers reads it too."""
        return self._backend.to_str()

    @property
    def digest(self) -> str:
        """SHA-256 of the tokenizer.json that `save` writes."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without any special token."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_spelt(self, text: str) -> list[int]:
        """Token ids of a text whose special tokens are spelt out, as `spell` does."""
        names = "|".join(map(re.escape, self.special_ids))
        ids: list[int] = []
        for piece in re.split(f"({names})", text) if names else [text]:
            special = self.special_ids.get(piece)
            ids += self.encode(piece) if special is None else [special]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, on all cores."""
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of `ids`, without special tokens.

        Bytes that are not UTF-8 (half a character, say) and ids beyond the tokenizer's
        vocabulary (a model may have more embeddings) become U+FFFD.
        """
        known = range(self.vocab_size)
        pieces = (
            self.pieces[i] if i in known else _REPLACEMENT
            for i in map(operator.index, ids)
        )
        return b"".join(pieces).decode(errors="replace")

    def spell(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of `ids`, with GLM-5's special tokens spelt out."""
        names = {i: name for name, i in self.special_ids.items()}
        runs = itertools.groupby(map(operator.index, ids), names.get)
        return "".join(
            self.decode(run) if name is None else name * len(list(run))
            for name, run in runs
        )

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a tokenizer.json, which transformers reads too."""
        files.write_text(pathlib.Path(path), self.text)


def load(path: str | pathlib.Path) -> Tokenizer:
    """Loads the tokenizer.json at `path`, or in the folder `path`.

    Raises:
        config.InputError: the file is missing, or its tokenizer is not supported.
    """
    path = copies.local(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.exists() and not file.is_file():  # such as the endless /dev/zero
            raise OSError("it is no regular file")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise config.InputError(
            f"No tokenizer can be read from {file}: {error}. Give 'bpe', 'byte' (or "
            f"'bpe_chat', 'byte_chat' for conversations) or the path of a "
            f"tokenizer.json."
        ) from error
    if _PREFIX.search(text):  # mismatched merges abort the process
        raise config.InputError(
            f"{file}: continuing_subword_prefix must be empty, because ids would not "
            f"spell their text; give another tokenizer.json, 'bpe' or 'byte'."
        )
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # a Rust panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise config.InputError(f"{file} is not a tokenizer.json: {error}.") from error
    tokenizer = Tokenizer(backend)
    lossless.require_declared_ids(backend, text)
    check_released(tokenizer, file)
    return tokenizer


def digest_of(path: pathlib.Path) -> str:
    """SHA-256 of a tokenizer.json, byte by byte."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_released(tokenizer: Tokenizer, file: str | pathlib.Path) -> None:
    """Checks the special tokens of a tokenizer of GLM-5's size.

    Smaller tokenizers pass: those of small models have the same tokens at other ids.

    Raises:
        config.InputError: a token is missing, or its id differs from the release's.
    """
    ids = tokenizer.special_ids
    if _OF_GLM not in ids or tokenizer.vocab_size <= min(RELEASED_IDS.values()):
        return
    wrong = [
        f"{name} must be {wanted}, is {ids.get(name, 'missing')}"
        for name, wanted in RELEASED_IDS.items()
        if ids.get(name) != wanted
    ]
    if wrong:
        more = [f"and {len(wrong) - _MAX_SHOWN} more"] * (len(wrong) > _MAX_SHOWN)
        raise config.InputError(
            f"{file} is of GLM-5's size, but its special tokens are not GLM-5's: "
            f"{'; '.join([*wrong[:_MAX_SHOWN], *more])}. Use the tokenizer.json from "
            f"the folder of the weights."
        )


def byte_tokenizer(special_tokens: Sequence[str] = (END_OF_TEXT,)) -> Tokenizer:
    """The tokenizer whose ids 0..255 are bytes and 256 is <|endoftext|>.

    Args:
        special_tokens: their ids start at 256; pass SPECIAL_TOKENS for chats.
    """
    backend = tokenizers.Tokenizer(models.BPE(vocab=_ALPHABET, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_special(name) for name in special_tokens])
    return Tokenizer(backend)


def train_bpe(
    texts: Sequence[str],
    vocab_size: int,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens; <|endoftext|> is token 0.

    Args:
        texts: training text for the merges.
        vocab_size: includes bytes and special tokens.
        special_tokens: their ids start at 0; pass SPECIAL_TOKENS for chats.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_special(name) for name in special_tokens],
        initial_alphabet=sorted(_ALPHABET),
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator(texts, trainer, length=len(texts))
    return Tokenizer(lossless.without_merges_to(backend, special_tokens))


def named(name: str) -> Tokenizer:
    """Returns the tokenizer "byte" or "byte_chat", or loads the one at a path."""
    if name == "byte":
        return byte_tokenizer()
    if name == "byte_chat":
        return byte_tokenizer(SPECIAL_TOKENS)
    return load(name)


def for_corpus(data: config.DataConfig, texts: Sequence[str]) -> Tokenizer:
    """Returns the tokenizer that `data` names; a BPE is trained once and cached.

    Args:
        data: the config's data section.
        texts: training documents in random order; the first 4 MB are used.
    """
    if data.tokenizer not in BPE_NAMES:
        return named(data.tokenizer)
    special_tokens = BPE_NAMES[data.tokenizer]
    sample = _leading(texts, MAX_TRAINING_BYTES)
    chat = " ".join(special_tokens[1:])
    key = hashlib.sha256(f"{data.bpe_vocab_size} {_WORDS}{chat}".encode())
    for text in sample:
        key.update(hashlib.sha256(text.encode()).digest())
    if any(name in text for name in special_tokens for text in sample):
        key.update(b"no merge makes a special token")
    folder = pathlib.Path(data.cache_dir).expanduser()

    def make() -> Tokenizer:
        logging.info("Training a BPE on %d documents ...", len(sample))
        start = time.perf_counter()
        trained = train_bpe(sample, data.bpe_vocab_size, special_tokens)
        seconds = time.perf_counter() - start
        logging.info("... %d tokens in %.1f s.", trained.vocab_size, seconds)
        return trained

    return files.cached(
        folder / f"bpe-{key.hexdigest()[:16]}.json",
        make=make,
        load=_load_proven,
        save=_save_proven,
    )


def check_vocab(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Checks that the model has an embedding for every id.

    Raises:
        config.InputError: the tokenizer has more ids than the model.
    """
    if tokenizer.vocab_size > model_vocab_size:
        raise config.InputError(
            f"model.vocab_size must be at least the tokenizer's "
            f"{tokenizer.vocab_size} ids, got {model_vocab_size}; set "
            f"model.vocab_size={tokenizer.vocab_size} (or more), or choose a smaller "
            f"tokenizer (data.tokenizer, data.bpe_vocab_size)."
        )


def _save_proven(tokenizer: Tokenizer, path: pathlib.Path) -> None:
    """Writes the digest of a tokenizer.json, then the file's bytes."""
    files.write_text(path, f"{tokenizer.digest}\n{tokenizer.text}")


def _load_proven(path: pathlib.Path) -> Tokenizer:
    """Reads a file of `_save_proven`; raises ValueError if any byte changed."""
    digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ValueError("its content does not match its digest")
    return Tokenizer(tokenizers.Tokenizer.from_str(text))


def _special(name: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(name, special=True, normalized=False)


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level tokenizer.json (GPT-2).

    Visible Latin-1 characters stand for themselves; all other bytes map to U+0100 on.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    visible = {c: ord(c) for c in alphabet if ord(c) < 256}
    others = sorted(set(range(256)) - set(visible.values()))
    rest = [c for c in alphabet if c not in visible]
    return visible | dict(zip(rest, others, strict=True))


_ALPHABET = _byte_alphabet()


def _pieces(backend: tokenizers.Tokenizer) -> tuple[bytes, ...]:
    """Returns the bytes that each id stands for."""
    vocab = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    plain = {token: i for token, i in vocab.items() if i not in added}
    is_byte_level = _ALPHABET.keys() >= set().union(*plain)
    spelt = _spelt_by_bytes if is_byte_level else _spelt_by_characters
    if (size := max(vocab.values()) + 1) > _MAX_IDS:
        raise config.InputError(
            f"The tokenizer has an id of {size - 1:,}; give one below {_MAX_IDS:,}."
        )
    pieces = [b""] * size
    for token, i in plain.items():
        pieces[i] = spelt(token)
    for i, token in added.items():
        pieces[i] = b"" if token.special else token.content.encode()
    return tuple(pieces)


def _spelt_by_bytes(token: str) -> bytes:
    return bytes(_ALPHABET[character] for character in token)


def _spelt_by_characters(token: str) -> bytes:
    """Returns the bytes of a SentencePiece token: U+2581 is a blank, <0x0A> a byte."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()


def _leading(texts: Sequence[str], limit: int) -> list[str]:
    """Returns the first texts, as many as together reach `limit` characters."""
    sample, size = [], 0
    for text in texts:
        sample.append(text)
        size += len(text)
        if size >= limit:
            break
    return sample
