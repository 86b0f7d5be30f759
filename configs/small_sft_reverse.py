"""Teaches a small GLM-5 to spell words backwards, a little: where RL then starts.

python -m glm5_jax.train --config=configs/small_sft_reverse.py --workdir=runs/sft

Hardware: a laptop (2 cores), about a minute.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

# All of GLM-5 at a size for bytes: selects 16 of up to 32 keys.
MODEL = dataclasses.replace(
    presets.small(hidden=96, layers=3, experts=8, vocab=320), index_topk=16
)


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    config = config_lib.TrainConfig(
        stage="sft",
        num_steps=150,
        eval_every=50,
        eval_batches=2,
        sample_prompt="reverse glmfive",
        sample_tokens=12,
        model=MODEL,
        data=config_lib.DataConfig(
            source="tasks:reverse:3-6",
            tokenizer="byte_chat",
            enable_thinking=False,
            sequence_length=32,
            batch_size=64,
        ),
        loss=config_lib.LossConfig(indexer_weight=0.1, router_bias_rate=0.01),
        optim=config_lib.OptimConfig(
            learning_rate=5e-3,
            end_learning_rate=5e-4,
            warmup_steps=5,
            ns_dtype="float32",
        ),
    )
    return command_line.to_config_dict(config)
