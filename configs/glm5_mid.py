"""Mid-training of GLM-5 at 32K, 128K and 200K (arXiv 2602.15763, section 2.3).

python -m glm5_jax.train --config=configs/glm5_mid.py:mid_32k --config.init_from=DIR

docs/stages.md prepares the data. Hardware: 512 v5p chips, v5p:8x8x8. Compiled, never
run: 38.8, 47.9 and 57.6 GiB of 96 a chip; a step takes 4, 14 and 22 minutes at
least, limited by FLOPs.

Disclosed: the lengths, with 1T, 500B and 50B tokens; rates that fall linearly from 4e-5
to 1e-5 across the three; RoPE's base, which becomes 1e6 with 32K; dense attention;
best-fit packing, interleaved packing of similar texts; long texts up-sampled.
Undisclosed, and therefore ours: 64M tokens a step, pre-training's last batch, because
the rates continue its schedule; half of the rows from texts longer than a quarter row.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

# Tokens of a row, tokens before and after, rows of a step, and the mesh: fsdp, context.
VARIANTS = {
    "mid_32k": (32_768, 0, 1e12, 2048, 8, 8),
    "mid_128k": (131_072, 1e12, 1.5e12, 512, 1, 64),
    "mid_200k": (202_752, 1.5e12, 1.55e12, 320, 1, 64),
}
EXPERT = 8


def get_config(variant: str = "mid_32k") -> ml_collections.ConfigDict:
    """Returns the config of a length."""
    length, first, last, rows, fsdp, context = VARIANTS[variant]
    folders = f"prepared/{variant}/up_to_{length // 4}", f"prepared/{variant}/longer"
    model = dataclasses.replace(
        presets.GLM5, attention="dense", remat_policy="full", expert_chunks=4
    )
    config = config_lib.TrainConfig(
        init_from_changes=("rope_theta",) if first == 0 else (),
        num_steps=int((last - first) / (length * rows)),
        log_every=10,
        checkpoint_every=100,
        model=model,
        data=config_lib.DataConfig(
            mixture=folders,
            mixture_weights=((0.5, 0.5),),
            sequence_length=length,
            batch_size=rows,
        ),
        loss=config_lib.LossConfig(mtp_weight=0.1, router_bias_rate=0.0),
        optim=config_lib.OptimConfig(
            learning_rate=4e-5 - 3e-5 * first / 1.55e12,
            end_learning_rate=4e-5 - 3e-5 * last / 1.55e12,
            schedule="linear",
            accumulation_steps=rows // (fsdp * EXPERT),
        ),
        mesh=config_lib.MeshConfig(fsdp=fsdp, expert=EXPERT, context=context),
    )
    return command_line.to_config_dict(config)
