"""Counts where training's forward pass and decoding choose other keys or experts.

    python benchmarks/bfloat16_parity.py --checkpoint=runs/sft

Rows of demonstrations, repeated up to --tokens, are read as whole rows, then token by
token and in chunks. Prints a Markdown table: the (layer, token) pairs whose set of
selected keys or of experts differs, and |log p - log p'| of the tokens that follow.
"""

import argparse
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.environments.tasks import problems
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import cached, invariance, transformer
from glm5_jax.weights import loading
from pallas_kernels import selection

ARMS = (("float32", False), ("bfloat16", False), ("bfloat16", True))
Choices = tuple[np.ndarray, np.ndarray, np.ndarray]  # keys, experts, log-probs


def main() -> None:
    """Parses flags and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", required=True, help="run folder")
    parser.add_argument("--tasks", default="reverse:4-6", help="with demonstrations")
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=40, help="of a row")
    parser.add_argument("--chunks", default="1,10", help="tokens read at once")
    args = parser.parse_args()
    model, params, tokenizer = loading.load_model(args.checkpoint)
    rows = np.asarray(
        [
            _demonstration(args.tasks, i, tokenizer, args.tokens)
            for i in range(args.rows)
        ],
        np.int32,
    )
    print(
        "| dtype | batch_invariant | read by | keys differ | experts differ | "
        "gap mean | gap max |\n|---|---|---|---|---|---|---|"
    )
    for dtype, is_invariant in ARMS:
        config = dataclasses.replace(model, dtype=dtype, batch_invariant=is_invariant)
        computed = transformer.cast(params, config)
        expected = _whole(computed, config, rows)
        for size in map(int, args.chunks.split(",")):
            found = _in_chunks(computed, config, rows, size)
            cells = [dtype, is_invariant, size, *_differences(expected, found)]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


def _demonstration(
    name: str, index: int, tokenizer: tokenizer_lib.Tokenizer, length: int
) -> list[int]:
    """Returns the ids of a question and its answer, repeated to this length."""
    problem = problems.problem(name, "train", 5, index)
    text = f"{problem.messages[0]['content']} {problem.answer} "
    ids = tokenizer.encode(text)
    return (ids * length)[:length]


def _compiled(run, config: config_lib.ModelConfig):  # noqa: ANN001, ANN202
    return jax.jit(run, compiler_options=invariance.compiler_options(config))


def _whole(params: dict, config: config_lib.ModelConfig, rows: np.ndarray) -> Choices:
    """Choices and log-probs of whole rows."""

    def run(params: dict, tokens: jax.Array) -> tuple:
        out = transformer.forward(params, config, tokens, with_traces=True)
        experts = cached.chosen_experts(config, out.aux, tokens.shape)
        selected = [
            selection.to_list(
                selection.as_mask(layer, tokens.shape[1]), config.index_topk
            )
            for layer in _selections(config, out.traces)
        ]
        return (
            jnp.stack(selected),
            experts,
            transformer.logits(params, config, out.hidden),
        )

    keys, experts, logits = _compiled(run, config)(params, rows)
    return np.asarray(keys), np.asarray(experts), _logprobs(logits, rows)


def _selections(config: config_lib.ModelConfig, traces: dict) -> Iterator[jax.Array]:
    """Yields each layer's selection."""
    for g, group in enumerate(depth.layer_groups(config)):
        unit = traces[f"layers_{g}"].values()
        for repeat in range(group.repeats):
            for layer in unit:
                (keys,) = layer.attended.index.selection  # in the form of this chip
                yield keys[repeat]


def _in_chunks(
    params: dict, config: config_lib.ModelConfig, rows: np.ndarray, size: int
) -> Choices:
    """The same of `size` tokens at a time, behind a cache of what came before."""

    def run(params: dict, tokens: jax.Array) -> tuple:
        def read(cache: cache_lib.Cache, chunk: jax.Array) -> tuple:
            hidden, cache, choices = cached.decode(params, config, cache, chunk)
            logits = transformer.logits(params, config, hidden)
            return cache, (choices.selection.indices, choices.experts, logits)

        cache = cached.empty(config, len(tokens), tokens.shape[1])
        chunks = jnp.stack(jnp.split(tokens, tokens.shape[1] // size, axis=1))
        _, (keys, experts, logits) = jax.lax.scan(read, cache, chunks)
        keys, experts = (jnp.concatenate(list(x), axis=2) for x in (keys, experts))
        return keys, experts, jnp.concatenate(list(logits), axis=1)

    keys, experts, logits = _compiled(run, config)(params, rows)
    return np.asarray(keys), np.asarray(experts), _logprobs(logits, rows)


def _logprobs(logits: jax.Array, rows: np.ndarray) -> np.ndarray:
    """Log-probability of every next token."""
    logprobs = jax.nn.log_softmax(logits[:, :-1])
    return np.take_along_axis(np.asarray(logprobs), rows[:, 1:, None], -1)[..., 0]


def _differences(expected: Choices, found: Choices) -> list[str]:
    """Cells of the table."""
    cells = []
    for a, b in zip(expected[:2], found[:2], strict=True):
        differs = (np.sort(a, axis=-1) != np.sort(b, axis=-1)).any(axis=-1)
        cells.append(f"{differs.sum():,} of {differs.size:,}")
    gap = np.abs(expected[2] - found[2])
    return [*cells, f"{gap.mean():.2g}", f"{gap.max():.2g}"]


if __name__ == "__main__":
    main()
