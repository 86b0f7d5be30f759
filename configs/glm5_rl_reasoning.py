"""Reasoning RL of GLM-5 at the paper's numbers (arXiv 2602.15763, section 3.2).

python -m glm5_jax.train --config=configs/glm5_rl_reasoning.py \
    --config.init_from=/shared/sft --config.rl.servers=http://HOST:8000 \
    --config.rl.weights_store=/shared/weights

Servers on other chips sample (docs/async_rl.md); without staleness this is on-policy.
Hardware: 512 v5p chips, v5p:8x8x8; 8 chips share a row, 64 rows at a time. The update
was compiled, never run: 44.2 of 96 GiB a chip, 12,210 GiB sent for 42M tokens, 111 s
(limited by HBM). Disclosed: 32 prompts with 32 rollouts each, beta 2, clips 0.2 and
0.28, no KL term, a frozen indexer, fully on-policy. Undisclosed, and therefore taken
from slime's recipe: AdamW at 1e-6, betas 0.9 and 0.98, weight decay 0.1, 32,768 new
tokens, temperature 1. Disclosed, but for science: an even mix of maths, code and tools.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    config = config_lib.TrainConfig(
        stage="async_rl",
        num_steps=1000,
        eval_every=50,
        checkpoint_every=20,
        sample_tokens=0,
        model=dataclasses.replace(presets.GLM5, remat_policy="full", expert_chunks=4),
        data=config_lib.DataConfig(tokenizer="tokenizer.json", sequence_length=40960),
        optim=config_lib.OptimConfig(
            name="adamw",
            learning_rate=1e-6,
            end_learning_rate=1e-6,
            schedule="constant",
            adam_b2=0.98,
            clip_norm=1.0,  # ours
            accumulation_steps=16,  # of 64 rows, a row on 8 chips
        ),
        rl=config_lib.RLConfig(
            environment="reasoning_gym:gsm_symbolic+code+python:chain_sum:4",
            prompts_per_step=32,
            group_size=32,
            max_staleness=0,
            max_new_tokens=32768,
            max_turns=8,
            slots=512,
            prefill_chunk=2048,
            answer_timeout_seconds=3600.0,  # planned: 1,000 s, and as long for a slot
            episode_timeout_seconds=7200.0,  # ours, for all turns
        ),
        mesh=config_lib.MeshConfig(fsdp=8, expert=8, context=8),
    )
    return command_line.to_config_dict(config)
