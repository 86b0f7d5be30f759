"""Trains GLM-5 with sparse attention: 4096 tokens a row, one row a device.

python -m glm5_jax.aot --config=configs/glm5_pretrain.py:v5p_512 --topology=v5p:8x8x8

The whole model: 78 layers and MTP, Muon Split, the indexer trained by its KL. The
paper's own first stage has dense attention and is configs/pretrain.py:glm5. Hardware:
the variants name the number of chips. Compiled, never run. The columns are the memory
of a device, what it sends in a step, and the seconds of the resource that limits it:

  v5p_512    v5p:8x8x8      79.9 of 96 GiB   746 GiB   3.3 s (FLOPs)
  v5p_512_exchange           84.5 of 96       362       3.3 (FLOPs)
  v5p_256    v5p:8x8x4      47.9 of 96       746       6.0 (HBM)
  tpu7x_256  tpu7x:4x8x8    34.3 of 95       744       4.4 (HBM), two devices a chip
  v6e_1024   v6e:32x32      24.7 of 31       748       11.1 (HBM)
  h200_512   64 nodes of 8  not compiled: 5.6 GiB of parameters, 5.6 GiB of moments
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

# Keeps what kernels and experts computed, in buffers of bounded size.
_KEEPS = {"remat_policy": "experts", "expert_transport": "rounds"}
# Two parts of a layer's tokens, so that one travels while the other is multiplied.
_EXCHANGES = _KEEPS | {"expert_transport": "exchange", "expert_chunks": 2}
_RECOMPUTES = {"remat_policy": "full", "expert_chunks": 4}
VARIANTS = {  # mesh.fsdp, mesh.expert, what the model does with its memory
    "v5p_512": (64, 8, _KEEPS),
    "v5p_512_exchange": (8, 64, _EXCHANGES),
    "v5p_256": (32, 8, _RECOMPUTES),
    "tpu7x_256": (64, 8, _RECOMPUTES),
    "v6e_1024": (128, 8, _RECOMPUTES),
    "h200_512": (64, 8, _RECOMPUTES),  # experts within a node of 8
}


def get_config(variant: str = "v5p_512") -> ml_collections.ConfigDict:
    """Returns the config of a number of chips."""
    fsdp, expert, memory = VARIANTS[variant]
    config = config_lib.TrainConfig(
        num_steps=1000,
        log_every=10,
        eval_every=100,
        checkpoint_every=100,
        model=dataclasses.replace(presets.GLM5, **memory),
        data=config_lib.DataConfig(
            tokenizer="tokenizer.json",
            sequence_length=4096,
            batch_size=fsdp * expert,
        ),
        optim=config_lib.OptimConfig(warmup_steps=50),
        mesh=config_lib.MeshConfig(fsdp=fsdp, expert=expert),
    )
    return command_line.to_config_dict(config)
