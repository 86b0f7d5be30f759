"""The shape for comparing CPU training with peers (docs/log.md has the figures).

python -m glm5_jax.train --config=configs/bench_cpu.py:like_transformers
python -m glm5_jax.train --config=configs/bench_cpu.py:full

Hardware: any CPU; pin the process (taskset -c 0) to compare. About 30 s. 7.0 M
parameters, 8 rows of 512 tokens, float32. Prints tokens per second and per CPU-second.
`like_transformers` has next-token loss, sparse attention and AdamW. `full` has Muon
Split instead, and also the indexer's loss and MTP with three steps.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

VARIANTS = {"like_transformers": "what transformers trains", "full": "all of GLM-5"}


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
    """Returns the config of a variant."""
    config = config_lib.TrainConfig(
        num_steps=12,
        eval_every=0,
        eval_batches=1,
        sample_tokens=0,
        model=presets.BENCH,
        data=config_lib.DataConfig(
            bpe_vocab_size=1024, sequence_length=512, batch_size=8
        ),
        optim=config_lib.OptimConfig(learning_rate=1e-3, end_learning_rate=1e-4),
    )
    if variant == "like_transformers":
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, num_nextn_predict_layers=0),
            loss=config_lib.LossConfig(indexer_weight=0.0, balance_weight=0.0),
            optim=dataclasses.replace(config.optim, name="adamw"),
        )
    return command_line.to_config_dict(config)
