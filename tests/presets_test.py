"""The real models, counted without making them; and the ladder of small ones."""

import math

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from flax import linen as nn

from glm5_jax import presets
from glm5_jax.model import transformer
from tests import environment

# Audits of the released checkpoints.
RELEASED = (
    ("glm5", presets.GLM5, 753_864_139_008),
    ("glm5_2", presets.GLM5_2, 753_329_940_480),
)


class RealShapesTest(parameterized.TestCase):
    @parameterized.named_parameters(*RELEASED)
    def test_exact_number_of_parameters(self, config, want):
        tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        module = transformer.Transformer(config)
        variables = jax.eval_shape(module.init, jax.random.key(0), tokens)
        params = variables["params"]
        self.assertEqual(sum(x.size for x in jax.tree.leaves(params)), want)
        shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
        abstract = transformer.abstract_params(config)
        self.assertEqual(shapes(nn.meta.unbox(params)), shapes(abstract))

    def test_glm5_2_differs_from_glm5_by_57_indexers(self):
        a, b = (count for _, _, count in RELEASED)
        self.assertEqual(a - b, 57 * 9_371_904)


class LadderTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("1m", "glm5_1m", 1e6),
        ("10m", "glm5_10m", 10e6),
        ("100m", "glm5_100m", 100e6),
        ("1b", "glm5_1b", 1e9),
    )
    def test_names_say_the_size(self, name, size):
        params = transformer.abstract_params(presets.MODELS[name])
        count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
        self.assertBetween(count / size, 0.6, 1.6)

    def test_proportions_are_those_of_glm5(self):
        real = self._proportions(presets.GLM5)
        for name in ("glm5_1m", "glm5_10m", "glm5_100m", "glm5_1b"):
            ours = self._proportions(presets.MODELS[name])
            for key, want in real.items():
                self.assertBetween(ours[key] / want, 0.6, 1.6, f"{name}: {key}")

    def _proportions(self, config):
        hidden = config.hidden_size
        return {
            "value width": config.num_attention_heads * config.v_head_dim / hidden,
            "query latent": config.q_lora_rank / hidden,
            "dense width": config.intermediate_size / hidden,
            "expert width": config.moe_intermediate_size / hidden,
            "rotated part": config.qk_rope_head_dim / config.qk_head_dim,
            "qk head over v head": config.qk_head_dim / config.v_head_dim,
        }


if __name__ == "__main__":
    environment.main()
