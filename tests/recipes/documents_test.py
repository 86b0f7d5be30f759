"""What the documents of retrieval ask can be answered from what stands before."""

import random
import re

from absl.testing import parameterized

from glm5_jax.recipes import documents
from tests import environment

LENGTHS = (128, 256, 512)


class DocumentsTest(parameterized.TestCase):
    @parameterized.product(
        make=(documents.repeated, documents.pairs, documents.needles), length=LENGTHS
    )
    def test_they_fit_their_length_and_fill_most_of_it(self, make, length):
        sizes = [len(make(random.Random(seed), length)) for seed in range(50)]
        self.assertLessEqual(max(sizes), length)
        self.assertGreater(min(sizes), length - 32)

    @parameterized.parameters(*LENGTHS)
    def test_needles_are_asked_word_for_word(self, length):
        for seed in range(50):
            text = documents.needles(random.Random(seed), length)
            hay, *questions = text.split("\n")
            facts = re.findall(r"The number of \w+ is \d{4}\.", hay)
            self.assertContainsSubset(questions, facts)
            names = [fact.split()[3] for fact in facts]
            self.assertLen(set(names), len(names))

    @parameterized.parameters(*LENGTHS)
    def test_pairs_ask_only_what_they_have_said(self, length):
        for seed in range(50):
            text = documents.pairs(random.Random(seed), length)
            said, asked = text.split("? ")
            self.assertContainsSubset(asked.split(), said.split())
            keys = [pair.split("=")[0] for pair in said.split()]
            self.assertLen(set(keys), len(keys))

    def test_a_seed_decides_about_all_of_them(self):
        def made(seed):
            return [
                *documents.mixed(seed, length=99, count=20, weights=(1.0, 1.0, 1.0))
            ]

        self.assertEqual(made(0), made(0))
        self.assertEmpty(set(made(0)) & set(made(1)))


if __name__ == "__main__":
    environment.main()
