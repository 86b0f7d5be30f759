"""The optimizer's moments in bfloat16 and in the host's memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax import sharding
from glm5_jax.checkpoint import manager as manager_lib
from glm5_jax.optim import optimizer
from tests import environment

DIMS = {
    "norm": ("D",),
    "embed_tokens": ("V", "D"),
    "block": {"o_proj": ("L", "N", "O", "D"), "up_proj": ("L", "E", "D", "F")},
}
SHAPES = {
    "norm": (16,),
    "embed_tokens": (24, 16),
    "block": {"o_proj": (2, 4, 6, 16), "up_proj": (2, 4, 16, 8)},
}
NUM_STEPS = 6
# A number is rounded by 2^-9 of it at most. Muon's momentum is rounded once a step and
# forgets with 0.95; AdamW's also rounds b1 m before it adds g, and forgets with 0.9.
UNIT = 2.0**-9
MUON_ERROR = UNIT * sum(0.95**i for i in range(NUM_STEPS))
ADAM_ERROR = 2 * UNIT * sum(0.9**i for i in range(NUM_STEPS))


def draw(seed):
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)
    normal = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return jax.tree.map(normal, SHAPES, is_leaf=is_shape)


def make(**fields):
    fields = {"learning_rate": 0.1, "end_learning_rate": 0.1} | fields
    config = config_lib.OptimConfig(ns_dtype="float32", **fields)
    return optimizer.make_optimizer(config, config_lib.ModelConfig(), DIMS, 20)


@functools.cache
def programs(axes, fields):
    """Returns the mesh, the places of parameters, and jitted init and update."""
    opt = make(**dict(fields))
    mesh = mesh_lib.make_mesh(config_lib.MeshConfig(**{"data": 1} | dict(axes)))
    places = sharding.shardings(DIMS, mesh)
    params = draw(0)
    shapes = jax.eval_shape(opt.init, params)
    dims = opt.state_dims(shapes, params)
    kept = opt.kept(shapes, sharding.shardings(dims, mesh))
    update = jax.jit(
        lambda p, s, g: optimizer.update_if_finite(opt, g, s, p)[:2],
        out_shardings=(places, kept),
        donate_argnums=(0, 1),
    )
    return mesh, places, jax.jit(opt.init, out_shardings=kept), update


class Run:
    """Updates on a mesh, with the state where the optimizer keeps it."""

    def __init__(self, axes, **fields):
        keys = (tuple(sorted(x.items())) for x in (axes, fields))
        self.mesh, places, init, self.step = programs(*keys)
        self.params = jax.device_put(draw(0), places)
        self.state = init(self.params)

    def __call__(self, seeds):
        for seed in seeds:
            with jax.set_mesh(self.mesh):
                self.params, self.state = self.step(self.params, self.state, draw(seed))
        return jax.device_get((self.params, self.state))


def moments_of(state):
    """Returns Muon's momentum and AdamW's first and second moment."""
    inner = {k: v.inner_state[0] for k, v in state.inner.inner_states.items()}
    return inner["muon"][0].trace["block"], inner["adamw"].mu, inner["adamw"].nu


class MomentDtypeTest(parameterized.TestCase):
    def test_bfloat16_stays_within_its_rounding(self):
        seeds = range(1, NUM_STEPS + 1)
        _, exact = Run({"fsdp": 4, "expert": 2})(seeds)
        _, rough = Run({"fsdp": 4, "expert": 2}, moment_dtype="bfloat16")(seeds)
        momentum, first, second = moments_of(exact)
        for name, expected in momentum.items():
            got = moments_of(rough)[0][name]
            self.assertEqual(got.dtype, jnp.bfloat16)
            # The largest value that the sum of 6 steps can have bounds each rounding.
            limit = MUON_ERROR * np.max(np.abs(expected)) * 2
            np.testing.assert_allclose(np.float32(got), expected, atol=limit)
        got = np.float32(moments_of(rough)[1]["embed_tokens"])
        expected = first["embed_tokens"]
        limit = ADAM_ERROR * np.max(np.abs(expected)) * 2
        np.testing.assert_allclose(got, expected, atol=limit)
        self.assertEqual(second["embed_tokens"].dtype, np.float32)

    def test_bytes_in_closed_form(self):
        def num_bytes(**fields):
            state = jax.eval_shape(make(**fields).init, draw(0))
            return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

        num_params = sum(x.size for x in jax.tree.leaves(draw(0)))
        saved = num_bytes() - num_bytes(moment_dtype="bfloat16")
        self.assertEqual(saved, 2 * num_params)


class OffloadTest(parameterized.TestCase):
    @parameterized.parameters({}, {"fsdp": 4, "expert": 2})
    def test_moments_wait_on_the_host_and_change_nothing(self, **axes):
        axes = axes or {"data": 8}
        here = Run(axes)
        away = Run(axes, offload_moments=True)
        for moment in jax.tree.leaves(moments_of(away.state)):
            self.assertEqual(moment.sharding.memory_kind, "pinned_host")
        jax.tree.map(np.testing.assert_array_equal, here([1, 2]), away([1, 2]))
        for moment in jax.tree.leaves(moments_of(away.state)):
            self.assertEqual(moment.sharding.memory_kind, "pinned_host")


class ResumeTest(parameterized.TestCase):
    @parameterized.parameters(
        {"moment_dtype": "bfloat16"},
        {"offload_moments": True},
        {"moment_dtype": "bfloat16", "offload_moments": True},
    )
    def test_resumes_bit_for_bit(self, **fields):
        axes = {"fsdp": 4, "expert": 2}
        expected = Run(axes, **fields)([1, 2, 3, 4])
        first, second = Run(axes, **fields), Run(axes, **fields)
        first([1, 2])
        manager = manager_lib.CheckpointManager(self.create_tempdir().full_path, 1)
        manager.save(2, {"params": first.params, "opt_state": first.state}, {})
        fresh = {"params": second.params, "opt_state": second.state}
        _, state, _ = manager.restore(fresh)
        manager.close()
        second.params, second.state = state["params"], state["opt_state"]
        jax.tree.map(np.testing.assert_array_equal, second([3, 4]), expected)


if __name__ == "__main__":
    environment.main()
