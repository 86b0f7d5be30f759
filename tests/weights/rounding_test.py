"""Rounding while reading gives the bits of rounding the whole, part by part."""

import pathlib
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.model import transformer
from glm5_jax.quantization import leaf, schemes
from glm5_jax.weights import huggingface, huggingface_export, quantized_loading
from tests import environment
from tests.model import tiny

MODEL = tiny.model(
    num_hidden_layers=2,
    num_nextn_predict_layers=0,
    hidden_size=256,
    kv_lora_rank=16,
    moe_intermediate_size=64,
    vocab_size=64,
)
MESHES = {
    "mixed": {"fsdp": 2, "tensor": 2, "expert": 2},
    "fsdp": {"fsdp": 8},
    "tensor": {"tensor": 2},
}


class RoundingTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.params = tiny.params(MODEL)

    def load(self, scheme, mesh):
        folder = pathlib.Path(self.create_tempdir().full_path) / "model"
        huggingface_export.save_params(self.params, MODEL, folder)
        return quantized_loading.load_model(folder, mesh=mesh, scheme=scheme)[1]

    @parameterized.parameters(
        ("int8", None),
        ("int8", "fsdp"),
        ("fp8", "tensor"),
        ("w4a16", "mixed"),
        ("int4", "mixed"),
    )
    def test_equal_bits(self, scheme, mesh):
        dims = transformer.param_dims(MODEL)
        wanted = jax.jit(
            lambda params: schemes.quantized(params, dims, schemes.SCHEMES[scheme])
        )(self.params)
        made = mesh and mesh_lib.make_mesh(config_lib.MeshConfig(**MESHES[mesh]))
        got = self.load(scheme, made)
        self.assertTrue(any(map(leaf.is_quantized, flat(got))))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)

    def test_each_matrix_is_read_once(self):
        """Also where eight devices have a part of each, whose scales need all of it."""
        seen, read = [], huggingface.StoredLeaf.read

        def noted(stored, window):
            if stored._depth == 2:  # layers and experts
                seen.append(read(stored, window).size)
            return read(stored, window)

        mesh = mesh_lib.make_mesh(config_lib.MeshConfig(fsdp=8))
        with mock.patch.object(huggingface.StoredLeaf, "read", noted):
            self.load("int8", mesh)
        experts = self.params["layers_1"]["block_0"]["mlp"]["experts"]
        one = MODEL.hidden_size * MODEL.moe_intermediate_size
        self.assertEqual(sum(seen), sum(x.size for x in jax.tree.leaves(experts)))
        self.assertEqual(max(seen), one)


def flat(tree):
    return jax.tree.leaves(tree, is_leaf=leaf.is_quantized)


if __name__ == "__main__":
    environment.main()
