"""Messages about a mesh that does not divide name choices that fit."""

import dataclasses
import re

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.config import checks
from tests import environment

# A config that keeps every rule until a case changes it.
CONFIG = config_lib.TrainConfig(
    model=dataclasses.replace(presets.GLM5_1M, max_position_embeddings=8192),
    data=config_lib.DataConfig(batch_size=512, sequence_length=256),
)


def changed(changes):
    """Returns the config with fields changed by their paths."""
    config = CONFIG
    sections: dict[str, dict] = {}
    for path, value in changes.items():
        section, _, name = path.rpartition(".")
        sections.setdefault(section, {})[name] = value
    whole = {
        name: dataclasses.replace(getattr(config, name), **fields)
        for name, fields in sections.items()
        if name
    }
    return dataclasses.replace(config, **whole, **sections.get("", {}))


class NearestTest(parameterized.TestCase):
    def test_multiples_and_divisors_by_trying_all(self):
        for number in range(1, 60):
            for other in range(1, 60):
                found = checks.nearest_multiples(number, other)
                every = [n for n in range(1, 200) if n % other == 0]
                below = [n for n in every if n <= number][-1:]
                above = [n for n in every if n >= number][:1]
                self.assertEqual(found, sorted({*below, *above}))
                found = checks.nearest_divisors(number, other)
                every = [n for n in range(1, 60) if number % n == 0]
                below = [n for n in every if n <= other][-1:]
                above = [n for n in every if n >= other][:1]
                self.assertEqual(found, sorted({*below, *above}))


class ChoicesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (
            "batch",
            {"data.batch_size": 100, "mesh.data": 512},
            "data.batch_size must be divisible by data * fsdp * expert of mesh, got "
            "100 on 512; set it to 512, or give devices to mesh.tensor or "
            "mesh.context.",
            {"data.batch_size": 512},
        ),
        (
            "parts_of_a_batch",
            {
                "data.batch_size": 20,
                "mesh.data": 4,
                "optim.accumulation_steps": 2,
            },
            "by data * fsdp * expert * accumulation_steps of mesh, got 20 on 8; set it "
            "to 16 or 24, or give",
            {"data.batch_size": 16},
        ),
        (
            "experts",
            {"model.n_routed_experts": 12, "mesh.expert": 8},
            "model.n_routed_experts must be divisible by expert of mesh, got 12 on 8; "
            "set it to 8 or 16, or expert to 4.",
            {"mesh.expert": 4},
        ),
        (
            "heads_on_24_devices",
            {
                "model.num_attention_heads": 12,
                "model.intermediate_size": 96,
                "model.moe_intermediate_size": 96,
                "model.vocab_size": 24 * 64,
                "mesh.tensor": 8,
                "mesh.data": 3,
                "data.batch_size": 6,
            },
            "by tensor of mesh, got 12 on 8; set it to 8 or 16, or tensor to 6 or 12.",
            {"mesh.tensor": 12, "mesh.data": 2},
        ),
        (
            "heads",
            {"mesh.tensor": 16},
            "model.num_attention_heads must be divisible by tensor of mesh, got 4 on "
            "16; set it to 16, or tensor to 4.",
            {"mesh.tensor": 4},
        ),
        (
            "tokens",
            {"data.sequence_length": 300, "mesh.context": 8},
            "data.sequence_length must be divisible by 2 * context of mesh, got 300 on "
            "16; set it to 288 or 304, or context to 2.",
            {"mesh.context": 2},
        ),
        (
            "odd_tokens",
            {"data.sequence_length": 301, "mesh.context": 2},
            "set it to 300 or 304, or context to 1.",
            {"mesh.context": 1},
        ),
        (
            "chunks",
            {"data.sequence_length": 300, "model.expert_chunks": 8},
            "by context * expert_chunks of mesh, got 300 on 8; set it to 296 or 304, "
            "or model.expert_chunks to 6 or 10.",
            {"model.expert_chunks": 10},
        ),
        (
            "rollouts",
            {"stage": "rl", "mesh.data": 48, "rl.slots": 48, "rl.max_new_tokens": 64},
            "rl.prompts_per_step * rl.group_size must be divisible by data * fsdp * "
            "expert of mesh, got 1024 on 48; set it to 1008 or 1056, or give",
            {"rl.prompts_per_step": 33},
        ),
        (
            "slots",
            {"stage": "rl", "mesh.data": 64, "rl.max_new_tokens": 64},
            "rl.slots must be divisible by data * fsdp * expert * context of mesh, got "
            "32 on 64; set it to 64, or give devices to mesh.tensor.",
            {"rl.slots": 64},
        ),
    )
    def test_one_that_is_named_is_accepted(self, changes, message, choice):
        with self.assertRaisesRegex(config_lib.InputError, re.escape(message)):
            changed(changes)
        changed(changes | choice)

    @parameterized.parameters(
        ({"rl.objective": "gspo"}, "rl.objective='gspo', whose ratio is that of"),
        (
            {"loss.mtp_objective": "end_to_end"},
            "loss.mtp_objective='end_to_end', which",
        ),
    )
    def test_losses_of_whole_rows_are_not_cut(self, changes, words):
        changed(changes)
        message = f"mesh.context must be 1 for {words}"
        with self.assertRaisesRegex(config_lib.InputError, re.escape(message)):
            changed(changes | {"mesh.context": 2})


if __name__ == "__main__":
    environment.main()
