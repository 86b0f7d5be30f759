"""Pre-training of the real models and of a ladder of small ones, with one schedule.

python -m glm5_jax.train --config=configs/pretrain.py:glm5 --dry_run
python -m glm5_jax.train --config=configs/pretrain.py:glm5_10m --config.data.source=DIR

glm5_pretrain_paper.py has the paper's batches and schedules. Hardware: glm5_1m and
glm5_10m train on a laptop, glm5_100m and glm5_1b on one accelerator; the real models
need a pod, whose size --dry_run prints. Expected result: unknown, because only glm5_1m
was trained so far (configs/quickstart.py). Undisclosed by the paper, and therefore
ours: warm-up steps, AdamW's rate, the small models' batch.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

VARIANTS = presets.MODELS


def get_config(variant: str = "glm5_1m") -> ml_collections.ConfigDict:
    """Returns the config of a model of the ladder."""
    model = VARIANTS[variant]
    is_real = model.hidden_size == presets.GLM5.hidden_size
    config = config_lib.TrainConfig(
        num_steps=1000,
        log_every=10,
        eval_every=100,
        checkpoint_every=250,
        model=model,
        data=config_lib.DataConfig(
            bpe_vocab_size=min(model.vocab_size, 32768),
            sequence_length=4096 if is_real else 512,
            batch_size=4096 if is_real else 32,  # 16M tokens, the paper's first batch
        ),
        loss=config_lib.LossConfig(indexer_weight=0.0 if is_real else 0.1),
        optim=config_lib.OptimConfig(warmup_steps=50),
    )
    if is_real:  # the indexer comes after pre-training: stages dsa_warmup, dsa_sparse
        dense = dataclasses.replace(
            config.model, attention="dense", remat_policy="full"
        )
        config = dataclasses.replace(config, model=dense)
    return command_line.to_config_dict(config)
