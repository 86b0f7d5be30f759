"""The base configs of the studies, a size each: tiny, small and base.

| scale | parameters | tokens of a run | meant for |
|---|---|---|---|
| tiny | 0.4M | 0.1M | two cores: half a minute a run and as much to compile an arm |
| small | 10M | 33M | one GPU |
| base | 100M | 2.6G | several GPUs |
"""

import dataclasses

from glm5_jax import config as config_lib
from glm5_jax import presets

# One stack of layers and no module for later tokens, which compiles in a third of the
# time of GLM5_1M; the study of MTP adds the module.
_TINY = dataclasses.replace(
    presets.small(hidden=96, layers=2, experts=8, vocab=1024),
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
)
# Model, rows of a step, tokens of a row, steps, peak of the learning rate.
_PRETRAIN = {
    "tiny": (_TINY, 8, 128, 100, 1e-2),
    "small": (presets.GLM5_10M, 32, 512, 2000, 4e-3),
    "base": (presets.GLM5_100M, 128, 1024, 20000, 1e-3),
}


def pretrain(scale: str) -> config_lib.TrainConfig:
    """Returns pre-training on the text of every Python installation.

    A quarter of a row's keys is selected; the loss is that of configs/quickstart.py.
    """
    model, rows, length, steps, rate = _PRETRAIN[scale]
    return config_lib.TrainConfig(
        num_steps=steps,
        log_every=max(steps // 100, 1),
        eval_every=steps // 5,
        eval_batches=8,
        checkpoint_every=steps // 2,
        checkpoints_to_keep=1,
        sample_tokens=0,
        model=dataclasses.replace(model, index_topk=length // 4),
        data=config_lib.DataConfig(
            bpe_vocab_size=model.vocab_size, sequence_length=length, batch_size=rows
        ),
        loss=config_lib.LossConfig(indexer_weight=0.1, router_bias_rate=0.01),
        optim=config_lib.OptimConfig(
            learning_rate=rate,
            end_learning_rate=rate / 10,
            warmup_steps=max(steps // 20, 5),
            ns_dtype="float32" if scale == "tiny" else "bfloat16",
        ),
    )


def with_windows(base: config_lib.TrainConfig) -> config_lib.TrainConfig:
    """Returns dense pre-training of at least 4 layers, of which some become cheaper.

    A window, or what an indexer selects, has an eighth of a row's keys.
    """
    model, keys = base.model, base.data.sequence_length // 8
    variants = dataclasses.replace(model.variants, sliding_window=keys)
    model = dataclasses.replace(
        model,
        num_hidden_layers=max(model.num_hidden_layers, 4),
        attention="dense",
        index_topk=keys,
        variants=variants,
    )
    return dataclasses.replace(base, model=model)
