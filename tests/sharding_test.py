"""The rule table, on a mesh of 8 CPU devices."""

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax import presets, sharding
from glm5_jax.model import transformer
from tests import environment


class SpecTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (
            "activation",
            ("B", "T", "D"),
            (("data", "fsdp", "expert"), "context", None),
        ),
        ("matrix", ("D", "F"), (("fsdp", "context", "expert"), "tensor")),
        (
            "experts",
            ("L", "E", "D", "F"),
            (None, "expert", ("fsdp", "context"), "tensor"),
        ),
        ("heads", ("Q", "N", "H"), (("fsdp", "context", "expert"), "tensor", None)),
        ("head", ("D", "V"), (("fsdp", "context"), ("tensor", "expert"))),
        ("norm", ("Q",), (None,)),
    )
    def test_an_axis_is_spent_once(self, dims, want):
        self.assertEqual(tuple(sharding.spec(dims)), want)

    def test_every_dim_of_the_model_is_in_the_alphabet(self):
        from glm5_jax import shapes

        dims = jax.tree.leaves(transformer.param_dims(presets.GLM5_2))
        self.assertContainsSubset(set(dims), set(shapes.ALPHABET))


class StateTest(parameterized.TestCase):
    def test_optimizer_state_lies_where_its_parameter_does(self):
        mesh = mesh_lib.make_mesh(config_lib.MeshConfig(fsdp=2))
        places = sharding.shardings({"a": {"w": ("D", "F")}}, mesh)
        state = {"muon": ({"a": {"w": np.zeros(2)}},), "count": np.zeros(())}
        got = sharding.like_params(state, places, mesh)
        self.assertEqual(got["muon"][0]["a"]["w"], places["a"]["w"])
        self.assertTrue(got["count"].is_fully_replicated)


if __name__ == "__main__":
    environment.main()
