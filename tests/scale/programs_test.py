"""A run's and the engine's programs as they are compiled ahead of time."""

import dataclasses

import jax
import pytest
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax import presets
from glm5_jax.scale import inputs, programs
from glm5_jax.scale.compiled import compile as compile_lib
from glm5_jax.scale.hlo import parser as hlo
from tests import environment, tpus
from tests.model import tiny

PLAIN = programs.AS_STORED
CODED = programs.Serving(quantize="w4a8", num_drafts=2)
MESH = config_lib.MeshConfig(data=1, fsdp=2, expert=2, tensor=2)
SERVING = config_lib.TrainConfig(
    model=tiny.model(num_hidden_layers=2, num_nextn_predict_layers=0, dtype="bfloat16"),
    data=config_lib.DataConfig(sequence_length=64, batch_size=8),
    mesh=MESH,
)
# GLM-5 of two layers, a dense one and one with experts, on 8 chips.
GLM5 = config_lib.TrainConfig(
    model=dataclasses.replace(
        presets.GLM5,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        param_dtype="bfloat16",
    ),
    data=config_lib.DataConfig(sequence_length=32768, batch_size=16),
    mesh=config_lib.MeshConfig(data=1, expert=4, tensor=2),
)


def cache_bytes(job):
    return inputs.by_kind(inputs.arguments(job.arguments, job.names))["cache"]


class ServingTest(parameterized.TestCase):
    def test_slots_must_be_divisible(self):
        config = dataclasses.replace(
            SERVING,
            data=dataclasses.replace(SERVING.data, batch_size=10),
            mesh=config_lib.MeshConfig(),
        )
        mesh = mesh_lib.make_mesh(MESH)
        with self.assertRaisesRegex(config_lib.InputError, "got 10 on 4; set it to 8"):
            programs.make(config, mesh, "decode")

    @parameterized.named_parameters(
        ("prefill", "prefill", PLAIN),
        ("extend", "extend", PLAIN),
        ("decode", "decode", PLAIN),
        ("decode_with_codes_and_drafts", "decode", CODED),
    )
    def test_the_cache_is_written_in_place(self, name, serving):
        config = SERVING
        if serving.num_drafts:  # MTP's layer is the second that writes
            model = dataclasses.replace(
                config.model,
                num_hidden_layers=1,
                first_k_dense_replace=0,
                num_nextn_predict_layers=1,
            )
            config = dataclasses.replace(config, model=model)
        job = programs.make(config, mesh_lib.make_mesh(MESH), name, serving)
        with jax.set_mesh(job.mesh):
            compiled = job.step.lower(*job.arguments).compile()
        aliased = compiled.memory_analysis().alias_size_in_bytes
        self.assertGreaterEqual(aliased, cache_bytes(job))

    def test_arguments_are_codes_and_the_rows_of_drafts(self):
        model = dataclasses.replace(SERVING.model, num_nextn_predict_layers=1)
        config = dataclasses.replace(SERVING, model=model)
        mesh, found = mesh_lib.make_mesh(MESH), {}
        for serving in (PLAIN, CODED):
            job = programs.make(config, mesh, "decode", serving)
            arrays = inputs.arguments(job.arguments, job.names)
            found[serving] = {array.name: array for array in arrays}
        plain, coded = found[PLAIN], found[CODED]
        name = "params.layers_1.block_0.mlp.experts.up_proj"
        size = plain[name].device_bytes
        self.assertEqual(4 * coded[f"{name}.values"].device_bytes, size)
        kv = "cache.cache.entries.kv"
        self.assertEqual(coded[kv].shape[0], plain[kv].shape[0] + 1)

    def test_settings_of_the_engine_are_for_its_programs(self):
        mesh = mesh_lib.make_mesh(MESH)
        with self.assertRaisesRegex(config_lib.InputError, "not of 'train'"):
            programs.make(SERVING, mesh, "train", CODED)
        with self.assertRaisesRegex(config_lib.InputError, "num_drafts must be 0"):
            programs.make(SERVING, mesh, "decode", CODED)


class StateTest(parameterized.TestCase):
    def test_programs_that_hold_the_state_hold_little_else(self):
        """Initialisation, restore and save on 8 devices, of a model with experts."""
        mesh, sizes = mesh_lib.make_mesh(MESH), {}
        model = dataclasses.replace(
            SERVING.model, num_hidden_layers=1, first_k_dense_replace=0
        )
        config = dataclasses.replace(SERVING, model=model)
        for name in ("init", "restore", "save"):
            job = programs.make(config, mesh, name)
            sizes[name] = compile_lib.compile(job).sizes
        state = programs.make(config, mesh).arguments[:2]
        arrays = inputs.arguments(state, ("params", "opt_state"))
        needed = sum(array.device_bytes for array in arrays)
        self.assertEqual(sizes["save"].arguments, needed)
        for name in ("init", "restore"):
            self.assertAlmostEqual(sizes[name].outputs / needed, 1, delta=0.05)
        for name in ("restore", "save"):
            self.assertLess(sizes[name].temporaries, needed / 5)

    def test_a_push_is_half_of_the_parameters_and_sends_nothing(self):
        mesh = mesh_lib.make_mesh(MESH)
        made = compile_lib.compile(programs.make(SERVING, mesh, "push"))
        self.assertEqual(made.sizes.arguments, sum(a.device_bytes for a in made.arrays))
        # The matrices become bfloat16; the norms, the router and the head stay.
        self.assertBetween(made.sizes.outputs / made.sizes.arguments, 0.5, 0.6)
        self.assertLess(made.sizes.temporaries, made.sizes.outputs / 20)
        self.assertEmpty(made.traffic.collectives)

    def test_a_push_of_codes_sends_what_scales_need(self):
        """The largest numbers of blocks that lie on several devices."""
        rl = dataclasses.replace(SERVING.rl, rollout_weights="fp8")
        config = dataclasses.replace(SERVING, rl=rl)
        job = programs.make(config, mesh_lib.make_mesh(MESH), "push")
        made = compile_lib.compile(job)
        self.assertBetween(made.sizes.outputs / made.sizes.arguments, 0.25, 0.4)
        kinds = {found.kind for found in made.traffic.collectives}
        self.assertEqual(kinds, {"all-reduce"})
        sent = sum(found.wire_bytes for found in made.traffic.collectives)
        self.assertLess(sent, made.sizes.outputs)


@pytest.mark.aot
class TpuTest(parameterized.TestCase):
    def test_kernels_read_a_cache_that_is_not_copied(self):
        if not tpus.has_libtpu():
            self.skipTest("needs libtpu")
        mesh = mesh_lib.make_mesh(GLM5.mesh, mesh_lib.topology("v5p:2x2x2"))
        job = programs.make(GLM5, mesh, "decode")
        with jax.set_mesh(job.mesh):
            compiled = job.step.lower(*job.arguments).compile()
        module = hlo.parse(compiled.as_text())
        lines = [i for body in module.computations.values() for i in body.values()]
        calls = " ".join(i.op_name for i in lines if i.opcode == "custom-call")
        for kernel in ("decode_indexer_topk", "decode_sparse_mla"):
            self.assertIn(f"{kernel}/pallas_call", calls)
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        self.assertLess(temporaries, cache_bytes(job) / 2)


if __name__ == "__main__":
    environment.main()
