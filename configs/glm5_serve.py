"""GLM-5's engine on 64 v5p chips: 64 sequences at once, weights in bfloat16.

python -m glm5_jax.aot --config=configs/glm5_serve.py:32k --topology=v5p:4x4x4 \
    --program=decode

Hardware: a v5p:4x4x4 slice. Compiled, never run. Memory of a chip, and for one token of
all 64 sequences the roofline (32k) or the GiB sent (198k):

32k    decode 52.1 of 96 GiB, 53 ms (HBM); prefill of 2048 tokens of each 57.6
198k   decode 69.2 of 96 GiB, 16.8 GiB sent

Weights take 1.4 TiB. A token in the cache takes 117 KiB on each chip that shares its
slot. Long sequences therefore need more devices with different slots (expert) and fewer
that share slots (tensor), although devices that share slots fetch less of the weights.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

# Tokens of a sequence, expert, tensor.
VARIANTS = {
    "32k": (32_768, 8, 8),
    "198k": (202_752, 32, 2),
}


def get_config(variant: str = "32k") -> ml_collections.ConfigDict:
    """Returns the config of a length of sequences."""
    length, expert, tensor = VARIANTS[variant]
    model = dataclasses.replace(
        presets.GLM5,
        param_dtype="bfloat16",
        expert_chunks=8,  # of a prefill: its buffers are as much smaller
    )
    config = config_lib.TrainConfig(
        model=model,
        data=config_lib.DataConfig(
            tokenizer="tokenizer.json", sequence_length=length, batch_size=64
        ),
        mesh=config_lib.MeshConfig(data=1, expert=expert, tensor=tensor),
    )
    return command_line.to_config_dict(config)
