"""Runs a model layer by layer, to compare patterns of layers without training.

A pattern has a letter for each layer. Each kind of layer is compiled once, whatever the
number of patterns, and a pattern starts from the states of the layers that it has in
common with the one before. All of it runs on one device.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from glm5_jax import config as config_lib
from glm5_jax import depth, files, losses
from glm5_jax.config import checks
from glm5_jax.inference import scoring
from glm5_jax.model import attention as attention_lib
from glm5_jax.model import block as block_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import embedding, layers
from glm5_jax.weights import index_share

State = tuple[Float[Array, "B T D"], Any]  # hidden states, and the shared index


class Stack:
    """The layers of a model, each able to compute as several kinds."""

    def __init__(
        self,
        params: dict,
        config: config_lib.ModelConfig,
        rows: scoring.Rows,
        kinds: Mapping[str, Sequence[depth.Kind]],
        built_with: config_lib.ModelConfig | None = None,
    ) -> None:
        """Takes a model and its calibration rows.

        Args:
          params: of the model, with what every kind needs.
          config: of the model.
          rows: of `scoring`; their loss_mask says which tokens count.
          kinds: for each letter of a pattern, the kind that it makes of each layer.
          built_with: config that layers are built with; None: that of the model.
        """
        self._params, self._rows = params, rows
        self._config = built_with or config
        self._layers = index_share.by_layer(params, config, lambda x, i: x[i])
        self._kinds = kinds

    def losses(self, patterns: Sequence[str]) -> dict[str, float]:
        """Returns the mean loss of a token under each pattern, in nats."""
        ordered = sorted(set(patterns))  # neighbours have most layers in common
        totals = dict.fromkeys(ordered, 0.0)
        for batch, context in self._batches():
            states, last = [self._start(batch)], ""
            for pattern in ordered:
                num_common = _num_common(last, pattern)
                del states[num_common + 1 :]
                for layer in range(num_common, len(pattern)):
                    kind = self._kinds[pattern[layer]][layer]
                    states.append(self._layer(layer, kind, states[-1], context))
                totals[pattern] += self._total(batch, states[-1])
                last = pattern
        count = float(self._rows["loss_mask"].sum())
        return {pattern: totals[pattern] / count for pattern in patterns}

    def _batches(self) -> Iterator[tuple[scoring.Rows, context_lib.Context]]:
        """Yields parts of the rows, and their contexts."""
        num_rows, length = self._rows["tokens"].shape
        size = max(1, scoring.BATCH_TOKENS // length)
        for first in range(0, num_rows, size):
            batch = {k: v[first : first + size] for k, v in self._rows.items()}
            yield (
                batch,
                context_lib.make_context(
                    self._config,
                    jnp.asarray(batch["segment_ids"]),
                    jnp.asarray(batch["positions"]),
                ),
            )

    def _start(self, batch: scoring.Rows) -> State:
        tokens = jnp.asarray(batch["tokens"])
        x = embedding.embed(self._params["embed_tokens"], self._config, tokens)
        num_rows, length = tokens.shape
        shared = attention_lib.first_shared(
            self._config, num_rows, length, with_indexer_loss=False
        )
        return x, shared

    def _layer(
        self, layer: int, kind: depth.Kind, state: State, context: context_lib.Context
    ) -> State:
        names, run = self._program(kind)
        params = {name: self._layers[layer][name] for name in names}
        return run(params, *state, context)

    @functools.cache  # noqa: B019 - a search holds one stack
    def _program(self, kind: depth.Kind) -> tuple[tuple[str, ...], Callable]:
        """Returns the parameters' names and the compiled layer of a kind."""
        block = block_lib.make(self._config, kind)

        def run(params: dict, x: Array, shared: Any, context: Any) -> State:
            out = block.forward(block.fetched(params), x, context, shared)
            return out.x, out.shared

        return tuple(block.table()), jax.jit(run)

    def _total(self, batch: scoring.Rows, state: State) -> float:
        """Returns the sum of the losses of a batch, in nats."""
        nll = _nll(self._params, self._config, state[0], jnp.asarray(batch["targets"]))
        return float(np.sum(np.asarray(nll) * batch["loss_mask"], dtype=np.float64))


def _num_common(one: str, other: str) -> int:
    """Returns how many first letters of two patterns are equal."""
    pairs = itertools.takewhile(lambda x: x[0] == x[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


@functools.partial(jax.jit, static_argnames="config")
def _nll(
    params: dict, config: config_lib.ModelConfig, x: Array, targets: Array
) -> Float[Array, "B T"]:
    hidden = layers.rms_norm(x, params["norm"], config.rms_norm_eps)
    return losses.token_nll(hidden, params["lm_head"], targets, scoring.CHUNK_TOKENS)


def finished_rounds(path: pathlib.Path | None, digest: str) -> list[dict[str, Any]]:
    """Returns the fields of the rounds that an earlier start of a search has finished.

    Args:
      path: file of the search; None: it keeps none.
      digest: from `digest`.

    Raises:
      InputError: the file is of another search.
    """
    if path is None or not path.exists():
        return []
    tree = json.loads(path.read_text(encoding="utf-8"))
    checks.require(
        (
            tree.get("digest") == digest,
            f"{path} holds the search of another model or text; give another path.",
        )
    )
    return tree["rounds"]


def write_rounds(path: pathlib.Path | None, digest: str, rounds: Sequence[Any]) -> None:
    """Writes the finished rounds, which are dataclasses."""
    if path is not None:
        tree = {"digest": digest, "rounds": [dataclasses.asdict(r) for r in rounds]}
        files.write_text(path, json.dumps(tree, indent=1) + "\n")


def digest(
    params: dict, config: config_lib.ModelConfig, rows: scoring.Rows, *settings: int
) -> str:
    """Returns a digest of rows, config, settings and the sums of the parameters."""
    found = hashlib.sha256(repr(config).encode())
    for name in ("tokens", "targets", "loss_mask", "segment_ids", "positions"):
        found.update(np.ascontiguousarray(rows[name]).tobytes())
    for leaf in jax.tree.leaves(params):
        found.update(np.float32(jnp.sum(leaf, dtype=jnp.float32)).tobytes())
    found.update("".join(f" {number}" for number in settings).encode())
    return found.hexdigest()
