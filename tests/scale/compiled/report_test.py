"""The report: a tiny step compiled for 4 chips, and what does not fit or cannot be."""

import dataclasses
import json
import pathlib
import tempfile
from unittest import mock

import jax
import pytest
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.scale import inputs, slice_devices
from glm5_jax.scale.compiled import compile as compile_lib
from glm5_jax.scale.compiled import flops, report
from glm5_jax.training import accumulation
from glm5_jax.training.reporting import accounting
from tests import environment, tpus

TINY = dataclasses.replace(
    presets.GLM5_1M,
    num_hidden_layers=1,
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
    attention="dense",
    dtype="bfloat16",
    remat_policy="none",
)
CONFIG = config_lib.TrainConfig(
    model=TINY,
    data=config_lib.DataConfig(sequence_length=128, batch_size=8),
    loss=config_lib.LossConfig(indexer_weight=0.0),
    optim=config_lib.OptimConfig(name="adamw"),
)
POLICY = config_lib.RLConfig(
    prompts_per_step=4,
    group_size=2,
    max_new_tokens=8,
    kl_weight=0.1,
    reference="runs/x",
)
OVERFLOWS = {
    # libtpu 0.0.51 and, with a list of what is largest, older ones.
    "short": (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the "
        "total memory required for HLO temporaries (51.88G) exceeds available HBM "
        "(31.24G). HLO module: jit_step.",
        (51.88, True, []),
    ),
    "listed": (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 63.5G of "
        "31.25G hbm. Exceeded hbm capacity by 32.25G.\n\n"
        "  Largest program allocations in hbm:\n\n"
        "  1. Size: 1.50G\n"
        '     Operator: op_name="jit(step)/jvp(layers_1)/moe/all_gather" \n'
        "     Shape: bf16[64,2048,6144]{2,1,0:T(8,128)(2,1)}\n"
        "     Unpadded size: 1.50G\n",
        (63.5, False, [(1.5, "bf16[64,2048,6144]{2,1,0:T(8,128)(2,1)}")]),
    ),
}
# libtpu pads arrays to whole tiles of 8 x 128: a lot for tiny ones.
ARGUMENTS_RTOL = 0.25
# Sums of metrics and of gradients' squares come on top.
GRADIENTS_RTOL = 0.05


# Shapes this small have no kernel: plain XLA stands in, with a warning.
@pytest.mark.filterwarnings("ignore:.* runs as .* instead of tpu")
class CompiledTest(parameterized.TestCase):
    def test_pure_data_parallelism_reduces_every_gradient_once(self):
        """About 2 (n - 1) / n of the parameters' bytes, as a ring moves a sum."""
        if not tpus.has_libtpu():
            self.skipTest("no libtpu: pip install -e '.[aot]'")
        with environment.optimized(), tempfile.TemporaryDirectory() as folder:
            given = "python -m glm5_jax.aot --topology=v5p:2x2x1"
            made = report.make(CONFIG, "tiny", "v5p:2x2x1", command=given)
            made.write(f"{folder}/reports/tiny")
            stem = pathlib.Path(folder) / "reports" / "tiny"
            everything = json.loads(stem.with_suffix(".json").read_text())
            page = stem.with_suffix(".md").read_text()
        self.assertIn("not timed", page)
        self.assertIn(f"```\n{given}\n```", page)
        self.assertEqual(everything["command"], given)
        self.assertEqual(everything["expert_chunks"], TINY.expert_chunks)
        self.assertEqual(everything["accumulation_steps"], 1)
        if not everything["is_printed"]:
            self.assertIsNone(made.line["collective_gib"])
            self.skipTest("this libtpu cannot print programs of this jax")
        line, gib = made.line, 2**30
        self.assertTrue(line["fits"])
        self.assertEmpty(made.refusal)
        leaves = jax.tree.leaves(accumulation.abstract_gradients(CONFIG))
        gradients = sum(x.size * x.dtype.itemsize for x in leaves)
        got = line["collective_gib_by_axes"]["data"] * gib / gradients
        self.assertAlmostEqual(got / (2 * 3 / 4), 1, delta=GRADIENTS_RTOL)
        state = accounting.state_bytes(CONFIG)
        want = state["parameters"] + state["optimizer state"]
        self.assertBetween(line["hbm_args_gib"] * gib / want, 1, 1 + ARGUMENTS_RTOL)
        self.assertGreater(line["hbm_temp_gib"], 0)
        self.assertBetween(line["flops"] / line["model_flops"], 0.9, 2.0)
        self.assertEqual(everything["collective_gib"], line["collective_gib"])
        for wanted in ("parameters: experts", "optimizer moments", "MFU"):
            self.assertIn(wanted, page)

    def test_a_reference_counts_beside_the_program(self):
        """Two bytes for each parameter of matrices, four for the others."""
        config = dataclasses.replace(CONFIG, stage="rl", rl=POLICY)
        plain = dataclasses.replace(POLICY, kl_weight=0.0)
        without = dataclasses.replace(config, rl=plain)
        mesh = slice_devices.abstract_mesh(config.mesh, "v5p:2x2x1")
        device = slice_devices.named("v5p:2x2x1")
        of = lambda config: report.beside(config, dict(mesh.shape), device)
        want = accounting.state_bytes(config)["reference"]  # the same on each device
        self.assertAlmostEqual(of(config)["reference"] / want, 1, delta=0.01)
        self.assertEqual(of(without), {})
        rl = dataclasses.replace(plain, critic=True)
        critic = dataclasses.replace(config, rl=rl)
        want = accounting.state_bytes(critic)["critic"]
        self.assertEqual(of(critic), {"critic": want})


