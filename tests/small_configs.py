"""Configs of runs and steps that a CPU compiles in seconds, and data to run them on.

Those of reinforcement learning are in tests/training/rl_runs.py.
"""

import dataclasses
import json

from glm5_jax import config as config_lib
from glm5_jax.config import stages
from tests.model import tiny

# One stack of layers, which compiles faster than two. Multi-token prediction would take
# more than half of the time: training/growth_test.py has it.
TEXT_MODEL = tiny.model(
    num_hidden_layers=1,
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
    vocab_size=260,
)
# Compiles fastest, and nothing is chosen by a largest value, which the last bit can
# decide.
DENSE_MODEL = tiny.model(
    num_hidden_layers=1,
    first_k_dense_replace=1,
    num_nextn_predict_layers=0,
    attention="dense",
    vocab_size=260,
)
CHAT_MODEL = dataclasses.replace(DENSE_MODEL, vocab_size=292)
SENTENCE = "def f{}(x):\n    '''Adds {} to x, and nothing else.'''\n    return x + {}\n"


def write_corpus(folder):
    """Writes 40 files of text."""
    folder.mkdir()
    for i in range(40):
        text = "".join(SENTENCE.format(i, j, j) for j in range(i, i + 12))
        (folder / f"{i}.txt").write_text(text)


def write_conversations(path):
    """Writes 30 conversations of 1 to 3 turns each."""
    lines = []
    for i in range(30):
        question = {"role": "user", "content": f"Reverse {i}"}
        answer = {"role": "assistant", "content": f"{i}"[::-1]}
        lines.append(json.dumps({"messages": [question, answer] * (1 + i % 3)}))
    path.write_text("\n".join(lines))


def text_run(corpus, cache_dir, **changes):
    """A run of 6 steps on a folder of text."""
    config = config_lib.TrainConfig(
        num_steps=6,
        eval_every=2,
        eval_batches=1,
        checkpoint_every=3,
        sample_prompt="def",
        sample_tokens=4,
        model=TEXT_MODEL,
        data=config_lib.DataConfig(
            source=str(corpus),
            tokenizer="byte",
            sequence_length=24,
            batch_size=8,
            cache_dir=str(cache_dir),
        ),
        optim=config_lib.OptimConfig(learning_rate=1e-2, end_learning_rate=1e-3),
    )
    return dataclasses.replace(config, **changes)


def mixture_run(web, code, **changes):
    """The run of `text_run`, with its compiled step, on a mixture of prepared folders.

    Args:
      web: a folder.
      code: another one.
      **changes: of the section `data`.
    """
    config = text_run("python", "", sample_tokens=0, eval_every=0)
    data = config_lib.DataConfig(
        mixture=(web, code),
        mixture_weights=((0.75, 0.25), (0.25, 0.75)),
        mixture_steps=(3,),
        sequence_length=24,
        batch_size=8,
    )
    return dataclasses.replace(config, data=dataclasses.replace(data, **changes))


def chat_run(root, **changes):
    """A run of 2 steps of stage sft on root/data.jsonl.

    Its optimizer compiles faster than that of `text_run`.
    """
    config = config_lib.TrainConfig(
        stage="sft",
        num_steps=2,
        eval_every=1,
        eval_batches=1,
        checkpoint_every=1,
        sample_prompt="Reverse 12",
        sample_tokens=4,
        model=CHAT_MODEL,
        data=config_lib.DataConfig(
            source=str(root / "data.jsonl"),
            tokenizer="byte_chat",
            sequence_length=64,
            batch_size=8,
            held_out_percent=20,
            cache_dir=str(root / "cache"),
            enable_thinking=False,
        ),
        optim=config_lib.OptimConfig(name="adamw"),
    )
    return dataclasses.replace(config, **changes)


def step(length, model, chunk_tokens=50, **optim):
    """A config of 8 rows of `length` tokens, for the training step alone."""
    return config_lib.TrainConfig(
        num_steps=100,
        model=model,
        data=config_lib.DataConfig(sequence_length=length, batch_size=8),
        loss=config_lib.LossConfig(indexer_weight=0.1, chunk_tokens=chunk_tokens),
        optim=config_lib.OptimConfig(
            learning_rate=1e-2, end_learning_rate=1e-3, ns_dtype="float32", **optim
        ),
    )


def of_stage(config, stage):
    """The config in another stage, with the attention that the stage needs."""
    record = stages.BY_NAME[stage]
    model = config.model
    if record.attention is not None:
        model = dataclasses.replace(model, attention=record.attention)
    return dataclasses.replace(config, stage=stage, model=model)
