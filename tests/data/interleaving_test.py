"""Interleaved packing: chunks in turns, and rows of documents that are alike."""

import hashlib
import itertools

import numpy as np

from glm5_jax.data.rows import interleaving, packing, similarity
from tests import environment, runs

EOS = 0
LENGTH = 64


def make_documents(num_topics=4, per_topic=5, size=20):
    """Documents that share four of five tokens with the others of their topic."""
    rng = np.random.default_rng(0)
    documents = []
    for i in range(num_topics * per_topic):
        topic = i % num_topics
        own = 1000 + rng.integers(0, 500, size // 5)
        shared = 10 + 20 * topic + rng.integers(0, 20, size - own.size - 1)
        ids = rng.permutation(np.concatenate([own, shared]))
        documents.append(np.append(ids, EOS).astype(np.int32))
    return documents


def interleave(documents, chunk_tokens=8):
    return interleaving.interleave(
        documents, eos_id=EOS, sequence_length=LENGTH, chunk_tokens=chunk_tokens
    )


class InterleavingTest(runs.FolderTest):
    def test_documents_take_turns_by_the_number_of_their_chunks(self):
        long, short = np.arange(10, 18), np.arange(20, 24)
        tokens, mask = interleaving.alternate([long, short], 2)
        want = [10, 11, 12, 13, 20, 21, 14, 15, 16, 17, 22, 23]
        self.assertEqual(tokens.tolist(), want)
        self.assertEqual(mask.tolist(), [n not in (10, 14, 20, 22) for n in want])

    def test_every_token_comes_once_and_in_order(self):
        documents = [*make_documents(), np.arange(1, 200, dtype=np.int32)]
        rows = interleave(documents)
        seen = [rows.tokens[a:b] for a, b in itertools.pairwise(rows.starts)]
        pieces = [p for ids in documents for p in packing.pieces(ids, LENGTH)]
        want = np.sort(np.concatenate(pieces))
        np.testing.assert_array_equal(np.sort(np.concatenate(seen)), want)
        for index in range(len(rows)):
            row = rows[index]
            used = int((row["segment_ids"] > 0).sum())
            self.assertEqual(set(row["segment_ids"][:used]), {1})
            np.testing.assert_array_equal(row["positions"][:used], np.arange(used))
            np.testing.assert_array_equal(
                row["targets"][: used - 1], row["tokens"][1:used]
            )
        whole = rows.mask.sum() / rows.tokens.size
        self.assertGreater(whole, 0.8)

    def test_rows_hold_documents_of_one_topic(self):
        """A row has room for three; at random a pair is alike 4 times in 19."""
        documents = make_documents()
        groups = similarity.groups(
            similarity.vectors(documents), [20] * len(documents), LENGTH
        )
        placed = [i for group in groups for i in group]
        self.assertCountEqual(placed, range(len(documents)))
        pairs = [(a % 4, b % 4) for a, *others in groups for b in others]
        self.assertGreater(np.mean([a == b for a, b in pairs]), 0.7)

    def test_vectors_are_those_of_a_loop(self):
        """Counts each word by itself; and products in float32 are exact."""
        # Tokens 656 and 787 share a number under which frequency is counted.
        documents = [*make_documents(2, 3), np.array([656, 1]), np.array([787, 2])]
        words = [similarity._words(ids).tolist() for ids in documents]
        n = len(documents)
        for ids, got in zip(words, similarity.vectors(documents), strict=True):
            vector = [0] * 1024
            for word in set(ids):
                m = sum(word % 2**20 in {w % 2**20 for w in other} for other in words)
                weight = (2 * ids.count(word)).bit_length() - 1
                weight *= (2 * n // m).bit_length() - 1
                vector[(word >> 32) % 1024] += -weight if word >> 63 else weight
            scale = 2048 / np.sqrt(sum(x * x for x in vector))
            np.testing.assert_array_equal(got, np.rint(np.array(vector) * scale))
        found = similarity.vectors(documents)
        exact = found.astype(np.int64) @ found.astype(np.int64).T
        np.testing.assert_array_equal(found @ found.T, exact)

    def test_every_machine_finds_the_same_vectors(self):
        """A document of one token is one place; one of none is zero."""
        ids = ([5], [1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 9], [], [154_879, 7, 7, 7, 7])
        found = similarity.vectors([np.array(some, np.int32) for some in ids])
        self.assertEqual(np.flatnonzero(found[0]).tolist(), [929])
        self.assertEqual(found[0, 929], -2048)
        self.assertFalse(found[3].any())
        common = similarity.vectors([np.array([5])] * 2)  # the least weight, 1
        self.assertEqual(np.abs(common).sum(1).tolist(), [2048, 2048])
        digest = hashlib.sha256(found.tobytes()).hexdigest()
        self.assertEqual(digest[:16], "58097834fa3079b4")

    def test_a_row_takes_what_just_fits(self):
        found = np.ones((5, 1), np.float32)
        for capacity, want in (
            (6, [[0, 2], [1, 3], [4]]),
            (7, [[0, 1], [2, 3, 4]]),
            (5, [[0], [1, 2], [3, 4]]),
        ):
            groups = similarity.groups(found, [4, 3, 2, 3, 2], capacity)
            self.assertEqual(groups, want, capacity)


if __name__ == "__main__":
    environment.main()
