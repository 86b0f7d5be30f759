"""JSON in pieces is the JSON of the standard library, and no piece is long."""

import json
from typing import NamedTuple

import hypothesis
from absl.testing import absltest
from hypothesis import strategies

from glm5_jax.rl import long_json
from tests import environment

SCALARS = (
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats()
    | strategies.text(max_size=9)
)
SHORT = SCALARS | strategies.lists(SCALARS, max_size=2) | strategies.just({"a": 1})
# A few items, again and again.
LONG = strategies.tuples(
    strategies.lists(SHORT, min_size=1, max_size=3),
    strategies.sampled_from([171, 256, 257, 512, 513]),
).map(lambda pair: pair[0] * pair[1])
OTHERS = strategies.sampled_from([object, frozenset({1})])
VALUES = strategies.recursive(
    SCALARS | OTHERS | LONG,
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.lists(inner, max_size=3).map(tuple)
        | strategies.dictionaries(SCALARS, inner, max_size=3)
    ),
    max_leaves=6,
)
NUM_TOKENS = 60_000


class Pair(NamedTuple):
    first: int
    second: list


class LongJsonTest(absltest.TestCase):
    @hypothesis.settings(max_examples=150, deadline=None)
    @hypothesis.given(VALUES)
    def test_it_is_the_same_text(self, value):
        self.assertEqual(long_json.dumps(value), json.dumps(value, default=repr))

    def test_names_numbers_and_objects_of_other_kinds(self):
        value = {"a": Pair(1, [{}]), 3: float("nan"), None: {1.5: object}, "\u00e9": ()}
        self.assertEqual(long_json.dumps(value), json.dumps(value, default=repr))

    def test_no_piece_of_an_answer_is_long(self):
        sample = {"tokens": [150_000] * NUM_TOKENS, "logprobs": [-1 / 3] * NUM_TOKENS}
        sample["alternatives"] = [[[7, -1 / 3]]] * NUM_TOKENS
        records = [{"samples": [sample], "transcript": [{"content": "hello"}] * 600}]
        answer = {"played": {"records": records * 600}, "evaluated": [3, records]}
        longest = max(map(len, long_json.pieces(answer["evaluated"])))
        self.assertLess(longest, 20_000)
        played = long_json.pieces(answer)
        self.assertLess(max(len(next(played)) for _ in range(5_000)), 20_000)


if __name__ == "__main__":
    environment.main()
