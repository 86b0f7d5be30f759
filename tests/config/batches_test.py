"""Batches that grow at the beginning of a run, counted by hand."""

import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.config import batches as batches_lib
from tests import environment

LENGTH = 4


def make(sizes=(2, 4), last=8, tokens=32.0, **changes):
    """Two phases of 16 tokens each: two steps of 2 rows, then one of 4."""
    return config_lib.DataConfig(
        batch_warmup_sizes=sizes,
        batch_size=last,
        batch_warmup_tokens=tokens,
        sequence_length=LENGTH,
        **changes,
    )


class BatchesTest(parameterized.TestCase):
    def test_sizes_rows_and_tokens_of_every_step(self):
        batches = make().batches
        self.assertEqual([batches.size(s) for s in range(5)], [2, 2, 4, 8, 8])
        self.assertEqual(
            [batches.rows_before(s) for s in range(6)], [0, 2, 4, 8, 16, 24]
        )
        self.assertEqual(batches.tokens_before(5), 24 * LENGTH)

    @parameterized.parameters((0,), (1,), (8,), (9,), (32,), (33,), (64,), (1e4,))
    def test_steps_for_tokens_are_the_fewest(self, tokens):
        batches = make().batches
        steps = batches.steps_for(tokens)
        self.assertGreaterEqual(batches.tokens_before(steps), tokens)
        if steps:
            self.assertLess(batches.tokens_before(steps - 1), tokens)

    def test_the_papers_numbers(self):
        """16M to 64M tokens a step over the first 500B (arXiv 2602.15763, App. A)."""
        sizes = tuple(range(4096, 16384, 2048))
        batches = batches_lib.growing(sizes, 16384, 5e11, 4096)
        self.assertEqual(batches.size(0) * 4096, 2**24)
        end = batches.firsts[-1]
        self.assertAlmostEqual(batches.tokens_before(end) / 5e11, 1, delta=1e-3)
        self.assertEqual(batches.size(end) * 4096, 2**26)
        shares = np.diff([batches.tokens_before(first) for first in batches.firsts])
        np.testing.assert_allclose(shares, 5e11 / len(sizes), rtol=2e-3)

    @parameterized.parameters(
        ({"sizes": (4, 2)}, r"must ascend .* batch_size=8, got \(4, 2\)"),
        ({"sizes": (2, 8)}, "must ascend and end below"),
        ({"sizes": ()}, r"need each other, got \(\) and 32: set both"),
        ({"tokens": 0.0}, "need each other"),
    )
    def test_sizes_that_do_not_grow_are_refused(self, changes, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            make(**changes)

    def test_parts_have_at_most_the_rows_of_a_whole_batchs(self):
        config = config_lib.TrainConfig(
            data=make((4, 6), tokens=96.0),
            optim=config_lib.OptimConfig(accumulation_steps=4),
            model=config_lib.ModelConfig(attention="dense"),
        )
        self.assertEqual([config.num_parts(n) for n in (4, 6, 8)], [2, 3, 4])
        message = r"each of data.batch_warmup_sizes must .* got 6 on 12; set it to 12"
        with self.assertRaisesRegex(config_lib.InputError, message):
            config_lib.checks.require(*config.batch_rules(4))

    @parameterized.parameters(
        ("mtp_weight_changes", ((2.0, 0.1), (1.0, 0.2))),
        ("router_bias_rate_changes", ((1.0,),)),
        ("router_bias_rate_changes", ((1.0, -0.1),)),
    )
    def test_changes_that_are_no_schedule_are_refused(self, name, changes):
        message = rf"{name} must be pairs of tokens, ascending .* got \(\("
        with self.assertRaisesRegex(config_lib.InputError, message):
            config_lib.LossConfig(**{name: changes})

    @parameterized.parameters(
        ({"optim": config_lib.OptimConfig(warmup_tokens=1.0)}, "optim.warmup_tokens"),
        (
            {"loss": config_lib.LossConfig(mtp_weight_changes=((1.0, 0.1),))},
            "loss.mtp_weight_changes",
        ),
    )
    def test_tokens_of_texts_are_not_counted_in_rl(self, changes, name):
        rl = config_lib.RLConfig(max_new_tokens=8)
        message = f"{name} counts the tokens of texts and is not for stage 'rl'"
        with self.assertRaisesRegex(config_lib.InputError, message):
            config_lib.TrainConfig(stage="rl", rl=rl, **changes)


if __name__ == "__main__":
    environment.main()
