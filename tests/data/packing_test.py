"""Packed rows against a token-by-token loop over the documents."""

import numpy as np
from absl.testing import parameterized

from glm5_jax.data.rows import packing
from tests import environment

EOS = 99


def packed_by_loop(documents, length):
    """Returns rows of (token, target, segment, position, mask), token by token."""
    rows = [[]]
    for document in documents:
        position = 0
        for i, token in enumerate(document):
            if len(rows[-1]) == length:
                rows.append([])
                position = 0
            row = rows[-1]
            new = i == 0 or not row
            segment = (row[-1][2] if row else 0) + new
            target = document[i + 1] if i + 1 < len(document) else EOS
            row.append((token, target, segment, position, 1))
            position += 1
    rows[-1] += [(EOS, EOS, 0, 0, 0)] * (length - len(rows[-1]))
    return np.array(rows)


def make_documents(*lengths):
    """Returns documents in which token i of document d is 10 d + i % 10."""
    return [10 * d + np.arange(n, dtype=np.int32) % 10 for d, n in enumerate(lengths)]


class PackingTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("exact", (4, 4), 4),
        ("one_token_each", (1, 1, 1, 1, 1), 3),
        ("long", (11,), 4),
        ("border_at_row_end", (3, 5, 8, 2), 8),
        ("mixed", (5, 1, 9, 2, 2, 1, 7), 6),
        ("shorter_than_a_row", (2, 1), 8),
    )
    def test_rows(self, lengths, sequence_length):
        documents = make_documents(*lengths)
        rows = packing.pack(documents, eos_id=EOS, sequence_length=sequence_length)
        expected = packed_by_loop(documents, sequence_length)
        self.assertLen(rows, len(expected))
        for row, expected_row in zip(rows_of(rows), expected, strict=True):
            for key, column in zip(
                ("tokens", "targets", "segment_ids", "positions", "loss_mask"),
                expected_row.T,
                strict=True,
            ):
                np.testing.assert_array_equal(row[key], column, err_msg=key)
                is_mask = key == "loss_mask"
                self.assertEqual(row[key].dtype, np.float32 if is_mask else np.int32)

    def test_documents_come_back(self):
        rng = np.random.default_rng(0)
        documents = make_documents(*rng.integers(1, 30, size=9))
        rows = packing.pack(documents, eos_id=EOS, sequence_length=7)
        pairs = [
            (token, target)
            for row in rows_of(rows)
            for token, target, mask in zip(
                row["tokens"], row["targets"], row["loss_mask"], strict=True
            )
            if mask
        ]
        found, document = [], []
        for token, target in pairs:
            document.append(token)
            if target == EOS:
                found.append(document)
                document = []
        self.assertEqual(found, [list(d) for d in documents])

    def test_targets_never_cross_documents(self):
        rows = packing.pack(make_documents(3, 8, 1, 6), eos_id=EOS, sequence_length=5)
        for row in rows_of(rows):
            tokens, targets = row["tokens"], row["targets"]
            inside = targets != EOS
            np.testing.assert_array_equal(tokens[inside] // 10, targets[inside] // 10)
            same = row["segment_ids"][1:] == row["segment_ids"][:-1]
            np.testing.assert_array_equal(tokens[1:][same], targets[:-1][same])

    def test_beyond_the_last_row_is_padding(self):
        rows = packing.pack(make_documents(4), eos_id=EOS, sequence_length=4)
        row = rows[1]
        self.assertFalse(row["segment_ids"].any() or row["loss_mask"].any())
        np.testing.assert_array_equal(row["tokens"], EOS)

    def test_empty_documents_are_left_out(self):
        documents = make_documents(0, 3, 0, 2, 0)
        rows = packing.pack(documents, eos_id=EOS, sequence_length=5)
        np.testing.assert_array_equal(rows[0]["segment_ids"], [1, 1, 1, 2, 2])


def rows_of(rows):
    return [rows[i] for i in range(len(rows))]


class BestFitTest(parameterized.TestCase):
    @parameterized.parameters(*range(20))
    def test_against_a_search_over_all_bins(self, seed):
        rng = np.random.default_rng(seed)
        capacity = int(rng.integers(5, 60))
        lengths = rng.integers(1, capacity + 1, size=80).tolist()
        rooms = []
        for length in sorted(lengths, reverse=True):
            fitting = [room for room in rooms if room >= length]
            if fitting:
                rooms.remove(min(fitting))
            rooms.append(min(fitting, default=capacity) - length)
        bins = packing.best_fit(lengths, capacity)
        ours = [capacity - sum(lengths[i] for i in things) for things in bins]
        self.assertCountEqual(ours, rooms)
        self.assertCountEqual([i for things in bins for i in things], range(80))
        self.assertEqual(packing.best_fit(lengths, capacity), bins)

    def test_equal_lengths_keep_their_order(self):
        self.assertEqual(packing.best_fit([2, 5, 2, 3], 5), [[1], [3, 0], [2]])
        self.assertEqual(packing.best_fit([], 5), [])

    def test_fitted_rows(self):
        documents = [
            ([7, 1, 2], [0, 0, 1]),
            ([7, 3, 4, 5], [0, 1, 0, 1]),
            ([7, 6], [0, 1]),
        ]
        documents = [(np.array(t, np.int32), np.array(m, bool)) for t, m in documents]
        rows = packing.fit(documents, eos_id=EOS, sequence_length=5)
        self.assertLen(rows, 2)
        expected = {
            "tokens": [[7, 3, 4, 7, 1], [7, EOS, EOS, EOS, EOS], [EOS] * 5],
            "targets": [[3, 4, 5, 1, 2], [6, EOS, EOS, EOS, EOS], [EOS] * 5],
            "loss_mask": [[1, 0, 1, 0, 1], [1, 0, 0, 0, 0], [0] * 5],
            "segment_ids": [[1, 1, 1, 2, 2], [1, 0, 0, 0, 0], [0] * 5],
            "positions": [[0, 1, 2, 0, 1], [0] * 5, [0] * 5],
        }
        for i in range(3):
            row = rows[i]
            self.assertEqual(row.keys(), expected.keys())
            for key, values in expected.items():
                np.testing.assert_array_equal(row[key], values[i], err_msg=key)
                is_mask = key == "loss_mask"
                self.assertEqual(row[key].dtype, np.float32 if is_mask else np.int32)

    @parameterized.parameters(2, 5, 6, 7, 11, 12)
    def test_pieces_have_every_target_once_and_fit(self, size):
        ids = np.arange(size)
        pieces = packing.pieces(ids, 5)
        for piece in pieces:
            self.assertBetween(piece.size, 2, 6)
        targets = np.concatenate([piece[1:] for piece in pieces])
        np.testing.assert_array_equal(targets, ids[1:])


if __name__ == "__main__":
    environment.main()
