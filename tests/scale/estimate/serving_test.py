"""Serving's estimates: against the compiler, and against arithmetic by hand."""

import dataclasses
import json
import pathlib

from absl.testing import parameterized

from glm5_jax import presets
from glm5_jax.scale.estimate import serving
from glm5_jax.training.reporting import accounting
from tests import environment

POINTS = pathlib.Path(__file__).parents[3] / "docs" / "serving_roofline.json"
CLOSE = 0.1  # of the compiler's bytes
MODEL = dataclasses.replace(
    presets.GLM5, num_hidden_layers=9, first_k_dense_replace=1, index_topk=4
)
HAND = serving.Compiled(
    sequences=2.0,
    length=1000,
    devices=8,
    caches=4,
    hbm_bytes=5e9,
    flop_seconds=1e-4,
    link_seconds=2e-3,
    hbm_rate=1e12,
    limit=9e9,
    besides=1e8,
    experts=1.8e9,
    matrices=1e9,
    head=1e8,
    others=5e7,
)


class CompiledTest(parameterized.TestCase):
    def test_bytes_of_another_length_are_near_the_compilers(self):
        """From the steps at 32K follow those at 198K, on the same mesh."""
        reports = json.loads(POINTS.read_text())
        plain = [x for x in reports if not x.get("num_drafts")]
        plain = [x for x in plain if x.get("quantize", "stored") == "stored"]
        found = map(serving.Compiled.of_report, plain)
        by_length = {c.length: c for c in found if c.devices == 2 * c.caches}
        short, long = by_length[32_768], by_length[202_752]
        step = serving.step(
            presets.GLM5,
            short,
            serving.FORMATS[0],
            length=long.length,
            sequences=int(long.sequences),
        )
        ratio = step.hbm * long.hbm_rate / long.hbm_bytes
        self.assertBetween(ratio, 1 - CLOSE, 1 + CLOSE)

    def test_a_step_as_compiled_has_the_compilers_bytes(self):
        step = serving.step(MODEL, HAND, serving.FORMATS[0], sequences=2)
        self.assertAlmostEqual(step.hbm, 5e-3)
        self.assertAlmostEqual(step.links, 2e-3)
        self.assertEqual(step.tokens_a_second(HAND), 2 * 0.5 / 5e-3)


class MeasuredTest(parameterized.TestCase):
    def test_rates_and_room_by_hand(self):
        """4 chips, two for each cache of 2 sequences of 1000 tokens: 1 MiB a token."""
        report = {
            "arguments_gib": {"cache": 2000 / 1024, "parameters: experts": 3.0},
            "tokens": 4,
            "devices": 4,
            "mesh": {"tensor": 2},
            "sequence_length": 1000,
            "hbm_temp_gib": 0.5,
            "hbm_code_gib": 0.5,
            "hbm_limit_gib": 10.0,
            "roofline_seconds": {"FLOPs": 0.01, "HBM": 0.04, "ICI": 0.02},
        }
        plain = serving.Measured.of_report(report)
        self.assertEqual(plain.cache_tokens, 6 * 1024)
        self.assertAlmostEqual(plain.tokens_a_second((0.9,)), 4 / (4 * 0.04))
        seconds = {"HBM": 0.06}
        drafted = report | {"num_drafts": 2, "roofline_seconds": seconds}
        found = serving.Measured.of_report(drafted)
        self.assertAlmostEqual(found.tokens_a_second((0.75, 0.25, 0.1)), 2 / 0.06)
        self.assertAlmostEqual(found.break_even(plain), 0.5)


