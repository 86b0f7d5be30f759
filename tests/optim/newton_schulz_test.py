"""Newton-Schulz against a float64 loop and the singular values."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax.optim import newton_schulz
from tests import environment
from tests.optim.loops import in_float64

POLAR = newton_schulz.coefficients("polar_express", 5)
DOUBLE = 2e-5  # float32 against a float64 loop: five steps amplify the rounding
# The composed polynomials map [0.01, 1] into [0.978, 1.032].
POLYNOMIAL = 0.033
# Two mantissa bits of bfloat16 a step, five steps, relative to the Frobenius norm.
HALF = 0.05


def normal(*shape):
    return jax.random.normal(jax.random.key(0), shape)


class NewtonSchulzTest(parameterized.TestCase):
    @parameterized.product(
        name=["quintic", "polar_express"], shape=[(7, 12), (12, 7), (9, 9)]
    )
    def test_equals_a_float64_loop(self, name, shape):
        steps = newton_schulz.coefficients(name, 5)
        x = normal(2, 3, *shape)
        got = newton_schulz.orthogonalize(x, steps, jnp.float32)
        for i in np.ndindex(2, 3):
            np.testing.assert_allclose(got[i], in_float64(x[i], steps), atol=DOUBLE)

    def test_ranges_of_singular_values_are_those_of_the_docstring(self):
        start = np.geomspace(1e-5, 1, 100_001)
        end = start
        for a, b, c in POLAR:
            end = a * end + b * end**3 + c * end**5
        large, small = start >= 0.01, start < 0.0025
        self.assertBetween(end[large].min(), 0.97, 1.0)
        self.assertBetween(end[large].max(), 1.0, 1.04)
        self.assertBetween(end[~large & ~small].max(), 1.0, 1.15)
        self.assertLess(end[small].max(), 1.0)

    def test_singular_values_go_to_one(self):
        steps = POLAR
        got = newton_schulz.orthogonalize(normal(16, 64), steps, jnp.float32)
        values = np.linalg.svd(got, compute_uv=False)
        np.testing.assert_allclose(values, 1.0, atol=POLYNOMIAL)

    def test_bfloat16_stays_close(self):
        steps, x = POLAR, normal(4, 32, 48)
        exact = newton_schulz.orthogonalize(x, steps, jnp.float32)
        rough = newton_schulz.orthogonalize(x, steps, jnp.bfloat16)
        self.assertEqual(rough.dtype, jnp.float32)
        self.assertLess(jnp.linalg.norm(rough - exact), HALF * jnp.linalg.norm(exact))
        self.assertGreater(jnp.linalg.norm(rough - exact), 0)

    def test_cpu_loops_over_matrices_and_accelerators_batch_them(self):
        steps, x = POLAR, normal(4, 12, 7)
        lowered = jax.jit(
            lambda x: newton_schulz.orthogonalize(x, steps, jnp.float32)
        ).trace(x)
        for platform, batch in (("cpu", "tensor<7x7x"), ("tpu", "tensor<4x7x7x")):
            text = lowered.lower(lowering_platforms=(platform,)).as_text()
            self.assertIn(f"{batch}f32>", text)
            # A chip would round the factors otherwise.
            self.assertIn("precision = [HIGHEST, HIGHEST]", text)
        half = jax.jit(lambda x: newton_schulz.orthogonalize(x, steps, jnp.bfloat16))
        self.assertNotIn("HIGHEST", half.lower(x).as_text())

    def test_no_gradient_no_update(self):
        zeros = jnp.zeros((3, 4, 5))
        got = newton_schulz.orthogonalize(zeros, POLAR, "float32")
        np.testing.assert_array_equal(got, zeros)
        tiny = newton_schulz.orthogonalize(jnp.full((1, 1), 1e-8), POLAR, "float32")
        self.assertBetween(float(tiny[0, 0]), 0.5, 1 + POLYNOMIAL)

    @parameterized.parameters((3, 3), (5, 5), (7, 5))
    def test_the_last_coefficients_repeat(self, num_steps, num_distinct):
        steps = newton_schulz.coefficients("polar_express", num_steps)
        table = newton_schulz.COEFFICIENTS["polar_express"]
        self.assertEqual(tuple(steps[:num_distinct]), table[:num_steps])
        self.assertEqual(list(steps[5:]), [table[-1]] * (num_steps - num_distinct))

    def test_the_polynomials_are_those_of_xtuner(self):
        """Where they take 1: a mistyped number would change few singular values."""
        ends = [0.1172, 0.2853, 0.4542, 0.9388, 0.9853]
        np.testing.assert_allclose([sum(abc) for abc in POLAR], ends, atol=1e-9)

    def test_an_unknown_polynomial_is_refused(self):
        with self.assertRaisesRegex(ValueError, "polar_express.*got cubic"):
            newton_schulz.coefficients("cubic", 5)


if __name__ == "__main__":
    environment.main()
