"""Agentic RL of GLM-5 with the paper's numbers (arXiv 2602.15763, 3.3 and 4.1).

python -m glm5_jax.train --config=configs/glm5_rl_agentic.py \
    --config.init_from=/shared/rl --config.rl.environment=swe:/shared/tasks+terminal \
    --config.rl.servers=http://HOST:8000 --config.rl.weights_store=/shared/weights

Hardware: 1024 v5p chips, of which 256 train (docs/planning.md, first row); never
run. Disclosed: two parts, no standard deviation in advantages, dis, no loss on tools'
answers, moments forgotten after a push, 16,384 tokens a turn. GLM-5.2: bands, 131,072
tokens. SkyRL: staleness 4. slime: AdamW. Ours: 200 turns, 32 groups of 8, 1,280 live.
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
        checkpoint_every=20,
        sample_tokens=0,
        model=dataclasses.replace(presets.GLM5, remat_policy="full", expert_chunks=8),
        data=config_lib.DataConfig(tokenizer="tokenizer.json", sequence_length=131072),
        optim=config_lib.OptimConfig(
            name="adamw",
            learning_rate=1e-6,
            end_learning_rate=1e-6,
            schedule="constant",
            adam_b2=0.98,
            clip_norm=1.0,  # ours
            accumulation_steps=4,
        ),
        rl=config_lib.RLConfig(
            environment="swe",
            prompts_per_step=32,
            group_size=8,
            rows_per_step=64,
            max_new_tokens=16384,  # a turn's, as in the paper's SWE-bench
            max_turns=200,
            slots=768,  # of all servers: twice as many episodes may be under way
            step_timeout_seconds=600.0,  # planned: at most 276 s
            answer_timeout_seconds=1200.0,  # planned: 293 s, and as long for a slot
            episode_timeout_seconds=7200.0,  # planned: 88 minutes, half of it waiting
            objective="dis",
            dis_low=config_lib.DIS_AGENTIC[0],
            dis_high=config_lib.DIS_AGENTIC[1],
            advantage_std="none",
            loss_mean="token",
            forgets_moments=True,
            max_staleness=4,
        ),
        mesh=config_lib.MeshConfig(fsdp=2, expert=8, context=16),
    )
    return command_line.to_config_dict(config)
