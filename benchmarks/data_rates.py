"""Measures how fast one process prepares a corpus and reads its rows.

    python benchmarks/data_rates.py [--sequence_length=4096] [--rounds=3]

The corpus is the one that every Python carries, its tokenizer a BPE of 2048 that is
trained before the clock starts. Prints a JSON line for each round: MB of text and
tokens per CPU second of preparing, the tokenizer's share of that, rows and tokens per
CPU second of reading at random.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

from glm5_jax import config
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.preparation import prepare, prepared
from glm5_jax.data.sources import documents as documents_lib

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a worker
BATCH_SIZE = 64
BATCHES = 20
AT_ONCE = 32  # documents, as in preparing


def rates(folder: pathlib.Path, tokenizer: str, length: int) -> dict[str, Any]:
    """Prepares, and reads some batches."""
    settings = config.PrepareConfig(
        source="python", tokenizer=tokenizer, sequence_length=length
    )
    found = documents_lib.read_documents("python")
    size = sum(len(d.text.encode()) for d in found)
    began = time.process_time()
    written = prepare.prepare(settings, folder)
    seconds = time.process_time() - began
    tokens = written["train"]["tokens"]
    began = time.process_time()
    encode = tokenizer_lib.load(tokenizer).encode_batch
    for first in range(0, len(found), AT_ONCE):
        encode([d.text for d in found[first : first + AT_ONCE]])
    encoding = time.process_time() - began
    data = config.DataConfig(
        source=str(folder), sequence_length=length, batch_size=BATCH_SIZE
    )
    pipeline = prepared.make_pipeline(data, seed=0)
    pipeline.train_batch(0)  # opens the shard
    began = time.process_time()
    for step in range(BATCHES):
        pipeline.train_batch(step)
    reading = time.process_time() - began
    return {
        "prepare_mb_per_second": round(size / seconds / 1e6, 2),
        "prepare_tokens_per_second": round(tokens / seconds),
        "share_of_tokenizer": round(encoding / seconds, 2),
        "read_rows_per_second": round(BATCHES * BATCH_SIZE / reading),
        "read_tokens_per_second": round(BATCHES * BATCH_SIZE * length / reading),
    }


def main() -> None:
    """Prints one line a round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequence_length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        bpe = config.PrepareConfig(source="python")
        prepare.prepare(bpe, folder / "tokenizer")
        for i in range(args.rounds):
            tokenizer = str(folder / "tokenizer")
            got = rates(folder / str(i), tokenizer, args.sequence_length)
            sys.stdout.write(json.dumps(got) + "\n")


if __name__ == "__main__":
    main()
