"""Grouped-query attention against transformers' (tests/golden/make_grouped.py)."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.model import attention
from glm5_jax.model import context as context_lib
from tests import environment

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "grouped.npz"
N, U, A, R = 4, 2, 12, 8
ATOL = 2e-6  # float32 against float64, of outputs of size one


def heads(weight, is_rotated):
    """Returns a projection [D, heads, A] with the dims of a head in our order.

    transformers has the rotated dims first, and of each pair the first ones before the
    second ones; here they are last, and pairs are neighbours.
    """
    weight = weight.reshape(len(weight), -1, A)
    if is_rotated:
        pairs = np.arange(R).reshape(2, -1).T.ravel()
        weight = weight[..., [*range(R, A), *pairs]]
    return jnp.asarray(weight, jnp.float32)


class TransformersTest(parameterized.TestCase):
    @parameterized.parameters(("grouped", "full"), ("grouped_sliding", "window"))
    def test_outputs(self, name, output):
        arrays = np.load(GOLDEN)
        config = config_lib.ModelConfig(
            hidden_size=24,
            num_attention_heads=N,
            qk_rope_head_dim=R,
            num_hidden_layers=1,
            first_k_dense_replace=1,
            rope_theta=1e4,
            dtype="float32",
            layer_types=(name,),
            variants=config_lib.AttentionVariants(
                num_key_value_heads=U, head_dim=A, sliding_window=4
            ),
        )
        params = {
            name: heads(arrays[f"{name}.weight"], name != "v_proj")
            for name in ("q_proj", "k_proj", "v_proj")
        }
        o_proj = jnp.asarray(arrays["o_proj.weight"], jnp.float32)
        params["o_proj"] = o_proj.reshape(N, A, -1)
        x = jnp.asarray(arrays["x"], jnp.float32)[None]
        positions = jnp.arange(x.shape[1])[None]
        context = context_lib.make_context(config, jnp.ones_like(positions), positions)
        own = attention.make(config, depth.layer_kinds(config)[0])
        run = jax.jit(lambda params, x: own.forward(params, x, context).x)
        out = run({"self_attn": params}, x)
        np.testing.assert_allclose(out[0], arrays[output], rtol=0, atol=ATOL)


if __name__ == "__main__":
    environment.main()
