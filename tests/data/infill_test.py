"""Fill-in-the-middle: no text is lost, names decide, rates are met."""

import hashlib

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.rows import infill
from tests import environment

TEXT = "def f(x):\n    return x + 1  # 漢字\n"
NUM = 4000
# Six standard deviations of a fraction of NUM / 2 documents.
RATE_ATOL = 6 * (0.25 / (NUM / 2)) ** 0.5
PSM = [infill.PREFIX, infill.SUFFIX, infill.MIDDLE]
SPM = [infill.SUFFIX, infill.PREFIX, infill.MIDDLE]


class InfillTest(parameterized.TestCase):
    @parameterized.parameters((1.0, 0.0, PSM), (1.0, 1.0, SPM))
    def test_the_parts_are_the_text_in_the_order_of_the_mode(self, rate, spm, order):
        cuts = set()
        for i in range(200):
            parts = infill.Infill(rate, spm).arrange(str(i), TEXT)
            self.assertEqual([special for special, _ in parts], order)
            found = dict(parts)
            whole = found[infill.PREFIX] + found[infill.MIDDLE] + found[infill.SUFFIX]
            self.assertEqual(whole, TEXT)
            cuts.add(len(found[infill.PREFIX]))
        # 200 first cuts reach nearly every position, both ends included.
        self.assertGreater(len(cuts), len(TEXT) * 0.6)
        self.assertEqual(min(cuts), 0)

    def test_rates(self):
        arrange = infill.Infill(0.5, 0.3).arrange
        orders = [[s for s, _ in arrange(str(i), TEXT)] for i in range(NUM)]
        plain = orders.count([None])
        self.assertAlmostEqual(plain / NUM, 0.5, delta=RATE_ATOL)
        self.assertEqual(plain + orders.count(PSM) + orders.count(SPM), NUM)
        share = orders.count(SPM) / (NUM - plain)
        self.assertAlmostEqual(share, 0.3, delta=RATE_ATOL)

    def test_name_and_seed_decide(self):
        first, other = infill.Infill(0.5, 0.5), infill.Infill(0.5, 0.5, seed=1)
        ours = [first.arrange(str(i), TEXT) for i in range(50)]
        self.assertEqual([first.arrange(str(i), TEXT) for i in range(50)], ours)
        self.assertNotEqual([other.arrange(str(i), TEXT) for i in range(50)], ours)
        self.assertEqual(infill.Infill(0.0, 0.5).arrange("a", TEXT), [(None, TEXT)])
        self.assertEqual(len(infill.Infill(1.0, 0.5).arrange("a", "")), 3)

    @parameterized.parameters(
        ("0", [(None, "0123456789")]),
        (
            "3",
            [(infill.SUFFIX, "56789"), (infill.PREFIX, "0"), (infill.MIDDLE, "1234")],
        ),
        (
            "6",
            [(infill.PREFIX, "012"), (infill.SUFFIX, "56789"), (infill.MIDDLE, "34")],
        ),
        (
            "7",
            [(infill.PREFIX, "0123"), (infill.SUFFIX, "9"), (infill.MIDDLE, "45678")],
        ),
    )
    def test_every_machine_cuts_at_the_same_places(self, name, want):
        """Other places would need another version of the plan."""
        self.assertEqual(infill.Infill(0.5).arrange(name, "0123456789"), want)

    @parameterized.parameters("a", "漢")
    def test_numbers_below_the_rate_choose(self, name):
        """Number k of a document is in [0, 1): 53 bits of its name's hash."""
        digest = hashlib.sha256(f"fim:0:{name}".encode()).digest()
        numbers = [digest[i : i + 8] for i in (0, 8)]
        chosen, order = ((int.from_bytes(n) >> 11) / 2**53 for n in numbers)
        for rate, spm, want in (
            (chosen, 0.5, [None]),
            (chosen + 2**-53, order, PSM),
            (chosen + 2**-53, order + 2**-53, SPM),
        ):
            parts = infill.Infill(rate, spm).arrange(name, TEXT)
            self.assertEqual([special for special, _ in parts], want)

    def test_special_tokens_are_required(self):
        infill.check(tokenizer_lib.SPECIAL_TOKENS)
        with self.assertRaisesRegex(config.InputError, "code_prefix.*'byte_chat'"):
            infill.check([tokenizer_lib.END_OF_TEXT])


if __name__ == "__main__":
    environment.main()
