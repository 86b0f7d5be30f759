"""Checks how drafts are accepted: the result always has the model's distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax.inference import draws, rounds, sampling, steps, verification
from glm5_jax.model import transformer
from tests import environment
from tests.model import tiny

WORDS, DRAWS = 16, 200_000
# The expected total variation of DRAWS draws from 16 words is below 16^0.5 / (2
# DRAWS^0.5) = 0.0045, its standard deviation about 0.001.
NOISE = 0.0075


@functools.partial(jax.jit, static_argnames="by_rejection")
def draw(target, draft, settings, by_rejection):
    """Returns ids, log-probs and drafts of DRAWS requests at one position."""
    keys = sampling.request_keys(0, jnp.arange(DRAWS))
    positions = jnp.full(DRAWS, 7, jnp.int32)
    target, draft = (jnp.tile(x, (DRAWS, 1)) for x in (target, draft))
    draft = sampling.scaled_logits(draft, settings)
    drafts, _ = sampling.choose(draft, keys, positions, settings)
    if by_rejection:
        proposal = verification.Draft(drafts, draft)
        found = verification.accept_or_redraw(
            target, proposal, keys, positions, settings
        )
    else:
        found = sampling.sample(target, keys, positions, settings)
    return *found, drafts


def distribution(logits, temperature, top_p):
    """Softmax over the likeliest words that together have top_p, as numpy."""
    p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: 1 + np.searchsorted(np.cumsum(p[order]), top_p)]
    q = np.zeros_like(p)
    q[kept] = p[kept]
    return q / q.sum()


class VerificationTest(parameterized.TestCase):
    @parameterized.product(by_rejection=(False, True), setting=((1.0, 1.0), (0.7, 0.9)))
    def test_total_variation_is_noise(self, by_rejection, setting):
        rng = np.random.default_rng(1)
        target, other = rng.normal(size=(2, WORDS)).astype(np.float32)
        draft = target + 0.7 * other
        settings = sampling.make_sampling(DRAWS, *setting)
        ids, logprobs, drafts = map(
            np.asarray, draw(target, draft, settings, by_rejection)
        )
        p, q = (distribution(x, *setting) for x in (target, draft))

        def variation(ids, p):
            return np.abs(np.bincount(ids, minlength=WORDS) / DRAWS - p).sum() / 2

        self.assertLess(variation(ids, p), NOISE)
        self.assertLess(variation(drafts, q), NOISE)
        np.testing.assert_allclose(logprobs, np.log(p[ids]), rtol=1e-4)
        accepted, d = np.mean(ids == drafts), np.abs(p - q).sum() / 2
        self.assertBetween(d, 0.1, 0.5)
        if by_rejection:
            self.assertAlmostEqual(accepted, 1 - d, delta=NOISE)
        else:
            self.assertBetween(accepted, (1 - d) / (1 + d) - NOISE, 1 - d + NOISE)

    def test_greedy_and_missing_drafts_are_drawn_as_without_them(self):
        rng = np.random.default_rng(2)
        logits, other = jnp.asarray(rng.normal(size=(2, 6, WORDS)), jnp.float32)
        settings = sampling.make_sampling(6)
        temperature = jnp.asarray([0.0] * 3 + [1.0] * 3)
        settings = sampling.Sampling(
            temperature, settings.top_p, settings.top_k, settings.min_p
        )
        keys, positions = sampling.request_keys(1, jnp.arange(6)), jnp.arange(6)
        sample = jax.jit(sampling.sample)
        wanted, wanted_logprobs = sample(logits, keys, positions, settings)
        draft = verification.Draft(jnp.asarray([1, 2, 3, -1, -1, -1]), other)
        accept_or_redraw = jax.jit(verification.accept_or_redraw)
        ids, logprobs = accept_or_redraw(logits, draft, keys, positions, settings)
        np.testing.assert_array_equal(ids, wanted)
        np.testing.assert_allclose(logprobs, wanted_logprobs, rtol=1e-5)


MODEL = tiny.model(
    vocab_size=WORDS, num_hidden_layers=1, first_k_dense_replace=1, attention="dense"
)
PROMPT, TOKENS, ROWS = (3, 1, 4), 4, 8_000


@functools.partial(jax.jit, static_argnames="settings")
def texts(params, first, settings):
    """Returns the first TOKENS tokens of ROWS requests, with ids from `first` on."""
    keys = sampling.request_keys(0, first + jnp.arange(ROWS))
    whole = jnp.full(ROWS, len(PROMPT), jnp.int32)
    parts = steps.Parts(
        tokens=jnp.tile(jnp.asarray(PROMPT), (ROWS, 1)),
        num_tokens=whole,
        slots=jnp.arange(ROWS),
        start=jnp.zeros_like(whole),
        is_last=jnp.ones(ROWS, bool),
        plan=draws.Plan(
            keys, sampling.make_sampling(ROWS), whole + 9, whole[:, None] * 0 - 1
        ),
    )
    state = steps.empty(MODEL, ROWS, 24, 1, with_drafts=True)
    state, drawn = steps.prefill(
        params, MODEL, state, parts, is_fresh=True, with_experts=False
    )
    _, more = rounds.decode(params, MODEL, state, settings=settings)
    return jnp.concatenate([drawn.ids, more.ids[:, : TOKENS - 1]], 1), more.tally


def marginals(params):
    """Returns the distribution of each of TOKENS tokens, summed over those before."""
    grid = np.indices((WORDS,) * (TOKENS - 1)).reshape(TOKENS - 1, -1).T
    rows = np.concatenate([np.tile(PROMPT, (len(grid), 1)), grid], axis=1)
    out = transformer.forward(params, MODEL, jnp.asarray(rows))
    logits = transformer.logits(params, MODEL, out.hidden)[:, len(PROMPT) - 1 :]
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    weights, found = np.full(len(grid), WORDS ** -(TOKENS - 1.0)), []
    for i in range(TOKENS):
        found.append(weights @ p[:, i])
        if i < TOKENS - 1:  # the grid has each text of i + 1 tokens equally often
            weights = weights * WORDS * p[np.arange(len(grid)), i, grid[:, i]]
    return found


@pytest.mark.slow  # 40 s
class ModelTest(parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_texts_have_the_distribution_of_the_model(self, by_rejection):
        params = tiny.params(MODEL)
        settings = rounds.Settings(TOKENS - 1, 2, by_rejection)
        found = [texts(params, i, settings) for i in range(0, DRAWS, ROWS)]
        ids = np.concatenate([ids for ids, _ in found])
        self.assertEqual(ids.shape, (DRAWS, TOKENS))
        judged, kept = (
            sum(np.sum(getattr(tally, name), 0) for _, tally in found)
            for name in ("judged", "accepted")
        )
        self.assertBetween(kept[0] / judged[0], 0.1, 0.9)
        for place, p in enumerate(marginals(params)):
            share = np.bincount(ids[:, place], minlength=WORDS) / DRAWS
            self.assertLess(np.abs(share - p).sum() / 2, NOISE, place)


if __name__ == "__main__":
    environment.main()
