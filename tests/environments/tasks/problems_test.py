"""Problems: the first of each kind, correct answers, no leak between splits."""

import hashlib
import json
import math

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.environments.tasks import expressions, problems
from tests import environment

# The first problems of ("train", seed 0): a change makes old runs incomparable.
GOLDEN = {
    "reverse": ["reverse kvhlpy -> yplhvk", "reverse dqx -> xqd"],
    "sort": ["sort ewdz -> dewz", "sort urm -> mru"],
    "arithmetic": ["9+25 -> 34", "80+22 -> 102"],
    "chain_sum": ["3-97 -> -94", "80+8+8 -> 96"],
    "gcd": ["gcd 58 87 -> 29", "gcd 48 64 -> 16"],
    "reverse_dense": ["reverse kvhlpy -> yplhvk", "reverse dqx -> xqd"],
    "countdown": ["make 81 of 1 9 8 -> (1+8)*9", "make 91 of 7 6 7 -> (6+7)*7"],
    "calculator": ["71*54 -> 3834", "539*990 -> 533610"],
    "calculator_untold": ["71*54 -> 3834", "539*990 -> 533610"],
    "calculator_without_tool": ["71*54 -> 3834", "539*990 -> 533610"],
}
DIGESTS = {
    "reverse:2-9": "a1c56609cfc6be4a",
    "sort:2-9": "723ae666b9630cce",
    "arithmetic:1-9": "e5f4bd5ae18ec762",
    "chain_sum:2-9": "00dfa1e8efa98f56",
    "gcd:1-5": "73f449425bbfbaab",
    "countdown:2-6": "a9f5f5a63ceed6f5",
    "calculator:2-9": "52bf5b03997225af",
    "calculator_untold:2-3": "4c7249a486d25853",
    "calculator_without_tool:2-3": "668cc9edb79aa0d7",
}
EACH = tuple((name, name) for name in problems.names())


def prompt(problem):
    return problem.messages[-1]["content"]


def draw(name, split, count, seed=0):
    return [problems.problem(name, split, seed, i) for i in range(count)]


