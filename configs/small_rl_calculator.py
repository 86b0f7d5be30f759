"""Teaches a small GLM-5 by reward alone to use a calculator, over several turns.

python -m glm5_jax.train --config=configs/small_sft_calculator.py --workdir=runs/sft
python -m glm5_jax.train --config=configs/small_rl_calculator.py \
    --config.init_from=runs/sft --workdir=runs/rl

A control run has the same tasks without the tool:
    --config.rl.environment=calculator_without_tool:2-3 \
    --config.rl.min_start_success=0

Hardware: a laptop (2 cores), six to eight minutes while it also does other work.
Expected: held-out success rises above 95% with 3 of 5 seeds that started at 66 to 76%,
and to 91% with the others, which copy five digits wrongly; without the tool it is 0%
(docs/rl.md).
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    config = config_lib.TrainConfig(
        stage="rl",
        num_steps=150,
        eval_every=25,
        model=dataclasses.replace(presets.BYTES, index_topk=32),
        data=config_lib.DataConfig(
            tokenizer="byte_chat", enable_thinking=False, sequence_length=64
        ),
        optim=config_lib.OptimConfig(
            name="adamw",
            learning_rate=5e-4,
            end_learning_rate=5e-5,
            schedule="linear",
            warmup_steps=10,
            weight_decay=0.0,
            adam_b2=0.98,
            clip_norm=1.0,
        ),
        rl=config_lib.RLConfig(
            environment="calculator_untold:2-3",
            prompts_per_step=16,
            group_size=8,
            max_new_tokens=32,
            max_turns=4,
            slots=128,
            dynamic_sampling=True,
        ),
    )
    return command_line.to_config_dict(config)
