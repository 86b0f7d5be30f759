"""Attention variants on a mesh: outputs and gradients are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import PartitionSpec

from glm5_jax import collectives, depth, sharding
from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.config import attention as config_attention
from glm5_jax.model import attention, layers, transformer
from glm5_jax.model import context as context_lib
from glm5_jax.model.attention import mla
from tests import environment
from tests.model import tiny

B, T = 4, 12
RTOL = 1e-5  # float32 sums over devices in another order
MESH = config_lib.MeshConfig(data=2, fsdp=2, tensor=2)


class MeshTest(parameterized.TestCase):
    @parameterized.parameters(*config_attention.LAYER_TYPES[1:])
    def test_equals_one_device(self, name):
        config = tiny.variants(kv_lora_rank=16)
        kinds = {kind.attention: kind for kind in depth.layer_kinds(config)}
        own = attention.make(config, kinds[name])
        table, rng = own.table(), np.random.default_rng(0)
        params = transformer.map_table(
            lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32) / 4, table
        )
        x, weights = rng.normal(size=(2, B, T, config.hidden_size)).astype(np.float32)
        batch = tiny.batch(config, [(T,), (5, 7), (3, 6), (1, 11)], T)
        rows = sharding.spec(("B", "T"))

        def local(params, x, segments, positions):
            params = layers.fetched(params, table, "float32")
            context = context_lib.make_context(config, segments, positions)
            return own.forward(params, x, context).x, ()

        def loss(params, x):
            dims = transformer.map_table(lambda p: p.dims, table)
            specs = sharding.specs(dims), rows, rows, rows
            run = collectives.on_shards(local, specs, (rows, ()))
            out, _ = run(params, x, batch["segment_ids"], batch["positions"])
            return jnp.vdot(out, weights), out

        grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
        want = jax.jit(grad)(params, x)
        with jax.set_mesh(mesh_lib.make_mesh(MESH)):
            got = jax.jit(lambda *args: grad(*args))(params, x)
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=RTOL * np.abs(b).max())


class AllHeadsTest(parameterized.TestCase):
    @parameterized.named_parameters(("listed", True), ("dense", False))
    def test_gathers_the_heads_of_all_devices(self, is_latent):
        """No two dims are equal, so that each gather joins the right one."""
        rng = np.random.default_rng(0)
        k_shape = (2, 7, 5) if is_latent else (2, 7, 4, 5)
        shapes = (2, 3, 4, 5), k_shape, (2, 4, 3)
        heads = PartitionSpec(None, None, "tensor")
        k_spec = PartitionSpec() if is_latent else heads
        specs = mla.Softmax(heads, k_spec, PartitionSpec(None, "tensor"))
        want = mla.Softmax(*(jnp.asarray(rng.random(shape)) for shape in shapes))

        def local(softmax):
            return mla.all_heads(softmax, is_latent)

        with jax.set_mesh(mesh_lib.make_mesh(config_lib.MeshConfig(tensor=2, data=4))):
            run = collectives.on_shards(local, (specs,), PartitionSpec())
            got = jax.jit(run)(want)
        jax.tree.map(np.testing.assert_array_equal, got, want)


if __name__ == "__main__":
    environment.main()
