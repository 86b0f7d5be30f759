"""Ops inside `jax.shard_map`, which checks along which axes arrays vary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import pallas_kernels as pk
from tests import environment

B, T, N, C, R, I, J, K = 2, 20, 4, 16, 8, 4, 16, 6
SHARDS = 2


def inputs():
    """The ops of a small layer: indexer, attention, experts."""
    rng = np.random.default_rng(0)
    shapes = {
        "index": ((B, T, I, J), (B, T, J), (B, T, I)),
        "main": ((B, T, N, C + R), (B, T, C + R)),
        "experts": ((3, C, J),),
    }
    normal = lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return {name: tuple(map(normal, sizes)) for name, sizes in shapes.items()}


def layer(x, lo, hi, sum_over):
    """Selection, attention in both forms, both losses and experts, to one number."""
    mask = pk.indexer_mask(*x["index"], lo, hi, topk=K)
    lists = pk.indexer_topk(*x["index"], lo, hi, topk=K)
    q, kv = x["main"]
    out, lse = pk.sparse_mla(q, kv, lists, scale=0.2, value_dim=C)
    k = jnp.broadcast_to(kv[:, :, None], (*kv.shape[:2], *q.shape[2:]))
    dense, dense_lse = pk.dense_attention(q, k, k[..., :C], lo, hi, mask, scale=0.2)
    weight = jnp.ones(lo.shape)
    loss = pk.sparse_indexer_kl_loss((q, kv, lse), x["index"], lists, weight, scale=0.2)
    loss += pk.indexer_kl_loss(
        (q, k, dense_lse), x["index"], lo, hi, mask, weight, scale=0.2
    )
    loss += jnp.sum(jnp.sin(pk.indexer_scores_at(*x["index"], lists)))
    rows = (out + dense).reshape(-1, C)
    sizes = jnp.asarray([len(rows) // 4, 0, len(rows) // 4])
    y = pk.grouped_matmul(rows, *x["experts"], sizes)
    return sum_over(loss + jnp.sum(jnp.sin(y)))


class ShardMapTest(absltest.TestCase):
    def test_ops_are_differentiable_under_its_checks(self):
        """Sequences are split; experts are whole on every device."""
        x = inputs()
        lo, hi = pk.segment_bounds(jnp.ones((B, T), jnp.int32))
        axis = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((SHARDS,), ("data",), axis_types=axis)
        split, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
        specs = {"index": split, "main": split, "experts": whole}
        sharded = jax.shard_map(
            functools.partial(layer, sum_over=lambda x: jax.lax.psum(x, "data")),
            mesh=mesh,
            in_specs=(specs, split, split),
            out_specs=whole,
        )

        def alone(x, lo, hi):
            def sequence(part):
                one, *bounds = jax.tree.map(lambda a: a[None], part)
                return layer({**one, "experts": x["experts"]}, *bounds, lambda x: x)

            rows = {name: x[name] for name in ("index", "main")}
            return jnp.sum(jax.lax.map(sequence, (rows, lo, hi)))

        got, want = (
            jax.jit(jax.value_and_grad(f))(x, lo, hi) for f in (sharded, alone)
        )
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    environment.main()
