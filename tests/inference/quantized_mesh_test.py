"""Quantized weights on a mesh: codes and scales are sharded, and the numbers stay."""

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.inference import engine, placement, scoring
from glm5_jax.model import transformer
from glm5_jax.quantization import leaf, schemes
from tests import environment
from tests.model import tiny

MODEL = tiny.model(
    num_hidden_layers=2, num_nextn_predict_layers=0, attention="dense", vocab_size=64
)
DECODED = tiny.model(
    num_hidden_layers=2, num_nextn_predict_layers=1, vocab_size=64, kv_lora_rank=16
)
FLOAT32 = 2e-5  # nats, of sums in another order


class QuantizedMeshTest(parameterized.TestCase):
    def test_a_mesh_scores_as_one_device(self):
        """int4 experts and int8 matrices, whose heads, widths and experts are cut."""
        dims, scheme = transformer.param_dims(MODEL), schemes.SCHEMES["w4a16"]
        made = jax.jit(lambda p: schemes.quantized(p, dims, scheme))(tiny.params(MODEL))
        tokens = np.random.default_rng(0).integers(0, 64, (4, 16))
        rows = scoring.rows_of_tokens(tokens, MODEL)
        wanted = scoring.score(made, MODEL, rows)
        mesh = mesh_lib.make_mesh(config_lib.MeshConfig(fsdp=2, tensor=2, expert=2))
        places = placement.params(made, MODEL, mesh)
        placed = jax.device_get(made)  # numpy cuts without programs
        placed = jax.device_put(placed, places)
        experts = placed["layers_1"]["block_0"]["mlp"]["experts"]["gate_proj"]
        self.assertTrue(leaf.is_quantized(experts))
        shard = experts.values.addressable_shards[0].data
        self.assertEqual(8 * shard.size, experts.values.size)
        with jax.set_mesh(mesh):
            got = scoring.score(placed, MODEL, rows)
        np.testing.assert_allclose(got, wanted, atol=FLOAT32)

    @pytest.mark.slow
    def test_a_mesh_decodes_as_one_device(self):
        """Rows go to the int8 matrices; drafts are verified so, too."""
        dims, scheme = transformer.param_dims(DECODED), schemes.SCHEMES["w4a16"]
        params = tiny.params(DECODED)
        made = jax.jit(lambda p: schemes.quantized(p, dims, scheme))(params)
        prompts = np.random.default_rng(0).integers(1, 64, (4, 12)).tolist()
        settings = {"max_new_tokens": 6, "temperature": 0.0, "num_drafts": 2}
        wanted = engine.generate(made, DECODED, prompts, **settings)
        mesh = mesh_lib.make_mesh(config_lib.MeshConfig(fsdp=2, tensor=2, expert=2))
        with jax.set_mesh(mesh):
            got = engine.generate(made, DECODED, prompts, **settings)
        for one, other in zip(got, wanted, strict=True):
            self.assertEqual(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=FLOAT32)


if __name__ == "__main__":
    environment.main()
