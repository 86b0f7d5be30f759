"""Muon on a mesh: the same updates as on one device, and its collectives."""

import collections
import functools
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax import sharding
from glm5_jax.model import transformer
from glm5_jax.optim import (
    dimension_numbers,
    matrix_groups,
    muon,
    muon_mesh,
    optimizer,
)
from glm5_jax.scale.hlo import communication as wires
from tests import environment, runs
from tests.model import tiny
from tests.optim import parameter_tree

# 16: to be divided by every axis below. Stacked layers, and the MTP module's alone.
MODEL = tiny.model(kv_lora_rank=16, num_hidden_layers=2, first_k_dense_replace=0)
DIMS = transformer.param_dims(MODEL)
MESHES = {
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "expert8": {"expert": 8},
    "tensor2_fsdp4": {"tensor": 2, "fsdp": 4},
    "context2_fsdp2_expert2": {"context": 2, "fsdp": 2, "expert": 2},
    "data2_fsdp2_expert2": {"data": 2, "fsdp": 2, "expert": 2},
}
# Relative to the norm of a parameter after two updates with a learning rate of 1:
# sums of products in another order, amplified by five steps.
ROUNDING = 1e-6


def mesh_of(axes):
    return mesh_lib.make_mesh(config_lib.MeshConfig(**({"data": 1} | axes)))


def make(**fields):
    fields = {"learning_rate": 1.0, "end_learning_rate": 1.0} | fields
    config = config_lib.OptimConfig(ns_dtype="float32", **fields)
    return optimizer.make_optimizer(config, MODEL, DIMS, 20)


def update(opt, params, state, grads):
    return optimizer.update_if_finite(opt, grads, state, params)


def compiled_once(opt):
    return jax.jit(lambda *args: update(opt, *args))


def run(opt, trees, step=None):
    """Returns parameters, state and metrics after an update with each gradient."""
    params, *grads = trees
    step = step or compiled_once(opt)
    state = jax.jit(opt.init)(params)
    for grad in grads:
        params, state, metrics = step(params, state, grad)
    return jax.device_get((params, state, metrics))


def run_on(mesh, opt, trees, step=None):
    with jax.set_mesh(mesh):
        places = [sharding.shardings(DIMS, mesh)] * len(trees)
        return run(opt, jax.device_put(trees, places), step)


@functools.cache
def on_one_device():
    return run(make(), trees())


def trees():
    return [jax.device_get(tiny.params(MODEL, seed)) for seed in range(3)]


def muon_leaves(model):
    config = config_lib.OptimConfig()
    dims = transformer.param_dims(model)
    return optimizer.muon_leaves(
        config, model, dims, transformer.abstract_params(model)
    )


def difference(got, expected):
    """Returns the largest difference of all arrays, relative to the array's norm."""
    norms = jax.tree.map(
        lambda a, b: np.linalg.norm(a - b) / max(np.linalg.norm(b), 1), got, expected
    )
    return max(jax.tree.leaves(norms))


def collectives(text):
    """Yields kind, devices of a group, bytes of a device and scope of collectives."""
    pattern = r"= (.*?) (all-[a-z-]+|reduce-scatter|collective-permute)\((?!.*-done)"
    for line in text.splitlines():
        if (match := re.search(pattern, line)) is None:
            continue
        sizes = [
            4 * math.prod(int(n) for n in dims.split(",") if n)
            for dims in re.findall(r"f32\[([\d,]*)\]", match[1])
        ]
        members = len(wires.groups(line, jax.device_count())[0])
        scope = re.search(r'op_name="([^"]*)"', line)[1]
        yield match[2], members, sum(sizes), scope


