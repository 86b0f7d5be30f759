"""Searches layers whose indexer can go, without training (IndexShare).

arXiv 2603.12201, training-free: begin with an indexer in every layer; let the layer
share the selection of an earlier one that raises the loss on a calibration text least;
repeat. GLM-5 keeps 40 of 78 indexers so. The search runs layer by layer, compiles each
kind of layer once, and starts a candidate from the states before its layer.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
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

_LETTERS = {"own": "F", "shared": "S", "none": "-"}
State = tuple[Float[Array, "B T D"], Any]  # hidden states, and the shared index


@dataclasses.dataclass(frozen=True)
class Round:
    """A pattern of the search, and what it costs.

    Attributes:
        pattern: for model.index_topk_pattern.
        nats: mean loss of a calibration token.
        removed: layer whose indexer this round removed; None at the start.
        losses: mean loss without the indexer of each layer that could lose it, as
            pairs of layer and nats.
    """

    pattern: str
    nats: float
    removed: int | None = None
    losses: tuple[tuple[int, float], ...] = ()


def search(
    params: dict,
    config: config_lib.ModelConfig,
    rows: scoring.Rows,
    num_indexers: int,
    path: pathlib.Path | None = None,
) -> list[Round]:
    """Removes indexers one by one until `num_indexers` are left.

    Args:
      params: of the model, on one device.
      config: of the model, with sparse attention.
      rows: calibration rows, from `scoring.rows_of_text`.
      num_indexers: to keep, at least 1.
      path: JSON file of the finished rounds, from which a search resumes; None: none.

    Returns:
      The rounds, from the model as it is; the last one has the pattern to use.

    Raises:
      InputError: the model selects no keys, or the file is of another search.
    """
    length, owned = rows["tokens"].shape[1], sum(config.is_full_index_layer)
    checks.require(
        (
            config.attention == "sparse",
            f"IndexShare needs model.attention='sparse', got {config.attention!r}.",
        ),
        (
            config.index_topk < length,
            f"The rows of the calibration text must be longer than model.index_topk="
            f"{config.index_topk}, got {length} tokens: all keys would be selected.",
        ),
        (
            1 <= num_indexers <= owned,
            f"The indexers to keep must be 1 to {owned}, those that the model has; got "
            f"{num_indexers}.",
        ),
    )
    record = _Record(path, _digest(params, config, rows))
    stack = _Stack(params, config, rows)
    if not record.rounds:
        pattern = "".join(_LETTERS[kind.index] for kind in depth.layer_kinds(config))
        record.add(Round(pattern, stack.losses(pattern, [])[None]))
    candidates = range(num_indexers, record.rounds[-1].pattern.count("F"))
    for _ in tqdm.tqdm(
        candidates, desc="IndexShare", unit=" layers", disable=not sys.stderr.isatty()
    ):
        record.add(_next_round(stack, record.rounds[-1].pattern))
    return record.rounds


def _next_round(stack: "_Stack", pattern: str) -> Round:
    """Removes the indexer whose loss is least; the earliest one among equals."""
    can_go = [i for i, letter in enumerate(pattern) if letter == "F"][1:]
    found = stack.losses(pattern, can_go)
    removed = min(can_go, key=lambda layer: found[layer])
    return Round(
        pattern=_without(pattern, removed),
        nats=found[removed],
        removed=removed,
        losses=tuple((layer, found[layer]) for layer in can_go),
    )


def _without(pattern: str, layer: int) -> str:
    return f"{pattern[:layer]}S{pattern[layer + 1 :]}"


class _Stack:
    """The layers of a model, each able to use its own index or the shared one."""

    def __init__(
        self, params: dict, config: config_lib.ModelConfig, rows: scoring.Rows
    ) -> None:
        self._params, self._rows = params, rows
        self._layers = index_share.by_layer(params, config, lambda x, i: x[i])
        self._kinds = depth.layer_kinds(config)
        letters = [_LETTERS[kind.index] for kind in self._kinds]
        first = letters.index("F") + 1
        # A layer hands on its index only in a model that shares some.
        sharing = "".join(
            letters[:first] + [x.replace("F", "S") for x in letters[first:]]
        )
        self._config = dataclasses.replace(config, index_topk_pattern=sharing)

    def losses(self, pattern: str, layers_to_share: list[int]) -> dict[Any, float]:
        """Returns the mean loss of the pattern without each layer's indexer.

        Args:
          pattern: where layers own an index.
          layers_to_share: layers that lose theirs, each in turn; []: the loss of the
            pattern itself, under None.
        """
        totals: dict[Any, float] = dict.fromkeys(layers_to_share or [None], 0.0)
        for batch, context in self._batches():
            state = self._start(batch)
            states = []
            for layer, letter in enumerate(pattern):
                states.append(state)
                state = self._layer(layer, letter, state, context)
            if not layers_to_share:
                totals[None] += self._total(batch, state)
            for first in layers_to_share:
                state = states[first]
                for layer, letter in enumerate(_without(pattern, first)):
                    if layer >= first:
                        state = self._layer(layer, letter, state, context)
                totals[first] += self._total(batch, state)
        count = float(self._rows["loss_mask"].sum())
        return {layer: total / count for layer, total in totals.items()}

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
        return x, attention_lib.first_shared(self._config, num_rows, length)

    def _layer(
        self, layer: int, letter: str, state: State, context: context_lib.Context
    ) -> State:
        kind = self._kinds[layer]
        if letter != "-":
            kind = kind._replace(index="own" if letter == "F" else "shared")
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


@functools.partial(jax.jit, static_argnames="config")
def _nll(
    params: dict, config: config_lib.ModelConfig, x: Array, targets: Array
) -> Float[Array, "B T"]:
    hidden = layers.rms_norm(x, params["norm"], config.rms_norm_eps)
    return losses.token_nll(hidden, params["lm_head"], targets, scoring.CHUNK_TOKENS)


class _Record:
    """The finished rounds, in a file that is written after each."""

    def __init__(self, path: pathlib.Path | None, digest: str) -> None:
        self._path, self._digest = path, digest
        self.rounds: list[Round] = []
        if path is not None and path.exists():
            tree = json.loads(path.read_text(encoding="utf-8"))
            checks.require(
                (
                    tree.get("digest") == digest,
                    f"{path} holds the search of another model or text; give another "
                    f"path.",
                )
            )
            for fields in tree["rounds"]:
                fields["losses"] = tuple(tuple(pair) for pair in fields["losses"])
                self.rounds.append(Round(**fields))

    def add(self, found: Round) -> None:
        self.rounds.append(found)
        if self._path is not None:
            rounds = [dataclasses.asdict(r) for r in self.rounds]
            tree = {"digest": self._digest, "rounds": rounds}
            files.write_text(self._path, json.dumps(tree, indent=1) + "\n")


def _digest(params: dict, config: config_lib.ModelConfig, rows: scoring.Rows) -> str:
    """Returns a digest of the rows, the config and the sums of the parameters."""
    digest = hashlib.sha256(repr(config).encode())
    for name in ("tokens", "targets", "loss_mask", "segment_ids", "positions"):
        digest.update(np.ascontiguousarray(rows[name]).tobytes())
    for leaf in jax.tree.leaves(params):
        digest.update(np.float32(jnp.sum(leaf, dtype=jnp.float32)).tobytes())
    return digest.hexdigest()
