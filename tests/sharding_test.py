"""The table of sharding rules."""

import jax
import optax
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

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


class TreeTest(parameterized.TestCase):
    def test_a_plain_tuple_of_names_is_an_array_and_a_named_one_a_branch(self):
        tree = ({"w": ("D", "F"), "count": ()}, optax.EmptyState())
        got = sharding.specs(tree)
        self.assertEqual(got[0]["w"], P(("fsdp", "context", "expert"), "tensor"))
        self.assertEqual(got[0]["count"], P())
        self.assertEqual(got[1], optax.EmptyState())


if __name__ == "__main__":
    environment.main()
