"""Shows a small GLM-5 how to add a line to a crontab in a shell, as a start for RL.

python -m glm5_jax.train --config=configs/small_sft_cron.py --workdir=runs/sft

The tasks are those of the world "terminal:cron_line" (docs/worlds/terminal.md): real
shells, and checks that the model never sees. "untold" leaves the description of the
tools out of the prompt, and a BPE of the demonstrations makes the rest short, so an
episode has about 100 tokens instead of 1,100 bytes. The run ends when 35% of held-out
tasks are solved; the number of steps therefore depends on the seed.
"""

import dataclasses

import ml_collections

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib

TASKS = "untold:terminal:cron_line"


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    config = config_lib.TrainConfig(
        stage="sft",
        num_steps=600,
        eval_every=50,
        eval_batches=1,
        eval_success=True,
        stop_metric="eval/success",
        stop_at=0.35,
        sample_tokens=0,
        model=dataclasses.replace(
            presets.BYTES, vocab_size=640, index_topk=32, num_nextn_predict_layers=0
        ),
        data=config_lib.DataConfig(
            source=f"tasks:{TASKS}",
            tokenizer="bpe_chat",
            bpe_vocab_size=640,
            enable_thinking=False,
            sequence_length=112,
            batch_size=16,
        ),
        loss=config_lib.LossConfig(indexer_weight=0.1, router_bias_rate=0.01),
        optim=config_lib.OptimConfig(
            name="adamw",
            learning_rate=3e-3,
            schedule="constant",
            warmup_steps=5,
        ),
        rl=config_lib.RLConfig(
            environment=TASKS,
            max_new_tokens=40,
            max_turns=3,
            slots=64,
            prefill_chunk=16,
            num_eval_tasks=64,
        ),
    )
    return command_line.to_config_dict(config)