class MapMatricesTest(parameterized.TestCase):
    """Matrices of all shapes and shardings, each mapped once."""

    LEAVES = (  # shape; batch, rows, columns, cut; sharding
        ((3, 16, 24), ((0,), (1,), (2,)), (None, ("fsdp", "expert"))),
        ((1, 24, 16), ((0,), (1,), (2,)), (None, ("fsdp", "expert"))),
        ((5, 8, 12), ((0,), (1,), (2,)), (None, None, "fsdp")),
        ((2, 8, 16, 12), ((0, 1), (2,), (3,)), (None, "expert", "fsdp")),
        ((2, 8, 16, 12), ((0, 1), (2,), (3,)), (None, "expert", "tensor", "fsdp")),
        ((2, 16, 4, 6), ((0, 2), (1,), (3,)), (None, "fsdp", "tensor")),
        ((2, 4, 6, 16), ((0,), (1, 2), (3,)), (None, "tensor", None, "fsdp")),
        ((2, 16, 4, 6), ((0, 2), (1,), (3,), (3, 4)), (None, "fsdp", "tensor")),
        ((16, 24), ((), (0,), (1,), (1, 8)), ("fsdp", "expert")),
        ((4, 6), ((), (0,), (1,)), ()),
    )

    @parameterized.product(
        axes=[
            {"fsdp": 2, "expert": 2, "tensor": 2},
            {"fsdp": 4, "context": 2},
            {"data": 2, "expert": 4},
        ],
        constants=[
            {"FLOPS_PER_BYTE": 1e9},
            {"FLOPS_PER_BYTE": 0, "GROUP_FLOPS": 1e12},
            {"FLOPS_PER_BYTE": 0, "GROUP_FLOPS": 0, "PIECE_BYTES": 1},
        ],
    )
    def test_equals_a_map_on_one_device(self, axes, constants):
        layouts, arrays, wanted = self.mapped_on_one_device()
        specs = [P(*axes) for _, _, axes in self.LEAVES]
        mesh = mesh_of(axes)
        with mock.patch.multiple(matrix_groups, **constants), jax.set_mesh(mesh):
            got = jax.jit(
                lambda *x: muon_mesh.map_matrices(self.function, x, layouts, specs)
            )(*arrays)
        for result, expected in zip(got, wanted, strict=True):
            np.testing.assert_allclose(result, expected, atol=ROUNDING)

    @staticmethod
    def function(x):  # not linear, and another one for every matrix
        return x @ x.mT @ x / (1 + jnp.sum(x**2, (-2, -1), keepdims=True))

    @classmethod
    @functools.cache
    def mapped_on_one_device(cls):
        """Returns the layouts, random arrays, and what each of them is mapped to."""
        layouts = [dimension_numbers.Layout(*axes) for _, axes, _ in cls.LEAVES]
        rng = np.random.default_rng(0)
        arrays = [rng.normal(size=x[0]).astype(np.float32) for x in cls.LEAVES]
        apply = lambda *arrays: [
            layout.join([cls.function(m) for m in layout.split(x)], x.shape)
            for layout, x in zip(layouts, arrays, strict=True)
        ]
        return layouts, arrays, jax.device_get(jax.jit(apply)(*arrays))

    def test_what_pieces_leave_over_is_mapped_too(self):
        """Of five rounds two pieces take two each; a small stack fills the rest."""
        most = 3 * 8 * 8 * 2  # three matrices
        layout = dimension_numbers.Layout((0,), (1,), (2,))
        rng = np.random.default_rng(0)
        arrays = [rng.normal(size=(n, 8, 8)).astype(np.float32) for n in (10, 3, 11)]
        specs = [P(None, "fsdp")] * 3
        function = lambda x: x @ x.mT @ x
        mesh = mesh_of({"fsdp": 2, "data": 4})
        leaves = [(x.shape, layout, specs[0]) for x in arrays]

        def mapped(*x):
            return muon_mesh.map_matrices(function, x, [layout] * 3, specs, ("data",))

        with mock.patch.object(matrix_groups, "PIECE_BYTES", most), jax.set_mesh(mesh):
            groups = matrix_groups.plan(leaves, {"fsdp": 2})
            text = jax.jit(mapped).lower(*arrays).as_text()
            got = jax.jit(mapped)(*arrays)
        self.assertIn("stablehlo.while", text)  # one piece at a time is whole
        starts = {(s.leaf, s.start, s.count) for group in groups for s in group.stacks}
        wanted = {(0, 0, 8), (0, 8, 2), (1, 0, 3), (2, 0, 8), (2, 8, 3)}
        self.assertEqual(starts, wanted)
        for x, result in zip(arrays, got, strict=True):
            np.testing.assert_allclose(result, function(x), rtol=1e-5, atol=1e-5)


