import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from optax import contrib

from glm5_jax import config as config_lib
from glm5_jax.optim import muon, muon_split
from tests import environment

MODEL = config_lib.ModelConfig(
    qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8, kv_lora_rank=10
)
FLOAT32 = config_lib.OptimConfig(ns_dtype="float32")
ROUNDING = 4e-6  # of five steps of products in float32
DOUBLE = 2e-5  # float32 against a float64 loop: five steps amplify the rounding
# The composed polynomials map [0.01, 1] into [0.978, 1.032].
POLYNOMIAL = 0.033
# Two mantissa bits of bfloat16 a step, five steps, relative to the Frobenius norm.
HALF = 0.05


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def newton_schulz(matrix, steps):
    """The definition, in float64."""
    x = np.float64(matrix)
    x /= np.linalg.norm(x)
    for a, b, c in steps:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def updates(grads, dims, config, num_steps=1):
    layouts = {"w": muon_split.layout(dims, config, MODEL)}
    transform = muon.scale_by_muon_split(layouts, config)
    state = transform.init({"w": grads[0]})
    for grad in grads[:num_steps]:
        update, state = transform.update({"w": grad}, state)
    return update["w"]


class LayoutTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("up_projection", "L Q N H", True, (0, 2), (1,), (3,)),
        ("up_projection_whole", "L Q N H", False, (0,), (1,), (2, 3)),
        ("key", "C N P", True, (1,), (0,), (2,)),
        ("key_whole", "C N P", False, (), (0,), (1, 2)),
        ("value", "L C N O", True, (0, 2), (1,), (3,)),
        ("value_whole", "L C N O", False, (0,), (1,), (2, 3)),
        ("output", "L N O D", True, (0,), (1, 2), (3,)),
        ("index_query", "L Q I J", True, (0,), (1,), (2, 3)),
        ("index_weights", "L D I", True, (0,), (1,), (2,)),
        ("expert", "L E D F", True, (0, 1), (2,), (3,)),
        ("router", "L D E", True, (0,), (1,), (2,)),
        ("plain", "D+D D", True, (), (0,), (1,)),
    )
    def test_dims_decide(self, dims, split, batch, rows, cols):
        config = config_lib.OptimConfig(muon_split=split)
        layout = muon_split.layout(tuple(dims.split()), config, MODEL)
        self.assertEqual(layout, muon_split.Layout(batch, rows, cols))

    @parameterized.parameters("D", "L D", "D F Q", "L E F")
    def test_what_is_no_matrix_is_refused(self, dims):
        with self.assertRaisesRegex(ValueError, "needs matrices"):
            muon_split.layout(tuple(dims.split()), FLOAT32, MODEL)

    def test_map_hands_out_the_matrices_and_puts_them_back(self):
        w_LQNH = normal(2, 5, 3, 10)
        layout = muon_split.layout(("L", "Q", "N", "H"), FLOAT32, MODEL)
        seen = []
        result = layout.map(lambda m: seen.append(m) or 2 * m, w_LQNH)
        np.testing.assert_array_equal(seen[0], w_LQNH.transpose(0, 2, 1, 3))
        np.testing.assert_array_equal(result, 2 * w_LQNH)


class NewtonSchulzTest(parameterized.TestCase):
    @parameterized.product(
        name=["quintic", "polar_express"], shape=[(7, 12), (12, 7), (9, 9)]
    )
    def test_equals_a_float64_loop(self, name, shape):
        config = dataclasses.replace(FLOAT32, ns_coefficients=name)
        steps = muon_split.coefficients(config)
        x = normal(2, 3, *shape)
        got = muon_split.orthogonalize(x, steps, jnp.float32)
        for i in np.ndindex(2, 3):
            np.testing.assert_allclose(got[i], newton_schulz(x[i], steps), atol=DOUBLE)

    def test_singular_values_go_to_one(self):
        steps = muon_split.coefficients(FLOAT32)
        got = muon_split.orthogonalize(normal(16, 64), steps, jnp.float32)
        values = np.linalg.svd(got, compute_uv=False)
        np.testing.assert_allclose(values, 1.0, atol=POLYNOMIAL)

    def test_bfloat16_stays_close(self):
        steps, x = muon_split.coefficients(FLOAT32), normal(4, 32, 48)
        exact = muon_split.orthogonalize(x, steps, jnp.float32)
        rough = muon_split.orthogonalize(x, steps, jnp.bfloat16)
        self.assertEqual(rough.dtype, jnp.float32)
        self.assertLess(jnp.linalg.norm(rough - exact), HALF * jnp.linalg.norm(exact))
        self.assertGreater(jnp.linalg.norm(rough - exact), 0)

    def test_cpu_loops_over_matrices_and_accelerators_batch_them(self):
        steps, x = muon_split.coefficients(FLOAT32), normal(4, 12, 7)
        lowered = jax.jit(
            lambda x: muon_split.orthogonalize(x, steps, jnp.float32)
        ).trace(x)
        for platform, batch in (("cpu", "tensor<7x7x"), ("tpu", "tensor<4x7x7x")):
            text = lowered.lower(lowering_platforms=(platform,)).as_text()
            self.assertIn(f"{batch}f32>", text)

    def test_no_gradient_no_update(self):
        zeros = jnp.zeros((3, 4, 5))
        got = muon_split.orthogonalize(
            zeros, muon_split.coefficients(FLOAT32), "float32"
        )
        np.testing.assert_array_equal(got, zeros)

    @parameterized.parameters((3, 3), (5, 5), (7, 5))
    def test_the_last_coefficients_repeat(self, num_steps, num_distinct):
        config = dataclasses.replace(FLOAT32, ns_steps=num_steps)
        steps = muon_split.coefficients(config)
        table = muon_split.COEFFICIENTS["polar_express"]
        self.assertEqual(tuple(steps[:num_distinct]), table[:num_steps])
        self.assertEqual(list(steps[5:]), [table[-1]] * (num_steps - num_distinct))


