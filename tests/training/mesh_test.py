"""The same run on meshes of 8 devices as on one: losses, parameters, router biases."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax import sharding
from glm5_jax.model import transformer
from glm5_jax.training import step as step_lib
from tests import environment, small_configs
from tests.model import tiny

T, NUM_STEPS = 32, 5
# Float32 sums over devices in another order, for five steps. Muon and Adam divide a
# gradient by its size, so a rounding may move what has next to no gradient.
ATOL = 1e-5
CONFIG = small_configs.step(
    T,
    tiny.model(num_hidden_layers=2, kv_lora_rank=16),
    chunk_tokens=40,
    adam_eps=1e-4,
)
# One stack of layers and all losses; step_test.py takes its steps too. One step of
# multi-token prediction and AdamW compile faster than a loop of two and Muon, which
# `test_all` has; optim/muon_mesh_test.py has Muon on meshes.
SMALL = small_configs.of_stage(
    dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(
            CONFIG.model,
            num_hidden_layers=1,
            first_k_dense_replace=0,
            mtp_num_steps=1,
        ),
        optim=dataclasses.replace(CONFIG.optim, name="adamw"),
    ),
    "dsa_sparse",
)
EXCHANGE = dataclasses.replace(
    CONFIG, model=dataclasses.replace(CONFIG.model, expert_transport="exchange")
)
KEPT = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(
        CONFIG.model, expert_transport="rounds", remat_policy="experts"
    ),
)
WARMUP = small_configs.of_stage(CONFIG, "dsa_warmup")
SHARED = dataclasses.replace(
    CONFIG,
    model=tiny.index_share(kv_lora_rank=16, index_share_for_mtp_iteration=True),
)
REJECTED = dataclasses.replace(
    CONFIG, loss=dataclasses.replace(CONFIG.loss, mtp_objective="end_to_end")
)


def make_batch(seed):
    """Packed documents, padding, and rows of one document."""
    rows = [(T,), (9, 19), (3, 22, 7), (16, 16), (T,), (1, 30), (10,), (T,)]
    return tiny.batch(CONFIG.model, rows, T, seed)


def run(config, step, params, state, place=lambda batch: batch):
    losses = []
    for seed in range(NUM_STEPS):
        params, state, metrics = step(params, state, place(make_batch(seed)))
        losses.append(jax.device_get(metrics))
    return jax.device_get(params), losses


@functools.cache
def make_step(config):
    """The jitted step, parameters and optimizer state of a config."""
    optimizer = step_lib.make_optimizer(config)
    params = tiny.params(config.model)
    step = jax.jit(step_lib.make_train_step(config, optimizer))
    return step, params, jax.jit(optimizer.init)(params)


@functools.cache
def on_one_device(config):
    return run(config, *make_step(config))


class MeshTest(parameterized.TestCase):
    def check(self, config, **axes):
        wanted, want_metrics = on_one_device(config)
        devices = jax.devices()[: math.prod(axes.values())]
        axes = config_lib.MeshConfig(**({"data": 1} | axes))
        mesh = mesh_lib.make_mesh(axes, devices)
        optimizer = step_lib.make_optimizer(config)
        _, params, state = make_step(config)
        places = sharding.shardings(transformer.param_dims(config.model), mesh)
        state_dims = optimizer.state_dims(state, params)
        places = places, sharding.shardings(state_dims, mesh)
        step = jax.jit(
            step_lib.make_train_step(config, optimizer), out_shardings=(*places, None)
        )
        rows = jax.NamedSharding(mesh, sharding.spec(("B", "T")))
        with jax.set_mesh(mesh):
            params, state = jax.device_put((params, state), places)
            got, metrics = run(
                config, step, params, state, lambda x: jax.device_put(x, rows)
            )
        for one, other in zip(metrics, want_metrics, strict=True):
            for name, value in other.items():
                rtol = 0 if name == "train/loss" else 2 * ATOL
                np.testing.assert_allclose(
                    one[name], value, rtol=rtol, atol=ATOL, err_msg=name
                )
        paths = jax.tree_util.tree_flatten_with_path(wanted)[0]
        for (path, want), found in zip(paths, jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(
                found, want, rtol=0, atol=ATOL, err_msg=jax.tree_util.keystr(path)
            )

    def test_data_fsdp_expert(self):
        self.check(SMALL, data=2, fsdp=2, expert=2)

    @parameterized.parameters(
        {"data": 8},
        {"fsdp": 8},
        {"expert": 8},
        {"tensor": 4},
        {"tensor": 4, "fsdp": 2},
        {"context": 8},
        {"context": 2, "fsdp": 2, "tensor": 2},
        {"expert": 2, "context": 2, "tensor": 2},
    )
    @pytest.mark.slow
    def test_all(self, **axes):
        self.check(CONFIG, **axes)

    @parameterized.named_parameters(
        ("dense_warm_up_over_context", WARMUP, {"context": 4, "fsdp": 2}),
        ("shared_index_over_context", SHARED, {"context": 4, "expert": 2}),
        ("exchange", EXCHANGE, {"expert": 4, "fsdp": 2}),
        ("rounds_of_which_the_first_is_kept", KEPT, {"expert": 4, "fsdp": 2}),
        ("rejected_drafts", REJECTED, {"tensor": 4, "fsdp": 2}),
    )
    @pytest.mark.slow
    def test_variants(self, config, axes):
        self.check(config, **axes)


if __name__ == "__main__":
    environment.main()