class ScaleTest(parameterized.TestCase):
    """Matrices on a mesh get the root mean square of one device, each part its own."""

    def test_parts_of_a_cut_weight_are_scaled_by_their_own_sizes(self):
        kind = dimension_numbers.DimensionNumbers
        numbers = {
            "columns": kind(rows=1, cols=2, cut=(2, 4)),
            "rows": kind(rows=0, cols=1, cut=(0, 4)),
            "whole": kind(rows=0, cols=1),
        }
        specs = {"columns": P(None, "fsdp"), "rows": P(None, "fsdp"), "whole": P()}
        shapes = {"columns": (3, 8, 24), "rows": (24, 8), "whole": (4, 10)}
        rng = np.random.default_rng(0)
        grads = {
            name: rng.normal(size=shape).astype(np.float32)
            for name, shape in shapes.items()
        }
        wide = {
            n: muon.scale_by_muon_split(numbers, ns_dtype="float32", specs=s)
            for n, s in (("mesh", specs), ("device", None))
        }

        def update(transform):
            return jax.jit(lambda g: transform.update(g, transform.init(g))[0])(grads)

        expected = update(wide["device"])
        with jax.set_mesh(mesh_of({"fsdp": 4, "data": 2})):
            got = update(wide["mesh"])
        for name, want in expected.items():
            np.testing.assert_allclose(got[name], want, rtol=0, atol=ROUNDING)
        parts = {"of_4": got["columns"][..., :4], "of_20": got["columns"][..., 4:]}
        for part in (*parts.values(), got["rows"][:4], got["rows"][4:], got["whole"]):
            rms = np.sqrt(np.mean(np.square(part)))
            np.testing.assert_allclose(rms, 0.2, rtol=0.04)  # Newton-Schulz's error


class UpdateTest(parameterized.TestCase):
    """The same update on every mesh as on one device."""

    @parameterized.named_parameters(*MESHES.items())
    @pytest.mark.slow  # 5 to 20 s each
    def test_sharded_is_unsharded(self, axes):
        expected, expected_state, expected_metrics = on_one_device()
        params, state, metrics = run_on(mesh_of(axes), make(), trees())
        self.assertLess(difference(params, expected), ROUNDING)
        self.assertLess(difference(state.inner, expected_state.inner), ROUNDING)
        norm, expected_norm = (
            m["train/grad_norm"] for m in (metrics, expected_metrics)
        )
        np.testing.assert_allclose(norm, expected_norm, rtol=ROUNDING)

    def test_it_equals_one_device_and_skips_a_gradient_that_is_not_finite(self):
        mesh, opt = mesh_of({"fsdp": 2, "expert": 4}), make()
        step = compiled_once(opt)
        expected, *_ = on_one_device()
        params, *_ = run_on(mesh, opt, trees(), step)
        self.assertLess(difference(params, expected), ROUNDING)
        start, grads, _ = trees()
        experts = grads["layers_0"]["block_0"]["mlp"]["experts"]
        experts["up_proj"] = np.where(experts["up_proj"] > 0.5, np.nan, 0)
        params, _, metrics = run_on(mesh, opt, [start, grads], step)
        jax.tree.map(np.testing.assert_array_equal, params, start)
        self.assertEqual(metrics["optim/skipped_in_a_row"], 1)


