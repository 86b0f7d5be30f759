"""The same tool as small_rl_calculator, in episodes that play while the model learns.

python -m glm5_jax.train --config=configs/small_sft_calculator.py --workdir=runs/sft
python -m glm5_jax.train --config=configs/small_async_calculator.py \
    --config.init_from=runs/sft --workdir=runs/async

The command starts a server that samples and an orchestrator that plays; metrics.jsonl
has rollout/staleness_max. docs/async_rl.md says how it works.
Hardware: a laptop (2 cores), needs the extra serve.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    config = config_lib.TrainConfig(
        stage="async_rl",
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
            objective="dis",
            max_staleness=2,
            num_engines=1,
        ),
    )
    return command_line.to_config_dict(config)
