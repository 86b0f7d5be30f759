"""GLM-5's engine on 64 v5p chips, weights in bfloat16.

python -m glm5_jax.aot --config=configs/glm5_serve.py:32k --topology=v5p:4x4x4 \
    --program=decode

Hardware: a v5p:4x4x4 slice. Compiled, never run. Memory of a chip, and for one token of
all sequences the roofline, which is that of HBM:

32k        decode of 64 sequences 51.8 of 96 GiB, 19 ms
32k_many   decode of 512 sequences 82.2 of 96 GiB, 34 ms
198k       decode of 64 sequences 68.9 of 96 GiB, 17 ms

docs/scaling.md says what follows for other formats, and for drafts.

Weights take 1.4 TiB. A token in the cache takes 117 KiB on each chip that shares its
slot. Long sequences therefore need more devices with different slots (expert) and fewer
that share slots (tensor), although devices that share slots fetch less of the weights.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

# Tokens of a sequence, sequences, expert, tensor.
VARIANTS = {
    "32k": (32_768, 64, 8, 8),
    "198k": (202_752, 64, 32, 2),
    "32k_many": (32_768, 512, 32, 2),
}


def get_config(variant: str = "32k") -> ml_collections.ConfigDict:
    """Returns the config of a length of sequences."""
    length, num_sequences, expert, tensor = VARIANTS[variant]
    model = dataclasses.replace(
        presets.GLM5,
        param_dtype="bfloat16",
        expert_chunks=8,  # of a prefill: its buffers are as much smaller
        expert_transport="rounds",  # with buffers for 1.5 times an even load
    )
    config = config_lib.TrainConfig(
        model=model,
        data=config_lib.DataConfig(
            tokenizer="tokenizer.json",
            sequence_length=length,
            batch_size=num_sequences,
        ),
        mesh=config_lib.MeshConfig(data=1, expert=expert, tensor=tensor),
    )
    return command_line.to_config_dict(config)
