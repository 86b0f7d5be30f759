"""Four kinds of tasks at once, evenly, as GLM-5 mixes four domains in reasoning RL.

python -m glm5_jax.train --config=configs/small_sft_mixture.py --workdir=runs/sft
python -m glm5_jax.train --config=configs/small_async_mixture.py \
    --config.init_from=runs/sft --workdir=runs/async

GLM-5 mixes mathematics, science, code and tools (arXiv 2602.15763, 3.2); here these are
what a model of bytes can begin to learn, see small_sft_mixture. rollout/share/TAG and
rollout/reward/TAG have each kind's share and reward of a step, eval/success/TAG its
held-out success. docs/async_rl.md has a curve.
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
            environment="arithmetic:1+sort:2-4+reverse:2-4+calculator_untold:2-3",
            prompts_per_step=16,
            group_size=8,
            max_new_tokens=32,
            max_turns=4,
            slots=128,
            dynamic_sampling=True,
            objective="dis",
            max_staleness=2,
            num_engines=1,
            num_eval_tasks=256,
        ),
    )
    return command_line.to_config_dict(config)
