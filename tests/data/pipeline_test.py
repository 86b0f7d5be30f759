"""Batches of a small corpus: order, resumption, held-out bytes, fingerprints."""

import collections
import dataclasses
import itertools
import pathlib
import sys
from unittest import mock

import numpy as np
from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.data.rows import pipeline as pipeline_lib
from glm5_jax.data.sources import documents as documents_lib
from tests import environment

WORDS = ("naïve", "漢字", "def", "return", "self", "import", "🙂", "one", "two")
BATCH = 3
FIRST_MARK = 0x3400  # a document's character, before each of its words


def write_corpus(folder, num_documents=60):
    rng = np.random.default_rng(0)
    for i in range(num_documents):
        words = rng.choice(WORDS, size=rng.integers(2, 40))
        text = " ".join(chr(FIRST_MARK + i) + word for word in words)
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")


def marks(text):
    """Returns the documents that the characters of a text are from."""
    return {c for c in text if FIRST_MARK <= ord(c) < FIRST_MARK + 1000}


def row_key(batch, row):
    return b"".join(batch[key][row].tobytes() for key in sorted(batch))


class PipelineTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        write_corpus(self.folder)
        self.data = config.DataConfig(
            source=str(self.folder),
            tokenizer="byte",
            sequence_length=32,
            batch_size=BATCH,
            held_out_percent=20,
            cache_dir=self.create_tempdir().full_path,
        )

    def make(self, seed=0, **changes):
        data = dataclasses.replace(self.data, **changes)
        return pipeline_lib.make_pipeline(data, seed)

    def split(self):
        documents = documents_lib.read_documents(str(self.folder))
        percent = self.data.held_out_percent
        held_out = [d for d in documents if documents_lib.is_held_out(d.name, percent)]
        return [d for d in documents if d not in held_out], held_out

    def assert_equal_batches(self, first, second):
        self.assertEqual(first.keys(), second.keys())
        for key, value in first.items():
            np.testing.assert_array_equal(value, second[key], err_msg=key)

    def test_batches_are_a_function_of_seed_and_step(self):
        one, two = self.make(seed=5), self.make(seed=5)
        steps = (0, 7, 1000)
        for step in steps:
            self.assert_equal_batches(one.train_batch(step), two.train_batch(step))
        for step, batch in zip(steps, map(two.train_batch, steps), strict=True):
            self.assert_equal_batches(one.train_batch(step), batch)
        other = self.make(seed=6).train_batch(0)
        self.assertFalse(np.array_equal(one.train_batch(0)["tokens"], other["tokens"]))

    def test_iterator_resumed_at_k_is_the_iterator_from_0_at_k(self):
        pipeline = self.make()
        from_0 = list(itertools.islice(pipeline.train_iterator(), 90))
        from_40 = list(itertools.islice(self.make().train_iterator(40), 50))
        for step, batch in enumerate(from_0):
            self.assert_equal_batches(batch, pipeline.train_batch(step))
        for first, second in zip(from_0[40:], from_40, strict=True):
            self.assert_equal_batches(first, second)

    def test_batches_that_grow_have_the_same_rows_in_the_same_order(self):
        """Three steps of 1 row, two of 2, then 3; also from any step."""
        growth = {"batch_warmup_sizes": (1, 2), "batch_warmup_tokens": 6 * 32.0}
        growing, whole = self.make(**growth), self.make()
        batches = list(itertools.islice(growing.train_iterator(), 6))
        self.assertEqual([len(b["tokens"]) for b in batches], [1, 1, 1, 2, 2, 3])
        rows = [row_key(b, row) for b in batches for row in range(len(b["tokens"]))]
        wanted = [whole.train_batch(step) for step in range(4)]
        wanted = [row_key(b, row) for b in wanted for row in range(BATCH)]
        self.assertEqual(rows, wanted[: len(rows)])
        for step, batch in enumerate(batches):
            self.assert_equal_batches(self.make(**growth).train_batch(step), batch)
            self.assert_equal_batches(next(growing.train_iterator(step)), batch)
        self.assertNotEqual(growing.fingerprint, whole.fingerprint)
        self.assertEqual(growing.epochs(5), {"": whole.epochs(1)[""] * 7 / 3})

    def test_rows_taken_are_those_of_the_whole(self):
        """Checks that two processes together read the batch that one process reads."""
        whole, part = self.make(), self.make()
        for rows in ([0], [1, 2], [2]):
            part.restrict_to({BATCH: rows})
            for step in (0, 7, 1000):
                want = {k: v[rows] for k, v in whole.train_batch(step).items()}
                self.assert_equal_batches(part.train_batch(step), want)
            self.assert_equal_batches(next(part.train_iterator(7)), part.train_batch(7))
            held_out = zip(part.eval_batches(3), whole.eval_batches(3), strict=True)
            for ours, theirs in held_out:
                self.assert_equal_batches(ours, {k: v[rows] for k, v in theirs.items()})

    def test_every_epoch_has_every_row_once_in_another_order(self):
        pipeline = self.make()
        train, _ = self.split()
        num_bytes = sum(len(d.text.encode()) for d in train)
        num_rows = -(-num_bytes // self.data.sequence_length)
        batches = itertools.islice(pipeline.train_iterator(), 2 * num_rows)
        keys = [row_key(b, row) for b in batches for row in range(3)][: 2 * num_rows]
        first, second = keys[:num_rows], keys[num_rows:]
        self.assertEqual(collections.Counter(first), collections.Counter(second))
        self.assertLen(set(first), num_rows)
        self.assertNotEqual(first, second)

    def test_each_side_of_the_split_reads_its_documents(self):
        pipeline = self.make()
        train, held_out = self.split()

        def seen(batches):
            rows = [row for batch in batches for row in batch["tokens"]]
            return marks("".join(map(pipeline.tokenizer.decode, rows)))

        batches = itertools.islice(pipeline.train_iterator(), 200)
        self.assertEqual(seen(batches), marks("".join(d.text for d in train)))
        batches = pipeline.eval_batches(200)
        self.assertEqual(seen(batches), marks("".join(d.text for d in held_out)))

    @parameterized.parameters("byte", "bpe")
    def test_held_out_bytes_are_exact(self, tokenizer):
        pipeline = self.make(tokenizer=tokenizer, bpe_vocab_size=330)
        _, held_out = self.split()
        batches = list(pipeline.eval_batches(10**6))
        ids = [pipeline.tokenizer.encode(d.text) for d in held_out]
        unscored = sum(len(pipeline.tokenizer.pieces[i[0]]) for i in ids)
        expected = sum(len(d.text.encode()) for d in held_out) - unscored
        self.assertEqual(sum(b["num_bytes"].sum() for b in batches), expected)
        num_targets = sum(b["loss_mask"].sum() for b in batches)
        self.assertEqual(num_targets, sum(map(len, ids)))
        for batch in batches:
            self.assertEqual(batch["num_bytes"].dtype, np.float32)
            self.assertEqual({v.shape for v in batch.values()}, {(3, 32)})
            is_eos = batch["targets"] == pipeline.tokenizer.eos_id
            self.assertFalse(batch["num_bytes"][is_eos].any())

    def test_held_out_documents_are_in_the_order_of_seed_0(self):
        """Another order would change the figures of runs that have begun."""
        pipeline = self.make(seed=3)
        ordered = documents_lib.shuffled(self.split()[1], 0)
        want = [id for d in ordered for id in pipeline.tokenizer.encode(d.text)]
        batches = pipeline.eval_batches(10**6)
        got = np.concatenate([b["tokens"][b["loss_mask"] > 0] for b in batches])
        self.assertEqual(got.tolist(), want)

    def test_held_out_batches_are_the_same_for_every_seed(self):
        for first, second in zip(
            self.make(seed=1).eval_batches(2),
            self.make(seed=2).eval_batches(2),
            strict=True,
        ):
            self.assert_equal_batches(first, second)
        self.assertLen(list(self.make().eval_batches(1)), 1)

    @parameterized.parameters(True, False)
    def test_only_a_terminal_shows_how_far_it_is(self, is_terminal):
        with (
            mock.patch.object(sys.stderr, "isatty", return_value=is_terminal),
            mock.patch.object(sys.stderr, "write") as written,
        ):
            self.make(cache_dir=self.create_tempdir().full_path)
        shown = "".join(call.args[0] for call in written.call_args_list)
        self.assertEqual("tokenize: 100%" in shown, is_terminal)

    def test_fingerprint_names_the_difference(self):
        base = self.make()
        self.assertEqual(self.make().fingerprint, base.fingerprint)
        # A new version invalidates every run; raise it only for a new order.
        self.assertIn("order_version=1", base.fingerprint.split())
        digests = "^corpus=[0-9a-f]{16} tokenizer=[0-9a-f]{16} "
        self.assertRegex(base.fingerprint, digests)
        for part, changed in (
            ("seed", self.make(seed=1)),
            ("sequence_length", self.make(sequence_length=16)),
            ("tokenizer", self.make(tokenizer="bpe", bpe_vocab_size=330)),
        ):
            words = set(base.fingerprint.split()) ^ set(changed.fingerprint.split())
            self.assertEqual({word.split("=")[0] for word in words}, {part})
        (self.folder / "0.txt").write_text("other", encoding="utf-8")
        self.assertNotEqual(self.make().fingerprint, base.fingerprint)

    def test_tokens_are_kept(self):
        first = self.make().train_batch(0)
        (file,) = pathlib.Path(self.data.cache_dir).iterdir()
        self.assertRegex(file.name, r"^tokens-[0-9a-f]{16}\.npz$")
        written = file.stat().st_mtime_ns
        self.assert_equal_batches(self.make().train_batch(0), first)
        self.assertEqual(file.stat().st_mtime_ns, written)
        # The archive's checksum detects one flipped bit.
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with self.assertLogs(level="WARNING") as logs:
            self.assert_equal_batches(self.make().train_batch(0), first)
        self.assertIn("damaged", logs.output[0])

    def test_a_split_without_documents_is_refused(self):
        folder = pathlib.Path(self.create_tempdir().full_path)
        (folder / "input.txt").write_text("x")  # a text that cannot be split
        with self.assertRaisesRegex(config.InputError, "no held-out document.*JSONL"):
            self.make(source=str(folder))


if __name__ == "__main__":
    environment.main()
