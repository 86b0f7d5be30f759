"""Tokenizers: exact round trips, files, and refused ones."""

import contextlib
import itertools
import json
import pathlib

import tokenizers
from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.data import tokenizer as tokenizer_lib
from tests import environment

TEXTS = (
    "def f(x):\r\n\treturn x  # 1234567\n\n",
    "naïve Ω≈ç 漢字 🙂 e\u0301",
    "a <|endoftext|> b",
    "\x00\x7f\u2028 \ufffd",
    "",
)
CORPUS = ["def function(argument):\n    return argument + 1\n"] * 20 + list(TEXTS)


def make_tokenizers():
    yield "byte", tokenizer_lib.byte_tokenizer()
    yield "bpe", tokenizer_lib.train_bpe(CORPUS, 320)
    yield "byte_chat", tokenizer_lib.named("byte_chat")
    names = tokenizer_lib.SPECIAL_TOKENS
    yield "bpe_chat", tokenizer_lib.train_bpe(CORPUS, 350, names)


class TokenizerTest(parameterized.TestCase):
    @parameterized.named_parameters(*make_tokenizers())
    def test_decoding_undoes_encoding(self, tokenizer):
        for text in TEXTS:
            ids = tokenizer.encode(text)
            self.assertEqual(tokenizer.decode(ids), text)
            self.assertEqual(b"".join(tokenizer.pieces[i] for i in ids), text.encode())
            self.assertNotIn(tokenizer.eos_id, ids)
        self.assertEqual(
            tokenizer.encode_batch(TEXTS), [tokenizer.encode(text) for text in TEXTS]
        )

    @parameterized.named_parameters(*make_tokenizers())
    def test_a_run_folder_carries_its_tokenizer(self, tokenizer):
        folder = pathlib.Path(self.create_tempdir().full_path)
        tokenizer.save(folder / "tokenizer.json")
        for path in (folder, folder / "tokenizer.json"):
            again = tokenizer_lib.load(path)
            self.assertEqual(again.digest, tokenizer.digest)
            self.assertEqual(again.pieces, tokenizer.pieces)
            self.assertEqual(again.eos_id, tokenizer.eos_id)
            self.assertEqual(again.encode_batch(TEXTS), tokenizer.encode_batch(TEXTS))

    def test_byte_ids_are_bytes(self):
        tokenizer = tokenizer_lib.byte_tokenizer()
        self.assertEqual(tokenizer.encode("é\n"), list("é\n".encode()))
        self.assertEqual((tokenizer.eos_id, tokenizer.vocab_size), (256, 257))

    def test_special_tokens_are_glm5_s_in_their_order(self):
        names = tokenizer_lib.SPECIAL_TOKENS
        self.assertLen(set(names), 36)
        # Ids of the released tokenizer (spec/glm5.md 5.2).
        for name, released in (
            ("<|endoftext|>", 154820),
            ("<|assistant|>", 154828),
            ("<think>", 154841),
            ("</arg_value>", 154850),
            ("<|video|>", 154855),
        ):
            self.assertEqual(names.index(name) + 154820, released)
        ids = tokenizer_lib.named("byte_chat").special_ids
        self.assertEqual(ids, {name: 256 + i for i, name in enumerate(names)})
        bpe = tokenizer_lib.train_bpe(CORPUS, 350, names)
        self.assertEqual(bpe.special_ids, {name: i for i, name in enumerate(names)})
        self.assertEqual(
            bpe.spell([7, *bpe.encode("é"), 8, 8]), "<|user|>é" + names[8] * 2
        )
        self.assertEqual(bpe.decode([7, *bpe.encode("é"), 8, 8]), "é")

    def test_plain_tokenizers_have_one_special_token(self):
        for tokenizer, eos_id in (
            (tokenizer_lib.byte_tokenizer(), 256),
            (tokenizer_lib.train_bpe(CORPUS, 320), 0),
        ):
            self.assertEqual(tokenizer.special_ids, {"<|endoftext|>": eos_id})

    def test_no_merge_makes_a_special_token(self):
        """/nothink is one word of GLM-5's after a letter or at a line's begin."""
        texts = ("Say hi/nothink", "4 times 5\n/nothink", "/nothinking")
        tokenizer = tokenizer_lib.train_bpe(
            texts * 50, 400, tokenizer_lib.SPECIAL_TOKENS
        )
        for text in texts:
            ids = tokenizer.encode(text)
            self.assertEqual(tokenizer.decode(ids), text)
            self.assertNoCommonElements(ids, tokenizer.special_ids.values())
        plain = tokenizer_lib.train_bpe(texts * 50, 400)
        self.assertLen(plain.encode("/nothink"), 1)

    def test_bpe_merges_within_words_only(self):
        tokenizer = tokenizer_lib.train_bpe(CORPUS, 320)
        self.assertLessEqual(tokenizer.vocab_size, 320)
        self.assertLen(tokenizer.encode(" argument"), 1)
        self.assertGreater(len(tokenizer.encode("argument argument")), 1)
        # A mark and the letters after it are one word of GLM-5's, two of GPT-2's.
        tokenizer = tokenizer_lib.train_bpe(["(argument"] * 9, 320)
        self.assertLen(tokenizer.encode("(argument"), 1)

    def test_decode_survives_any_ids(self):
        tokenizer = tokenizer_lib.byte_tokenizer()
        ids = [*"é".encode()[:1], tokenizer.eos_id, *b"a", tokenizer.vocab_size, -1]
        self.assertEqual(tokenizer.decode(ids), "\ufffda\ufffd\ufffd")

    def test_every_byte_of_utf8_comes_back(self):
        """Bytes are spelt by GPT-2's characters, as the library has them."""
        text = "".join(map(chr, [*range(0x900), 0xD7FF, 0xFFFD, 0x1F642, 0x10FFFF]))
        tokenizer = tokenizer_lib.byte_tokenizer()
        self.assertEqual(tokenizer.encode(text), [*text.encode()])
        self.assertEqual(tokenizer.decode(tokenizer.encode(text)), text)
        library = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
        ((spelt, _),) = library.pre_tokenize_str(text)
        alphabet = tokenizer_lib._ALPHABET
        self.assertEqual([alphabet[character] for character in spelt], [*text.encode()])
        self.assertEqual(sorted(alphabet.values()), [*range(256)])

    def test_a_file_may_cut_pad_and_frame_texts_and_ours_do_not(self):
        backend = tokenizers.Tokenizer.from_str(tokenizer_lib.byte_tokenizer().text)
        backend.enable_truncation(4)
        backend.enable_padding(length=9, pad_id=256)
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
        )
        file = self.create_tempfile(content=backend.to_str()).full_path
        self.assertLen(backend.encode("abcdef").ids, 9)
        tokenizer = tokenizer_lib.load(file)
        for text in ("a", "abcdef", "a" * 20):
            self.assertEqual(tokenizer.encode(text), [*text.encode()])
            self.assertEqual(tokenizer.encode_batch([text]), [[*text.encode()]])

    def test_special_tokens_in_the_file(self):
        """As in the released file, whose special tokens no normalizer changes."""
        written = json.loads(tokenizer_lib.byte_tokenizer().text)
        (token,) = written["added_tokens"]
        kept = {"id": 256, "content": "<|endoftext|>", "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        self.assertEqual(token, kept | flags)
        # Folders of before have the digest of a file that cuts no words.
        self.assertFalse(written["pre_tokenizer"]["use_regex"])

    @parameterized.parameters(
        ("bpe", "61568ce45277e24d"), ("bpe_chat", "9e545f726784c752")
    )
    def test_a_bpe_of_an_earlier_version_is_found(self, name, want):
        cache_dir = self.create_tempdir().full_path
        data = config.DataConfig(
            cache_dir=cache_dir, tokenizer=name, bpe_vocab_size=320
        )
        with self.assertLogs("absl", "INFO") as logs:
            tokenizer_lib.for_corpus(data, CORPUS[:2])
        (path,) = pathlib.Path(cache_dir).iterdir()
        self.assertEqual(path.name, f"bpe-{want}.json")
        (line,) = [line for line in logs.output if " tokens in " in line]
        self.assertLess(float(line.split(" tokens in ")[1].split()[0]), 60)

    def test_a_bpe_is_trained_once_for_a_corpus_and_its_settings(self):
        cache_dir = self.create_tempdir().full_path
        data = config.DataConfig(cache_dir=cache_dir, bpe_vocab_size=320)
        first = tokenizer_lib.for_corpus(data, CORPUS)
        (file,) = pathlib.Path(cache_dir).iterdir()
        written = file.stat().st_mtime_ns
        again = tokenizer_lib.for_corpus(data, CORPUS)
        self.assertEqual(again.digest, first.digest)
        self.assertEqual(file.stat().st_mtime_ns, written)
        tokenizer_lib.for_corpus(data, CORPUS[1:])
        self.assertLen(list(pathlib.Path(cache_dir).iterdir()), 2)
        whole = file.read_text()
        other_ids = whole.replace('"z":', '"\u0141":', 1)
        for damage in (whole[:100], other_ids, "", whole.replace("\n", " ", 1)):
            file.write_text(damage)
            with self.assertLogs(level="WARNING") as logs:
                again = tokenizer_lib.for_corpus(data, CORPUS)
            self.assertIn("damaged", logs.output[0])
            self.assertEqual(again.digest, first.digest)
            self.assertEqual(file.read_text(), whole)

    def test_an_endless_file_is_no_tokenizer(self):
        with self.assertRaisesRegex(config.InputError, "/dev/zero: it is no regular"):
            tokenizer_lib.load("/dev/zero")

    def test_a_cache_that_cannot_be_written_is_no_error(self):
        file = self.create_tempfile().full_path  # a file where a folder should be
        data = config.DataConfig(cache_dir=file, bpe_vocab_size=320)
        with self.assertLogs(level="WARNING") as logs:
            tokenizer = tokenizer_lib.for_corpus(data, CORPUS)
        self.assertIn("cannot be kept", logs.output[0])
        self.assertGreater(tokenizer.vocab_size, 257)

    def test_added_tokens_that_are_not_special_have_bytes(self):
        path = self.create_tempfile().full_path
        tokenizer_lib.byte_tokenizer().save(path)
        backend = tokenizers.Tokenizer.from_file(path)
        backend.add_tokens(["<think é>"])
        tokenizer = tokenizer_lib.Tokenizer(backend)
        self.assertEqual(tokenizer.encode("a<think é>"), [97, 257])
        self.assertEqual(tokenizer.decode([97, 257]), "a<think é>")


def of_bytes(vocab, special_tokens):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(special_tokens)
    return backend


def of_characters(*normalizers, end="<eos>"):
    """Makes one like SentencePiece's: blanks as U+2581, single bytes, merges."""
    characters = [*"\u2581defturnxabos()", "\u2581d", "re", "r\u2581"]
    names = ["<unk>", end, *(f"<0x{i:02X}>" for i in range(256)), *characters]
    model = tokenizers.models.BPE(
        vocab={name: i for i, name in enumerate(names)},
        merges=[("\u2581", "d"), ("r", "e"), ("r", "\u2581")],
        byte_fallback=True,
        unk_token="<unk>",
    )
    backend = tokenizers.Tokenizer(model)
    blanks = tokenizers.normalizers.Replace(" ", "\u2581")
    backend.normalizer = tokenizers.normalizers.Sequence([*normalizers, blanks])
    backend.add_special_tokens(["<unk>", end])
    return backend


class CharacterTest(parameterized.TestCase):
    @parameterized.parameters("<eos>", "</s>")
    def test_decoding_undoes_encoding(self, end):
        path = self.create_tempfile(content=of_characters(end=end).to_str()).full_path
        tokenizer = tokenizer_lib.load(path)
        self.assertEqual(tokenizer.eos_id, 1)
        self.assertEqual(tokenizer.encode(" dr x"), [273, 275, 266])
        for text in (*TEXTS, f"a {end} b"):
            ids = tokenizer.encode(text)
            self.assertNotIn(1, ids)
            self.assertEqual(b"".join(tokenizer.pieces[i] for i in ids), text.encode())
            self.assertEqual(tokenizer.decode([1, *ids]), text)

    @parameterized.parameters("<|end_of_text|>", tokenizer_lib._DEEPSEEK)
    def test_bytes_with_the_end_of_another_family(self, end):
        backend = of_bytes(tokenizer_lib._ALPHABET | {end: 256}, [end])
        tokenizer = tokenizer_lib.Tokenizer(backend)
        self.assertEqual(tokenizer.eos_id, 256)
        self.assertEqual(tokenizer.encode(end), list(end.encode()))

    @parameterized.named_parameters(
        ("a_blank_in_front", tokenizers.normalizers.Prepend(" "), "makes . Def  f"),
        ("small_letters", tokenizers.normalizers.Lowercase(), "makes .def  f"),
        ("one_blank", tokenizers.normalizers.Replace("  ", " "), "makes .Def f"),
    )
    def test_a_normalizer_that_changes_a_text_is_refused(self, normalizer, message):
        with self.assertRaisesRegex(config.InputError, message):
            tokenizer_lib.Tokenizer(of_characters(normalizer))

    def test_words_without_blanks_are_refused(self):
        """Tries one of ASCII only, which looks byte-level."""
        backend = tokenizers.Tokenizer(
            tokenizers.models.WordPiece({"[UNK]": 0, "def": 1, "</s>": 2})
        )
        with self.assertRaisesRegex(config.InputError, "must keep text unchanged"):
            tokenizer_lib.Tokenizer(backend)


def of_glm5_s_size(special_tokens):
    """Writes a tokenizer.json of the released size, of pairs and triples of bytes."""
    alphabet = sorted(tokenizer_lib._ALPHABET)
    pairs = (a + b for a in alphabet for b in alphabet)
    triples = ("a" + a + b for a in alphabet for b in alphabet)
    more = ("b" + a + b for a in alphabet for b in alphabet)
    words = itertools.chain(alphabet, pairs, triples, more)
    vocab = {word: i for i, word in enumerate(itertools.islice(words, 154_820))}
    return of_bytes(vocab, special_tokens)


class ReleasedTest(parameterized.TestCase):
    def check(self, special_tokens):
        """Checks a tokenizer with high special ids and few ids of text."""
        ids = {name: 154_820 + i for i, name in enumerate(special_tokens)}
        vocab = tokenizer_lib._ALPHABET | ids
        backend = of_bytes(vocab, special_tokens)
        tokenizer_lib.check_released(tokenizer_lib.Tokenizer(backend), "x")

    def test_ids_of_the_release(self):
        """spec/glm5.md 5.2: 154,820 ids of text, 36 of special tokens."""
        file = self.create_tempfile().full_path
        of_glm5_s_size(list(tokenizer_lib.SPECIAL_TOKENS)).save(file)
        tokenizer = tokenizer_lib.load(file)
        self.assertEqual(tokenizer.vocab_size, 154_856)
        self.assertEqual(tokenizer.special_ids, tokenizer_lib.RELEASED_IDS)
        ids = tokenizer.special_ids
        for name, released in (
            ("<|endoftext|>", 154820),
            ("<|user|>", 154827),
            ("<|observation|>", 154829),
            ("<|begin_of_transcription|>", 154836),
            ("<|code_prefix|>", 154838),
            ("<|code_suffix|>", 154840),
            ("</think>", 154842),
            ("<arg_key>", 154847),
            ("/nothink", 154851),
        ):
            self.assertEqual(ids[name], released)
        self.assertEqual(tokenizer.eos_id, 154820)

    @parameterized.named_parameters(
        ("swapped", 22, 21, "<think> must be 154841, is 154842"),
        ("renamed", 20, None, "<|code_suffix|> must be 154840, is missing"),
    )
    def test_other_ids_are_refused(self, place, other, message):
        names = list(tokenizer_lib.SPECIAL_TOKENS)
        if other is None:
            names[place] = "<|other|>"
        else:
            names[place], names[other] = names[other], names[place]
        with self.assertRaisesRegex(config.InputError, message.replace("|", r"\|")):
            self.check(names)

    @parameterized.parameters((5, ""), (6, "; and 1 more"), (7, "; and 2 more"))
    def test_a_message_names_five_tokens_and_counts_the_others(self, count, more):
        names = [f"<|{i}|>" for i in range(36)]
        kept = [*range(0, 36 - count)]
        for i in kept:
            names[i] = tokenizer_lib.SPECIAL_TOKENS[i]
        with self.assertRaises(config.InputError) as caught:
            self.check(names)
        wrong = [
            f"{name} must be {154_820 + 36 - count + i}, is missing"
            for i, name in enumerate(tokenizer_lib.SPECIAL_TOKENS[-count:][:5])
        ]
        self.assertIn(f" GLM-5's: {'; '.join(wrong)}{more}. Use", str(caught.exception))

    @parameterized.parameters((154_819, True), (154_820, False))
    def test_ids_are_those_of_the_release_in_tokenizers_of_its_size(self, last, passes):
        """A tokenizer of 154,820 ids has room for no special token of the release."""
        vocab = tokenizer_lib._ALPHABET | {"[gMASK]": 256, "<|endoftext|>": last}
        tokenizer = tokenizer_lib.Tokenizer(
            of_bytes(vocab, ["[gMASK]", "<|endoftext|>"])
        )
        self.assertEqual(tokenizer.vocab_size, last + 1)
        refused = self.assertRaisesRegex(config.InputError, "not GLM-5's")
        with contextlib.nullcontext() if passes else refused:
            tokenizer_lib.check_released(tokenizer, "x")

    def test_a_file_with_other_ids_is_not_loaded(self):
        ids = {"[gMASK]": 154_820, "<|endoftext|>": 154_821}
        file = self.create_tempfile().full_path
        of_bytes(tokenizer_lib._ALPHABET | ids, list(ids)).save(file)
        message = f"{file} is of GLM-5's size"
        with self.assertRaisesRegex(config.InputError, message):
            tokenizer_lib.load(file)

    def test_large_tokenizers_of_other_families_are_none_of_ours(self):
        self.check(["<|other|>", "<|endoftext|>", "<|user|>"])


class TokenizerErrorTest(parameterized.TestCase):
    def test_missing_file(self):
        with self.assertRaisesRegex(config.InputError, "nowhere.json.*'bpe', 'byte'"):
            tokenizer_lib.load("nowhere.json")

    def test_not_a_tokenizer(self):
        path = self.create_tempfile(content='{"a": 1}').full_path
        with self.assertRaisesRegex(config.InputError, "is not a tokenizer.json"):
            tokenizer_lib.load(path)

    @parameterized.named_parameters(
        ("no_eos", {"a": 0}, "no <|endoftext|> token"),
        ("loses_text", {"<|endoftext|>": 0, "漢": 1}, "makes '漢' of"),
    )
    def test_unusable(self, vocab, message):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
        path = self.create_tempfile(content=backend.to_str()).full_path
        with self.assertRaisesRegex(config.InputError, message.replace("|", r"\|")):
            tokenizer_lib.load(path)

    @parameterized.named_parameters(
        ("huge_id", '"Ā":0', '"Ā":4000000000', "id of 4,000,000,000"),
        ("large_id", '"Ā":0', '"Ā":10000000', "10,000,000; give one below 10,000,000"),
        # The library panics, which is no Exception of Python.
        (
            "panic",
            '"normalizer":null',
            '"normalizer":{"type":"Precompiled","precompiled_charsmap":""}',
            "is not a tokenizer.json",
        ),
        ("prefix", 'prefix":null', 'prefix":"x"', "continuing_subword_prefix must"),
        ("deep", "{", "[" * 100_000, "is not a tokenizer.json"),
    )
    def test_damaged(self, before, after, message):
        """These inputs would make the library fill the memory or abort the process."""
        text = tokenizer_lib.byte_tokenizer().text
        self.assertIn(before, text)
        path = self.create_tempfile(content=text.replace(before, after, 1)).full_path
        with self.assertRaisesRegex(config.InputError, message):
            tokenizer_lib.load(path)

    @parameterized.parameters((1, 1), (3, 1), (4, 2), (6, 2), (7, 3), (9, 3), (99, 3))
    def test_a_bpe_trains_on_the_first_texts_that_reach_the_limit(self, limit, count):
        texts = ["abc", "def", "ghi"]
        self.assertEqual(tokenizer_lib._leading(texts, limit), texts[:count])

    def test_model_smaller_than_the_vocabulary(self):
        tokenizer = tokenizer_lib.byte_tokenizer()
        tokenizer_lib.check_vocab(tokenizer, 257)
        with self.assertRaisesRegex(config.InputError, r"model\.vocab_size=257"):
            tokenizer_lib.check_vocab(tokenizer, 256)


if __name__ == "__main__":
    environment.main()
