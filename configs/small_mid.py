"""GLM-5's mid-training, warm-up and sparse adaptation in proportion, on a laptop.

python -m glm5_jax.train --config=configs/small_mid.py:mid_512 --workdir=runs/mid_512 \
    --config.init_from=runs/base --config.data.tokenizer=runs/base/tokenizer.json

Then mid_1024, warmup and sparse, each from the folder of the last one; runs/base is of
small_pretrain.py (docs/stages.md). Hardware: a laptop (2 cores). Written in proportion,
not yet trained to its end.

In proportion to the paper: the rate falls linearly to a quarter across mid-training, to
a twenty-fifth in the warm-up, and stays in the adaptation; RoPE's base grows a
hundredfold with the first longer rows. Ours: rows grow 2 and 2 times instead of 8, 4
and 1.5, and an eighth of the keys is selected instead of a hundredth.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

# Stage, attention, tokens of a row, steps of 4096 tokens, first and last rate.
VARIANTS = {
    "mid_512": ("pretrain", "dense", 512, 120, 2e-3, 1e-3),
    "mid_1024": ("pretrain", "dense", 1024, 60, 1e-3, 5e-4),
    "warmup": ("dsa_warmup", "dense_with_indexer_loss", 1024, 60, 5e-3, 2e-4),
    "sparse": ("dsa_sparse", "sparse", 1024, 60, 5e-4, 5e-4),
}


def get_config(variant: str = "mid_512") -> ml_collections.ConfigDict:
    """Returns the config of a stage."""
    stage, attention, length, steps, first, last = VARIANTS[variant]
    config = config_lib.TrainConfig(
        stage=stage,
        init_from_changes=("rope_theta",) if variant == "mid_512" else (),
        num_steps=steps,
        eval_every=30,
        checkpoint_every=30,
        model=dataclasses.replace(
            presets.GLM5_1M, attention=attention, rope_theta=1e6, index_topk=128
        ),
        data=config_lib.DataConfig(sequence_length=length, batch_size=4096 // length),
        loss=config_lib.LossConfig(
            mtp_weight=0.1, router_bias_rate=0.0, indexer_weight=0.1
        ),
        optim=config_lib.OptimConfig(
            learning_rate=first,
            end_learning_rate=last,
            schedule="linear" if stage == "pretrain" else "cosine",
            ns_dtype="float32",
        ),
    )
    return command_line.to_config_dict(config)
