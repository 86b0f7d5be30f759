"""Consistent hashing: which keys move, and where to."""

import collections

import hypothesis
from absl.testing import parameterized
from hypothesis import strategies

from glm5_jax.serving.router import ring as ring_lib
from tests import environment

KEYS = [f"session {i}" for i in range(2000)]
# The share of a member with 256 points deviates by 1/16 of itself; six times that.
SHARE_RTOL = 6 / ring_lib.NUM_POINTS**0.5
NAMES = strategies.lists(
    strategies.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True
)


def homes(ring):
    return {key: next(ring.walk(key)) for key in KEYS}


class RingTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=10, deadline=None)
    @hypothesis.given(NAMES, strategies.text(min_size=9, max_size=9))
    def test_one_that_joins_takes_its_share_and_nothing_else_moves(self, names, new):
        ring = ring_lib.Ring(names)
        before = homes(ring)
        ring.add(new)
        after = homes(ring)
        moved = [key for key in KEYS if before[key] != after[key]]
        self.assertEqual({after[key] for key in moved}, {new})
        share = len(KEYS) / (len(names) + 1)
        self.assertAlmostEqual(len(moved), share, delta=SHARE_RTOL * share)
        ring.remove(new)
        self.assertEqual(homes(ring), before)

    @hypothesis.settings(max_examples=6, deadline=None)
    @hypothesis.given(NAMES, strategies.text())
    def test_a_key_meets_every_member_once(self, names, key):
        met = [*ring_lib.Ring(names).walk(key)]
        self.assertCountEqual(met, names)
        self.assertEqual(met, [*ring_lib.Ring(reversed(names)).walk(key)])

    def test_members_have_equal_shares(self):
        ring = ring_lib.Ring(f"http://10.0.0.{i}:8000" for i in range(4))
        shares = collections.Counter(homes(ring).values())
        for share in shares.values():
            self.assertAlmostEqual(share, 500, delta=SHARE_RTOL * 500)

    def test_places_do_not_depend_on_the_process(self):
        """A known digest; Python's own hash is salted."""
        self.assertEqual(ring_lib.place(""), 0xE4A6A0577479B2B4)

    def test_joining_and_leaving_twice_and_no_members(self):
        ring = ring_lib.Ring(["a", "a"])
        self.assertLen(ring, 1)
        self.assertEqual([*ring.walk("k")], ["a"])
        ring.remove("b")
        ring.remove("a")
        self.assertEmpty([*ring.walk("k")])


if __name__ == "__main__":
    environment.main()
