"""FLOPs of programs that can be counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax import ad_checkpoint, lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

from glm5_jax.model import expert_rounds
from glm5_jax.scale.compiled import flops
from tests import environment

A, B, C = 8, 16, 32
PRODUCT = 2 * A * B * C
UNNAMED = "kernel without a name"
X = jax.ShapeDtypeStruct((A, B), jnp.float32)
W = jax.ShapeDtypeStruct((B, C), jnp.float32)


def count(function, *args, num_devices=1):
    return flops.of_traced(jax.jit(function).trace(*args), num_devices)


def matmul(x, w):
    return x @ w


class DenseTest(parameterized.TestCase):
    def test_gradients_are_two_more_products(self):
        self.assertEqual(count(matmul, X, W).total, PRODUCT)
        square = lambda x, w: jnp.sum(matmul(x, w) ** 2)
        self.assertEqual(count(jax.grad(square, (0, 1)), X, W).total, 3 * PRODUCT)

    def test_recomputation_counts(self):
        layer = lambda x, w: jnp.sin(matmul(x, w)) @ w.T
        loss = lambda f: jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))
        plain, again = (
            count(loss(layer), X, W),
            count(loss(jax.checkpoint(layer)), X, W),
        )
        self.assertEqual(plain.total, 6 * PRODUCT)
        self.assertEqual(again.total, 7 * PRODUCT)  # the inner product, not the outer

    def test_batched_products(self):
        q = jax.ShapeDtypeStruct((3, A, 5, B), jnp.float32)
        scores = lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k)
        self.assertEqual(count(scores, q, q).total, 2 * 3 * 5 * A * A * B)

    def test_scans_count_as_often_as_they_run(self):
        def f(x, w):
            def inner(x, _):
                return matmul(x, w) @ w.T, None

            outer = lambda x, _: lax.scan(inner, x, None, length=3)
            return lax.scan(lambda x, _: (outer(x, _)[0], None), x, None, length=5)[0]

        self.assertEqual(count(f, X, W).total, 15 * 2 * PRODUCT)

    def test_loops_over_what_overflows_do_not_count(self):
        """Nor in gradients; other loops of unknown length count once."""

        def loop(x, w):
            step = lambda carry: (carry[0] + 1, jnp.sin(matmul(carry[1], w) @ w.T))
            return lax.while_loop(lambda c: c[0] < c[1][0, 0], step, (0.0, x))[1]

        def scoped(x, w):
            with jax.named_scope("overflow"):
                return loop(x, w)

        plain, free = (count(f, X, W) for f in (loop, scoped))
        self.assertEqual((plain.total, plain.num_unknown_loops), (2 * PRODUCT, 1))
        self.assertEqual((free.total, free.num_unknown_loops), (0, 0))
        summed = lambda x, w: expert_rounds.summed(
            lambda n, _, arrays: matmul(*arrays), jnp.int32(1), (), (x, w)
        )
        self.assertEqual(count(summed, X, W).total, PRODUCT)
        square = lambda x, w: jnp.sum(summed(x, w) ** 2)
        self.assertEqual(count(jax.grad(square, (0, 1)), X, W).total, 3 * PRODUCT)

    def test_of_a_conditional_the_dearer_branch(self):
        def f(x, w):
            more = lambda: matmul(matmul(x, w), w.T)
            return lax.cond(x[0, 0] > 0, more, lambda: x)

        self.assertEqual(count(f, X, W).total, 2 * PRODUCT)

    def test_a_loop_of_unknown_length_counts_once_and_is_told(self):
        def f(x, w):
            step = lambda x: matmul(x, w) @ w.T
            return lax.while_loop(lambda x: jnp.sum(x) < 1, step, x)

        got = count(f, X, W)
        self.assertEqual(got.total, 2 * PRODUCT)
        self.assertEqual(got.num_unknown_loops, 1)


class DevicesTest(parameterized.TestCase):
    def test_dims_that_jit_splits_are_split_evenly(self):
        self.assertEqual(count(matmul, X, W, num_devices=4).total, PRODUCT / 4)

    def test_a_shard_map_counts_its_local_shapes(self):
        """Split over a and b, and repeated on every device of c."""
        mesh = jax.make_mesh(
            (2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3
        )
        spec = PartitionSpec
        f = jax.shard_map(
            matmul,
            mesh=mesh,
            in_specs=(spec("a"), spec(None, "b")),
            out_specs=spec("a", "b"),
            check_vma=False,
        )
        self.assertEqual(count(f, X, W, num_devices=8).total, PRODUCT / 4)


class GroupedTest(parameterized.TestCase):
    def test_each_row_meets_one_group_and_so_do_its_gradients(self):
        w = jax.ShapeDtypeStruct((4, B, C), jnp.float32)
        sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
        loss = lambda x, w, sizes: jnp.sum(lax.ragged_dot(x, w, sizes) ** 2)
        self.assertEqual(count(loss, X, w, sizes).total, PRODUCT)
        got = count(jax.grad(loss, (0, 1)), X, w, sizes)
        self.assertEqual(got.by_kind, {flops.GROUPED: 3 * PRODUCT})
        self.assertEqual(got.at_even_load(4).total, 3 * PRODUCT / 4)


class KernelTest(parameterized.TestCase):
    def kernel(self, **options):
        def body(x_ref, w_ref, out_ref):
            out_ref[...] = jnp.dot(x_ref[...], w_ref[...])

        return pl.pallas_call(
            body,
            grid=(2,),
            in_specs=[
                pl.BlockSpec((A // 2, B), lambda i: (i, 0)),
                pl.BlockSpec((B, C), lambda i: (0, 0)),
            ],
            out_specs=pl.BlockSpec((A // 2, C), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((A, C), jnp.float32),
            interpret=True,
            **options,
        )

    def test_body_times_grid(self):
        self.assertEqual(count(self.kernel(), X, W).by_kind, {UNNAMED: PRODUCT})

    def test_one_whose_results_nobody_reads_does_not_count(self):
        """Recomputing it brings nothing: what the gradient reads was kept."""

        @jax.custom_vjp
        def f(x, w):
            return self.kernel()(x, w)

        def forward(x, w):
            out = ad_checkpoint.checkpoint_name(self.kernel()(x, w), "kept")
            return out, (w, out)

        def backward(kept, d):
            w, out = kept
            return (d * out) @ w.T, jnp.zeros_like(w)

        f.defvjp(forward, backward)
        policy = jax.checkpoint_policies.save_only_these_names("kept")
        run = lambda x, w: jnp.sum(jax.checkpoint(f, policy=policy)(x, w))
        traced = jax.jit(jax.grad(run)).trace(X, W)
        # jax 0.12 drops the kernel of the recomputation itself, earlier ones keep it.
        self.assertIn(str(traced.jaxpr).count("pallas_call"), (1, 2))
        found = flops.of_traced(traced, 1).by_kind
        self.assertEqual(found, {UNNAMED: PRODUCT, "dense products": PRODUCT})

    def test_or_the_cost_that_a_kernel_states(self):
        said = pl.CostEstimate(flops=77, transcendentals=0, bytes_accessed=0)
        got = count(self.kernel(cost_estimate=said), X, W)
        self.assertEqual(got.by_kind, {UNNAMED: 77})


class ModelTest(parameterized.TestCase):
    def test_a_forward_pass_is_two_per_active_weight(self):
        """Up to attention: on rows of one token there is next to none."""
        from glm5_jax import presets
        from glm5_jax.model import transformer
        from glm5_jax.training.reporting import accounting

        config = presets.GLM5_1M
        params = transformer.abstract_params(config)
        tokens = jax.ShapeDtypeStruct((512, 1), jnp.int32)

        def forward(params, tokens):
            hidden = transformer.forward(params, config, tokens).hidden
            return transformer.logits(params, config, hidden)

        got = count(forward, params, tokens).total / tokens.size
        active = accounting.count_parameters(config)["active"]
        np.testing.assert_allclose(got, 2 * active, rtol=0.25)


if __name__ == "__main__":
    environment.main()
