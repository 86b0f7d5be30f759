"""SFT of GLM-5 at the paper's length (arXiv 2602.15763, section 3.1).

python -m glm5_jax.train --config=configs/glm5_sft.py --config.init_from=zai-org/GLM-5 \
    --config.data.source=DIR --config.data.tokenizer=zai-org/GLM-5/tokenizer.json

Hardware: 512 v5p chips, v5p:8x8x8; 64 chips share a row, 8 rows at a time. Compiled,
never run: 36.4 of 96 GiB a chip, 6,364 GiB sent in a step of 13M tokens, 63 s (limited
by HBM). Disclosed: the length. Undisclosed, and therefore ours: batch, steps and
learning rates; MTP's weight is slime's.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

VARIANTS = {"glm5": presets.GLM5, "glm5_2": presets.GLM5_2}


def get_config(variant: str = "glm5") -> ml_collections.ConfigDict:
    """Returns the config of a released model."""
    is_glm5_2 = variant == "glm5_2"
    config = config_lib.TrainConfig(
        stage="sft",
        num_steps=2000,
        eval_every=200,
        checkpoint_every=200,
        sample_tokens=0,  # needs a single process; use glm5_jax.generate afterwards
        model=dataclasses.replace(
            VARIANTS[variant], remat_policy="full", expert_chunks=4
        ),
        data=config_lib.DataConfig(
            source="data/sft",
            tokenizer="tokenizer.json",
            chat_template="glm5.2" if is_glm5_2 else "glm5",
            sequence_length=202752,
            batch_size=64,
        ),
        loss=config_lib.LossConfig(mtp_weight=0.2, router_bias_rate=0.0),
        optim=config_lib.OptimConfig(
            learning_rate=1e-5,
            end_learning_rate=1e-6,
            warmup_steps=50,
            accumulation_steps=8,  # of 8 rows, a row on 64 chips
        ),
        mesh=config_lib.MeshConfig(expert=8, context=64),
    )
    return command_line.to_config_dict(config)
