"""Experts within the stack of all layers, against those of the layer alone."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from glm5_jax.model import cached, expert_products, expert_rounds, experts, layers
from glm5_jax.quantization import leaf
from tests import environment

L, E, D, F, M = 3, 4, 8, 6, 24  # layers, experts, widths, rows


class OfLayerTest(absltest.TestCase):
    def test_equals_the_layer_alone(self):
        rng = np.random.default_rng(0)
        shapes = {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}
        stacks = {
            k: jnp.float32(rng.normal(size=(L, E, *s))) for k, s in shapes.items()
        }
        rows = jnp.float32(rng.normal(size=(M, D)))
        sizes = jnp.asarray([5, 0, 9, 4])  # the last rows have no expert

        @jax.jit
        def both(layer):
            own = jax.tree.map(lambda x: x[layer], stacks)
            views = {k: expert_products.OfLayer(x, layer) for k, x in stacks.items()}
            return [expert_products.swiglu(p, rows, sizes) for p in (own, views)]

        for layer in range(L):
            np.testing.assert_allclose(*both(jnp.int32(layer)), rtol=1e-6, atol=1e-6)


class ScanTest(parameterized.TestCase):
    @parameterized.parameters(None, "int8")
    def test_where_kernels_run_experts_stay_in_their_stack(self, kind):
        """A scan gives the same states, in bfloat16 or with codes."""
        rng = np.random.default_rng(0)
        shapes = {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}
        table = {
            k: layers.Param((L, E, *s), ("L", "E", "D", "F")) for k, s in shapes.items()
        }
        stacks = {k: jnp.float32(rng.normal(size=p.shape)) for k, p in table.items()}
        if kind:
            layout = leaf.Layout(kind, (leaf.WHOLE, 1))
            stacks = {k: leaf.compiled_quantize(x, layout) for k, x in stacks.items()}
        x = jnp.asarray(rng.normal(size=(M, D)), jnp.bfloat16)
        chosen = jnp.asarray(rng.integers(0, E, (M, 1)))
        norms = jnp.float32(rng.normal(size=(L, 1, D)))
        mlp = {"experts": stacks, "shift": norms}
        stack = {"block_0": {"mlp": mlp}, "block_1": {"mlp": {"shift": norms}}}
        seen = []

        def unit(carry, params):
            (x,) = carry
            first, second = (params[f"block_{i}"]["mlp"] for i in range(2))
            own = layers.fetched(first["experts"], table, "bfloat16")
            seen.append({type(w) for w in own.values()})
            ones = jnp.ones((M, 1), x.dtype)
            x += experts.grouped(own, x + first["shift"].astype(x.dtype), chosen, ones)
            return (x + second["shift"].astype(x.dtype),), jnp.sum(x)

        found = []
        for platform in ("cpu", "tpu"):
            with mock.patch.object(cached, "dispatch") as dispatch:
                dispatch.platform.return_value = platform
                found.append(jax.jit(lambda x: cached._scan(unit, (x,), stack))(x))
        self.assertEqual(seen[-1], {expert_products.OfLayer})
        self.assertNotIn(expert_products.OfLayer, seen[0])
        jax.tree.map(np.testing.assert_array_equal, *found)


class RoundsTest(parameterized.TestCase):
    @parameterized.parameters((0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3))
    def test_no_more_rounds_than_there_are_rows(self, num_rows, wanted):
        """Of buffers of 4 rows; the first round always runs. Values and gradients."""
        sizes = jnp.asarray([num_rows - num_rows // 2, num_rows // 2])
        num_rounds = -(-jnp.sum(sizes) // 4)
        power = lambda n, base, x: (x * base) ** (n + 1)

        def run(x):
            return expert_rounds.summed(power, num_rounds, jnp.int32(3), x)

        found, gradient = jax.value_and_grad(run)(jnp.float32(0.5))
        terms = [(1.5 ** (n + 1), 3 * (n + 1) * 1.5**n) for n in range(wanted)]
        np.testing.assert_allclose((found, gradient), np.sum(terms, 0), rtol=1e-6)

    def test_a_window_counts_the_rows_of_each_group(self):
        sizes, groups = np.asarray([3, 0, 5, 2]), np.repeat(np.arange(4), [3, 0, 5, 2])
        for first in range(0, 12, 3):
            found = expert_rounds.within(jnp.asarray(sizes), first, 4)
            want = np.bincount(groups[first : first + 4], minlength=4)
            np.testing.assert_array_equal(found, want)


class RoomTest(absltest.TestCase):
    def test_half_more_than_an_even_load_and_more_of_few_rows(self):
        """12.5 rows and four deviations, 14.1, are 26.6: 32 in whole tiles."""
        for num_rows, num_devices, wanted in (
            (4096, 8, 768),
            (100, 8, 32),
            (8, 64, 8),
            (6, 2, 6),  # never more than there can be
        ):
            found = expert_rounds.room(num_rows, num_devices)
            self.assertEqual(found, wanted, (num_rows, num_devices))

    def test_without_rounds_there_is_room_for_every_load(self):
        for transport, num_devices, wanted in (
            ("rounds", 8, 1.5),
            ("rounds", 1, 1),
            ("gather", 8, 8),
            ("exchange", 4, 1.5),
        ):
            found = expert_rounds.spare(transport, num_devices)
            self.assertEqual(found, wanted, (transport, num_devices))


if __name__ == "__main__":
    environment.main()
