"""Teaches a small GLM-5 to spell some words backwards, as a start for RL.

python -m glm5_jax.train --config=configs/small_sft_reverse.py --workdir=runs/sft

The run ends when 75% of held-out words are spelt right. The number of steps therefore
depends on the seed. RL needs a start that solves some tasks of every length, but not
all: after an earlier end words of six letters may die out in RL, and it must start
below 80% of the same words, so they are evaluated every two steps (docs/rl.md, Starts).
The learning rate is constant, so that no step depends on the number of steps.
"""

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    config = config_lib.TrainConfig(
        stage="sft",
        num_steps=1000,
        eval_every=2,
        eval_batches=1,
        eval_success=True,
        stop_metric="eval/success",
        stop_at=0.75,
        sample_prompt="reverse glm",
        sample_tokens=12,
        model=presets.BYTES,
        data=config_lib.DataConfig(
            source="tasks:reverse:3-6",
            tokenizer="byte_chat",
            enable_thinking=False,
            sequence_length=32,
            batch_size=64,
        ),
        loss=config_lib.LossConfig(indexer_weight=0.1, router_bias_rate=0.01),
        optim=config_lib.OptimConfig(
            name="adamw",
            learning_rate=3e-3,
            schedule="constant",
            warmup_steps=5,
        ),
        rl=config_lib.RLConfig(
            environment="reverse:3-6",
            max_new_tokens=8,
            max_turns=1,
            slots=128,
            num_eval_tasks=256,
        ),
    )
    return command_line.to_config_dict(config)
