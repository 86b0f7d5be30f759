"""Gives a small GLM-5 back what a later stage taught another one: distillation.

python -m glm5_jax.train --config=configs/small_sft_reverse.py --workdir=runs/sft
python -m glm5_jax.train --config=configs/small_rl_reverse.py \
    --config.init_from=runs/sft --workdir=runs/rl
python -m glm5_jax.train --config=configs/small_distill_reverse.py \
    --config.init_from=runs/sft --config.rl.teachers="('runs/rl',)" \
    --workdir=runs/distilled

The policy plays, one answer to a task, and the policy of runs/rl says of each of its
tokens how likely it would have been. Rewards are measured and teach nothing
(docs/distillation.md). Hardware: a laptop (2 cores).
"""

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    config = config_lib.TrainConfig(
        stage="distill",
        num_steps=100,
        eval_every=10,
        model=presets.BYTES,
        data=config_lib.DataConfig(
            tokenizer="byte_chat", enable_thinking=False, sequence_length=32
        ),
        optim=config_lib.OptimConfig(
            name="adamw",
            learning_rate=8e-4,
            end_learning_rate=1e-4,
            schedule="linear",
            warmup_steps=10,
            weight_decay=0.0,
            adam_b2=0.98,
            clip_norm=1.0,
        ),
        rl=config_lib.RLConfig(
            environment="reverse:3-6",
            teachers=("runs/rl",),
            prompts_per_step=128,
            group_size=1,
            max_new_tokens=8,
            max_turns=1,
            slots=128,
            num_eval_tasks=256,
        ),
    )
    return command_line.to_config_dict(config)
