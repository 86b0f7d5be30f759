"""GLM-5's engine on 64 v5p chips: 64 sequences at once, weights in bfloat16.

python -m glm5_jax.aot --config=configs/glm5_serve.py:v5p_64_32k --topology=v5p:4x4x4 \
    --program=decode
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

# expert, tensor, tokens of a sequence
VARIANTS = {
    "v5p_64_32k": (8, 8, 32_768),
    "v5p_64_128k": (16, 4, 131_072),
    "v5p_64_198k": (32, 2, 202_752),
}


def get_config(variant: str = "v5p_64_32k") -> ml_collections.ConfigDict:
    """Returns the config of a length of sequences."""
    expert, tensor, length = VARIANTS[variant]
    config = config_lib.TrainConfig(
        model=dataclasses.replace(presets.GLM5, param_dtype="bfloat16"),
        data=config_lib.DataConfig(
            tokenizer="tokenizer.json", sequence_length=length, batch_size=64
        ),
        mesh=config_lib.MeshConfig(data=1, expert=expert, tensor=tensor),
    )
    return command_line.to_config_dict(config)
