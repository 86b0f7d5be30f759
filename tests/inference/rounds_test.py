"""Rounds of drafts by themselves, where it is known which drafts are kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from glm5_jax.inference import draws, programs, rounds, sampling, steps
from glm5_jax.model import context as context_lib
from glm5_jax.model import mtp, transformer
from tests import environment
from tests.model import tiny

WORDS, ROWS, SIZE, CAPACITY = 16, 256, 3, 32
MODEL = tiny.model(
    vocab_size=WORDS, num_hidden_layers=1, first_k_dense_replace=1, attention="dense"
)
DRAFTS = 3
ROUND = rounds.Settings(1, DRAFTS, by_rejection=True)


def start(params, prompts, budget, temperature):
    """Reads prompts of SIZE tokens; returns the state and the first tokens."""
    sizes = jnp.full(ROWS, SIZE, jnp.int32)
    plan = draws.Plan(
        keys=sampling.request_keys(0, jnp.arange(ROWS)),
        sampling=sampling.make_sampling(ROWS, temperature),
        budget=jnp.asarray(budget, jnp.int32) + 1,
        stop_ids=jnp.full((ROWS, 1), -1, jnp.int32),
    )
    parts = steps.Parts(
        tokens=jnp.asarray(prompts, jnp.int32),
        num_tokens=sizes,
        slots=jnp.arange(ROWS),
        start=jnp.zeros_like(sizes),
        is_last=jnp.ones(ROWS, bool),
        plan=plan,
    )
    state = steps.empty(MODEL, ROWS, CAPACITY, 1, with_drafts=True)
    return programs.prefill(
        params, MODEL, state, parts, is_fresh=True, with_experts=False
    )


@functools.partial(jax.jit, static_argnums=1)
def trained(params, config, tokens):
    """Returns the likeliest next token and that after it, at every place."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    context = context_lib.make_context(config, jnp.ones_like(tokens), positions)
    hidden = transformer.forward(params, config, tokens).hidden
    ahead, embedding = mtp.ahead(tokens, 1), params["embed_tokens"]
    (later,), _ = mtp.steps(params["mtp"], config, embedding, hidden, ahead, context)
    logits = (transformer.logits(params, config, x) for x in (hidden, later))
    return tuple(x.argmax(-1) for x in logits)


class RoundsTest(absltest.TestCase):
    def test_a_model_that_knows_nothing_keeps_every_draft(self):
        """All words are equally likely to it, so that no draft is ever rejected."""
        params = tiny.params(MODEL)
        params = params | {"lm_head": jnp.zeros_like(params["lm_head"])}
        budget = np.arange(ROWS) % 10
        state, drawn = start(params, [[3, 1, 4]] * ROWS, budget, 1.0)
        last, left, ids = np.asarray(drawn.ids)[:, 0], budget, []
        for _ in range(3):
            state, drawn = programs.speculate(params, MODEL, state, settings=ROUND)
            self.assertIsNone(drawn.experts)
            new = np.minimum(left, DRAFTS + 1)
            is_drawn = np.arange(DRAFTS + 1) < new[:, None]
            np.testing.assert_array_equal(drawn.ids >= 0, is_drawn)
            np.testing.assert_array_equal(drawn.tally.rounds, new > 0)
            np.testing.assert_array_equal(drawn.tally.judged, is_drawn[:, :DRAFTS])
            np.testing.assert_array_equal(drawn.tally.accepted, is_drawn[:, :DRAFTS])
            left, found = left - new, np.asarray(drawn.ids)
            np.testing.assert_array_equal(state.plan.budget, left)
            np.testing.assert_array_equal(state.cache.lengths, SIZE + budget - left)
            ends = found[np.arange(ROWS), new - 1]
            last = np.where(new > 0, ends, last)
            np.testing.assert_array_equal(state.tokens, last)
            logprobs = np.asarray(drawn.logprobs)[is_drawn]
            np.testing.assert_allclose(logprobs, -np.log(WORDS), rtol=1e-6)
            ids.append(found)
        for place in range(DRAFTS + 1):
            found = np.concatenate([x[:, place] for x in ids])
            found = found[found >= 0]
            share = np.bincount(found, minlength=WORDS) / len(found)
            # About 4 / (2 * 300^0.5) = 0.12 of n = 300 draws from 16 words.
            self.assertLess(np.abs(share - 1 / WORDS).sum() / 2, 0.25)

    def test_the_first_draft_is_that_of_training(self):
        """A greedy sequence keeps it where training predicts the token after next."""
        params, budget = tiny.params(MODEL), np.full(ROWS, 20)
        prompts = np.random.default_rng(0).integers(0, WORDS, (ROWS, SIZE))
        state, drawn = start(params, prompts, budget, 0.0)
        texts, kept = [[*p, *d] for p, d in zip(prompts, drawn.ids, strict=True)], []
        texts = [[int(i) for i in text] for text in texts]
        plain = dataclasses.replace(ROUND, num_rounds=2, num_drafts=0)
        for settings in (ROUND, plain, ROUND, ROUND, ROUND):
            state, drawn = programs.speculate(params, MODEL, state, settings=settings)
            if settings.num_drafts:
                sizes = [len(text) for text in texts]
                kept.append((sizes, np.asarray(drawn.tally.accepted)[:, 0]))
            for text, new in zip(texts, drawn.ids.tolist(), strict=True):
                text += [i for i in new if i >= 0]
        tokens = np.zeros((ROWS, CAPACITY), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        likeliest, after = map(np.asarray, trained(params, MODEL, tokens))
        for row, text in enumerate(texts):
            found = likeliest[row, SIZE - 1 : len(text) - 1]
            np.testing.assert_array_equal(found, text[SIZE:])
        rows, shares = np.arange(ROWS), []
        for sizes, accepted in kept:
            sizes = np.array(sizes)
            is_right = after[rows, sizes - 2] == tokens[rows, sizes]
            np.testing.assert_array_equal(accepted, is_right)
            shares.append(is_right.mean())
        self.assertBetween(np.mean(shares), 0.05, 0.95)


if __name__ == "__main__":
    environment.main()
