"""Gluon's kernels, traced for an H200 and compiled, without a device.

In an environment of requirements/triton-py311.txt with jax-cuda13-plugin, which needs
no CUDA, and without TRITON_INTERPRET. Their values are held on the card alone
(on_device_test.py): no interpreter knows Gluon.
"""

import dataclasses
import importlib.util
import os
from concurrent import futures

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_kernels
from tests import environment

PACKAGES = ("triton", "jax_triton", "jax_cuda13_plugin")
CAN_COMPILE = all(map(importlib.util.find_spec, PACKAGES))
CAN_COMPILE &= os.environ.get("TRITON_INTERPRET") != "1"
if CAN_COMPILE:
    from pallas_kernels import triton_call, triton_gluon

KINDS = {"h200": "NVIDIA H200", "a100": "NVIDIA A100-SXM4-80GB", "b200": "NVIDIA B200"}
B, T, K = 2, 96, 40


def mesh_of(kind, size=2):
    """A mesh of GPUs that this machine lacks."""
    device = jax.sharding.AbstractDevice(kind, num_cores=None, platform="gpu")
    return jax.sharding.AbstractMesh(
        (size,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device
    )


def arguments(heads=64, latent=512, dtype=jnp.bfloat16):
    """Shapes of q, kv and lists."""
    shapes = ((B, T, heads, latent + 64), dtype), ((B, T, latent + 64), dtype)
    return *(jax.ShapeDtypeStruct(*x) for x in shapes), jax.ShapeDtypeStruct(
        (B, T, K), "int32"
    )


def gradients(deterministic=False):
    """A function of those: the gradients of q and kv."""

    def loss(q, kv, lists):
        out, lse = pallas_kernels.sparse_mla(
            q,
            kv,
            lists,
            scale=0.1,
            value_dim=q.shape[-1] - 64,
            deterministic=deterministic,
        )
        return jnp.sum(out, dtype=jnp.float32) + jnp.sum(lse)

    return jax.grad(loss, argnums=(0, 1))


def launched(kind, args, **options):
    """The kernels that a GPU would run, as "h._forward_kernel" if they are Gluon's."""
    mesh = jax.sharding.use_abstract_mesh(mesh_of(kind, 1))
    with mesh, triton_call.recorded() as launches:
        jax.eval_shape(gradients(**options), *args)
    kernels = [launch.kernel for launch in launches]
    return [f"{'h.' * kernel.is_gluon()}{kernel.__name__}" for kernel in kernels]


class GluonTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        if not CAN_COMPILE:
            self.skipTest(f"needs {PACKAGES}, and no TRITON_INTERPRET")

    def test_hopper_has_kernels_for_wide_rows(self):
        own = ["h._forward_kernel", "h._backward_kernel"]
        others = ["_forward_kernel", "_dq_kernel", "_dkv_kernel"]
        self.assertEqual(launched(KINDS["h200"], arguments()), own)
        self.assertEqual(launched(KINDS["h200"], arguments(heads=128)), own)
        for found in (
            launched(KINDS["a100"], arguments()),
            launched(KINDS["b200"], arguments()),
            launched(KINDS["h200"], arguments(heads=32)),
            launched(KINDS["h200"], arguments(heads=96)),
            launched(KINDS["h200"], arguments(latent=256)),
            launched(KINDS["h200"], arguments(dtype=jnp.float16)),
        ):
            self.assertEqual(found, others)
        ordered = launched(KINDS["h200"], arguments(), deterministic=True)
        self.assertEqual(ordered[:2], [own[0], others[1]])

    @parameterized.product(latent=(512, 256), check_vma=(True, False))
    def test_kernels_run_inside_shard_map(self, latent, check_vma):
        """Gluon's, and Triton's where rows are narrower."""
        args = arguments(latent=latent)
        split = (P("x"), P("x"))
        with jax.sharding.use_abstract_mesh(mesh_of(KINDS["h200"])):
            sharded = jax.shard_map(
                gradients(),
                in_specs=(*split, P("x")),
                out_specs=split,
                check_vma=check_vma,
            )
            found = jax.eval_shape(sharded, *args)
        self.assertEqual([x.shape for x in found], [x.shape for x in args[:2]])

    def test_a_mapped_axis_is_run_one_by_one(self):
        args = [x.update(shape=(3, *x.shape)) for x in arguments()]
        with jax.sharding.use_abstract_mesh(mesh_of(KINDS["h200"])):
            sharded = jax.shard_map(
                jax.vmap(gradients()), in_specs=P(None, "x"), out_specs=P(None, "x")
            )
            found = jax.eval_shape(sharded, *args)
        self.assertEqual([x.shape for x in found], [x.shape for x in args[:2]])

    def test_a_program_holds_the_compiled_kernels(self):
        with jax.sharding.use_abstract_mesh(mesh_of(KINDS["h200"], 1)):
            traced = jax.jit(gradients()).trace(*arguments())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        self.assertEqual(text.count("@triton_kernel_call"), 2)

    def test_threads_compile_one_after_another(self):
        """A trainer and an engine in one process meet new shapes at once."""
        before = os.environ.get("TRITON_CACHE_DIR")
        mesh = jax.sharding.use_abstract_mesh(mesh_of(KINDS["h200"], 1))
        with mesh, triton_call.recorded(replaces=True) as launches:
            jax.eval_shape(gradients(), *arguments())
        new = [
            dataclasses.replace(launch, constants=launch.constants | {"S": size})
            for launch in launches
            for size in (2, 3)
        ]
        with futures.ThreadPoolExecutor(len(new)) as pool:
            kernels = list(pool.map(triton_gluon.compiled, new))
        self.assertLen({kernel.asm["ptx"] for kernel in kernels}, len(new))
        self.assertEqual(os.environ.get("TRITON_CACHE_DIR"), before)


if __name__ == "__main__":
    environment.main()
