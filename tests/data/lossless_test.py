"""Tokenizers that lose a text are refused, whatever few texts they would keep."""

import copy
import json
import pathlib

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.data import lossless
from glm5_jax.data import tokenizer as tokenizer_lib
from tests import environment
from tests.data import tokenizer_test

BYTES = json.loads(tokenizer_lib.byte_tokenizer().text)
CHARACTERS = json.loads(tokenizer_test.of_characters().to_str())
BLANKS = CHARACTERS["normalizer"]
NFC = {"type": "NFC"}
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
UNUSED = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that are in no text in UTF-8


def changed(tree, **parts):
    """Returns a tokenizer.json with other parts, and other fields of its model."""
    tree = copy.deepcopy(tree)
    for name, value in parts.items():
        (tree["model"] if name in tree["model"] else tree)[name] = value
    return tree


def without(tree, *names):
    """Returns a tokenizer.json without some tokens and their ids."""
    vocab = sorted(tree["model"]["vocab"].items(), key=lambda item: item[1])
    kept = [name for name, _ in vocab if name not in names]
    vocab = {name: i for i, name in enumerate(kept)}
    special = [
        token | {"id": vocab.get(token["content"], len(vocab))}
        for token in tree["added_tokens"]
    ]
    return changed(tree, vocab=vocab, added_tokens=special)


def renumbered(tree, **ids):
    return changed(tree, vocab=tree["model"]["vocab"] | ids)


def added(tree, content, number, **flags):
    token = {"id": number, "content": content, "special": False, **FLAGS, **flags}
    return changed(tree, added_tokens=[*tree["added_tokens"], token])


def replaced(before, after):
    pattern = {"String": before}
    return {"type": "Replace", "pattern": pattern, "content": after}


def sequence(name, *parts):
    return {"type": "Sequence", name: list(parts)}


def dropping(kind, **settings):
    """Returns a pre-tokenizer that drops something before bytes are made."""
    part = {"type": kind, **settings}
    return sequence("pretokenizers", part, BYTES["pre_tokenizer"])


def removed(letter):
    settings = {"pattern": {"String": letter}, "behavior": "Removed", "invert": False}
    return dropping("Split", **settings)


def of_byte(byte):
    (name,) = (c for c, b in tokenizer_lib._ALPHABET.items() if b == byte)
    return name


def with_characters(text):
    """Returns CHARACTERS with a token for each character of a text."""
    vocab = dict(CHARACTERS["model"]["vocab"])
    for character in text.replace(" ", ""):
        vocab.setdefault(character, len(vocab))
    return changed(CHARACTERS, vocab=vocab)


def of_words():
    """Returns one that has a token for each byte, and for each text that is tried."""
    names = {byte: name for name, byte in tokenizer_lib._ALPHABET.items()}
    words = ["".join(names[b] for b in text.encode()) for text in lossless.TEXTS]
    vocab = tokenizer_lib._ALPHABET | {word: 257 + i for i, word in enumerate(words)}
    vocab |= {tokenizer_lib.END_OF_TEXT: 256}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "q"}
    return BYTES | {"model": model}