class CompiledTest(parameterized.TestCase):
    """The collectives of the compiled program."""

    def test_whole_matrices_by_all_to_all_and_one_number_besides(self):
        opt, mesh = make(), mesh_of({"data": 2, "fsdp": 2, "expert": 2})
        places = sharding.shardings(DIMS, mesh)
        shapes = transformer.abstract_params(MODEL)
        params = place(shapes, places)
        state = jax.eval_shape(opt.init, params)
        state_dims = opt.state_dims(state, params)
        state = place(state, sharding.shardings(state_dims, mesh))
        step = jax.jit(lambda *args: update(opt, *args))
        shared = mock.patch.object(matrix_groups, "FLOPS_PER_BYTE", 0)
        with jax.set_mesh(mesh), shared:
            text = step.lower(params, state, params).compile().as_text()
            groups = matrix_groups.plan(muon_leaves(MODEL), mesh.shape)
        sent = collections.defaultdict(float)
        for kind, members, num_bytes, scope in collectives(text):
            if "newton_schulz" in scope:
                sent[kind] += num_bytes * (1 - 1 / members)
            else:
                self.assertEqual((kind, members, num_bytes), ("all-reduce", 8, 4))
                sent["norms"] += 1
        self.assertEqual(set(sent), {"all-to-all", "all-gather", "norms"})
        self.assertEqual(sent["norms"], 1)
        work, wider = matrix_groups.total(groups), 4 / matrix_groups.ITEM_BYTES
        self.assertEqual(sent["all-to-all"], work.exchanged_bytes * wider)
        self.assertEqual(sent["all-gather"], work.gathered_bytes * wider)

    def test_slices_send_each_other_no_matrices(self):
        """Over data, the axis between slices, only the norm is summed."""
        mesh = mesh_of({"data": 2, "fsdp": 4})
        dims = transformer.param_dims(MODEL)
        opt = optimizer.make_optimizer(
            config_lib.OptimConfig(), MODEL, dims, 20, slow_axes=("data",)
        )
        places = sharding.shardings(dims, mesh)
        shapes = transformer.abstract_params(MODEL)
        params = place(shapes, places)
        state = jax.eval_shape(opt.init, params)
        state_dims = opt.state_dims(state, params)
        state = place(state, sharding.shardings(state_dims, mesh))
        step = jax.jit(lambda *args: update(opt, *args))
        with jax.set_mesh(mesh):
            text = step.lower(params, state, params).compile().as_text()
        members = {n for _, n, _, scope in collectives(text) if scope}
        inside = {n for _, n, _, scope in collectives(text) if "newton" in scope}
        self.assertEqual((inside, members), ({4}, {4, 8}))

    def test_two_devices_suffice_to_exchange_matrices(self):
        numbers = {"w": dimension_numbers.DimensionNumbers(1, 2)}
        specs = {"w": P(None, "fsdp")}
        transform = muon.scale_by_muon_split(numbers, specs=specs)
        grads = {"w": jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)}
        state = jax.eval_shape(transform.init, grads)
        with jax.set_mesh(runs.first_devices(fsdp=2)):
            text = jax.jit(transform.update).lower(grads, state).as_text()
        self.assertIn("all_to_all", text)

    def test_on_one_device_nothing_of_it_shows(self):
        dims = {"norm": ("D",), "layers_0": {"q_b_proj": ("L", "Q", "N", "H")}}
        shapes = {"norm": (12,), "layers_0": {"q_b_proj": (2, 8, 2, 6)}}
        shapes = parameter_tree.map_names(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes
        )
        opt = optimizer.make_optimizer(config_lib.OptimConfig(), MODEL, dims, 20)
        state = jax.eval_shape(opt.init, shapes)
        step = jax.jit(lambda *args: update(opt, *args))
        alone = step.lower(shapes, state, shapes).as_text()
        with jax.set_mesh(runs.first_devices()):
            text = step.lower(shapes, state, shapes).as_text()
        for program in (alone, text):
            self.assertNotIn("all_to_all", program)
            self.assertNotIn("manual_computation", program)


def place(shapes, places):
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        places,
    )


if __name__ == "__main__":
    environment.main()
