"""Which implementation runs, and for which chip a program is traced."""

import dataclasses
import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import parameterized

from pallas_kernels import cases, chips, dispatch, indexer_topk, sparse_mla
from tests import environment

CASE = cases.SMALL["short"]


def meant_for(chip, num_devices=1):
    """A context in which programs are traced for the chip, without its compiler."""
    device = jax.sharding.AbstractDevice(
        device_kind=chip.device_kind, num_cores=1, platform=chip.platform
    )
    axis = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh(
        (num_devices,), ("x",), axis_types=axis, abstract_device=device
    )
    return jax.sharding.use_abstract_mesh(mesh)


def attend(implementation=None):
    q, kv, indices = cases.make(CASE, "q_latent", "kv", "indices")
    return sparse_mla(
        q,
        kv,
        indices,
        scale=CASE.scale,
        value_dim=CASE.latent,
        implementation=implementation,
    )


class DispatchTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        for remembered in (dispatch._warn_once, dispatch._import_error):
            remembered.cache_clear()
            self.addCleanup(remembered.cache_clear)

    def test_without_a_mesh_it_is_the_default_device(self):
        self.assertEqual(dispatch.platform(), "cpu")
        self.assertIsNone(dispatch.chip())

    @parameterized.parameters(*chips.CHIPS)
    def test_the_mesh_says_which_chip_is_meant(self, name):
        chip = chips.CHIPS[name]
        seen = []

        @jax.jit
        def program(x):
            seen.append((dispatch.platform(), dispatch.chip()))
            return x

        program.trace(jnp.ones(3))
        with meant_for(chip):
            program.trace(jnp.ones(3))
        self.assertEqual(seen, [("cpu", None), (chip.platform, chip)])

    @parameterized.parameters("fast", "tiled_interpret", "cuda")
    def test_an_unknown_name_lists_the_known_ones(self, name):
        with self.assertRaisesRegex(NotImplementedError, f"tiled, .*got '{name}'"):
            attend(name)

    @parameterized.parameters("tpu", "gpu")
    def test_a_kernel_for_another_platform_is_refused(self, name):
        with self.assertRaisesRegex(NotImplementedError, f"{name}_interpret"):
            attend(name)

    def test_arguments_that_no_kernel_takes_run_as_plain_xla_with_a_warning(self):
        case = dataclasses.replace(CASE, latent=96)  # not a multiple of 128
        q, kv, indices = cases.make(case, "q_latent", "kv", "indices")
        run = functools.partial(sparse_mla, scale=0.1, value_dim=96)
        with (
            meant_for(chips.CHIPS["v5p"]),
            self.assertWarnsRegex(UserWarning, "sparse_mla runs as tiled instead of"),
        ):
            jax.eval_shape(run, q, kv, indices)

    @parameterized.parameters("triton", "jax_triton")
    def test_without_its_packages_plain_xla_runs_with_one_warning(self, package):
        """torch brings triton alone, so either may be missing."""
        inputs = cases.shapes(CASE)
        listed = [inputs[name] for name in ("q_latent", "kv", "indices")]
        index = [inputs[name] for name in ("q_index", "k_index", "w", "lo", "hi")]
        attend = functools.partial(sparse_mla, scale=0.1, value_dim=CASE.latent)
        select = functools.partial(indexer_topk, topk=4)
        missing = {"triton": mock.MagicMock(), package: None}
        with (
            meant_for(chips.CHIPS["h200"]),
            mock.patch.dict(sys.modules, missing),
            self.assertWarnsRegex(UserWarning, f"plain XLA .*{package}") as caught,
        ):
            jax.eval_shape(attend, *listed)
            jax.eval_shape(select, *index)
            with self.assertRaisesRegex(NotImplementedError, f"brings {package}"):
                jax.eval_shape(functools.partial(attend, implementation="gpu"), *listed)
        self.assertLen(caught.warnings, 1)

    @parameterized.parameters(
        ("Tesla T4", r"capability is 7\.5, without bfloat16 products"),
        ("NVIDIA Z9", "capability is unknown, and the kernels are for 8.0, .*, 12.0"),
    )
    def test_a_gpu_without_kernels_runs_plain_xla_and_says_why_once(self, kind, why):
        specs = cases.shapes(CASE)
        listed = [specs[name] for name in ("q_latent", "kv", "indices")]
        index = [specs[name] for name in ("q_index", "k_index", "w", "lo", "hi")]
        attend = functools.partial(sparse_mla, scale=0.1, value_dim=CASE.latent)
        other = dataclasses.replace(chips.CHIPS["h200"], device_kinds=(kind,))
        with (
            meant_for(other),
            self.assertWarnsRegex(UserWarning, f"this is {kind}: .*{why}") as caught,
        ):
            jax.eval_shape(attend, *listed)
            jax.eval_shape(functools.partial(indexer_topk, topk=4), *index)
            with self.assertRaisesRegex(NotImplementedError, why):
                jax.eval_shape(functools.partial(attend, implementation="gpu"), *listed)
        self.assertLen(caught.warnings, 1)

    @parameterized.parameters(
        ("NVIDIA A100-SXM4-40GB", 80),
        ("NVIDIA A100 80GB PCIe", 80),
        ("NVIDIA A10G", 86),
        ("NVIDIA RTX A6000", 86),
        ("NVIDIA GeForce RTX 3090", 86),
        ("NVIDIA L4", 89),
        ("NVIDIA L40S", 89),
        ("NVIDIA GeForce RTX 4090", 89),
        ("NVIDIA RTX 6000 Ada Generation", 89),
        ("NVIDIA RTX 2000 Ada Generation", 89),
        ("NVIDIA RTX 5000 Ada Generation", 89),
        ("Quadro RTX 4000", 75),
        ("NVIDIA GeForce RTX 2080 Ti", 75),
        ("NVIDIA H100 80GB HBM3", 90),
        ("NVIDIA H100 PCIe", 90),
        ("NVIDIA GH200 480GB", 90),
        ("NVIDIA B200", 100),
        ("NVIDIA B300 SXM6 AC", 103),
        ("NVIDIA GeForce RTX 5090", 120),
        ("Tesla T4", 75),
        ("Tesla V100-SXM2-16GB", 70),
        ("NVIDIA Z9", None),
    )
    def test_names_of_gpus_say_their_compute_capability(self, kind, want):
        other = dataclasses.replace(chips.CHIPS["h200"], device_kinds=(kind,))
        self.assertIsNone(dispatch.capability())  # of a CPU
        with meant_for(other):
            self.assertEqual(dispatch.capability(), want)

    def test_an_unknown_gpu_is_asked(self):
        device = mock.Mock(device_kind="NVIDIA Z9", compute_capability="8.9")
        other = dataclasses.replace(chips.CHIPS["h200"], device_kinds=("NVIDIA Z9",))
        with (
            meant_for(other),
            mock.patch.object(jax, "default_backend", return_value="gpu"),
            mock.patch.object(jax, "devices", return_value=[device]),
        ):
            self.assertEqual(dispatch.capability(), 89)

    @parameterized.parameters(({}, False), ({"deterministic": True}, True))
    def test_sums_have_one_order_on_demand(self, options, is_deterministic):
        """It costs memory on GPUs."""
        specs = cases.shapes(CASE)
        args = [specs[name] for name in ("q_latent", "kv", "indices")]
        options = {"scale": 0.1, "value_dim": CASE.latent, **options}
        with mock.patch.object(dispatch, "run", wraps=dispatch.run) as run:
            jax.eval_shape(functools.partial(sparse_mla, **options), *args)
        self.assertIs(run.call_args.args[2][-1], is_deterministic)

    def test_jit_does_not_split_a_kernel_over_a_mesh(self):
        specs = cases.shapes(CASE)
        args = [specs[name] for name in ("q_latent", "kv", "indices")]
        options = {"scale": 0.1, "value_dim": CASE.latent, "implementation": "tpu"}
        run = functools.partial(sparse_mla, **options)
        whole = jax.sharding.PartitionSpec()
        with meant_for(chips.CHIPS["v5p"], num_devices=2):
            with self.assertRaisesRegex(NotImplementedError, "inside jax.shard_map"):
                jax.eval_shape(run, *args)
            split = jax.shard_map(run, in_specs=whole, out_specs=whole, check_vma=False)
            out, _ = jax.eval_shape(split, *args)
        self.assertEqual(out.shape, (1, 5, CASE.heads, CASE.latent))


if __name__ == "__main__":
    environment.main()
