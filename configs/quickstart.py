"""Trains a small GLM-5 in about a minute, on the text in every Python installation.

python -m glm5_jax.train --config=configs/quickstart.py

Hardware: a laptop (2 cores). Expected: held-out bits per byte below 2.3 at the end,
loss.png, and a sample that looks like Python. The model has all parts of GLM-5: MLA,
sparse attention over 64 of 256 keys with an indexer trained by its divergence, experts
with loss-free balance, multi-token prediction, Muon Split. In so short a run many small
steps teach more than few large ones, and a faster momentum more than Muon's usual 0.95.
"""

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    config = config_lib.TrainConfig(
        num_steps=160,
        eval_every=80,
        eval_batches=16,
        checkpoint_every=80,
        model=presets.GLM5_1M,
        data=config_lib.DataConfig(
            bpe_vocab_size=2048, sequence_length=256, batch_size=4
        ),
        loss=config_lib.LossConfig(indexer_weight=0.1, router_bias_rate=0.01),
        optim=config_lib.OptimConfig(
            learning_rate=2e-2,
            end_learning_rate=2e-3,
            warmup_steps=5,
            muon_momentum=0.9,
            ns_dtype="float32",
        ),
    )
    return command_line.to_config_dict(config)
