"""Compares drafting with a cache to multi-token prediction over whole rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax import depth
from glm5_jax.model import block as block_lib
from glm5_jax.model import cached, mtp, mtp_cached
from glm5_jax.model import context as context_lib
from tests import environment
from tests.model import tiny

CHAINED = tiny.model(vocab_size=40, num_hidden_layers=1)
SHARED = dataclasses.replace(CHAINED, index_share_for_mtp_iteration=True)
LENGTHS = (10, 7)  # tokens that are cached before the first draft
NUM_TOKENS, CAPACITY = 14, 20  # more than index_topk
STEPS = 3
ATOL = 2e-5  # float32 sums of the absorbed form against the expanded one


def make_tokens(config):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(1, config.vocab_size, (2, NUM_TOKENS)))


def main_states(config):
    """Random ones in place of the main model's, which are normed."""
    size = 2, NUM_TOKENS, config.hidden_size
    return np.random.default_rng(2).standard_normal(size, np.float32)


@functools.partial(jax.jit, static_argnums=1)
def drafts(params, config, tokens, hidden, table):
    """Returns the states of all steps after two parts of each text were filled in.

    Also the lengths, and the rows of the module in the cache.
    """
    cache = cached.empty(config, 2, CAPACITY, None if table is None else (12, 4), True)
    cache = dataclasses.replace(cache, table=table)
    before = jnp.roll(hidden, 1, axis=1)
    for start, end in ((0, 4), (4, NUM_TOKENS)):  # the rest is overwritten
        lengths = jnp.full(2, start, jnp.int32)
        cache = mtp_cached.fill(
            params,
            config,
            dataclasses.replace(cache, lengths=lengths),
            tokens[:, start:end],
            before[:, start:end],
            None,
        )
    last = jnp.asarray(LENGTHS)
    cache = dataclasses.replace(cache, lengths=last)
    rows = jnp.arange(2)
    draft = mtp_cached.first(
        params, config, cache, tokens[rows, last], before[rows, last], None
    )
    found = [draft.hidden]
    for step in range(2, STEPS + 1):
        token = tokens[rows, last + step - 1]
        draft = mtp_cached.later(params, config, draft, token, step, None)
        found.append(draft.hidden)
    rows_of_module = draft.cache.entries["kv"][-1]
    return jnp.stack(found), draft.cache.lengths, rows_of_module


@functools.partial(jax.jit, static_argnums=1)
def trained(params, config, tokens, hidden):
    """Returns the states of training's steps at every place."""
    shape = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    context = context_lib.make_context(config, jnp.ones_like(tokens), positions)
    ahead = mtp.ahead(tokens, STEPS)
    embedding = params["embed_tokens"]
    return mtp.steps(params["mtp"], config, embedding, hidden, ahead, context)[0]


@functools.partial(jax.jit, static_argnums=1)
def whole_row(params, config, tokens, hidden, size):
    """Runs the module over pairs of a token and a state.

    Returns the last state, and the latent and rotated key of every pair.
    """
    positions = jnp.arange(NUM_TOKENS)[None]
    is_token = (positions < size).astype(jnp.int32)
    context = context_lib.make_context(config, is_token, positions)
    module = params["mtp"]
    x = mtp.joined(module, config, params["embed_tokens"], tokens, hidden)
    block = block_lib.make(config, depth.mtp_kind(config))
    out = block.forward(module["block"], x, context)
    x = out.x[0, size - 1]
    norm = jax.lax.rsqrt(jnp.mean(x * x) + config.rms_norm_eps)
    return x * norm * module["norm"], jnp.concatenate(out.attended.kv, axis=-1)[0]


class MtpCachedTest(parameterized.TestCase):
    def run_drafts(self, config, is_paged=False):
        params, tokens = tiny.params(config), make_tokens(config)
        hidden = main_states(config)
        table = np.random.default_rng(1).permutation(12)[:10].reshape(2, 5)
        table = jnp.asarray(table) if is_paged else None
        found, lengths, rows = drafts(params, config, tokens, hidden, table)
        np.testing.assert_array_equal(lengths, LENGTHS)
        return params, tokens, hidden, np.asarray(found), rows

    @parameterized.named_parameters(("rows", False), ("pages", True))
    def test_steps_that_share_are_those_of_training(self, is_paged):
        params, tokens, hidden, found, _ = self.run_drafts(SHARED, is_paged)
        wanted = trained(params, SHARED, tokens, hidden)
        for row, length in enumerate(LENGTHS):
            np.testing.assert_allclose(
                found[:, row], wanted[:, row, length - 1], atol=ATOL
            )

    def test_chained_steps_are_those_of_a_row_that_grows(self):
        params, tokens, hidden, found, rows = self.run_drafts(CHAINED)
        first = trained(params, CHAINED, tokens, hidden)[0]
        for row, length in enumerate(LENGTHS):
            np.testing.assert_allclose(found[0, row], first[row, length - 1], atol=ATOL)
            states = np.zeros_like(hidden[:1])
            states[0, :length] = hidden[row, :length]
            ahead = jnp.roll(tokens[row : row + 1], -1, axis=1)
            for step in range(1, STEPS + 1):
                state, kv = whole_row(params, CHAINED, ahead, states, length + step - 1)
                if step == 1:  # row r is that of position r - 1
                    own = rows[row, 1 : length + 1]
                    np.testing.assert_allclose(own, kv[:length], atol=ATOL)
                np.testing.assert_allclose(found[step - 1, row], state, atol=ATOL)
                states[0, length + step - 1] = state


if __name__ == "__main__":
    environment.main()