class LosslessTest(parameterized.TestCase):
    def load(self, tree):
        path = pathlib.Path(self.create_tempdir().full_path) / "tokenizer.json"
        path.write_text(json.dumps(tree), encoding="utf-8")
        return tokenizer_lib.load(path)

    @parameterized.named_parameters(
        (
            "nfc",
            changed(BYTES, normalizer=NFC),
            "makes .* of .*; its normalizer NFC changes",
        ),
        ("nfkc", changed(BYTES, normalizer={"type": "NFKC"}), "makes "),
        ("accents", changed(BYTES, normalizer={"type": "StripAccents"}), "makes "),
        ("letter", changed(BYTES, normalizer=replaced("q", "k")), "normalizer Replace"),
        (
            "word",
            changed(BYTES, normalizer=replaced("colour", "color")),
            "normalizer Replace changes characters .set normalizer to null",
        ),
        (
            "nested",
            changed(
                CHARACTERS,
                normalizer=sequence(
                    "normalizers", BLANKS, sequence("normalizers", replaced("ab", "b"))
                ),
            ),
            "normalizer Replace changes",
        ),
        ("drop", changed(BYTES, pre_tokenizer=removed("colour")), "Split drops char"),
        (
            "pattern",
            changed(
                BYTES,
                pre_tokenizer=dropping("Punctuation", behavior="Removed"),
            ),
            "makes ",
        ),
        (
            "delimiter",
            changed(
                BYTES, pre_tokenizer=dropping("CharDelimiterSplit", delimiter="漣")
            ),
            "CharDelimiterSplit drops characters",
        ),
        ("suffix", changed(BYTES, end_of_word_suffix="</w>"), "makes "),
        ("letter_is_missing", without(BYTES, "q"), "stands for 0x71 .add"),
        (
            "letter_in_words_only",
            without(CHARACTERS, "<0x71>"),
            "no token stands for 0x71 ",
        ),
        (
            "byte_in_no_probe",
            without(BYTES, of_byte(0xEB)),
            "no token stands for 0xeb ",
        ),
        ("bytes", without(BYTES, *map(of_byte, range(0xE1, 0xE9))), "and 3 more"),
        ("fallback", without(CHARACTERS, "<0xEB>"), "no token stands for 0xeb "),
        ("no_fallback", changed(CHARACTERS, byte_fallback=False), "makes "),
        (
            "no_fallback_of_rare_characters",
            changed(with_characters("".join(lossless.TEXTS[:2])), byte_fallback=False),
            "makes .* of '.U0010ffff",
        ),
        ("words", of_words(), "its model WordLevel has no tokens for unknown words"),
        ("two_letters", renumbered(BYTES, z=123), "tokens: 123 .the first: 'z', '{'"),
        ("a_letter_and_the_end", renumbered(BYTES, z=256), "several tokens: 256 "),
        ("a_word", renumbered(CHARACTERS, re=260), "several tokens: 260 "),
        (
            "a_special_token_and_a_letter",
            added(BYTES, "<x>", 122, special=True),
            "<x> is declared as 122 in .* 257; give each token an id of its own",
        ),
        (
            "blanks_before",
            added(BYTES, "<x>", 257, lstrip=True),
            "token '<x>' takes blanks around it .set its lstrip and rstrip to false",
        ),
        ("blanks_after", added(BYTES, "<x>", 257, rstrip=True), "token '<x>' takes"),
    )
    def test_refused(self, tree, message):
        with self.assertRaisesRegex(config.InputError, message) as caught:
            self.load(tree)
        said = str(caught.exception)
        self.assertEqual(said.count("\n"), 0)
        self.assertRegex(said, "must keep text unchanged|an id of its own")

    def test_a_message_stays_short_whatever_the_file(self):
        tree = changed(BYTES, vocab=dict.fromkeys(BYTES["model"]["vocab"], 7))
        with self.assertRaisesRegex(config.InputError, "and 251 more") as caught:
            self.load(tree)
        self.assertLess(len(str(caught.exception)), 600)

    @parameterized.named_parameters(
        ("bytes", BYTES),
        ("characters", CHARACTERS),
        ("nothing", changed(BYTES, normalizer=sequence("normalizers"))),
        (
            "nested_blanks",
            changed(CHARACTERS, normalizer=sequence("normalizers", BLANKS)),
        ),
        ("bytes_of_no_text", without(BYTES, *map(of_byte, UNUSED))),
        ("fallback_of_no_text", without(CHARACTERS, "<0xC0>", "<0xFF>")),
        ("a_hole", renumbered(BYTES, z=300)),
        ("special", added(BYTES, "<x>", 257, special=True, lstrip=True)),
        ("plain", added(BYTES, "<x>", 257)),
        (
            "isolated",
            changed(BYTES, pre_tokenizer=dropping("Digits", individual_digits=True)),
        ),
        (
            "bytes_by_the_normalizer",
            changed(BYTES, normalizer={"type": "ByteLevel"}, pre_tokenizer=None),
        ),
    )
    def test_accepted(self, tree):
        tokenizer = self.load(tree)
        every = "".join(map(chr, [*range(0x2000), 0xD7FF, 0xE000, 0x1F642, 0x10FFFF]))
        for text in (*tokenizer_test.TEXTS, every, "colour <x> 漣", "e\u0301 \u212b"):
            self.assertEqual(tokenizer.decode(tokenizer.encode(text)), text)


if __name__ == "__main__":
    environment.main()
