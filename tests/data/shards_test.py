"""Rows written to records and files, and the effect of damage."""

import dataclasses
import hashlib
import pathlib
import resource
from unittest import mock

import numpy as np
from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.data.preparation import shards
from glm5_jax.data.rows import packing
from tests import environment

EOS = 9
LENGTH = 16


def packed(vocab_size, seed=0):
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, vocab_size, n) for n in rng.integers(1, 40, 30)]
    return packing.pack(documents, eos_id=EOS, sequence_length=LENGTH)


def fitted(vocab_size, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, LENGTH + 2, 30)
    documents = [(rng.integers(0, vocab_size, n), rng.random(n) < 0.5) for n in sizes]
    return packing.fit(documents, eos_id=EOS, sequence_length=LENGTH)


class ShardsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)

    def write(self, name, rows):
        each = [rows[i] for i in range(len(rows))]
        return shards.write(self.folder / name, each, [1] * 200_000)

    def open(self, *written):
        return shards.ShardRows(
            self.folder, written, eos_id=EOS, sequence_length=LENGTH
        )

    def assert_equal_rows(self, got, want):
        self.assertEqual(got.keys(), want.keys())
        for key, value in want.items():
            np.testing.assert_array_equal(got[key], value, err_msg=key)
            self.assertEqual(got[key].dtype, value.dtype, key)

    @parameterized.product(make=[packed, fitted], vocab_size=[300, 154_880])
    def test_records_hold_rows(self, make, vocab_size):
        rows = make(vocab_size)
        for i in range(len(rows) + 1):  # the row after the last is all padding
            record = shards.encode(rows[i])
            self.assert_equal_rows(shards.decode(record, LENGTH, EOS), rows[i])

    def test_a_record_is_little_more_than_its_ids(self):
        (row,) = [packed(300)[0]]
        num_documents = row["segment_ids"].max()
        want = 8 + 4 * num_documents + 2 * (LENGTH + num_documents)
        self.assertLen(shards.encode(row), want)

    def test_shards_are_one_sequence(self):
        first, second = packed(300), fitted(300)
        rows = self.open(self.write("a", first), self.write("b", second))
        self.assertLen(rows, len(first) + len(second))
        places = np.random.default_rng(0).permutation(len(rows))
        for i in places.tolist():
            inner = i - len(first)
            self.assert_equal_rows(rows[i], first[i] if inner < 0 else second[inner])
        self.assertFalse(rows[len(rows)]["loss_mask"].any())

    def test_figures(self):
        rows = fitted(300)
        each = [rows[i] for i in range(len(rows))]
        shard = shards.write(self.folder / "a", each, range(300))
        trained = np.concatenate([r["targets"][r["loss_mask"] > 0] for r in each])
        self.assertEqual(shard.targets, trained.size)
        self.assertEqual(shard.num_bytes, trained.sum())
        self.assertEqual(shard.filled, sum((r["segment_ids"] > 0).sum() for r in each))
        self.assertEqual(shard.sha256, shards.digest(self.folder / "a"))

    def test_one_flipped_bit_is_found(self):
        rows = packed(300)
        before, shard = self.write("b", rows), self.write("a", rows)
        content = bytearray((self.folder / "a").read_bytes())
        # Records of random ids are not compressed: the file holds their bytes.
        place = bytes(content).index(shards.encode(rows[5])[-20:])
        content[place] ^= 1
        (self.folder / "a").write_bytes(content)
        with self.assertRaisesRegex(config.InputError, "a is not the file"):
            self.open(before, shard, before)  # the bit is among the first bytes
        shard = dataclasses.replace(shard, ends="")
        damaged = self.open(before, shard, before)
        message = "/a is damaged.*prepare.*--check"
        with self.assertRaisesRegex(config.DamagedError, message):
            damaged[len(rows) + 5]
        for index in (5, len(rows), 2 * len(rows) + 5):
            self.assert_equal_rows(damaged[index], rows[index % len(rows)])

    @parameterized.parameters(0, 1, 4095, 4096, 4097, 8192, 9000)
    def test_ends_are_the_first_and_the_last_4096_bytes(self, size):
        content = np.random.default_rng(size).bytes(size)
        path = self.folder / "a"
        path.write_bytes(content)
        want = hashlib.sha256(content[:4096] + content[-4096:]).hexdigest()
        self.assertEqual(shards.ends(path), want)

    @parameterized.parameters((2**16 - 1, "<u2"), (2**16, "<u4"))
    def test_the_bytes_of_a_record(self, largest, kind):
        """Two documents: 1 2 3, of which 2 is no target, and 4 and the largest id."""
        rows = packing.fit(
            [
                (np.array([1, 2, 3]), np.array([True, False, True])),
                (np.array([4, largest]), np.array([False, True])),
            ],
            eos_id=EOS,
            sequence_length=LENGTH,
        )
        header = np.array([1, int(kind[-1])], "<u2").tobytes()
        counts = np.array([2, 2, 1], "<u4").tobytes()
        ids = np.array([1, 2, 3, 4, largest], kind).tobytes()
        record = header + counts + ids + b"\x60"  # 0, 1, 1 from the highest bit
        self.assertEqual(shards.encode(rows[0]), record)
        self.assert_equal_rows(shards.decode(record, LENGTH, EOS), rows[0])
        padding = np.array([0, 2, 0, 0], "<u2").tobytes()
        self.assertEqual(shards.encode(rows[1]), padding)

    def test_missing_and_cut_files_are_refused_at_once(self):
        shard = self.write("a", packed(300))
        content = (self.folder / "a").read_bytes()
        (self.folder / "a").write_bytes(content[:-1])
        with self.assertRaisesRegex(config.InputError, r"a has [\d,]+ bytes of"):
            self.open(shard)
        (self.folder / "a").unlink()
        with self.assertRaisesRegex(config.InputError, "a is missing"):
            self.open(shard)


class OpenFilesTest(parameterized.TestCase):
    """All shards stay open, and 256 other files."""

    @parameterized.parameters(
        (768, 1024, 4096, None),
        (769, 1024, 4096, (1025, 4096)),
        (3840, 1024, 4096, (4096, 4096)),
        (10**6, 1024, resource.RLIM_INFINITY, (10**6 + 256, resource.RLIM_INFINITY)),
    )
    def test_the_limit_rises_as_far_as_needed(self, count, soft, hard, limits):
        with mock.patch.multiple(
            resource,
            getrlimit=mock.Mock(return_value=(soft, hard)),
            setrlimit=mock.DEFAULT,
        ) as changed:
            shards._allow_open_files(count)
        calls = [(resource.RLIMIT_NOFILE, limits)] if limits else []
        found = [call.args for call in changed["setrlimit"].call_args_list]
        self.assertEqual(found, calls)

    def test_opening_shards_asks_for_them(self):
        few = mock.patch.object(resource, "getrlimit", return_value=(9, 9))
        refused = self.assertRaisesRegex(config.InputError, "0 shards needs 256 open")
        with few, mock.patch.object(resource, "setrlimit"), refused:
            shards.ShardRows(pathlib.Path(), (), eos_id=EOS, sequence_length=LENGTH)

    def test_a_system_that_allows_too_few_refuses(self):
        with (
            mock.patch.object(resource, "getrlimit", return_value=(1024, 4096)),
            mock.patch.object(resource, "setrlimit") as changed,
            self.assertRaisesRegex(config.InputError, "3841 shards needs 4097 open"),
        ):
            shards._allow_open_files(3841)
        changed.assert_called_once_with(resource.RLIMIT_NOFILE, (4096, 4096))


if __name__ == "__main__":
    environment.main()
