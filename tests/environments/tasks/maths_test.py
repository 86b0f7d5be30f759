"""Equality of numbers in answers; every input gives a bool."""

import fractions
import random
import time

from absl.testing import parameterized

from glm5_jax.environments.tasks import maths
from tests import environment

EQUAL = (
    ("12", "12"),
    ("12", " 12.\n"),
    ("12", "012"),
    ("12", "12.0"),
    ("12", "+12"),
    ("12", "1.2e1"),
    ("-12", "-12"),
    ("-12", "\u221212"),  # minus sign
    ("1/2", "0.5"),
    ("1/2", ".5"),
    ("1/2", "2/4"),
    ("1/2", "0.25/0.5"),
    ("1/2", r"\frac{1}{2}"),
    ("1/2", r"\dfrac{1}{2}"),
    ("1/2", r"\frac12"),
    ("1/2", r"\frac{-1}{-2}"),
    ("-1/2", r"-\frac{1}{2}"),
    ("-1/2", r"\frac{1}{-2}"),
    ("3/2", "1 1/2"),
    ("3/2", r"1\frac{1}{2}"),
    ("-3/2", r"-1 \frac{1}{2}"),
    ("1234567", "1,234,567"),
    ("1234567", "1{,}234{,}567"),
    ("1234567", r"1\,234\,567"),
    ("1234.5", "$1,234.50"),
    ("1234.5", r"\$1,234.50"),
    ("50", r"50\%"),
    ("12", "The answer is 12."),
    ("12", "the answer is: $12$."),
    ("12", "Answer: 12 (after 3 steps)"),
    ("12", "answer = 12, as 3 * 4 is"),
    ("12", "3 times 4 is 12"),
    ("12", "x = 12"),
    ("12", "3*4=12"),
    ("12", r"so it is \boxed{12}, not 13"),
    ("12", r"\boxed{13} ... no, \boxed{12}"),
    ("12", r"\boxed{x = 12}"),
    ("1/2", r"\boxed{\frac{1}{2}}"),
    ("12", r"\(12\)"),
    ("12", r"12 \text{ apples}"),
    ("12", "12 apples"),
    ("12", "#### 12"),
    ("12", "The answer is **12**."),
    ("12", "**Answer: 12**, after 3 steps"),
    ("12", "**Answer:** 12, after 3 steps"),
    ("12", "Answer: **$12$**, after 3 steps"),
    ("12", "The answer is *12*, not 13"),
    ("12", "The answer is __12__, not 13"),
    ("12", "The answer is `12`, not 13"),
    ("-12", "The answer is **-12**, not 13"),
    ("12", "**12**"),
    ("12", "**12 apples**"),
    ("12", "**_12_** or _**12**_, not 13 but **12**"),
    ("12", "3 ** 2 + 3 = **12**"),
    ("512", "2**9 = 512"),
    ("yes", " yes "),
    ("x+1", "x + 1"),
    ("x+1", r"\boxed{x+1}"),
    ("1" * 300, "1" * 300),
)
UNEQUAL = (
    ("12", "13"),
    ("12", "-12"),
    ("12", "1 2"),
    ("12", "120"),
    ("12", "12.01"),
    ("12", "12,5"),
    ("12", "x12"),
    ("12", "12x"),
    ("12", "2^12"),
    ("12", "2**12"),
    ("12", "3*12"),
    ("12", "x_12"),
    ("12", "12_000"),
    ("12", "**3**12"),
    ("12", "The answer is *13*, and not *12*."),
    ("12", "15-12"),
    ("12", "12/0"),
    ("12", "0/0"),
    ("12", ""),
    ("12", "twelve"),
    ("12", "The answer is 13, and not 12."),
    ("12", r"\boxed{13} 12"),
    ("12", r"\boxed{} 12"),
    ("12", "12.5.3"),
    ("1/3", "0.3333333333333333"),
    ("3/2", r"\frac{1}{2}"),
    ("1/2", "1"),
    ("1/2", "2"),
    ("123", "1,23"),
    ("yes", "no"),
    ("yes", "yes, no"),
    ("x+1", "1"),
)
NASTY = (
    "\0",
    "\\boxed{" * 1000,
    "\\frac{" * 1000,
    "\\frac{1}{" * 1000,
    "1/" * 2000,
    "1 " * 2000,
    "1" + " " * 3998 + "x",
    "9" * 5000,
    "1." * 2000,
    "-" * 4000,
    "1e99/1e-99",
    "1e999999999",
    "\u0661\u0662",  # Arabic digits
    "answer is " * 400,
    "*a " * 1400,
    "**a" * 1400,
    "`_*" * 1400,
    "*" + "a" * 3998,
    "1," * 2000,
    "\ud800",
    "{" * 4000,
    "1" * 100_000,
)
SECONDS = 0.2  # of CPU time of the nastiest; a few milliseconds are usual


class MathsTest(parameterized.TestCase):
    @parameterized.parameters(*EQUAL)
    def test_equal(self, reference, given):
        self.assertTrue(maths.is_equal(reference, given))

    @parameterized.parameters(*UNEQUAL)
    def test_unequal(self, reference, given):
        self.assertFalse(maths.is_equal(reference, given))

    def test_only_text_is_an_answer(self):
        for given in (None, 12, 12.0, (), {}, b"12", ["12"]):
            self.assertFalse(maths.is_equal("12", given))

    def test_as_many_characters_as_the_limit_are_read(self):
        digits = "1" * 4000
        self.assertEqual(
            maths.number(digits), int(digits[:2000]) * 10**2000 + int("1" * 2000)
        )
        self.assertIsNone(maths.number(digits + "1"))
        self.assertEqual(maths.final_number("7" + " " * 3999), 7)
        self.assertIsNone(maths.final_number("7" + " " * 4000))

    def test_braces_within_a_box(self):
        for said in (r"\boxed{\frac{1}{2}} 9", r"\boxed{1} \boxed{\text{x}1/2}"):
            self.assertTrue(maths.is_equal("1/2", said))
        self.assertTrue(maths.is_equal("12", r"\boxed{13 and 12"))  # never closed

    def test_nasty_text_is_wrong_and_quick(self):
        for text in NASTY:
            start = time.thread_time()  # others' work does not count
            self.assertFalse(maths.is_equal("12", text), text[:20])
            self.assertFalse(maths.is_equal(text, "12"), text[:20])
            self.assertLess(time.thread_time() - start, SECONDS, text[:20])

    def test_random_text_never_raises(self):
        rng = random.Random(0)
        pieces = ["1", "2", "0", ".", ",", "/", "-", " ", "\\frac", "\\boxed{", "{"]
        pieces += ["}", "e", "x", "$", "%", "answer is", "\\", "^", "="]
        for _ in range(3000):
            text = "".join(rng.choices(pieces, k=rng.randint(1, 30)))
            self.assertIn(maths.is_equal("12", text), (True, False))
            self.assertIn(maths.is_equal(text, "12"), (True, False))

    def test_fractions_survive_their_spellings(self):
        rng = random.Random(0)
        for _ in range(300):
            value = fractions.Fraction(rng.randint(-99999, 99999), rng.randint(1, 999))
            n, d = value.numerator, value.denominator
            sign, size = "-" * (n < 0), abs(n)
            for text in (
                f"{n}/{d}",
                f"{n:,}/{d}",
                f"{sign}\\frac{{{size}}}{{{d}}}",
                f"{sign}{size // d} {size % d}/{d}",
                f"The answer is {n} / {d}.",
                f"{n * 7}/{d * 7}",
            ):
                self.assertEqual(maths.final_number(text), value, text)


if __name__ == "__main__":
    environment.main()
