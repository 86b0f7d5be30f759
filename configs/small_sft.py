"""Teaches a small GLM-5 to answer like your own conversations (docs/sft.md).

python -m glm5_jax.train --config=configs/small_sft.py --config.data.source=chats.jsonl

Reads a .jsonl file, or a folder of .jsonl files, with {"messages": [...]} or ShareGPT's
{"conversations": [...]} in each line. Hardware: a laptop (2 cores), a few minutes.
Expected for the sums of docs/sft.md: 0.19 held-out bits per byte.
"""

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    config = config_lib.TrainConfig(
        stage="sft",
        num_steps=200,
        eval_every=50,
        checkpoint_every=100,
        sample_prompt="Hello",  # the user's message; the sample is the answer
        sample_tokens=48,
        model=presets.GLM5_1M,
        data=config_lib.DataConfig(
            source="chats.jsonl",
            tokenizer="bpe_chat",  # trained on the conversations
            enable_thinking=False,  # True where turns have a reasoning_content
            sequence_length=256,
            batch_size=8,
        ),
        optim=config_lib.OptimConfig(
            learning_rate=8e-3, end_learning_rate=8e-4, warmup_steps=10
        ),
    )
    return command_line.to_config_dict(config)
