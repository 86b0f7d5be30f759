"""Pre-training of GLM-5 at the paper's numbers (arXiv 2602.15763, 2.1 and App. A).

python -m glm5_jax.train --config=configs/glm5_pretrain_paper.py \
    --config.data.source=DIR --config.data.tokenizer=zai-org/GLM-5/tokenizer.json

Hardware: 512 v5p chips, v5p:8x8x8, a row on each at a time. Compiled, never run:
37.3 of 96 GiB a chip; a step of 64M tokens takes 140 s at least (HBM).

Disclosed: 27T tokens, 4096 a row, dense attention; a batch that grows from 16M to 64M
tokens over the first 500B; a rate that rises to 2e-4 and falls to 4e-5 on a cosine;
from GLM-4.5 RoPE's base 1e4, the router's bias at 0.001 and MTP at 0.3, after 15T
tokens 0.0 and 0.1.
Undisclosed, and therefore ours: the batch grows in three equal jumps, because each size
is compiled once (4 programs); the rate rises over 34B tokens, which are DeepSeek-V3's
2000 steps. 15T was said of a run of 22T tokens; we keep it.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

TOKENS = 27e12


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    data = config_lib.DataConfig(
        tokenizer="tokenizer.json",
        sequence_length=4096,
        batch_size=16384,
        batch_warmup_sizes=(4096, 8192, 12288),
        batch_warmup_tokens=5e11,
    )
    config = config_lib.TrainConfig(
        num_steps=data.batches.steps_for(TOKENS),
        log_every=10,
        eval_every=500,
        checkpoint_every=500,
        model=dataclasses.replace(
            presets.GLM5,
            attention="dense",
            rope_theta=1e4,
            remat_policy="full",
            expert_chunks=4,
        ),
        data=data,
        loss=config_lib.LossConfig(
            mtp_weight_changes=((15e12, 0.1),),
            router_bias_rate_changes=((15e12, 0.0),),
        ),
        optim=config_lib.OptimConfig(warmup_tokens=3.4e10, accumulation_steps=32),
        mesh=config_lib.MeshConfig(fsdp=64, expert=8),
    )
    return command_line.to_config_dict(config)
