"""A training step of GLM-5 with sparse attention: 4096 tokens a row, one row a device.

python -m glm5_jax.aot --config=configs/glm5_pretrain.py:v5p_512 --topology=v5p:8x8x8

Hardware: as the variants say, in chips: v5p_256 is v5p:8x8x4, tpu7x_256 is tpu7x:4x8x8
(two devices a chip). Compiled, never run: docs/scaling.md has the reports. All of
GLM-5: 78 layers and MTP, Muon Split, the indexer trained by its KL; the paper's own
first stage, dense, is configs/pretrain.py:glm5.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

VARIANTS = {
    "v5p_512": (64, 8),
    "v5p_256": (32, 8),
    "tpu7x_256": (64, 8),
    "v6e_1024": (128, 8),
    "h200_512": (64, 8),  # experts within a node of 8
}


def get_config(variant: str = "v5p_512") -> ml_collections.ConfigDict:
    """Returns the config of a number of chips: (fsdp, expert)."""
    fsdp, expert = VARIANTS[variant]
    config = config_lib.TrainConfig(
        num_steps=1000,
        log_every=10,
        eval_every=100,
        checkpoint_every=100,
        model=dataclasses.replace(presets.GLM5, remat_policy="full", expert_chunks=4),
        data=config_lib.DataConfig(
            tokenizer="tokenizer.json",
            sequence_length=4096,
            batch_size=fsdp * expert,
        ),
        optim=config_lib.OptimConfig(warmup_steps=50),
        mesh=config_lib.MeshConfig(fsdp=fsdp, expert=expert),
    )
    return command_line.to_config_dict(config)
