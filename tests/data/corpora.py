"""Small corpora, and folders prepared from them."""

import json
import pathlib

import numpy as np

from glm5_jax import config
from glm5_jax.data.preparation import prepare

WORDS = ("naïve", "漢字", "def", "return", "self", "import", "🙂", "one", "two")
FIRST_MARK = 0x3400  # a document's character, before each of its words
SHARD_MIB = 0.004  # of about 4 KB, so that a small corpus has several


def write_jsonl(folder, num_files=3, num_lines=40, seed=0):
    """Writes files with one document per line, each with its own character."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for i in range(num_files):
        lines = []
        for j in range(num_lines):
            words = rng.choice(WORDS, size=rng.integers(2, 40))
            mark = chr(FIRST_MARK + i * num_lines + j)
            text = " ".join(mark + word for word in words)
            lines.append(json.dumps({"text": text}, ensure_ascii=False))
        (folder / f"{i}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def settings(source, **changes):
    """Returns the settings that the tests prepare with."""
    defaults = {
        "tokenizer": "byte",
        "sequence_length": 32,
        "held_out_percent": 20,
        "shard_mib": SHARD_MIB,
    }
    return config.PrepareConfig(source=str(source), **defaults | changes)


def make_prepared(source, target, num_workers=1, **changes):
    """Prepares a folder and returns it."""
    prepare.prepare(settings(source, **changes), target, num_workers)
    return target


def contents(folder):
    """Returns the bytes of every file by its path, without hidden ones."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(pathlib.Path(folder).rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
