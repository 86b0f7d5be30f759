"""Conversations stay on a replica, whose load is bounded."""

import collections
import math
import random

import hypothesis
from absl.testing import parameterized
from hypothesis import strategies

from glm5_jax.serving.router import balance as balance_lib
from tests import environment

STRICT = balance_lib.Bound(factor=1.25, spare=1)
NAMES = ("a", "b", "c", "d")


def made(names=NAMES, bound=STRICT, **settings):
    found = balance_lib.Balance(bound, **settings)
    for name in names:
        found.ring.add(name)
    return found


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class BoundTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=30, deadline=None)
    @hypothesis.given(
        strategies.integers(1, 6),
        strategies.sampled_from([1.0, 1.25, 2.0]),
        strategies.integers(1, 5),
        strategies.lists(strategies.integers(-8, 30), max_size=120),
    )
    def test_no_replica_has_more(self, number, factor, spare, steps):
        """Requests of few sessions come and end in any order."""
        bound = balance_lib.Bound(factor=factor, spare=spare)
        loads = dict.fromkeys(map(str, range(number)), 0)
        placed = []
        balance = made(loads, bound)
        for step in steps:
            if step < 0:
                if placed:
                    loads[placed.pop(step % len(placed))] -= 1
                continue
            name = balance.choose(f"session {step % 5}", loads)
            loads[name] += 1
            placed.append(name)
            mean = sum(loads.values()) / number
            self.assertLessEqual(loads[name], max(spare, math.ceil(factor * mean)))

    def test_a_bound_that_is_none(self):
        for wrong in ({"factor": 0.5}, {"spare": 0}):
            with self.assertRaisesRegex(ValueError, "at least 1"):
                balance_lib.Bound(**wrong)


class BalanceTest(parameterized.TestCase):
    def test_a_session_stays_where_there_is_room(self):
        balance = made(bound=balance_lib.Bound(spare=4))
        for key in map(str, range(50)):
            loads = dict.fromkeys(NAMES, 3)
            first = balance.choose(key, loads)
            loads[first] -= 3
            self.assertEqual(balance.choose(key, loads), first)

    def test_few_sessions_move_when_a_replica_joins(self):
        """Under load: 400 sessions, each with a request under way; ten rings."""

        def place_all(balance, names):
            loads = dict.fromkeys(names, 0)
            found = {}
            for key in map(str, range(400)):
                found[key] = balance.choose(key, loads)
                loads[found[key]] += 1
            mean = len(found) / len(names)
            self.assertLessEqual(max(loads.values()), math.ceil(1.25 * mean))
            return found

        shares = []
        for ring in range(10):
            names = [f"http://10.0.{ring}.{i}" for i in range(5)]
            balance = made(names[:4])
            before = place_all(balance, names[:4])
            balance.ring.add(names[4])
            after = place_all(balance, names)
            shares.append(sum(before[key] != after[key] for key in before) / 400)
        self.assertBetween(sum(shares) / 10, 0.15, 0.25)  # a fifth is its share
        self.assertLess(max(shares), 0.3)

    def test_a_moved_session_stays_until_it_is_idle(self):
        clock = Clock()
        balance = made(idle_seconds=10.0, clock=clock)
        idle = dict.fromkeys(NAMES, 0)
        home = balance.choose("k", idle)
        away = balance.choose("k", {**idle, home: 9})
        self.assertNotEqual(away, home)
        self.assertEqual(balance.num_moved, 1)
        for _ in range(3):
            clock.now += 9
            self.assertEqual(balance.choose("k", idle), away)
        full = {**idle, away: 9}
        self.assertEqual(balance.choose("k", full), home)
        self.assertEqual(balance.num_moved, 0)
        balance.choose("k", {**idle, home: 9})
        clock.now += 10
        self.assertEqual(balance.choose("k", idle), home)

    def test_what_is_idle_is_forgotten(self):
        clock = Clock()
        balance = made(idle_seconds=10.0, clock=clock)
        for key in map(str, range(100)):
            home = next(balance.ring.walk(key))
            balance.choose(key, {**dict.fromkeys(NAMES, 0), home: 9})
        self.assertEqual(balance.num_moved, 100)
        clock.now += 10
        balance.choose("k", dict.fromkeys(NAMES, 0))
        self.assertEqual(balance.num_moved, 0)

    def test_replicas_that_refused_or_are_out_of_service_get_nothing(self):
        balance, rng = made(), random.Random(0)
        for key in map(str, range(50)):
            loads = {name: rng.randrange(5) for name in NAMES if name != "a"}
            refused = set()
            while name := balance.choose(key, loads, refused):
                self.assertNotIn(name, {"a", *refused})
                refused.add(name)
            self.assertEqual(refused, {"b", "c", "d"})
        self.assertIsNone(balance.choose("k", {}))

    def test_without_room_the_least_busy_one_takes_it(self):
        balance = made(("a", "b", "c"), balance_lib.Bound(spare=1))
        loads = {"a": 0, "b": 8, "c": 9}
        chosen = collections.Counter(
            balance.choose(str(i), loads, excluded={"a"}) for i in range(20)
        )
        self.assertEqual(chosen, {"b": 20})


if __name__ == "__main__":
    environment.main()
