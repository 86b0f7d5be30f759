"""Shows a small GLM-5 how to call a calculator, as a start for RL.

python -m glm5_jax.train --config=configs/small_sft_calculator.py --workdir=runs/sft

The run ends when 65% of held-out products are answered right. The number of steps
therefore depends on the seed. From one evaluation to the next success moves by up to 24
points, and RL must start below 80% (docs/rl.md, Starts). The learning rate is constant,
so that no step depends on the number of steps. The prompt does not describe the tool
(tasks "calculator_untold"), which keeps an episode below 64 byte tokens.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    config = config_lib.TrainConfig(
        stage="sft",
        num_steps=600,
        eval_every=5,
        eval_batches=1,
        eval_success=True,
        stop_metric="eval/success",
        stop_at=0.65,
        sample_prompt="123*456",
        sample_tokens=32,
        model=dataclasses.replace(presets.BYTES, index_topk=32),
        data=config_lib.DataConfig(
            source="tasks:calculator_untold:2-3",
            tokenizer="byte_chat",
            enable_thinking=False,
            sequence_length=64,
            batch_size=32,
        ),
        loss=config_lib.LossConfig(indexer_weight=0.1, router_bias_rate=0.01),
        optim=config_lib.OptimConfig(
            name="adamw",
            learning_rate=3e-3,
            schedule="constant",
            warmup_steps=5,
        ),
        rl=config_lib.RLConfig(
            environment="calculator_untold:2-3",
            max_new_tokens=32,
            max_turns=4,
            slots=128,
        ),
    )
    return command_line.to_config_dict(config)
