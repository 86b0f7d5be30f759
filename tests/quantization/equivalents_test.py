"""Rewritten weights compute the same function, and lose less to rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax.quantization import equivalents, leaf
from tests import environment
from tests.model import tiny

MODEL = tiny.model(num_hidden_layers=2, num_nextn_predict_layers=0)
FLOAT32 = 2e-4  # logits up to about 10, of sums in another order


class EquivalentsTest(parameterized.TestCase):
    @parameterized.parameters(12, 16)
    def test_rotations_are_orthogonal(self, size):
        turn = np.asarray(equivalents.rotation(size), np.float64)
        np.testing.assert_allclose(turn @ turn.T, np.eye(size), atol=1e-6)
        self.assertLess(np.abs(turn).max(), 0.95)

    def test_logits_stay(self):
        params = tiny.params(MODEL)
        tokens = tiny.batch(MODEL, [(20,), (9, 8)], 24)["tokens"]
        logits = functools.partial(tiny.logits, config=MODEL, tokens=tokens)
        wanted = logits(params)
        rewritten = jax.jit(equivalents.rewritten, static_argnums=1)
        for method in ("rotate", "smooth", "both"):
            changed = rewritten(params, method)
            both = jax.device_get((params, changed))
            moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), *both)
            attn = moved["layers_1"]["block_0"]["self_attn"]
            self.assertEqual(attn["q_a_proj"], method != "smooth")
            self.assertEqual(attn["o_proj"], method != "smooth")
            experts = moved["layers_1"]["block_0"]["mlp"]["experts"]
            self.assertEqual(experts["down_proj"], method != "rotate")
            np.testing.assert_allclose(logits(changed), wanted, atol=FLOAT32)

    def test_a_large_channel_costs_less_after_smoothing(self):
        rng = np.random.default_rng(0)
        down = rng.normal(size=(2, 16, 8)).astype(np.float32)
        down[:, 3] *= 50  # the other weights of its groups would be rounded away
        mlp = {"up_proj": jnp.ones((2, 8, 16)), "down_proj": jnp.asarray(down)}
        after = equivalents.rewritten({"self_attn": {}, "mlp": mlp}, "smooth")["mlp"]
        layout = leaf.Layout("int4", (16, 1))

        @jax.jit
        def error(mlp):
            made = leaf.dequantized(
                leaf.quantize(mlp["down_proj"], layout), jnp.float32
            )
            return jnp.mean(((made - mlp["down_proj"]) * mlp["up_proj"][:, :1].mT) ** 2)

        self.assertLess(error(after), 0.2 * error(mlp))


if __name__ == "__main__":
    environment.main()
