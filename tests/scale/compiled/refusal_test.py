"""The message of a program that does not fit: arrays by shapes, settings that fit."""

import dataclasses
import pathlib
import re

from absl.testing import parameterized

from glm5_jax import command_line
from glm5_jax.scale import inputs, programs, slice_devices
from glm5_jax.scale.compiled import refusal
from glm5_jax.scale.plan import planner
from tests import environment

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
TOPOLOGY = "v6e:8x8"
# libtpu says 118.9 GiB of temporaries, and lists nothing.
EIGHT_ROWS = {"mesh.fsdp": "8", "mesh.expert": "8", "model.expert_chunks": "1"}


def config_of(depth=5, name="glm5_pretrain.py", **overrides):
    whole = {"model.remat_policy": "full", "model.expert_transport": "gather"}
    overrides = whole | overrides if "serve" not in name else overrides
    arguments = command_line.Arguments(
        config=str(CONFIGS / name), overrides=tuple(overrides.items())
    )
    return programs.changed(arguments.train_config(), None, depth)


def refused(config, topology=TOPOLOGY, program="train", **tables):
    mesh = slice_devices.abstract_mesh(config.mesh, topology)
    job = programs.make(config, mesh, program)
    found = inputs.arguments(job.arguments, job.names)
    found.sort(key=lambda array: -array.device_bytes)
    line = {
        "config": "glm5",
        "topology": topology,
        "mesh": dict(mesh.shape),
        "program": program,
        "hbm_limit_gib": 31.25,
        "hbm_temp_gib": 118.9,
    }
    rows = [dataclasses.asdict(array) for array in found]
    return refusal.text(config, line, {"largest_arguments": rows, **tables})


class RefusalTest(parameterized.TestCase):
    def test_without_a_list_the_model_names_the_temporaries(self):
        text = refused(config_of(**EIGHT_ROWS))
        known = re.search(r"model knows (\S+) GiB: (\S+) GiB experts;", text)
        whole, rows = map(float, known.groups())
        self.assertAlmostEqual(whole / 118.9, 1, delta=0.2)  # it was fitted on others
        tokens = 8 * 8 * 4096  # of a group; each has eight rows of an expert
        numbers = tokens * (8 * (2 * 6144 + 3 * 2048) + 3 * 6144)
        self.assertEqual(rows, numbers * 2 / 2**30)
        # Hidden states of three dense layers, eight rows a device.
        state = 3 * 8 * 4096 * 6144 * 2 / 2**30
        self.assertIn(f"{state:.3g} GiB activations.layers_0.x", text)
        self.assertIn("model.expert_chunks=4 (saves", text)
        order = [text.index(name) for name in ("expert_chunks=4", "batch_size=256")]
        self.assertEqual(order, sorted(order))

    def test_savings_are_differences_of_estimates(self):
        given = {"mesh.fsdp": "32", "mesh.expert": "8", "data.batch_size": "256"}
        config, topology = config_of(78, **given), "v5p:8x8x4"
        text = refused(config, topology)
        now = planner.estimate(config, topology).memory.total
        found = re.findall(r"[:;] ([\w.]+)=(\w+) \(saves (\S+) GiB\)", text)
        self.assertContainsSubset(
            {
                "optim.offload_moments",
                "optim.moment_dtype",
                "model.param_dtype",
                "model.remat_policy",
                "model.expert_chunks",
            },
            {name for name, _, _ in found},
        )
        for name, value, saved in found:
            other = config_of(78, **given, **{name: value})
            left = planner.estimate(other, topology).memory.total
            self.assertAlmostEqual(float(saved) / ((now - left) / 2**30), 1, delta=0.01)
        savings = [float(saved) for _, _, saved in found]
        self.assertEqual(savings, sorted(savings, reverse=True))

    def test_a_reference_is_named_with_what_it_takes(self):
        given = {"rl.kl_weight": "0.1", "rl.reference": "runs/x"}
        config = config_of(None, "glm5_rl_reasoning.py", **given)
        needs = planner.estimate(config, "v5p:8x8x8").memory
        changes = refusal.settings(
            config,
            "v5p:8x8x8",
            {"data": 1, "fsdp": 8, "expert": 8, "tensor": 1, "context": 8},
        )
        size = f"{needs.reference / 2**30:.3g} GiB"
        self.assertIn(
            f"rl.kl_weight=0: no second copy of the weights (saves {size})", changes
        )
        line = {"hbm_reference_gib": 2.75}
        self.assertEqual(
            refusal.beside(line),
            ", and beside it 2.75 for the weights of other policies",
        )
        self.assertEqual(refusal.beside({}), "")
        line |= {"hbm_critic_gib": 1.5}
        self.assertEndsWith(
            refusal.beside(line), "other policies and 1.5 for the critic"
        )

    def test_the_compilers_list_comes_first(self):
        buffers = [{"num_bytes": 3 * 2**30, "shape": "bf16[9,9]"}]
        text = refused(config_of(**EIGHT_ROWS), largest_allocations=buffers)
        self.assertIn("Largest temporaries: 3 GiB bf16[9,9]", text)
        self.assertNotIn("model knows", text)

    @parameterized.named_parameters(
        ("whole", {}, "mesh.fsdp=64 with mesh.data=1: state is whole"),
        ("context", {"mesh.context": "8"}, "mesh.fsdp=8 with mesh.data=1 (saves"),
    )
    def test_state_is_cut_over_context_too(self, axes, wanted):
        given = {"mesh.fsdp": "1", "mesh.expert": "1", "model.expert_chunks": "1"}
        text = refused(config_of(**given, **axes))
        self.assertIn(wanted, text)

    @parameterized.named_parameters(
        ("warmup", "glm5_adapt.py:warmup_202k", "train", "model.remat_policy=offload;"),
        ("serving", "glm5_serve.py:32k", "decode", "data.sequence_length: the cache"),
    )
    def test_arrays_that_the_model_does_not_know_are_only_named(
        self, name, program, wanted
    ):
        axes = {"mesh.data": "-1", "mesh.fsdp": "1", "mesh.expert": "8"}
        axes |= {"mesh.context": "1" if program == "decode" else "8"}
        text = refused(config_of(5, name, **axes), program=program)
        self.assertIn(wanted, text)
        self.assertNotIn("saves", text)


if __name__ == "__main__":
    environment.main()
