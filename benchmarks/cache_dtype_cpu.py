"""What a cache and an indexer of 8 bits cost: bits per byte, log-probs, selected keys.

    python -m glm5_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
    python benchmarks/cache_dtype_cpu.py --checkpoint=runs/quickstart --text=FILE

Reads rows of a text through the cache, a few tokens at a time as decoding does, with
every model.kv_cache_dtype, and with index_dtype=fp8. Prints, beside the bits per byte:
the mean and the largest change of a token's log-prob, the share of an indexer's
selected keys that differ, and bytes of a token in the cache, here and of GLM-5.
"""

import argparse
import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax import losses, presets
from glm5_jax.model import cached
from glm5_jax.weights import loading

FORMATS = (
    {},
    {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "fp8"},
    {"index_dtype": "fp8"},
    {"index_dtype": "fp8", "kv_cache_dtype": "fp8"},
)


@functools.partial(jax.jit, static_argnames=("config", "num_new"))
def read(params, config, tokens, num_new):  # noqa: ANN001, ANN201
    """Returns the log-prob of every next token, and the keys selected for it."""
    num_rows, length = tokens.shape

    def step(cache, new):  # noqa: ANN001, ANN202
        hidden, cache, choices = cached.decode(params, config, cache, new)
        return cache, (hidden, getattr(choices.selection, "indices", None))

    parts = tokens.reshape(num_rows, -1, num_new).swapaxes(0, 1)
    cache = cached.empty(config, num_rows, length)
    _, (hidden, keys) = jax.lax.scan(step, cache, parts)
    hidden = hidden.swapaxes(0, 1).reshape(num_rows, length, -1)
    targets = jnp.roll(tokens, -1, axis=1)
    nll = losses.token_nll(hidden, params["lm_head"], targets, 1024)
    return -nll[:, :-1], keys


def differing(keys: np.ndarray, others: np.ndarray) -> float:
    """Returns the share of selected keys [..., K] that another selection has not."""
    rows = (x.reshape(-1, x.shape[-1]).tolist() for x in (keys, others))
    pairs = [(set(a) - {-1}, set(b)) for a, b in zip(*rows, strict=True)]
    counts = [(len(a), len(a - b)) for a, b in pairs]
    total, missing = map(sum, zip(*counts, strict=True))
    return missing / total


def main() -> None:
    """Prints a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--num_new", type=int, default=8)
    args = parser.parse_args()
    model, params, tokenizer = loading.load_model(args.checkpoint)
    assert tokenizer is not None
    ids = np.array(tokenizer.encode(args.text.read_text()), np.int32)
    count = min(args.rows, len(ids) // args.length)
    tokens = ids[: count * args.length].reshape(count, args.length)
    sizes = np.array([len(piece) for piece in tokenizer.pieces])
    num_bytes = sizes[tokens[:, 1:]].sum()
    exact = None
    for changes in FORMATS:
        config = dataclasses.replace(model, batch_invariant=False, **changes)
        logprobs, keys = jax.device_get(read(params, config, tokens, args.num_new))
        exact = exact or (logprobs, keys)
        gaps = np.abs(logprobs - exact[0])
        share = "-" if keys is None else f"{differing(exact[1], keys):.3%}"
        bits = -logprobs.sum(dtype=np.float64) / math.log(2) / num_bytes
        whole = dataclasses.replace(presets.GLM5, **changes)
        print(
            f"{changes or 'auto'}: {bits:.5f} bits per byte, gap mean "
            f"{gaps.mean():.2e} max {gaps.max():.2e}, other keys {share}, "
            f"{cached.bytes_per_token(config):,} bytes a token, GLM-5 "
            f"{cached.bytes_per_token(whole):,}"
        )


if __name__ == "__main__":
    main()
