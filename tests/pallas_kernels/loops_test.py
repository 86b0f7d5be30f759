"""Loops of one step are none, and compute what lax's compute."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax import lax

from pallas_kernels import loops
from tests import environment


def body(carry, xs):
    a, nothing = xs
    assert nothing is None
    return carry + a.sum(), {"twice": 2 * a * carry, "none": None}


def of(scan):
    def total(xs):
        carry, out = scan(body, jnp.float32(0.5), (xs, None))
        return carry * out["twice"].sum(), out

    return jax.jit(jax.value_and_grad(total, has_aux=True))


class ScanTest(parameterized.TestCase):
    @parameterized.parameters(1, 3)
    def test_values_and_gradients_are_those_of_lax(self, length):
        xs = np.arange(length * 4, dtype=np.float32).reshape(length, 2, 2)
        got, wanted = of(loops.scan)(xs), of(lax.scan)(xs)
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
        self.assertEqual(*(jax.tree.map(jax.typeof, made) for made in (got, wanted)))

    @parameterized.parameters((1, False), (2, True))
    def test_one_step_is_no_loop(self, length, is_loop):
        xs = np.ones((length, 2), np.float32)
        jaxpr = str(jax.make_jaxpr(lambda xs: loops.map(jnp.sin, xs))(xs))
        self.assertEqual("scan[" in jaxpr, is_loop)

    @parameterized.parameters(1, 2)
    def test_a_carry_keeps_its_shape_and_dtype(self, length):
        xs = jnp.ones((length, 2), jnp.float32)
        for wrong in (jnp.bfloat16(0), jnp.float32([0])):
            with self.assertRaisesRegex(TypeError, "carry"):
                loops.scan(lambda c, x: (c.sum() + x.sum(), x), wrong, xs)

    def test_no_step_is_allowed(self):
        got = loops.map(jnp.sin, np.ones((0, 2), np.float32))
        self.assertEqual(got.shape, (0, 2))


if __name__ == "__main__":
    environment.main()
