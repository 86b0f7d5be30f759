"""Every array by name: placement adds up, without a compiler."""

import dataclasses
import json
import math
import pathlib
import typing

import jax.numpy as jnp
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax import presets
from glm5_jax.scale import inputs, programs, slice_devices
from glm5_jax.scale.compiled import arrays
from glm5_jax.scale.estimate import memory
from glm5_jax.scale.estimate import setting as setting_lib
from glm5_jax.training.reporting import accounting
from tests import environment

MESH = config_lib.MeshConfig(fsdp=2, expert=2, context=2)
CONFIG = config_lib.TrainConfig(
    model=presets.GLM5_1M,
    data=config_lib.DataConfig(sequence_length=128, batch_size=8),
    mesh=MESH,
)


def listed(program="train", **changes):
    config = dataclasses.replace(CONFIG, **changes)
    mesh = slice_devices.abstract_mesh(config.mesh, "v5p:2x2x2")
    return arrays.of_program(config, mesh, program)


def whole(found, start):
    """Bytes of all devices, each part once."""
    return sum(
        array.device_bytes * 8 // array.num_copies
        for array in found
        if array.name.startswith(start)
    )


class ArraysTest(parameterized.TestCase):
    def test_parts_add_up_to_the_state(self):
        found, state = listed(), accounting.state_bytes(CONFIG)
        self.assertEqual(whole(found, "params."), state["parameters"])
        self.assertEqual(whole(found, "opt_state."), state["optimizer state"])
        self.assertEqual(whole(found, "gradients."), state["gradients"])
        self.assertEqual(whole(found, "batch."), 5 * 4 * 8 * 128)

    def test_arguments_are_those_of_devices_that_are_here(self):
        job = programs.make(CONFIG, mesh_lib.make_mesh(MESH))
        here = inputs.arguments(job.arguments, job.names)
        found = [a for a in listed() if a.kind not in arrays.MADE_BY_THE_STEP]
        size = {array.name: array.device_bytes for array in found}
        self.assertEqual(
            {a.name: a.device_bytes for a in here},
            {name: size[name] for name in (a.name for a in here)},
        )

    def test_dims_are_those_of_the_shape_and_of_the_parameter(self):
        by_name = {array.name: array for array in listed()}
        name = "layers_1.block_0.mlp.experts.down_proj"
        for prefix in ("params.", "gradients."):
            array = by_name[prefix + name]
            self.assertEqual(array.dims, ("L", "E", "F", "D"))
            spec = "(None, 'expert', 'tensor', ('fsdp', 'context'))"
            self.assertEqual((array.spec, array.num_copies), (spec, 1))
        (trace,) = (a for a in by_name.values() if a.name.endswith("trace." + name))
        self.assertEqual(trace.dims, ("L", "E", "F", "D"))
        for array in by_name.values():
            self.assertIn(len(array.dims), (0, len(array.shape)), array.name)

    @parameterized.parameters((1, "bfloat16"), (2, "float32"))
    def test_gradients_are_those_that_the_optimizer_gets(self, num_parts, dtype):
        """They are bfloat16, or float32 sums of parts; parts of a batch keep less."""
        model = dataclasses.replace(CONFIG.model, dtype="bfloat16")
        optim = config_lib.OptimConfig(accumulation_steps=num_parts)
        found = {a.name: a for a in listed(model=model, optim=optim)}
        name = "layers_1.block_0.mlp.experts.up_proj"
        gradient, param = found[f"gradients.{name}"], found[f"params.{name}"]
        self.assertEqual(gradient.dtype, dtype)
        ratio = {"bfloat16": 2, "float32": 1}[dtype]
        self.assertEqual(gradient.device_bytes * ratio, param.device_bytes)
        self.assertEqual(found["gradients.norm"].dtype, "float32")
        kept = found["activations.layers_1.x"].shape
        self.assertEqual(kept[1], CONFIG.data.batch_size // num_parts)

    def test_a_reference_is_listed_beside_the_step(self):
        rl = config_lib.RLConfig(
            prompts_per_step=4,
            group_size=2,
            max_new_tokens=8,
            kl_weight=0.1,
            reference="runs/x",
        )
        config = dataclasses.replace(CONFIG, stage="rl", rl=rl)
        found = listed(stage="rl", rl=rl)
        kept = accounting.state_bytes(config)["reference"]
        self.assertEqual(whole(found, "reference."), kept)
        setting = setting_lib.Setting(
            config,
            dict(slice_devices.abstract_mesh(MESH, "v5p:2x2x2").shape),
            slice_devices.named("v5p:2x2x2"),
        )
        of_a_device = sum(a.device_bytes for a in found if "reference." in a.name)
        norms = 16 * 256  # the last norm and MTP's, which the planner leaves out
        self.assertAlmostEqual(of_a_device, memory.reference(setting), delta=norms)
        plain = dataclasses.replace(rl, kl_weight=0.0)
        self.assertNotIn(
            "reference", accounting.state_bytes(dataclasses.replace(config, rl=plain))
        )

    def test_a_critic_is_listed_beside_the_step_with_its_moments(self):
        """By hand: the layers again, a vector, and moments of what learns."""
        rl = config_lib.RLConfig(
            prompts_per_step=8, group_size=1, max_new_tokens=8, critic=True
        )
        config = dataclasses.replace(CONFIG, stage="rl", rl=rl)
        found = [a for a in listed(stage="rl", rl=rl) if a.name.startswith("critic.")]
        params = {
            a.name.removeprefix("params."): math.prod(a.shape)
            for a in listed()
            if a.name.startswith("params.")
        }
        own = {
            name: size
            for name, size in params.items()
            if not name.startswith(("lm_head", "mtp."))
        }
        head = CONFIG.model.hidden_size
        total = sum(own.values()) + head
        names = [a for a in found if a.name.startswith("critic.params.")]
        self.assertEqual(sum(math.prod(a.shape) for a in names), total)
        self.assertEqual(
            whole(found, "critic."), accounting.state_bytes(config)["critic"]
        )
        frozen = sum(
            size
            for name, size in own.items()
            if {"self_attn", "indexer"} & {*name.split(".")}
        )
        moments = [a for a in found if a.name.startswith("critic.opt_state.")]
        kept = sum(math.prod(a.shape) for a in moments)
        self.assertGreater(frozen, 0)
        self.assertBetween(kept, total - frozen, 2 * (total - frozen) + 100)
        setting = setting_lib.Setting(
            config,
            dict(slice_devices.abstract_mesh(MESH, "v5p:2x2x2").shape),
            slice_devices.named("v5p:2x2x2"),
        )
        of_a_device = sum(a.device_bytes for a in found)
        self.assertEqual(of_a_device, memory.critic(setting))

    def test_scans_keep_a_state_a_layer(self):
        model = CONFIG.model
        state = 128 * model.hidden_size * jnp.dtype(model.dtype).itemsize  # of 8 x 128
        kept = [a for a in listed() if a.name.endswith(".x")]
        steps = model.num_hidden_layers + model.mtp_num_steps
        self.assertEqual(sum(a.device_bytes for a in kept), steps * state)

    def test_layers_that_share_an_index_keep_it(self):
        model = dataclasses.replace(CONFIG.model, index_topk_freq=2, index_topk=32)
        found = {array.name: array for array in listed(model=model)}
        names = [name for name in found if name.endswith("selection.words")]
        self.assertNotEmpty(names)
        bits = found[names[0]]  # a TPU's: 128 words of 32 bits hold 4096 keys
        self.assertEqual((bits.dtype, bits.shape[-1]), ("uint32", 128))

    def test_a_warm_up_trains_the_indexers_alone(self):
        model = dataclasses.replace(
            CONFIG.model, attention="dense_with_indexer_loss", index_topk=32
        )
        found = listed(model=model, stage="dsa_warmup")
        gradients = [a.name for a in found if a.name.startswith("gradients")]
        self.assertNotEmpty(gradients)
        self.assertEmpty([name for name in gradients if "indexer" not in name])

    def test_a_cache_holds_the_cost_of_its_tokens(self):
        found = listed("decode", mesh=config_lib.MeshConfig(fsdp=4, expert=2))
        kept = [a for a in found if a.name.split(".")[-1] in ("kv", "k_index")]
        a_token = accounting.cache_bytes_per_token(CONFIG.model)
        (room,) = {math.prod(a.shape[1:3]) for a in kept}  # rows and tokens
        self.assertGreaterEqual(room, 8 * 128)
        got = sum(a.device_bytes for a in kept) * 8
        self.assertGreaterEqual(got, a_token * room)
        filled = CONFIG.model.num_hidden_layers * 2 * 128 * 2  # to a TPU's 128 lanes
        self.assertLess(got, (a_token + filled) * room)

    @parameterized.named_parameters(
        ("chip", "v9:2x2x2", "chip of v5e, v5p, v6e, tpu7x"),
        ("number", "v5p:2x2x1", r"on 4 devices; .*mesh\.fsdp=1"),
        ("rows", "v5p:2x4x4", r"data\.batch_size must be divisible .*set it to 16"),
    )
    def test_a_refused_setting_names_possible_ones(self, topology, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            arrays.make(CONFIG, "name", topology)


class ListingTest(parameterized.TestCase):
    @parameterized.parameters(*typing.get_args(config_lib.RematPolicy))
    def test_notes_know_every_policy(self, policy):
        model = dataclasses.replace(CONFIG.model, remat_policy=policy)
        config = dataclasses.replace(CONFIG, model=model)
        text = arrays.make(config, "name", "v5p:2x2x2").text()
        self.assertIn(f"remat_policy={policy}", text)

    def test_sums_are_of_the_listed_arrays(self):
        listing = arrays.make(CONFIG, "name", "v5p:2x2x2")
        sums = dict(listing.sums)
        total = sum(a.device_bytes for a in listing.arrays) / slice_devices.GIB
        self.assertEqual(sums["all of these"], f"{total:.4g}")
        lines = listing.text().splitlines()
        self.assertIn("mesh fsdp 2 x expert 2 x context 2", lines[0])
        count = lambda start: sum(line.startswith(start) for line in lines)
        self.assertGreater(count("params."), 60)
        self.assertEqual(count("gradients."), count("params."))

    def test_it_is_written_as_a_page_and_for_programs(self):
        listing = arrays.make(CONFIG, "name", "v5p:2x2x2", depth=2)
        stem = pathlib.Path(self.create_tempdir().full_path) / "folder" / "arrays"
        listing.write(str(stem))
        page = stem.with_suffix(".md").read_text()
        content = json.loads(stem.with_suffix(".json").read_text())
        self.assertLen(content["arrays"], len(listing.arrays))
        for array in content["arrays"]:
            self.assertIn(f"| {array['name']} |", page)


if __name__ == "__main__":
    environment.main()
