"""Experts on several devices, reached in both ways, against one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import PartitionSpec

from glm5_jax import collectives, sharding
from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.model import experts
from tests import environment
from tests.model import tiny

CONFIG = tiny.model()
B, T, K, E = 8, 6, CONFIG.num_experts_per_tok, CONFIG.n_routed_experts
ATOL = 1e-5  # float32 sums in another order, of values of order 1


def make_inputs(load):
    """Parameters, hidden states, choices and gates; of some loads most are uneven."""
    rng = np.random.default_rng(0)
    params = tiny.params(CONFIG)["mtp"]["block"]["mlp"]["experts"]
    x = rng.normal(size=(B, T, CONFIG.hidden_size))
    gates = rng.uniform(0.1, 1, (B, T, K))
    chosen = {
        "random": np.argsort(rng.random((B, T, E)))[..., :K],
        "all_to_one_device": np.broadcast_to(np.arange(K), (B, T, K)),
    }[load]
    return params, jnp.float32(x), jnp.asarray(chosen % E), jnp.float32(gates)


def loss(run, params, x, chosen, gates):
    y = run(params, x, chosen, gates)
    return jnp.sum(jnp.sin(y)), y


class TransportTest(parameterized.TestCase):
    @parameterized.product(
        transport=("gather", "exchange"),
        load=("random", "all_to_one_device"),
    )
    def test_equals_one_device(self, transport, load):
        config = dataclasses.replace(
            CONFIG, expert_transport=transport, expert_chunks=2
        )
        params, x, chosen, gates = make_inputs(load)
        mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=2, expert=4))

        def run(params, x, chosen, gates):
            return experts.run(params, config, x, chosen, gates)

        def gradients(run):
            both = functools.partial(loss, run)
            return jax.jit(jax.grad(both, argnums=(0, 1, 3), has_aux=True))

        def at_once(params, x, chosen, gates):
            return experts.run(params, CONFIG, x, chosen, gates)

        want = gradients(at_once)(params, x, chosen, gates)
        with jax.set_mesh(mesh):
            rows, stacks = sharding.spec(("B", "T")), PartitionSpec("expert")
            local = collectives.on_shards(run, (stacks, rows, rows, rows), rows)
            got = gradients(local)(params, x, chosen, gates)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=ATOL, atol=ATOL),
            *(got, want),
        )


if __name__ == "__main__":
    environment.main()
