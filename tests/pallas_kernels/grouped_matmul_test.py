"""Grouped products against their definition, and the definition against a loop."""

import contextlib
import dataclasses
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import chips, dispatch, grouped_matmul
from pallas_kernels.grouped_matmul import batched
from tests import environment
from tests.pallas_kernels.dispatch_test import meant_for

E, K, N = 5, 12, 10
RTOL = 2e-5  # two orders of summation in float32
# Rows, and the rows of each group: none, tails, more than a tile, less than all rows.
CASES = (
    ("even", 40, (8, 8, 8, 8, 8)),
    ("empty_groups", 40, (0, 21, 0, 19, 0)),
    ("one_group", 40, (0, 0, 40, 0, 0)),
    ("rows_without_group", 40, (3, 0, 20, 1, 6)),
    ("no_group_has_rows", 40, (0, 0, 0, 0, 0)),
    ("many_tiles", 700, (1, 333, 0, 129, 237)),
)


def make_inputs(num_rows, dtype=jnp.float32):
    rng = np.random.default_rng(num_rows)
    x, w = rng.normal(size=(num_rows, K)), rng.normal(size=(E, K, N))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def loop(x, w, sizes):
    """Row by row, in float64."""
    y = np.zeros((x.shape[0], w.shape[2]))
    groups = np.repeat(np.arange(E), sizes)
    for row, e in enumerate(groups):
        y[row] = np.asarray(x, np.float64)[row] @ np.asarray(w, np.float64)[e]
    return y


@functools.partial(jax.jit, static_argnums=4)
def value_and_gradients(x, w, sizes, dy, implementation):
    """y, dx and dw."""
    run = lambda x, w: grouped_matmul(x, w, sizes, implementation=implementation)
    y, pull = jax.vjp(run, x, w)
    return y, *pull(dy)


