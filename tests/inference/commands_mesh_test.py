"""generate and evaluate on a mesh of 8 devices: the results of a single device."""

import pathlib

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.inference import commands
from glm5_jax.weights import loading
from tests import environment

GOLDEN = str(pathlib.Path(__file__).parent.parent / "golden" / "glm5")
AXES = ("fsdp", "expert", "tensor")
OVERRIDES = [("model.dtype", "float32"), ("model.param_dtype", "float32")]
MESH = [*OVERRIDES, *((f"mesh.{axis}", "2") for axis in AXES)]
ATOL = 1e-5  # float32 sums in another order


class CommandsOnMeshTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        self.tokens = str(self.folder / "ids.npy")
        rows = np.random.default_rng(0).integers(3, 80, (3, 12))
        np.save(self.tokens, rows)

    def test_parameters_are_shared(self):
        mesh, others = loading.mesh_of(MESH)
        self.assertEqual(others, OVERRIDES)
        _, params, _ = loading.load_model(GOLDEN, others, mesh)
        whole = params["lm_head"]
        shard = whole.addressable_shards[0].data
        self.assertEqual(shard.size * 8, whole.size)
        _, alone, _ = loading.load_model(GOLDEN, others)
        jax.tree.map(np.testing.assert_array_equal, params, alone)

    def test_evaluate(self):
        def logits_and_scores(name, overrides):
            path = str(self.folder / name)
            scores = commands.evaluate(
                GOLDEN, overrides, tokens=self.tokens, text=None, logits_out=path
            )
            return np.load(path), scores

        logits, scores = logits_and_scores("one.npy", OVERRIDES)
        others, on_mesh = logits_and_scores("mesh.npy", MESH)
        np.testing.assert_allclose(others, logits, atol=ATOL, rtol=0)
        self.assertAlmostEqual(on_mesh["nll"], scores["nll"], delta=ATOL)
        self.assertEqual(on_mesh["num_tokens"], scores["num_tokens"])

    def test_generate(self):
        def continued(overrides):
            return commands.generate(
                GOLDEN,
                overrides,
                commands.Prompt(tokens=self.tokens),
                commands.Sampling(max_new_tokens=1, temperature=0.0),
            )

        self.assertEqual(continued(MESH), continued(OVERRIDES))

    @parameterized.parameters(
        ([("mesh.fsdpp", "2")], "fsdp"),
        ([("mesh.fsdp", "3")], "8 devices"),
        ([("mesh.tensor", "8"), ("mesh.data", "1")], "num_attention_heads"),
        ([("data.batch_size", "8")], "no effect here"),
    )
    def test_bad_overrides(self, overrides, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            commands.generate(
                GOLDEN,
                overrides,
                commands.Prompt(tokens=self.tokens),
                commands.Sampling(max_new_tokens=1),
            )


if __name__ == "__main__":
    environment.main()