class ProblemsTest(parameterized.TestCase):
    @parameterized.named_parameters(*EACH)
    def test_golden(self, name):
        found = [f"{prompt(p)} -> {p.answer}" for p in draw(name, "train", 2)]
        self.assertEqual(found, GOLDEN[name])

    @parameterized.parameters(*DIGESTS.items())
    def test_no_problem_ever_changes(self, name, digest):
        """Of both splits, in all sizes: runs of different versions can be compared."""
        found = [
            [p.id, prompt(p), p.answer, p.tag, p.demonstration]
            for split in problems.SPLITS
            for p in draw(name, split, 300, seed=7)
        ]
        text = json.dumps(found)
        self.assertEqual(hashlib.sha256(text.encode()).hexdigest()[:16], digest)

    @parameterized.named_parameters(*EACH)
    def test_answers_are_right(self, name):
        for problem in draw(name, "train", 300):
            text, answer = prompt(problem), problem.answer
            kind, _, rest = text.partition(" ")
            if name in ("reverse", "reverse_dense"):
                self.assertEqual(rest, "".join(reversed(answer)))
            elif name == "sort":
                self.assertEqual((kind, "".join(sorted(rest))), ("sort", answer))
            elif name == "gcd":
                self.assertEqual(math.gcd(*map(int, rest.split())), int(answer))
            elif name == "countdown":
                target, _, *numbers = rest.split()
                self.assertEqual(expressions.evaluate(answer), int(target))
                self.assertEqual(
                    expressions.integers(answer), sorted(map(int, numbers))
                )
            else:
                self.assertEqual(expressions.evaluate(text), int(answer))

    @parameterized.named_parameters(*EACH)
    def test_a_demonstration_goes_from_the_prompt_to_the_answer(self, name):
        for problem in draw(name, "held_out", 20):
            turns = problem.demonstration
            self.assertEqual(turns[:1], problem.messages)
            self.assertEqual(turns[-1]["role"], "assistant")
            self.assertEqual(turns[-1]["content"], problem.answer)
            tools = (problems.CALC_TOOL,) if name == "calculator" else ()
            self.assertEqual(problem.tools, tools)
            if name not in ("calculator", "calculator_untold"):
                self.assertLen(turns, 2)
                continue
            call = turns[1]["tool_calls"][0]["function"]
            self.assertEqual(call["name"], problems.CALC_TOOL["function"]["name"])
            expression = call["arguments"]["expression"]
            self.assertEqual(turns[2]["content"], str(expressions.evaluate(expression)))

    @parameterized.named_parameters(*EACH)
    def test_a_problem_is_a_function_of_its_place(self, name):
        forwards = draw(name, "train", 30, seed=3)
        backwards = [problems.problem(name, "train", 3, i) for i in reversed(range(30))]
        self.assertEqual(forwards, backwards[::-1])
        self.assertNotEqual(forwards, draw(name, "train", 30, seed=4))
        self.assertLen({p.id for p in forwards}, 30)

    @parameterized.named_parameters(
        *EACH,
        ("reverse_of_three", "reverse:3"),
        ("small_gcd", "gcd:1"),
        ("small_sums", "arithmetic:1"),
        ("small_products", "calculator:2"),
    )
    def test_splits_are_disjoint(self, name):
        # A named size: few problems, each drawn often.
        count = 1000 if ":" in name else 150
        train = [p for seed in (0, 1) for p in draw(name, "train", count, seed)]
        held_out = draw(name, "held_out", count, seed=0)
        asked = [{prompt(p) for p in part} for part in (train, held_out)]
        self.assertEmpty(asked[0] & asked[1])
        self.assertGreater(len(asked[1]), 5)

    def test_splits_do_not_depend_on_the_size(self):
        short = {prompt(p) for p in draw("reverse:2", "held_out", 300)}
        mixed = {prompt(p) for p in draw("reverse:2-3", "train", 2000)}
        self.assertEmpty(short & mixed)
        self.assertTrue(any(len(text) == len("reverse ab") for text in mixed))

    @parameterized.named_parameters(
        ("reverse", "reverse:2", lambda text: "reverse " + text[:7:-1]),
        ("sort", "sort:2", lambda text: "sort " + text[:4:-1]),
        ("product", "calculator:2", lambda text: "*".join(text.split("*")[::-1])),
        ("sum", "arithmetic:1", lambda text: "+".join(text.split("+")[::-1])),
        (
            "gcd",
            "gcd:1",
            lambda text: "gcd " + " ".join(text.split()[:0:-1]),
        ),
    )
    def test_the_mirror_image_is_in_the_same_split(self, name, mirrored):
        train = {prompt(p) for p in draw(name, "train", 1500)}
        held_out = {prompt(p) for p in draw(name, "held_out", 300)}
        self.assertEmpty(train & {mirrored(text) for text in held_out})

    def test_sizes(self):
        lengths = {len(p.answer) for p in draw("reverse:4-5", "train", 100)}
        self.assertEqual(lengths, {4, 5})
        for p in draw("reverse:4-5", "held_out", 10):
            self.assertEqual(p.tag, f"{len(p.answer)}_letters")
        self.assertEqual(problems.parse("reverse:7"), ("reverse", 7, 7))
        self.assertEqual(problems.parse("reverse"), problems.parse("reverse:3-6"))
        counts = {prompt(p).count(" ") for p in draw("countdown:5", "train", 20)}
        self.assertEqual(counts, {7})

    @parameterized.parameters(
        ("reverse", (3, 6), (1, 256)),
        ("reverse_dense", (3, 6), (1, 256)),
        ("sort", (3, 6), (1, 256)),
        ("arithmetic", (1, 2), (1, 9)),
        ("chain_sum", (2, 4), (2, 32)),
        ("gcd", (2, 2), (1, 9)),
        ("countdown", (3, 3), (2, 6)),
        ("calculator", (2, 3), (2, 9)),
    )
    def test_sizes_by_default_and_at_most(self, name, sizes, within):
        low, high = within
        self.assertEqual(problems.parse(name), (name, *sizes))
        self.assertEqual(problems.parse(f"{name}:{low}-{high}"), (name, low, high))
        for beyond in (f"{low - 1}-{high}", f"{low}-{high + 1}"):
            with self.assertRaisesRegex(config.InputError, f"within {low}-{high},"):
                problems.parse(f"{name}:{beyond}")

    @parameterized.parameters(
        ("revers", "Did you mean 'reverse'"),
        ("knitting", "Choose one of reverse, reverse_dense, sort"),
        ("reverse:6-3", "within 1-256, got '6-3'; e.g. 'reverse:3-6'"),
        ("reverse:0-3", "got '0-3'"),
        ("countdown:3-99", "within 2-6"),
        ("reverse:three", "must be letters"),
        ("reverse:3-6-9", "got '3-6-9'"),
    )
    def test_bad_names(self, name, message):
        with self.assertRaisesRegex(config.InputError, message):
            problems.problem(name, "train", 0, 0)

    def test_bad_split(self):
        with self.assertRaisesRegex(config.InputError, "split must be one of"):
            problems.problem("reverse", "test", 0, 0)


if __name__ == "__main__":
    environment.main()