class GroupedMatmulTest(parameterized.TestCase):
    @parameterized.named_parameters(*CASES)
    def test_definition_is_a_loop(self, num_rows, sizes):
        x, w = make_inputs(num_rows)
        got = grouped_matmul(x, w, jnp.asarray(sizes), implementation="reference")
        np.testing.assert_allclose(got, loop(x, w, sizes), rtol=1e-4, atol=1e-5)

    @parameterized.parameters("blocked", "batched", "ragged_dot", "reference")
    def test_products_and_gradients_have_the_types_of_what_they_are_of(self, name):
        for rows, matrices in (("bfloat16", "float32"), ("float32", "bfloat16")):
            x, w = (
                x.astype(t)
                for x, t in zip(make_inputs(8), (rows, matrices), strict=True)
            )
            y = jax.ShapeDtypeStruct((8, N), rows)
            sizes = jnp.asarray([8, 0, 0, 0, 0])
            got = jax.eval_shape(value_and_gradients, x, w, sizes, y, name)
            self.assertEqual([str(a.dtype) for a in got], [rows, rows, matrices])

    @parameterized.product(
        case=CASES, implementation=("blocked", "batched", "ragged_dot")
    )
    def test_equals_definition_with_gradients(self, case, implementation):
        _, num_rows, sizes = case
        x, w = make_inputs(num_rows)
        sizes = jnp.asarray(sizes)
        dy = jnp.asarray(np.random.default_rng(1).normal(size=(num_rows, N)))
        dy = dy.astype(jnp.float32)
        got, want = (
            value_and_gradients(x, w, sizes, dy, name)
            for name in (implementation, "reference")
        )
        for g, wanted in zip(got, want, strict=True):
            np.testing.assert_allclose(g, wanted, rtol=RTOL, atol=RTOL * 10)

    @parameterized.product(implementation=("blocked", "batched", "ragged_dot"))
    def test_bfloat16_rounds_once(self, implementation):
        """Products are summed in float32: an error of one rounding of the result."""
        _, num_rows, sizes = CASES[-1]
        x, w = make_inputs(num_rows, jnp.bfloat16)
        sizes, dy = jnp.asarray(sizes), jnp.ones((num_rows, N), jnp.bfloat16)
        got = value_and_gradients(x, w, sizes, dy, implementation)
        self.assertEqual({g.dtype for g in got}, {jnp.dtype(jnp.bfloat16)})
        x, w, dy = (a.astype(jnp.float32) for a in (x, w, dy))
        wanted = value_and_gradients(x, w, sizes, dy, "reference")
        for g, want in zip(got, wanted, strict=True):
            error = np.abs(np.asarray(g, np.float32) - want)
            # half a unit in the last of 8 bits, and cancellation
            self.assertLess((error - 2.0**-8 * np.abs(want)).max(), 1e-2)

    @parameterized.parameters(
        (None, None, None),
        ("v5p", None, "ragged_dot"),  # XLA's own product wastes no work there
        ("v5p", "blocked", "blocked"),
        ("h200", None, None),
    )
    def test_xla_has_the_product_of_tpus(self, chip, asked, wanted):
        x, w = make_inputs(23)
        sizes = jnp.asarray([0, 11, 0, 12, 0])
        here = meant_for(chips.CHIPS[chip]) if chip else contextlib.nullcontext()
        out = jnp.zeros((23, N))
        with here, mock.patch.object(dispatch, "run", return_value=out) as run:
            grouped_matmul(x, w, sizes, implementation=asked)
        self.assertEqual(run.call_args.args[1], wanted)

    def test_new_group_sizes_do_not_recompile(self):
        traces = []

        @jax.jit
        def gradients(x, w, sizes):
            traces.append(sizes)
            loss = lambda x, w: jnp.sum(jnp.sin(grouped_matmul(x, w, sizes)))
            return jax.grad(loss, argnums=(0, 1))(x, w)

        x, w = make_inputs(23)
        for sizes in ((0, 11, 0, 12, 0), (23, 0, 0, 0, 0), (1, 2, 3, 4, 5)):
            gradients(x, w, jnp.asarray(sizes))
        self.assertLen(traces, 1)
        self.assertEqual(gradients._cache_size(), 1)

    @parameterized.parameters((40, 8), (700, 64), (7000, 128))
    def test_values_and_gradients_take_tiles_of_half_a_group(self, num_rows, size):
        """A power of two, from 8 to 128; a mean group has a fifth of the rows."""
        x, w = make_inputs(num_rows)
        sizes = jnp.full(E, num_rows // E)
        run = functools.partial(value_and_gradients, implementation="blocked")
        program = str(jax.make_jaxpr(run)(x, w, sizes, jnp.zeros((num_rows, N))))
        tiles = re.findall(r"slice_sizes=\((\d+), \d+\)", program)
        self.assertEqual(set(tiles), {str(size)})
        self.assertGreaterEqual(len(tiles), 4)  # y, dx, and both factors of dw

    def test_chunks_of_tiles_make_up_the_whole(self):
        """A matrix at a time, of 120 numbers; the last chunk is not filled."""
        _, num_rows, sizes = CASES[-1]
        x, w = make_inputs(num_rows)
        dy = jnp.ones((num_rows, N))
        run = functools.partial(value_and_gradients.__wrapped__, x, w)
        run = jax.jit(run, static_argnums=2)
        with mock.patch.object(batched, "COPIED_BYTES", 3 * 4 * K * N):
            got = run(jnp.asarray(sizes), dy, "batched")
        want = run(jnp.asarray(sizes), dy, "reference")
        for g, wanted in zip(got, want, strict=True):
            np.testing.assert_allclose(g, wanted, rtol=RTOL, atol=RTOL * 100)

    def test_gpus_without_kernels_run_no_loop_over_a_groups_rows(self):
        """Its length would depend on the routing, and the host would run it."""
        x, w = make_inputs(700)
        other = dataclasses.replace(chips.CHIPS["h200"], device_kinds=("Tesla T4",))
        run = functools.partial(value_and_gradients.__wrapped__, implementation=None)
        with meant_for(other), self.assertWarnsRegex(UserWarning, "Tesla T4"):
            dispatch._warn_once.cache_clear()
            traced = jax.make_jaxpr(run)(x, w, jnp.full(E, 140), jnp.ones((700, N)))
        self.assertNotIn("while", str(traced))
        self.assertIn("scan", str(traced))

    def test_unknown_implementation(self):
        x, w = make_inputs(8)
        with self.assertRaisesRegex(NotImplementedError, "implementation.*'fast'"):
            grouped_matmul(x, w, jnp.full(E, 1), implementation="fast")


if __name__ == "__main__":
    environment.main()
