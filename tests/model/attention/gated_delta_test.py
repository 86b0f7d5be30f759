"""Gated DeltaNet against transformers' module, with the same weights."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from glm5_jax import config as config_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model.attention import gated_delta
from tests import environment
from tests.model import tiny

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "gated_delta.npz"
ATOL = 1e-5  # float32, values of about 1
N, H, O = 2, 4, 3


def imported(given):
    """Qwen3-Next's weights under our names, with heads as a dim of their own."""
    heads = given["in_proj_qkvz.weight"].T.reshape(-1, N, 2 * H + 2 * O)
    q, k, v, g = np.split(heads, [H, 2 * H, 2 * H + O], axis=-1)
    b, a = given["in_proj_ba.weight"].T.reshape(-1, N, 2).transpose(2, 0, 1)
    taps = given["conv1d.weight"][:, 0]
    parts = np.split(taps, [N * H, 2 * N * H])
    conv = np.concatenate([x.reshape(N, -1, taps.shape[-1]) for x in parts], axis=1)
    return {
        **{"q_proj": q, "k_proj": k, "v_proj": v, "g_proj": g},
        **{"a_proj": a, "b_proj": b, "conv1d": conv},
        **{"A_log": given["A_log"], "dt_bias": given["dt_bias"]},
        "o_norm": given["norm.weight"],
        "o_proj": given["out_proj.weight"].T.reshape(N, O, -1),
    }


class GatedDeltaTest(absltest.TestCase):
    def test_is_that_of_transformers(self):
        with np.load(GOLDEN) as golden:
            given = dict(golden)
        config = tiny.model(
            hidden_size=given["x"].shape[-1],
            num_attention_heads=N,
            qk_nope_head_dim=H - 2,
            qk_rope_head_dim=2,
            v_head_dim=O,
            layer_types=("gated_delta",) * 3,
            variants=config_lib.AttentionVariants(linear_conv_kernel_dim=4),
        )
        attention = gated_delta.GatedDeltaNet(config)
        x, params = given["x"], {"self_attn": imported(given)}
        shapes = jax.tree.map(lambda p: p.shape, attention.table())
        want = jax.tree.map(np.shape, params)
        self.assertEqual(jax.tree.leaves(shapes), jax.tree.leaves(want))
        ones = np.ones(x.shape[:2], np.int32)
        positions = np.broadcast_to(np.arange(x.shape[1]), ones.shape)
        context = context_lib.make_context(config, *map(jnp.asarray, (ones, positions)))
        forward = jax.jit(attention.forward)
        got = forward(jax.tree.map(jnp.asarray, params), jnp.asarray(x), context)
        np.testing.assert_allclose(got.x, given["out"], rtol=0, atol=ATOL)

    def test_the_convolution_keeps_the_last_inputs_of_each_row(self):
        """Those before them where a row has few tokens, or none."""
        counts, num_tokens, taps = np.array([0, 2, 5]), 5, 4
        rng = np.random.default_rng(0)
        x = rng.normal(size=(3, num_tokens, N, H)).astype(np.float32)
        recent = rng.normal(size=(3, N, taps - 1, H)).astype(np.float32)
        weight = rng.normal(size=(N, H, taps)).astype(np.float32)
        segments = jnp.asarray(np.arange(num_tokens) < counts[:, None], jnp.int32)
        context = context_lib.make_context(
            tiny.model(), segments, jnp.arange(num_tokens)[None] * segments
        )
        arrays = map(jnp.asarray, (weight, x, recent))
        _, kept = gated_delta.convolved(*arrays, context)
        for row, count in enumerate(counts):
            inputs = [*recent[row].swapaxes(0, 1), *x[row, :count]]
            want = np.stack(inputs[1 - taps :], axis=1)
            np.testing.assert_array_equal(kept[row], want)


if __name__ == "__main__":
    environment.main()
