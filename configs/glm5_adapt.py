"""DeepSeek Sparse Attention for a dense GLM-5: warm-up, then sparse adaptation.

python -m glm5_jax.aot --config=configs/glm5_adapt.py:sparse_202k --topology=v5p:8x8x8
python -m glm5_jax.train --config=configs/glm5_adapt.py:warmup_202k \
    --config.init_from=DIR --config.data.source=DIR

Hardware: 512 v5p chips, v5p:8x8x8. Compiled, never run. The columns are the memory of a
chip, the GiB that it sends in a step, and the seconds of what limits the step:

  warmup_202k  28.5 of 96 GiB   305 GiB   20.8 s (FLOPs)
  warmup_paper 35.5            5,509      47.6 (FLOPs)
  sparse_128k  27.8             720       6.2 (HBM)
  sparse_202k  30.5             800       8.0 (HBM)

Disclosed (arXiv 2602.15763, section 2.3): 1000 steps of warm-up at 14 x 202,752 tokens
with rates from 5e-3 to 2e-4, which train only the indexer; then 20B tokens at 1e-5.
Ours: a cosine. warmup_paper has 14 rows, 2 at a time, and sends more; the others 8.
"""

from dataclasses import replace

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

VARIANTS = {  # tokens of a row, rows of a step, mesh.expert, mesh.context
    "warmup_202k": (202752, 8, 8, 64),
    "warmup_paper": (202752, 14, 2, 256),
    "sparse_128k": (131072, 8, 8, 64),
    "sparse_202k": (202752, 8, 8, 64),
}


def get_config(variant: str = "sparse_202k") -> ml_collections.ConfigDict:
    """Returns the config of a stage and a length."""
    length, rows, expert, context = VARIANTS[variant]
    is_warmup = variant.startswith("warmup")
    attention = "dense_with_indexer_loss" if is_warmup else "sparse"
    rates = (5e-3, 2e-4) if is_warmup else (1e-5, 1e-5)
    config = config_lib.TrainConfig(
        stage="dsa_warmup" if is_warmup else "dsa_sparse",
        num_steps=1000 if is_warmup else 20_000_000_000 // (rows * length),
        log_every=10,
        eval_every=100,
        model=replace(
            presets.GLM5, attention=attention, remat_policy="full", expert_chunks=4
        ),
        data=config_lib.DataConfig(
            tokenizer="tokenizer.json", sequence_length=length, batch_size=rows
        ),
        loss=config_lib.LossConfig(indexer_weight=1.0 if is_warmup else 1e-3),
        optim=config_lib.OptimConfig(
            learning_rate=rates[0],
            end_learning_rate=rates[1],
            accumulation_steps=rows // expert,
        ),
        mesh=config_lib.MeshConfig(expert=expert, context=context),
    )
    return command_line.to_config_dict(config)