@pytest.mark.aot
# Shapes this small have no kernel: plain XLA stands in, with a warning.
@pytest.mark.filterwarnings("ignore:.* runs as .* instead of tpu")
class NightlyTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("v5p_fsdp_expert", "v5p:2x2x2", {"fsdp": 4, "expert": 2}, "train"),
        ("v6e", "v6e:2x2", {"fsdp": 2, "tensor": 2}, "train"),
        ("tpu7x", "tpu7x:2x2x1", {"fsdp": 4, "expert": 2}, "train"),
        ("slices", "v5p:2x2x1", {"slices": 2, "data": 2, "fsdp": 4}, "train"),
        ("prefill", "v5p:2x2x1", {"fsdp": 4}, "prefill"),
        ("decode", "v5p:2x2x1", {"fsdp": 4}, "decode"),
    )
    def test_meshes_chips_and_programs(self, topology, axes, program):
        if not tpus.has_libtpu():
            self.skipTest("no libtpu: pip install -e '.[aot]'")
        config = dataclasses.replace(CONFIG, mesh=config_lib.MeshConfig(**axes))
        with environment.optimized():
            made = report.make(config, "tiny", topology, program=program)
        self.assertTrue(made.line["fits"])
        used = {axis for axis, size in axes.items() if size > 1} - {"slices", "data"}
        used |= {"dcn"} if "slices" in axes else set()
        by_axes = made.line["collective_gib_by_axes"]
        if by_axes is None:  # all but the traffic has been checked
            self.skipTest("this libtpu cannot print programs of this jax")
        found = " ".join(by_axes)
        for axis in used:
            self.assertIn(axis, found)
        if program != "decode":  # which loops until nothing runs: a token counts
            self.assertEmpty(made.tables["uncounted_loops"])


class OverflowTest(parameterized.TestCase):
    @parameterized.named_parameters(OVERFLOWS.items())
    def test_messages_of_libtpu(self, case):
        message, (needed, is_temporaries, allocations) = case
        made = compile_lib.overflow(message, [], flops.Flops(), (1.0, 2.0))
        self.assertAlmostEqual(made.needed / 2**30, needed)
        self.assertEqual(made.is_temporaries, is_temporaries)
        got = [(a.num_bytes / 2**30, a.shape) for a in made.allocations]
        self.assertEqual(got, allocations)

    def test_a_refusal_names_arrays_and_knobs(self):
        if not tpus.has_libtpu():
            self.skipTest("no libtpu: pip install -e '.[aot]'")

        def refuse(job, num_slices):
            arrays = inputs.arguments(job.arguments, job.names)
            message = OVERFLOWS["short"][0]
            return compile_lib.overflow(message, arrays, flops.Flops(), (1.0, 2.0))

        with (
            mock.patch.object(compile_lib, "compile", refuse),
            tempfile.TemporaryDirectory() as folder,
        ):
            made = report.make(CONFIG, "tiny", "v6e:2x2")
            made.write(f"{folder}/tiny")
            page = pathlib.Path(folder, "tiny.md").read_text()
        self.assertFalse(made.line["fits"])
        for wanted in (
            "tiny does not fit v6e:2x2",
            "a device has 31.25 GiB",
            "temp 51.88",
            "params.lm_head (the same on 4 devices)",
            "model.remat_policy=full (is none)",
            "mesh.fsdp=4 with mesh.data=1: state is whole on every device",
        ):
            self.assertIn(wanted, made.refusal)
            self.assertIn(wanted, page)


class InputTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("topology", {"topology": "v5p:3x3x3"}, "near it"),
        ("product", {"mesh": {"fsdp": 8}}, "fsdp=4"),
        (
            "batch",
            {"topology": "v5p:2x2x4"},
            "got 8 on 16; set it to 16, or give devices",
        ),
        ("program", {"program": "serve"}, "save, push, prefill, extend, decode"),
        ("depth", {"depth": 0}, "num_hidden_layers"),
    )
    def test_an_impossible_setting_is_told_before_compiling(self, changes, message):
        if not tpus.has_libtpu():
            self.skipTest("no libtpu: pip install -e '.[aot]'")
        settings = {"topology": "v5p:2x2x1", "mesh": {}} | changes
        mesh = config_lib.MeshConfig(**settings.pop("mesh"))
        with (
            self.assertRaisesRegex(config_lib.InputError, message),
            mock.patch.object(compile_lib, "compile", side_effect=AssertionError),
        ):
            config = dataclasses.replace(CONFIG, mesh=mesh)
            report.make(config, "tiny", settings.pop("topology"), **settings)


if __name__ == "__main__":
    environment.main()
