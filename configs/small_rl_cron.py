"""Teaches a small GLM-5 by reward alone to add a line to a crontab in a real shell.

python -m glm5_jax.train --config=configs/small_sft_cron.py --workdir=runs/sft
python -m glm5_jax.train --config=configs/small_rl_cron.py --config.init_from=runs/sft \
    --config.data.tokenizer=runs/sft/tokenizer.json --workdir=runs/rl

Every episode has a sandbox of its own; the reward is 1 if hidden checks find the line.
Hardware: a laptop (2 cores) with bubblewrap, five minutes of CPU.
Expected: held-out success rises from 48% to 65% in 10 steps and stays, and from 40% to
55% with another seed; from 21% it did not in 20 (docs/worlds/terminal.md).
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    config = config_lib.TrainConfig(
        stage="rl",
        num_steps=40,
        eval_every=10,
        model=dataclasses.replace(
            presets.BYTES, vocab_size=640, index_topk=32, num_nextn_predict_layers=0
        ),
        data=config_lib.DataConfig(
            tokenizer="runs/sft/tokenizer.json",
            enable_thinking=False,
            sequence_length=112,
        ),
        optim=config_lib.OptimConfig(
            name="adamw",
            learning_rate=8e-4,
            end_learning_rate=1e-4,
            schedule="linear",
            warmup_steps=5,
            weight_decay=0.0,
            adam_b2=0.98,
            clip_norm=1.0,
        ),
        rl=config_lib.RLConfig(
            environment="untold:terminal:cron_line",
            prompts_per_step=8,
            group_size=8,
            max_new_tokens=40,
            max_turns=3,
            slots=64,
            prefill_chunk=16,
        ),
    )
    return command_line.to_config_dict(config)
