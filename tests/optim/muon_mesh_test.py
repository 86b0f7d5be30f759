import collections
import dataclasses
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets, sharding
from glm5_jax.model import transformer
from glm5_jax.optim import matrix_groups, muon_split, optimizer
from tests import environment
from tests.model import tiny

# 16: to be divided by every axis below.
MODEL = tiny.model(kv_lora_rank=16)
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
TERA, GIBI = 1e12, 2**30


def mesh_of(axes):
    return sharding.make_mesh(config_lib.MeshConfig(**({"data": 1} | axes)))


def make(**fields):
    fields = {"learning_rate": 1.0, "end_learning_rate": 1.0} | fields
    config = config_lib.OptimConfig(ns_dtype="float32", **fields)
    return optimizer.make_optimizer(config, MODEL, DIMS, 20)


def update(opt, params, state, grads):
    return optimizer.update_if_finite(opt, grads, state, params)


def run(opt, trees):
    """Parameters, state and metrics after as many updates as there are gradients."""
    params, *grads = trees
    step = jax.jit(lambda *args: update(opt, *args))
    state = jax.jit(opt.init)(params)
    for grad in grads:
        params, state, metrics = step(params, state, grad)
    return jax.device_get((params, state, metrics))


def run_on(mesh, opt, trees):
    with jax.set_mesh(mesh):
        return run(opt, jax.device_put(trees, [sharding.shardings(DIMS, mesh)] * 3))


def trees():
    return [jax.device_get(tiny.params(MODEL, seed)) for seed in range(3)]


def difference(got, expected):
    """The largest over all arrays, relative to the array's norm."""
    norms = jax.tree.map(
        lambda a, b: np.linalg.norm(a - b) / max(np.linalg.norm(b), 1), got, expected
    )
    return max(jax.tree.leaves(norms))


def leaves_of(model, config):
    dims = transformer.param_dims(model)
    labels = optimizer.label_parameters(config, dims)
    leaves = jax.tree.map(
        lambda label, names, x: (
            (x.shape, muon_split.layout(names, config, model), sharding.spec(names))
            if label == "muon"
            else ()
        ),
        labels,
        dims,
        transformer.abstract_params(model),
    )
    is_leaf = lambda x: isinstance(x, tuple)
    return [leaf for leaf in jax.tree.leaves(leaves, is_leaf=is_leaf) if leaf]


def work_of(groups):
    return sum((group.work for group in groups), matrix_groups.Work())


def collectives(text):
    """Kind, bytes of the result and op_name of each, with the loops' trip counts."""
    found = []
    for line in text.splitlines():
        match = re.search(
            r"= (.*?) (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", line
        )
        if match is None:
            continue
        shapes = re.findall(r"(f32|bf16|s32|pred)\[([\d,]*)\]", match[1])
        size = {"f32": 4, "bf16": 2, "s32": 4, "pred": 1}
        num_bytes = sum(
            size[kind] * math.prod(int(n) for n in dims.split(",") if n)
            for kind, dims in shapes
        )
        name = re.search(r'op_name="([^"]*)"', line)
        found.append((match[2], num_bytes, name[1] if name else ""))
    return found


class UpdateTest(parameterized.TestCase):
    """The same update on every mesh as on one device."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.expected = run(make(), trees())

    @parameterized.named_parameters(*MESHES.items())
    def test_sharded_is_unsharded(self, axes):
        mesh = mesh_of(axes)
        params, state, metrics = run_on(mesh, make(), trees())
        self.assertLess(difference(params, self.expected[0]), ROUNDING)
        self.assertLess(difference(state.inner, self.expected[1].inner), ROUNDING)
        norm = metrics["train/grad_norm"]
        np.testing.assert_allclose(
            norm, self.expected[2]["train/grad_norm"], rtol=ROUNDING
        )

    @parameterized.named_parameters(*list(MESHES.items())[3:])
    def test_in_pieces_alone_and_shared(self, axes):
        changes = {"PIECE_BYTES": 1, "GROUP_FLOPS": 0, "FLOPS_PER_BYTE": 0}
        with mock.patch.multiple(matrix_groups, **changes):
            params, _, _ = run_on(mesh_of(axes), make(), trees())
        self.assertLess(difference(params, self.expected[0]), ROUNDING)

    def test_cut_weights_and_whole_heads(self):
        for fields in (
            {"muon_split_rope": True, "muon_split_kv_a": True},
            {"muon_split": False, "muon_lm_head": True},
        ):
            opt = make(**fields)
            mesh = mesh_of({"tensor": 2, "fsdp": 2, "expert": 2})
            params, _, _ = run_on(mesh, opt, trees())
            self.assertLess(difference(params, run(opt, trees())[0]), ROUNDING)

    def test_a_gradient_that_is_not_finite_is_skipped(self):
        start, grads, _ = trees()
        experts = grads["layers_1"]["block_0"]["mlp"]["experts"]
        experts["up_proj"] = np.where(experts["up_proj"] > 0.5, np.nan, 0)
        mesh = mesh_of({"fsdp": 2, "expert": 4})
        params, _, metrics = run_on(mesh, make(), [start, grads, grads])
        jax.tree.map(np.testing.assert_array_equal, params, start)
        self.assertEqual(metrics["optim/skipped_in_a_row"], 2)


if __name__ == "__main__":
    environment.main()
