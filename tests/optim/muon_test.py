"""Muon Split against optax, closed forms and a float64 loop."""

import dataclasses
import functools
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from optax import contrib

from glm5_jax import config as config_lib
from glm5_jax import optim
from glm5_jax.optim import dimension_numbers, muon, newton_schulz, optimizer
from tests import environment
from tests.optim.loops import in_float64

MODEL = config_lib.ModelConfig(
    qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8, kv_lora_rank=10
)
FLOAT32 = config_lib.OptimConfig(ns_dtype="float32")
ROOT = pathlib.Path(__file__).parents[2]
POLAR = newton_schulz.coefficients("polar_express", 5)
ROUNDING = 4e-6  # of five steps of products in float32
DOUBLE = 2e-5  # float32 against a float64 loop: five steps amplify the rounding


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def updates(grads, dims, config, num_steps=1):
    numbers = optimizer.dimension_numbers_of(dims, config, MODEL)
    transform = muon.scale_by_muon_split(
        {"w": numbers},
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        ns_coefficients=config.ns_coefficients,
        ns_dtype=config.ns_dtype,
    )
    state, run = transform.init({"w": grads[0]}), jax.jit(transform.update)
    for grad in grads[:num_steps]:
        update, state = run({"w": grad}, state)
    return np.asarray(update["w"])


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
        steps = newton_schulz.COEFFICIENTS[name]
        # The quintic is optax's default.
        oracle = contrib.scale_by_muon(*[steps] * (name != "quintic"))
        of_head = jax.jit(lambda head: oracle.update(head, oracle.init(head))[0])
        for index in np.ndindex(*w.shape[:-3], 3):
            head = (*index[:-1], slice(None), index[-1])
            alone = of_head(w[head])
            rms = 0.2 * max(alone.shape) ** 0.5
            np.testing.assert_allclose(got[head], rms * alone, atol=ROUNDING)

    def test_equals_optax_with_dimension_numbers_over_steps(self):
        # Without Nesterov, where optax's bias correction weighs the newest gradient
        # differently; without it, the correction is a common factor, which drops out.
        config = dataclasses.replace(FLOAT32, muon_nesterov=False)
        grads = [normal(2, 12, 3, 10, seed=i) for i in range(4)]
        oracle = contrib.scale_by_muon(
            newton_schulz.COEFFICIENTS["polar_express"],
            nesterov=False,
            weight_dimension_numbers={"w": contrib.MuonDimensionNumbers(1, 3)},
        )
        state, run = oracle.init({"w": grads[0]}), jax.jit(oracle.update)
        for grad in grads:
            expected, state = run({"w": grad}, state)
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
        expected = in_float64(direction, POLAR)
        got = updates(grads, ("D", "F"), config, num_steps=3)
        np.testing.assert_allclose(got, 0.2 * 3 * expected, atol=DOUBLE)

    @parameterized.parameters("D F", "F D")
    def test_root_mean_square_in_closed_form(self, dims):
        # All singular values of an orthogonal matrix are equal, r^-1/2 after the
        # division by its norm, so that the matrix iteration is one of numbers.
        q, _ = np.linalg.qr(normal(24, 8))
        value = 8**-0.5
        for a, b, c in POLAR:
            value = a * value + b * value**3 + c * value**5
        grad = np.ascontiguousarray(q if dims == "F D" else q.T)
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
        self.assertGreater(np.abs(updates([w], dims, FLOAT32) - got).max(), 0.01)

    @parameterized.named_parameters(
        ("rope", "muon_split_rope", ("Q", "N", "H"), (12, 3, 10), 6),
        ("latent", "muon_split_kv_a", ("L", "D", "C+R"), (2, 16, 14), 10),
    )
    def test_cut_weights_are_two_matrices(self, option, dims, shape, index):
        config = dataclasses.replace(FLOAT32, **{option: True})
        w = normal(*shape)
        parts = [updates([p], dims, FLOAT32) for p in np.split(w, [index], -1)]
        got = updates([w], dims, config)
        np.testing.assert_allclose(got, np.concatenate(parts, -1), atol=ROUNDING)


