"""The evaluator against Python's own, and hostile inputs."""

import random
import time

from absl.testing import parameterized

from glm5_jax.environments.tasks import expressions
from tests import environment

SECONDS = 0.2  # of CPU time; a tenth of a millisecond is usual


def random_expression(rng, depth=4):
    if depth == 0 or rng.random() < 0.2:
        return str(rng.randint(0, 99))
    left, right = (random_expression(rng, depth - 1) for _ in range(2))
    operator = rng.choice(["+", "-", "*", "//", "%", " + ", "-"])
    return rng.choice([f"({left}){operator}({right})", f"-({left}){operator}{right}"])


class EvaluateTest(parameterized.TestCase):
    @parameterized.parameters(
        ("17*23", 391),
        (" (1 + 2) * -3 ", -9),
        ("7//2", 3),
        ("-7//2", -4),
        ("-7%3", 2),
        ("2-3-4", -5),
        ("--5", 5),
        ("0", 0),
        ("999999999*999999999", 999999998000000001),
    )
    def test_values(self, text, expected):
        self.assertEqual(expressions.evaluate(text), expected)

    def test_against_python(self):
        rng = random.Random(0)
        num_compared = 0
        for _ in range(1000):
            text = random_expression(rng)
            try:
                found = expressions.evaluate(text)
            except expressions.ExpressionError as error:
                self.assertIn(str(error), ("division by zero", "too long", "too large"))
                continue
            self.assertEqual(found, eval(text))  # our own text
            num_compared += 1
        self.assertGreater(num_compared, 500)

    @parameterized.parameters(
        "",
        " ",
        "9**9**9**9",
        "2**2",
        "9<<99",
        "1<<1000000",
        "1/2",
        "1.5*2",
        "1e5",
        "0x10",
        "1_000",
        "1,2",
        "1,000*2",
        "(1)(2)",
        "(1)[0]",
        "().__class__",
        "a",
        "True",
        "None+1",
        "__import__('os').system('true')",
        "(lambda: 1)()",
        "[1 for _ in range(9)]",
        "f'{1}'",
        "1 if 1 else 2",
        "1;2",
        "1\n2",
        "\n",
        "1+",
        "*1",
        "(1",
        "1)",
        "()",
        "01",
        "\0",
        "\u0661+\u0662",  # Arabic digits
        "\u00b2",  # superscript two
        "~1",
        "not 1",
        "1==1",
        "1@1",
        "1//0",
        "1%0",
        "1//(2-2)",
        "1+1" * 100_000,
        "(" * 100 + "1" + ")" * 99,
        "(" * 200,
        "-" * 199 + "(",
        "9" * 31,
        "9" * 200,
        "*".join(["9" * 19] * 5),
        "(" * 10 + "9*9" * 40,
    )
    def test_refused_expressions(self, text):
        start = time.thread_time()  # others' work does not count
        with self.assertRaises(expressions.ExpressionError) as caught:
            expressions.evaluate(text)
        self.assertLess(len(str(caught.exception)), 60)
        self.assertLess(time.thread_time() - start, SECONDS)

    @parameterized.parameters(
        ("1" + "+1" * 99 + " ", 100),  # 199 characters
        ("-" + "+1" * 99 + "-", None),
        ("1" + "+1" * 99 + "+", None),
        ("+1" * 100, 100),  # 200
        ("+1" * 100 + "+", None),
        ("1" + "+1" * 100, "too long"),  # 201
        (str(10**30), 10**30),
        (str(10**30 + 1), "too large"),
        (f"-{10**30}-1", "too large"),
        (f"{10**15}*{10**15}-{10**30}", 0),
        (f"({10**15}*{10**15}+1)-1", "too large"),
    )
    def test_limits_hold_for_themselves(self, text, found):
        if isinstance(found, int):
            self.assertEqual(expressions.evaluate(text), found)
        else:
            with self.assertRaisesRegex(expressions.ExpressionError, found or ""):
                expressions.evaluate(text)

    @parameterized.parameters(
        ("-" * 199 + "1", -1),
        ("(" * 90 + "1" + ")" * 90, 1),
        ("+".join("1" * 100), 100),
    )
    def test_deep_is_fine_within_the_length(self, text, expected):
        self.assertEqual(expressions.evaluate(text), expected)

    def test_integers(self):
        self.assertEqual(expressions.integers("(9-5)*-9+10"), [5, 9, 9, 10])
        with self.assertRaises(expressions.ExpressionError):
            expressions.integers("x")


if __name__ == "__main__":
    environment.main()
