"""Whole rows, chunks and single tokens choose the same keys and experts in bfloat16."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax import lax

from glm5_jax.model import cached, invariance, transformer
from glm5_jax.model import selection as selection_lib
from pallas_kernels import selection
from tests import environment
from tests.model import tiny

# A dense layer's products are those of the shared expert.
MODEL = tiny.model(
    dtype="bfloat16",
    batch_invariant=True,
    num_hidden_layers=2,
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
)
CAPACITY = 64


def jit(function, config):
    return jax.jit(function, compiler_options=invariance.compiler_options(config))


@functools.cache
def whole(config, tokens):
    """Choices and hidden states of whole rows, as in training."""

    def run(params, tokens):
        out = transformer.forward(params, config, tokens, with_traces=True)
        experts = cached.chosen_experts(config, out.aux, tokens.shape)
        return out.hidden, out.traces, experts

    params, tokens = tiny.params(config), np.array(tokens, np.int32)
    hidden, traces, experts = jit(run, config)(params, tokens)
    selected = [
        as_list(t.attended.index.selection, config)
        for t in tiny.by_layer(config, traces)
    ]
    return np.stack(selected), np.asarray(experts), np.asarray(hidden, np.float32)


def as_list(selected, config):
    """A selection in either form of a CPU as a list of keys."""
    if isinstance(selected, selection_lib.Listed):
        return selected.indices
    return selection.to_list(jnp.asarray(selected.keep), config.index_topk)


def in_chunks(config, tokens, size):
    """The same of chunks of `size` tokens that are read one behind the other."""

    def run(params, tokens):
        def read(cache, chunk):
            hidden, cache, choices = cached.decode(params, config, cache, chunk)
            return cache, (choices.selection.indices, choices.experts, hidden)

        cache = cached.empty(config, len(tokens), CAPACITY)
        chunks = jnp.stack(jnp.split(tokens, tokens.shape[1] // size, axis=1))
        _, (selected, experts, hidden) = lax.scan(read, cache, chunks)
        join = functools.partial(jnp.concatenate, axis=2)
        return join(list(selected)), join(list(experts)), jnp.concatenate(hidden, 1)

    params = tiny.params(config)
    selected, experts, hidden = jit(run, config)(params, tokens)
    return np.asarray(selected), np.asarray(experts), np.asarray(hidden, np.float32)


class OptionsTest(parameterized.TestCase):
    def test_only_invariant_programs_keep_all_roundings(self):
        compiled = lambda f, compiler_options=None, **_: lambda *args: compiler_options
        with mock.patch.object(jax, "jit", compiled):
            run = invariance.jit(max, static_argnames="config")
        options = run({}, MODEL)
        self.assertIs(options["xla_allow_excess_precision"], False)
        self.assertEqual(invariance.compiler_options(MODEL), options)
        usual = tiny.model(dtype="bfloat16")
        self.assertIsNone(run({}, usual))
        self.assertIsNone(invariance.compiler_options(usual))


class InvarianceTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("decoding", 12, 1),
        ("decoding_one_sequence", 1, 1),
        ("chunks", 12, 12),
    )
    def test_choices_are_those_of_whole_rows(self, rows, size):
        self.check(MODEL, rows, size)

    def test_choices_of_an_indexer_in_8_bits(self):
        self.check(dataclasses.replace(MODEL, index_dtype="fp8"), 12, 1)

    @pytest.mark.slow  # the code of chunks, with smaller products
    def test_choices_are_those_of_whole_rows_drafts(self):
        self.check(MODEL, 12, 4)

    @pytest.mark.slow
    def test_choices_of_an_indexer_in_8_bits_in_chunks(self):
        self.check(dataclasses.replace(MODEL, index_dtype="fp8"), 12, 12)

    def check(self, model, rows, size):
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, model.vocab_size, (12, 48)).astype(np.int32)
        expected = whole(model, tuple(map(tuple, tokens.tolist())))
        found = in_chunks(model, tokens[:rows], size)
        for ours, theirs in zip(found, expected[:2], strict=False):
            different = (np.sort(ours) != np.sort(theirs[:, :rows])).any(-1)
            self.assertEqual(different.sum(), 0, f"of {different.size}")
        np.testing.assert_array_equal(found[2], expected[2][:rows])


if __name__ == "__main__":
    environment.main()