class EachMatrixTest(parameterized.TestCase):
    """Matrices of one shape share a call, which is a loop to compile."""

    LEAVES = (  # the shape of an array, and its DimensionNumbers
        ((2, 5, 3, 10), {"rows": 1, "cols": 3}),  # [2, 3] matrices of 5 rows
        ((10, 5), {"rows": 0, "cols": 1}),
        ((4, 12, 5), {"rows": 1, "cols": 2, "cut": (1, 10)}),  # 10 rows, and 2
        ((7, 7), {"rows": 0, "cols": 1}),
        ((5, 10, 9), {"rows": 0, "cols": 1}),  # too large to share
    )

    @parameterized.parameters((400, 4), (10**6, 3), (0, 6))
    def test_as_one_by_one(self, most, num_calls):
        arrays = [normal(*shape, seed=i) for i, (shape, _) in enumerate(self.LEAVES)]
        layouts = [
            dimension_numbers.DimensionNumbers(**numbers).layout(len(shape))
            for shape, numbers in self.LEAVES
        ]
        calls = []

        def function(x):  # as Newton-Schulz: the transpose's result is transposed
            calls.append(x.shape)
            return x @ x.mT @ x / (1 + jnp.sum(x**2, (-2, -1), keepdims=True))

        got = muon._each_matrix(function, list(map(jnp.asarray, arrays)), layouts, most)
        self.assertLen(calls, num_calls)
        for x, layout, result in zip(arrays, layouts, got, strict=True):
            parts = [
                m @ m.mT @ m / (1 + (m**2).sum((-2, -1), keepdims=True))
                for m in layout.split(jnp.asarray(x))
            ]
            expected = layout.join(parts, x.shape)
            np.testing.assert_allclose(result, expected, atol=ROUNDING)

    def test_a_mesh_whose_compiler_chooses_copies_nothing(self):
        params = {"a": normal(8, 4), "b": normal(8, 4, seed=1)}
        transform = muon.scale_by_muon_split()
        state = transform.init(params)
        program = lambda: str(jax.make_jaxpr(transform.update)(params, state))
        self.assertIn("concatenate", program())
        with jax.set_mesh(jax.make_mesh((2,), ("data",))):
            self.assertNotIn("concatenate", program())


