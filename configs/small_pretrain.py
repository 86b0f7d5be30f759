"""GLM-5's pre-training in proportion, on Python's own texts; small_mid.py continues it.

python -m glm5_jax.train --config=configs/small_pretrain.py --workdir=runs/base

Hardware: a laptop (2 cores). Written in proportion, not yet trained to its end. As in
the paper, the rate falls to a fifth on a cosine, the batch grows fourfold over the
first fiftieth of the tokens, MTP's weight and the router's bias rate change at 15/27,
RoPE's base is 1e4, and attention is dense. Ours: a warm-up of a hundredth, and a larger
bias rate, because a short run has few steps to balance the experts in.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

TOKENS = 500 * 4096


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    data = config_lib.DataConfig(
        sequence_length=256,
        batch_size=16,
        batch_warmup_sizes=(4, 8, 12),
        batch_warmup_tokens=TOKENS / 50,
    )
    config = config_lib.TrainConfig(
        num_steps=data.batches.steps_for(TOKENS),
        checkpoint_every=50,
        model=dataclasses.replace(presets.GLM5_1M, attention="dense"),
        data=data,
        loss=config_lib.LossConfig(
            mtp_weight_changes=((TOKENS * 15 / 27, 0.1),),
            router_bias_rate=0.01,
            router_bias_rate_changes=((TOKENS * 15 / 27, 0.0),),
        ),
        optim=config_lib.OptimConfig(
            learning_rate=1e-2,
            end_learning_rate=2e-3,
            warmup_tokens=TOKENS / 100,
            ns_dtype="float32",
        ),
    )
    return command_line.to_config_dict(config)
