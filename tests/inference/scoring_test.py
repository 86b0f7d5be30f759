"""Scores against the logits of whole rows, in passes and chunks of any size."""

import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.inference import engine, prompt_scores, scoring
from tests import environment, small_configs
from tests.inference import engine_test
from tests.model import tiny

MODEL = small_configs.DENSE_MODEL
VOCAB, MOST = MODEL.vocab_size, MODEL.max_position_embeddings
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (5, 8))
ATOL = 1e-5  # float32 sums in another order


class ScoreTest(parameterized.TestCase):
    @parameterized.parameters((4096, 1024, 5, 1), (17, 9, 2, 3), (4, 7, 1, 5))
    def test_passes_and_chunks(self, batch_tokens, chunk_tokens, size, number):
        """However many tokens share a pass or a chunk, the scores are the same."""
        params = tiny.params(MODEL)
        full = engine_test.full_logits(params, MODEL, jnp.asarray(TOKENS))
        logprobs = np.asarray(jax.nn.log_softmax(full))[:, :-1]
        own = np.take_along_axis(logprobs, TOKENS[:, 1:, None], 2)
        order = np.argsort(-logprobs, axis=2)[:, :, :3]
        shapes, score = [], scoring._score

        def counted(params, config, tokens, *rest):
            shapes.append(tokens.shape)
            return score(params, config, tokens, *rest)

        rows = scoring.rows_of_tokens(TOKENS, MODEL)
        logits, found = np.zeros(full.shape), scoring.Alternatives.empty(5, 8, 3)
        with (
            mock.patch.object(scoring, "BATCH_TOKENS", batch_tokens),
            mock.patch.object(scoring, "CHUNK_TOKENS", chunk_tokens),
            mock.patch.object(scoring, "_score", counted),
        ):
            nll = scoring.score(params, MODEL, rows, logits, found)
        self.assertEqual(shapes, [(size, 8)] * number)
        np.testing.assert_allclose(logits, full, atol=ATOL)
        np.testing.assert_allclose(nll[:, :-1], -own[..., 0], atol=ATOL)
        np.testing.assert_array_equal(found.ids[:, :-1], order)
        best = np.take_along_axis(logprobs, order, 2)
        np.testing.assert_allclose(found.logprobs[:, :-1], best, atol=ATOL)
        ranks = 1 + np.sum(logprobs > own, axis=2)
        np.testing.assert_array_equal(found.ranks[:, :-1], ranks)

    def test_summary(self):
        rows = {"loss_mask": np.array([[1, 1, 0], [1, 0, 0]], np.float32)}
        nll = np.array([[1, 2, 50], [3, 60, 70]], np.float32)
        wanted = {"nll": 2.0, "num_tokens": 3}
        self.assertEqual(scoring.summarize(rows, nll), wanted)
        rows["num_bytes"] = np.array([[4, 1, 0], [0, 0, 0]])
        wanted |= {"bits_per_byte": 6 / math.log(2) / 5, "num_bytes": 5}
        self.assertEqual(scoring.summarize(rows, nll), wanted)
        rows["num_bytes"] *= 0
        self.assertIsNone(scoring.summarize(rows, nll)["bits_per_byte"])


class ChecksTest(parameterized.TestCase):
    @parameterized.parameters(
        ([[5]], "at least two tokens"),
        ([[-1, 5]], "Ids must lie"),
        ([[5, VOCAB]], "Ids must lie"),
    )
    def test_wrong_rows(self, rows, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            scoring.rows_of_tokens(np.array(rows), MODEL)

    def test_rows(self):
        found = scoring.rows_of_tokens(np.array([[0, VOCAB - 1]]), MODEL)
        wanted = {
            "tokens": [[0, VOCAB - 1]],
            "targets": [[VOCAB - 1, 0]],
            "loss_mask": [[1.0, 0.0]],
            "segment_ids": [[1, 1]],
            "positions": [[0, 1]],
        }
        self.assertEqual({k: v.tolist() for k, v in found.items()}, wanted)

    def test_a_row_longer_than_the_positions(self):
        rows = scoring.rows_of_tokens(np.zeros((1, MOST + 1), int), MODEL)
        with self.assertRaisesRegex(config_lib.InputError, "shorten them"):
            scoring.score({}, MODEL, rows)
        scoring.require_positions(MOST, MODEL)

    def test_rows_of_an_engine(self):
        made = engine.Engine(tiny.params(MODEL), MODEL, num_slots=1, capacity=16)
        for row in ([5, VOCAB], [-1]):
            with self.assertRaisesRegex(config_lib.InputError, "Ids must lie"):
                prompt_scores.of(made, [[1, 2], row])
        for number in (-1, 21):
            with self.assertRaisesRegex(config_lib.InputError, "0..20"):
                prompt_scores.of(made, [[0]], number)
        prompt_scores.require_number(20)
        nothing = prompt_scores.Scores([], [], [])
        for number in (None, 0):
            found, _ = prompt_scores.of(made, [[0], [VOCAB - 1]], number)
            self.assertEqual(found, [nothing] * 2)
        found, _ = prompt_scores.of(made, [[0, VOCAB - 1], [5]], 0)
        self.assertEqual([len(row.logprobs) for row in found], [1, 0])
        self.assertEqual(found[0].alternatives, [[]])

    def test_short_rows_share_a_pass(self):
        rows = [[0] * length for length in (2, 3, 1, 16, 17, 2)]
        found = [*prompt_scores.batches(rows, MODEL)]
        self.assertEqual(found, [[2], [0, 1, 3, 5], [4]])

    def test_a_row_longer_than_a_pass_has_one_of_its_own(self):
        rows = [[0] * (MOST - 1), [0] * MOST]
        with mock.patch.object(scoring, "BATCH_TOKENS", MOST - 2):
            self.assertEqual([*prompt_scores.batches(rows, MODEL)], [[0], [1]])


if __name__ == "__main__":
    environment.main()
