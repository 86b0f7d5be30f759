"""Collectives counted in compiled programs whose traffic is known in closed form."""

import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from glm5_jax.scale.hlo import communication
from glm5_jax.scale.hlo import parser as hlo
from tests import environment

TEXTS = pathlib.Path(__file__).parent / "texts"
SIZES = {"a": 2, "b": 4}
N, ITEM = 1024, 4  # float32 elements of a device's part, and their bytes
# libtpu pads what a fused reduce-scatter cuts, and moves the padding separately.
PADDED_RTOL = 0.07


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def traffic_of(body):
    """Compiles body(part) under a shard_map of all axes and reads its collectives."""
    split = PartitionSpec(("a", "b"))
    function = jax.shard_map(
        body, mesh=mesh(), in_specs=split, out_specs=split, check_vma=False
    )
    x = jax.ShapeDtypeStruct((8 * N,), jnp.float32)
    text = jax.jit(function).lower(x).compile().as_text()
    return communication.find(hlo.parse(text), SIZES)


def repeated(body, *lengths):
    """A nest of scans around body, the outermost first."""
    for length in reversed(lengths):
        body = functools.partial(
            lambda inner, n, x: lax.scan(lambda c, _: (inner(c), None), x, length=n)[0],
            body,
            length,
        )
    return body


def gather(x):
    return 2 * lax.all_gather(x, "b", tiled=True)[:N]


def scatter(x):
    return jnp.tile(lax.psum_scatter(x, "b", tiled=True), 4)


def swap(x):
    return lax.ppermute(x + 1, "a", [(0, 1), (1, 0)])


def exchange(x):
    return lax.all_to_all(x.reshape(4, -1), "b", 0, 0, tiled=True).reshape(-1) + 1


class ClosedFormTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("all_gather", gather, "all-gather", ("b",), 3 / 4 * 4 * N),
        ("psum", lambda x: lax.psum(x, "a") / 2, "all-reduce", ("a",), 2 * N / 2),
        (
            "psum_of_both",
            lambda x: lax.psum(x, ("a", "b")) / 8,
            "all-reduce",
            ("a", "b"),
            2 * 7 / 8 * N,
        ),
        ("psum_scatter", scatter, "reduce-scatter", ("b",), 3 / 4 * N),
        ("ppermute", swap, "collective-permute", ("a",), N),
        ("all_to_all", exchange, "all-to-all", ("b",), 3 / 4 * N),
    )
    def test_bytes_axes_and_runs(self, body, kind, axes, elements):
        for lengths in ((), (5,), (3, 7)):
            times = math.prod(lengths)
            traffic = traffic_of(repeated(body, *lengths))
            self.assertEmpty(traffic.uncounted_loops)
            got = {(c.kind, c.axes) for c in traffic.collectives}
            self.assertEqual(got, {(kind, axes)})
            self.assertEqual(sum(c.count for c in traffic.collectives), times)
            wire = sum(c.wire_bytes for c in traffic.collectives)
            self.assertEqual(wire, elements * ITEM * times)

    def test_totals_add_several_loops(self):
        def body(x):
            x = repeated(lambda x: swap(gather(x)), 5)(x)
            return repeated(gather, 2, 3)(x)

        totals = traffic_of(body).total("kind", "axes")
        self.assertEqual(totals["all-gather", "b"], (11, 11 * 3 * N * ITEM))
        self.assertEqual(totals["collective-permute", "a"], (5, 5 * N * ITEM))

    def test_a_loop_as_long_as_data_says_counts_once_and_is_told(self):
        def body(x):
            return lax.while_loop(lambda x: jnp.sum(x) < 7, gather, x)

        traffic = traffic_of(body)
        self.assertLen(traffic.uncounted_loops, 1)
        self.assertEqual(traffic.collectives[0].count, 1)

    def test_of_a_conditional_the_branch_that_sends_most(self):
        def body(x):
            few = lambda x: lax.psum(x, "a")
            many = lambda x: gather(lax.psum(x, "a"))
            return lax.cond(lax.psum(x[0], ("a", "b")) > 0, many, few, x)

        totals = traffic_of(body).total("kind", "axes")
        self.assertEqual(totals["all-gather", "b"], (1, 3 * N * ITEM))
        self.assertEqual(totals["all-reduce", "a"], (1, N * ITEM))

    def test_phase_and_scope(self):
        def body(x):
            def loss(x):
                with jax.named_scope("moe"), jax.named_scope("experts"):
                    return jnp.sum(jnp.sin(lax.all_gather(x, "b", tiled=True)))

            grads = jax.grad(jax.checkpoint(loss))(x)
            with jax.named_scope("optimizer"):
                return grads / lax.psum(jnp.sum(grads), "a")

        found = traffic_of(body).collectives
        got = {(c.kind, c.phase, c.scope) for c in found}
        self.assertIn(("reduce-scatter", "backward", "moe/experts"), got)
        self.assertIn(("all-reduce", "optimizer", "optimizer"), got)


class GroupsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("listed", "{{0,2},{1,3}}, x={}", [0, 2], 4),
        ("iota", "[2,4]<=[8], dimensions={0}", [0, 1, 2, 3], 8),
        ("transposed", "[4,2]<=[2,4]T(1,0)", [0, 4], 8),
        ("of_three", "[2,4]<=[2,2,2]T(1,0,2)", [0, 1, 4, 5], 8),
        ("axis", "mesh['a'=2,'b'=4] {'a'}", [0, 4], 8),
        ("axes", "mesh['a'=2,'b'=4,'c'=1] {'b','c'}", [0, 1, 2, 3], 8),
        ("outer_factor", "mesh['a'=2,'b'=4] {'b':(1)2}", [0, 2], 8),
        ("inner_factor", "mesh['a'=2,'b'=4] {'b':(2)2}", [0, 1], 8),
        ("all", "{}, to_apply=%add", list(range(8)), 8),
    )
    def test_syntaxes(self, text, first, num_in_all):
        got = communication.groups(f"(%x), replica_groups={text}", 8)
        self.assertEqual(got, (first, num_in_all))

    def test_mesh_form_is_numpys(self):
        """Against reshape and transpose, for a factor in the middle of an axis."""
        ids = np.arange(48).reshape(2, 2, 3, 2, 2)  # b = 12 = 2 x 3 x 2
        want = ids.transpose(0, 1, 3, 4, 2).reshape(-1, 3)[0].tolist()
        text = "replica_groups=mesh['a'=2,'b'=12,'c'=2] {'b':(2)3}"
        self.assertEqual(communication.groups(text, 48)[0], want)


class LibtpuTest(parameterized.TestCase):
    """Texts of libtpu 0.0.51: a scan of 6 over h = relu(x W), y = scatter(h W^T).

    W [2048, 4096] in bfloat16 is gathered over fsdp; y has 512 rows a device.
    """

    def check(self, name, mesh, num_slices=1):
        module = hlo.parse((TEXTS / f"{name}.hlo").read_text())
        mesh = {"data": num_slices, **mesh, "tensor": 1, "context": 1}
        traffic = communication.find(module, mesh, num_slices)
        self.assertEmpty(traffic.uncounted_loops)
        fsdp, expert = mesh["fsdp"], mesh["expert"]
        totals = traffic.total("kind", "axes")
        weight, rows = 2048 * 4096 * 2, 512 * expert * 2048 * 2
        wire = 6 * weight * (fsdp - 1) / fsdp
        self.assertEqual(totals["all-gather", "fsdp"], (6, wire))
        runs, got = totals["reduce-scatter", "expert"]
        self.assertEqual(runs, 6)
        want = 6 * rows * (expert - 1) / expert
        np.testing.assert_allclose(got, want, rtol=PADDED_RTOL)
        return totals

    def test_reduce_scatter_that_is_written_as_an_all_reduce(self):
        totals = self.check("v5p", {"fsdp": 2, "expert": 4})
        self.assertNotIn("all-reduce", [kind for kind, _ in totals])

    def test_collectives_behind_calls_of_the_sparse_core(self):
        self.check("tpu7x", {"fsdp": 4, "expert": 2})

    def test_traffic_between_slices_is_sent_by_the_host(self):
        totals = self.check("slices", {"fsdp": 2, "expert": 2}, 2)
        self.assertEqual(totals["all-reduce", "dcn"], (1, 512 * 2048 * 2))


class ScopeTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (
            "layer",
            "jit(f)/jvp(layers_1)/while/body/eval_jaxpr/moe/router/top_k",
            "layers_1/moe/router",
        ),
        (
            "backward",
            "jit(f)/transpose(jvp(mtp))/while/body/checkpoint/rematted_computation/"
            "attention/shard_map/all_gather",
            "mtp/attention",
        ),
        ("einsum", "jit(f)/jvp(head)/while/body/td,dv->tv/dot_general", "head"),
        (
            "optimizer",
            "jit(f)/optimizer/cond/branch_1_fun/newton_schulz/dot_general",
            "optimizer/newton_schulz",
        ),
        ("bare", "jit(f)/jvp()/reduce_sum", ""),
    )
    def test_named_scopes_alone_are_left(self, op_name, want):
        self.assertEqual(communication.scope(op_name), want)


if __name__ == "__main__":
    environment.main()