class MuonSplitTest(parameterized.TestCase):
    """The transformation alone: no config, any dict of parameters."""

    def test_plain_matrices_are_those_of_optax(self):
        params = {"a": normal(6, 9), "b": {"c": normal(9, 4, seed=1)}}
        settings = {"weight_decay": 0.5, "nesterov": False}
        transform = optim.muon_split(0.1, ns_dtype="float32", **settings)
        oracle = contrib.muon(
            0.1, ns_coeffs=POLAR, consistent_rms=0.2, adaptive=False, **settings
        )
        state, other = transform.init(params), oracle.init(params)
        run, wanted = jax.jit(transform.update), jax.jit(oracle.update)
        for seed in (2, 3):
            draw = functools.partial(normal, seed=seed)
            grads = jax.tree.map(lambda x, draw=draw: draw(*x.shape), params)
            got, state = run(grads, state, params)
            expected, other = wanted(grads, other, params)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=ROUNDING),
                got,
                expected,
            )

    @parameterized.named_parameters(
        ("heads_first", (3, 10, 12), 2, 1, "nhq->nqh"),
        ("heads_last", (10, 12, 3), -2, -3, "hqn->nqh"),
        ("two_batch_dims", (12, 2, 10, 3), 0, 2, "qlhn->lnqh"),
        ("more_matrices_than_rows", (20, 3, 4), 1, 2, "nqh->nqh"),
        ("merged_rows", (4, 3, 10), (0, 1), 2, "abh->(ab)h"),
        ("merged_across", (3, 10, 4), (2, 0), 1, "bha->(ab)h"),
    )
    def test_any_layout_is_a_loop_over_matrices(self, shape, rows, cols, letters):
        w = normal(*shape)
        numbers = {"w": optim.DimensionNumbers(rows, cols)}
        transform = optim.scale_by_muon_split(numbers, ns_dtype="float32")
        run = jax.jit(lambda grads: transform.update(grads, transform.init(grads))[0])
        got = jax.device_get(run({"w": w}))
        before, after = letters.split("->")
        order = [before.index(letter) for letter in after.strip("()") if letter != ")"]
        moved = np.float64(w.transpose(order))
        stack = moved.reshape(-1, *moved.shape[-2:])
        if "(" in letters:
            stack = moved.reshape(1, -1, moved.shape[-1])
        expected = [
            0.2 * max(m.shape) ** 0.5 * in_float64(m, POLAR) for m in (1.95 * stack)
        ]
        result = got["w"].transpose(order).reshape(stack.shape)
        np.testing.assert_allclose(result, expected, atol=2 * DOUBLE)

    def test_joins_chain_and_partition_under_jit(self):
        params = {"q": normal(8, 2, 4), "mlp": {"w": normal(8, 6)}, "norm": normal(8)}
        numbers = {"q": optim.DimensionNumbers(rows=0, cols=2)}
        rate = optax.linear_schedule(0.1, 0.0, 4)
        transform = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.partition(
                {"muon": optim.muon_split(rate, numbers), "adam": optax.adam(rate)},
                {"q": "muon", "mlp": {"w": "muon"}, "norm": "adam"},
            ),
        )
        state = transform.init(params)
        update = jax.jit(transform.update)
        sizes = []
        for _ in range(3):
            updates, state = update(params, state, params)
            sizes.append(jnp.sqrt(jnp.mean(jnp.square(updates["q"]))))
            params = optax.apply_updates(params, updates)
        self.assertEqual(params["q"].dtype, jnp.float32)
        # Per-head matrices [8, 4] have root mean square 0.2, decay adds up to 0.1.
        self.assertBetween(sizes[0], 0.1 * 0.2, 0.1 * 0.4)
        self.assertLess(sizes[2], 0.7 * sizes[0])

    @parameterized.named_parameters(
        ("missing", {}, r"\['w'\].*\(2, 3, 4\)"),
        ("impossible", {"w": optim.DimensionNumbers(0, 3)}, r"\['w'\].*3 dims"),
    )
    def test_an_array_that_is_not_described_is_named(self, numbers, message):
        transform = optim.muon_split(0.1, numbers)
        grads = {"w": normal(2, 3, 4)}
        with self.assertRaisesRegex(ValueError, message):
            transform.update(grads, transform.init(grads), grads)

    def test_defaults_are_those_of_a_run(self):
        config = config_lib.OptimConfig()
        run = {
            "weight_decay": config.weight_decay,
            "momentum": config.muon_momentum,
            "nesterov": config.muon_nesterov,
            "update_rms": config.muon_update_rms,
            "ns_coefficients": config.ns_coefficients,
            "ns_dtype": jnp.dtype(config.ns_dtype),
            "moment_dtype": jnp.dtype(config.moment_dtype),
        }
        for function in (optim.muon_split, optim.scale_by_muon_split):
            for name, value in inspect.signature(function).parameters.items():
                if name in run:
                    self.assertEqual(value.default, run[name], name)

    def test_the_example_of_the_documentation_learns(self):
        text = (ROOT / "docs" / "muon.md").read_text(encoding="utf-8")
        example = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
        names = {}
        exec(compile(example, "docs/muon.md", "exec"), names)
        self.assertLess(names["loss"](names["params"]), 0.01)  # it begins at 16


if __name__ == "__main__":
    environment.main()
