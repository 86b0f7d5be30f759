"""Shows a small GLM-5 four kinds of tasks at once, as a start for RL on their mix.

python -m glm5_jax.train --config=configs/small_sft_mixture.py --workdir=runs/sft

Demonstrations come in turn: sums (mathematics), letters in order (rules), words
backwards (programs on strings) and products with a calculator (tools). The run ends
when 50% of held-out tasks are solved; eval/success/TAG has the share of each kind. The
learning rate is constant, so that no step depends on the number of steps.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

TASKS = "arithmetic:1+sort:2-4+reverse:2-4+calculator_untold:2-3"


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    config = config_lib.TrainConfig(
        stage="sft",
        num_steps=1500,
        eval_every=10,
        eval_batches=1,
        eval_success=True,
        stop_metric="eval/success",
        stop_at=0.5,
        sample_prompt="reverse glm",
        sample_tokens=12,
        model=dataclasses.replace(presets.BYTES, index_topk=32),
        data=config_lib.DataConfig(
            source=f"tasks:{TASKS}",
            tokenizer="byte_chat",
            enable_thinking=False,
            sequence_length=64,
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
            environment=TASKS,
            max_new_tokens=32,
            max_turns=4,
            slots=128,
        ),
    )
    return command_line.to_config_dict(config)