class ScaleByMuonSplitTest(parameterized.TestCase):
    @parameterized.product(
        name=["quintic", "polar_express"], dims=["Q N H", "L C N P", "C N O"]
    )
    def test_equals_optax_head_by_head(self, name, dims):
        dims = tuple(dims.split())
        size = {"L": 2, "Q": 12, "N": 3, "H": 10, "C": 10, "P": 6, "O": 8}
        config = dataclasses.replace(FLOAT32, ns_coefficients=name)
        w = normal(*(size[name] for name in dims))
        got = updates([w], dims, config)
        steps = muon_split.COEFFICIENTS[name]
        oracle = contrib.scale_by_muon(steps[0] if len(steps) == 1 else steps)
        for index in np.ndindex(*w.shape[:-3], 3):
            head = (*index[:-1], slice(None), index[-1])
            alone, _ = oracle.update(w[head], oracle.init(w[head]))
            rms = 0.2 * max(alone.shape) ** 0.5
            np.testing.assert_allclose(got[head], rms * alone, atol=ROUNDING)

    def test_equals_optax_with_dimension_numbers_over_steps(self):
        # Without Nesterov: optax weighs the newest gradient by its bias correction,
        # which plain momentum does not have; a common factor alone drops out.
        config = dataclasses.replace(FLOAT32, muon_nesterov=False)
        grads = [normal(2, 12, 3, 10, seed=i) for i in range(4)]
        oracle = contrib.scale_by_muon(
            muon_split.COEFFICIENTS["polar_express"],
            nesterov=False,
            weight_dimension_numbers={"w": contrib.MuonDimensionNumbers(1, 3)},
        )
        state = oracle.init({"w": grads[0]})
        for grad in grads:
            expected, state = oracle.update({"w": grad}, state)
        got = updates(grads, ("L", "Q", "N", "H"), config, num_steps=4)
        rms = 0.2 * 12**0.5
        np.testing.assert_allclose(got, rms * expected["w"], atol=2 * ROUNDING)

    @parameterized.parameters(True, False)
    def test_momentum_is_that_of_a_float64_loop(self, nesterov):
        config = dataclasses.replace(FLOAT32, muon_nesterov=nesterov)
        grads = [normal(6, 9, seed=i) for i in range(3)]
        momentum = np.zeros((6, 9))
        for grad in np.float64(grads):
            momentum = 0.95 * momentum + grad
            direction = grad + 0.95 * momentum if nesterov else momentum
        expected = newton_schulz(direction, muon_split.coefficients(config))
        got = updates(grads, ("D", "F"), config, num_steps=3)
        np.testing.assert_allclose(got, 0.2 * 3 * expected, atol=DOUBLE)

    @parameterized.parameters("D F", "F D")
    def test_root_mean_square_in_closed_form(self, dims):
        # All singular values of an orthogonal matrix are equal, r^-1/2 after the
        # division by its norm, so that the matrix iteration is one of numbers.
        q, _ = np.linalg.qr(normal(24, 8))
        value = 8**-0.5
        for a, b, c in muon_split.coefficients(FLOAT32):
            value = a * value + b * value**3 + c * value**5
        grad = jnp.asarray(q if dims == "F D" else q.T)
        update = updates([grad], tuple(dims.split()), FLOAT32)
        rms = np.sqrt(np.mean(np.square(update)))
        self.assertAlmostEqual(rms, 0.2 * value, delta=ROUNDING)
        np.testing.assert_allclose(update, 0.2 * 24**0.5 * value * grad, atol=DOUBLE)

    @parameterized.named_parameters(
        ("query", ("Q", "N", "H"), (12, 3, 10)),
        ("key", ("C", "N", "P"), (10, 3, 6)),
        ("value", ("C", "N", "O"), (10, 3, 8)),
    )
    def test_split_off_is_the_whole_matrix(self, dims, shape):
        config = dataclasses.replace(FLOAT32, muon_split=False)
        w = normal(*shape)
        whole = updates([w.reshape(shape[0], -1)], ("D", "F"), FLOAT32)
        got = updates([w], dims, config)
        np.testing.assert_allclose(got, whole.reshape(shape), atol=ROUNDING)
        self.assertGreater(jnp.abs(updates([w], dims, FLOAT32) - got).max(), 0.01)

    @parameterized.named_parameters(
        ("rope", "muon_split_rope", ("Q", "N", "H"), (12, 3, 10), 6),
        ("latent", "muon_split_kv_a", ("L", "D", "C+R"), (2, 16, 14), 10),
    )
    def test_cut_weights_are_two_matrices(self, option, dims, shape, index):
        config = dataclasses.replace(FLOAT32, **{option: True})
        w = normal(*shape)
        parts = [updates([p], dims, FLOAT32) for p in jnp.split(w, [index], -1)]
        got = updates([w], dims, config)
        np.testing.assert_allclose(got, jnp.concatenate(parts, -1), atol=ROUNDING)

    def test_masked_leaves_are_left_alone(self):
        layouts = {"w": muon_split.Layout((), (0,), (1,)), "b": optax.MaskedNode()}
        transform = muon.scale_by_muon_split(layouts, FLOAT32)
        grads = {"w": normal(3, 4), "b": optax.MaskedNode()}
        update, _ = transform.update(grads, transform.init(grads))
        self.assertEqual(update["b"], optax.MaskedNode())


if __name__ == "__main__":
    environment.main()
