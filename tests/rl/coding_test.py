"""Stored bytes of a window: the coding that is chosen, and back."""

import hashlib
import json
import zlib

import numpy as np
from absl.testing import absltest, parameterized

from glm5_jax.rl.weight_store import coding, manifest

TRIED = 2**18  # bytes at the middle that decide


def noise(size, seed=0):
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8)


class CodingTest(parameterized.TestCase):
    def coded(self, changes):
        """Returns the coding of changes to some bytes, after the way back."""
        old = noise(len(changes), seed=1)
        new = old ^ changes
        kind, stored = coding.encode(new, old)
        back = coding.decode(kind, stored, old, len(new))
        np.testing.assert_array_equal(back, new)
        return kind, stored

    def test_without_a_base(self):
        new = noise(10)
        kind, stored = coding.encode(new, None)
        self.assertEqual((kind, stored.tolist()), ("raw", new.tolist()))

    def test_nothing_changed(self):
        kind, stored = self.coded(np.zeros(1000, np.uint8))
        self.assertEqual((kind, stored.size), ("same", 0))

    def test_few_changes_are_compressed(self):
        changes = np.zeros(10_000, np.uint8)
        changes[17] = 1
        kind, stored = self.coded(changes)
        self.assertEqual(kind, "xor+zlib")
        self.assertLess(stored.size, 100)

    @parameterized.parameters(
        (0.70, "xor+zlib"), (0.74, "xor+zlib"), (0.76, "raw"), (0.80, "raw")
    )
    def test_three_quarters_of_the_bytes_are_worth_it(self, share, kind):
        size = 40_000  # noise takes its own size
        changes = np.zeros(size, np.uint8)
        changes[: int(share * size)] = noise(int(share * size))
        self.assertEqual(self.coded(changes)[0], kind)

    def test_changes_of_exactly_three_quarters_are_stored(self):
        changes, size = np.zeros(4000, np.uint8), 0
        for count in range(2900, 3000):
            changes[:count] = noise(count)
            size = len(zlib.compress(changes.data, 1))
            if size == 3000:
                break
        self.assertEqual(size, 3000)
        kind, stored = self.coded(changes)
        self.assertEqual((kind, stored.size), ("xor+zlib", 3000))

    @parameterized.parameters(
        (np.s_[: 2 * TRIED], "xor+zlib"),  # the middle is as it was
        (np.s_[2 * TRIED : 3 * TRIED], "raw"),
        (np.s_[2 * TRIED : 2 * TRIED + 7 * TRIED // 10], "xor+zlib"),
        (np.s_[3 * TRIED :], "xor+zlib"),
        (np.s_[2 * TRIED + 4 * TRIED // 10 : 3 * TRIED + TRIED // 2], "xor+zlib"),
    )
    def test_the_middle_decides(self, noisy, kind):
        changes = np.zeros(5 * TRIED, np.uint8)
        changes[noisy] = noise(changes[noisy].size)
        self.assertEqual(self.coded(changes)[0], kind)

    def test_a_middle_that_deceives(self):
        changes = noise(5 * TRIED)
        changes[2 * TRIED : 3 * TRIED] = 0
        self.assertEqual(self.coded(changes)[0], "raw")

    @parameterized.parameters(
        ("same", None, "needs its base"),
        ("xor+zlib", None, "needs its base"),
        ("zip", b"\0" * 4, "zip"),
    )
    def test_what_cannot_be_read(self, kind, old, words):
        old = None if old is None else np.frombuffer(old, np.uint8)
        with self.assertRaisesRegex(ValueError, words):
            coding.decode(kind, np.zeros(4, np.uint8), old, 4)


class ManifestTest(absltest.TestCase):
    def test_the_text_of_a_version(self):
        """Servers of other versions of glm5_jax read it."""
        name, base = manifest.Name(2, 7), manifest.Name(2, 6)
        text = manifest.to_text(manifest.Manifest(name, base, {}))
        digest, body = text.splitlines()
        wanted = {"format": 1, "name": [2, 7], "base": [2, 6], "leaves": {}}
        self.assertEqual(json.loads(body), wanted)
        self.assertLen(digest, 64)
        self.assertEqual(
            manifest.from_text(text, "x"), manifest.Manifest(name, base, {})
        )

    def test_a_later_format(self):
        text = manifest.to_text(manifest.Manifest(manifest.Name(0, 1), None, {}))
        body = text.splitlines()[1].replace('"format": 1', '"format": 2')
        later = f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n"
        with self.assertRaisesRegex(manifest.StoreError, "has format 2, .* format 1"):
            manifest.from_text(later, "x")


if __name__ == "__main__":
    absltest.main()