class HandTest(parameterized.TestCase):
    def test_the_cache_takes_what_the_weights_leave(self):
        """A token takes 9 layers of 640 + 128 numbers, ten with drafts.

        In FP8: 512 codes, 4 scales and 64 numbers of two bytes in a row of 768 bytes,
        and 128 codes with an exponent.
        """
        room = 9e9 - 1e8 - 5e7 - 1e8
        keys = dataclasses.replace(MODEL, index_dtype="fp8")
        w4a8 = 1.8e9 * (0.25 + 2 / 128) + 0.5e9
        for model, form, drafts, weights, layer in (
            (MODEL, serving.FORMATS[0], (), 2.8e9, 2 * (640 + 128)),
            (MODEL, serving.FORMATS[0], (0.5,), 2.8e9, 2 * (640 + 128)),
            (keys, serving.FORMATS[0], (), 2.8e9, 2 * 640 + 129),
            (MODEL, serving.FORMATS[3], (), w4a8, 768 + 129),
        ):
            found = serving.step(model, HAND, form, drafts)
            token = (9 + len(drafts)) * layer
            wanted = int((room - weights) / token)
            self.assertEqual(found.cache_tokens, 4 * wanted)
            self.assertEqual(found.sequences, wanted // 1000)

    def test_drafts_cost_their_layer_and_their_rows(self):
        """One draft: two tokens a sequence are verified, MTP and head run once."""
        form = serving.FORMATS[0]
        plain = serving.step(MODEL, HAND, form, sequences=2)
        drafted = serving.step(MODEL, HAND, form, (0.75,), sequences=2)
        mtp = 1.8e9 / 9 + 1e9 / 10
        keys, latents = 1000 * 128 * 2, 4 * 8 * 640 * 2
        known = 2.8e9 - mtp + 1e8 + 2 * 9 * (keys + latents)
        rest = (5e9 - known) / 2
        more = mtp + 1e8 + 2 * keys + 2 * 9 * latents + 2 * latents
        more += (2 + 2 / 9) * rest
        self.assertAlmostEqual(drafted.hbm - plain.hbm, more / 1e12)
        self.assertEqual(drafted.tokens, 1.75)
        self.assertAlmostEqual(drafted.links, 2e-3 * (4 + 2 / 9) / 2)

    @parameterized.named_parameters(
        ("shared_indexers", {"index_topk_freq": 3, "index_skip_topk_offset": 1}, 3, 32),
        ("dense", {"attention": "dense"}, 0, 1000),
        ("all_keys", {"index_topk": 1000}, 9, 1000),  # are visible, in one piece
    )
    def test_of_each_attention_what_it_caches_and_reads(self, changes, indexers, rows):
        """Keys in the layers with an indexer; rows, in groups of 8, of the selected."""
        model = dataclasses.replace(MODEL, **changes)
        form = serving.FORMATS[0]
        found = serving.step(model, HAND, form, (0.5,))
        of_token = 10 * 640 * 2 + (indexers + bool(indexers)) * 128 * 2
        wanted = int((9e9 - 1e8 - 5e7 - 1e8 - 2.8e9) / of_token)
        self.assertEqual(found.cache_tokens, 4 * wanted)
        keys, latents = indexers * 1000 * 128 * 2, 9 * rows * 640 * 2
        self.assertEqual(serving.cached_bytes(model, 1000), keys + latents)

    def test_only_scores_cost_more_for_a_longer_cache(self):
        form, first = serving.FORMATS[0], dataclasses.replace(HAND, length=500)
        short, long = (
            serving.step(MODEL, first, form, length=length, sequences=2).flops
            for length in (500, 1000)
        )
        self.assertAlmostEqual(short, HAND.flop_seconds)
        scored = 2 * 9 * 500 * MODEL.index_n_heads * MODEL.index_head_dim
        shared = 2  # devices of a cache, which share all else
        weights = 2 * accounting.count_parameters(MODEL)["active"] / shared
        attended = 2 * 9 * 4 * (2 * 512 + 64) * 64 / shared
        grown = scored / (weights + attended + scored)
        self.assertAlmostEqual(long / short - 1, grown)
        self.assertLess(grown, 0.02)

    def test_what_does_not_fit_has_no_sequence(self):
        tight = dataclasses.replace(HAND, limit=2e9)
        step = serving.step(MODEL, tight, serving.FORMATS[0])
        self.assertEqual((step.sequences, step.cache_tokens), (0, 0))


if __name__ == "__main__":
    environment.main()
