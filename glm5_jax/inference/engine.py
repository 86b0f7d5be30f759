"""Continues prompts in one batch: prefill once, then decode with a cache.

Sizes are rounded up to a few, so that few programs are compiled, and 16 tokens are
decoded in one dispatch. What a sequence gets after its end is thrown away: sequences
of a batch do not depend on each other.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from glm5_jax import config as config_lib
from glm5_jax.inference import sampling as sampling_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import layers, transformer
from pallas_kernels import dispatch

NUM_STEPS = 16  # tokens of a dispatch
MIN_TOKENS = 16  # shortest prompt that gets a program of its own
MAX_UNSTACKED_LAYERS = 32  # compile time grows with them


@dataclasses.dataclass
class Completion:
    """What followed a prompt."""

    tokens: list[int]  # the one that stopped it included
    logprobs: list[float]  # of each token, in the distribution that it was drawn from
    finish_reason: Literal["stop", "length"] | None  # None: not finished


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """A batch of sequences between two dispatches."""

    cache: cache_lib.Cache
    tokens: Int[Array, " B"]  # the last ones, which are not in the cache yet
    keys: Key[Array, " B"]
    sampling: sampling_lib.Sampling


Drawn = tuple[Int[Array, "B n"], Float[Array, "B n"]]  # ids and their log-probs


def generate(
    params: dict,
    config: config_lib.ModelConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_ids: Iterable[int] = (),
    seed: int = 0,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> list[Completion]:
    """Continues every prompt.

    Args:
      params: of `transformer.table`; `cast_params` beforehand saves doing it here.
      config: of the model.
      prompts: token ids.
      max_new_tokens: of each completion.
      temperature: 0 takes the most likely token.
      top_p: samples among the most likely tokens that together have this probability.
      stop_ids: tokens that end a completion.
      seed: of the random numbers.
      on_tokens: called with the index of a prompt and its new tokens, as they come.

    Raises:
      InputError: an empty prompt, an unknown id, too many tokens, no distribution.
    """
    _check(config, prompts, max_new_tokens, temperature, top_p)
    completions = [Completion([], [], None) for _ in prompts]
    if not prompts:
        return completions
    params, stop_ids = cast_params(params, config), frozenset(stop_ids)
    tokens, lengths = _pad(prompts)
    num_decoded = -(-(max_new_tokens - 1) // NUM_STEPS) * NUM_STEPS
    capacity = bucket(tokens.shape[1] + num_decoded)
    keys = sampling_lib.request_keys(seed, len(tokens))
    how = sampling_lib.make_sampling(len(tokens), temperature, top_p)
    state, drawn = prefill(params, config, tokens, lengths, keys, how, capacity)
    params = _decode_params(params, config)
    while True:
        ids, logprobs = (x.tolist() for x in jax.device_get(drawn))
        for i, completion in enumerate(completions):
            if completion.finish_reason:
                continue
            num_old = len(completion.tokens)
            _extend(completion, ids[i], logprobs[i], max_new_tokens, stop_ids)
            if on_tokens:
                on_tokens(i, completion.tokens[num_old:])
        if all(completion.finish_reason for completion in completions):
            return completions
        state, drawn = decode(params, config, state)


@functools.partial(jax.jit, static_argnames="config")
def cast_params(params: dict, config: config_lib.ModelConfig) -> dict:
    """Parameters in the dtypes that they are computed in, once instead of every token.

    Matrices become config.dtype; norms, router and head weights float32.
    """
    return layers.cast(params, transformer.table(config), config.dtype)


@functools.partial(jax.jit, static_argnames=("config", "capacity"))
def prefill(
    params: dict,
    config: config_lib.ModelConfig,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    keys: Key[Array, " B"],
    sampling: sampling_lib.Sampling,
    capacity: int,
) -> tuple[State, Drawn]:
    """Fills a cache with prompts, padded on the right, and draws a token for each."""
    hidden, cache = transformer.prefill(params, config, tokens, lengths, capacity)
    last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)
    state = State(cache, tokens[:, 0], keys, sampling)
    state, (ids, logprobs) = _draw(params, config, state, last[:, 0])
    return state, (ids[:, None], logprobs[:, None])


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def decode(
    params: dict, config: config_lib.ModelConfig, state: State
) -> tuple[State, Drawn]:
    """Draws the next NUM_STEPS tokens of every sequence."""

    def step(state: State, _: None) -> tuple[State, tuple[Array, Array]]:
        hidden, cache = transformer.decode(
            params, config, state.cache, state.tokens[:, None]
        )
        state = dataclasses.replace(state, cache=cache)
        return _draw(params, config, state, hidden[:, 0])

    state, (ids, logprobs) = lax.scan(step, state, length=NUM_STEPS)
    return state, (ids.T, logprobs.T)


def bucket(num_tokens: int) -> int:
    """The least 2^n or 1.5 * 2^n that is enough."""
    size = MIN_TOKENS
    while size < num_tokens:
        size += size // 2 if size & (size - 1) == 0 else size // 3
    return size


def _decode_params(params: dict, config: config_lib.ModelConfig) -> dict:
    """On a CPU, where a layer of a stack is copied before use, no stacks."""
    is_small = config.num_hidden_layers <= MAX_UNSTACKED_LAYERS
    if dispatch.platform() == "cpu" and is_small:
        return _unstacked(params, config)
    return params


_unstacked = jax.jit(transformer.unstacked, static_argnames="config")


def _draw(
    params: dict,
    config: config_lib.ModelConfig,
    state: State,
    hidden: Float[Array, "B D"],
) -> tuple[State, tuple[Int[Array, " B"], Float[Array, " B"]]]:
    """Draws the tokens that follow what is in the cache."""
    logits = transformer.logits(params, config, hidden)
    ids, logprobs = sampling_lib.sample(
        logits, state.keys, state.cache.lengths, state.sampling
    )
    return dataclasses.replace(state, tokens=ids), (ids, logprobs)


def _extend(
    completion: Completion,
    ids: list[int],
    logprobs: list[float],
    max_new_tokens: int,
    stop_ids: frozenset[int],
) -> None:
    """Adds drawn tokens up to the end of the completion."""
    for token, logprob in zip(ids, logprobs, strict=True):
        completion.tokens.append(token)
        completion.logprobs.append(logprob)
        if token in stop_ids:
            completion.finish_reason = "stop"
        elif len(completion.tokens) == max_new_tokens:
            completion.finish_reason = "length"
        if completion.finish_reason:
            return


def _pad(
    prompts: Sequence[Sequence[int]],
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Prompts padded on the right, and prompts of one token below them."""
    num_rows = 1 << (len(prompts) - 1).bit_length()
    lengths = np.ones(num_rows, np.int32)
    lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
    tokens = np.zeros((num_rows, bucket(int(lengths.max()))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=False):
        row[: len(prompt)] = prompt
    return tokens, lengths


def _check(
    config: config_lib.ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
) -> None:
    """Raises InputError for what cannot be continued."""
    errors = []
    if max_new_tokens < 1:
        errors.append(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
    if temperature < 0:
        errors.append(f"temperature must not be negative, got {temperature}.")
    if not 0 < top_p <= 1:
        errors.append(f"top_p must lie in (0, 1], got {top_p}; 1 turns it off.")
    limit = config.max_position_embeddings
    for i, prompt in enumerate(prompts):
        unknown = [t for t in prompt if not 0 <= t < config.vocab_size]
        if len(prompt) == 0:
            errors.append(f"Prompt {i} is empty; give at least one token.")
        if unknown:
            errors.append(
                f"Prompt {i} has the id {unknown[0]}, but ids lie in "
                f"0..{config.vocab_size - 1} (model.vocab_size)."
            )
        if len(prompt) + max_new_tokens > limit:
            errors.append(
                f"Prompt {i} has {len(prompt)} tokens; with {max_new_tokens} new ones "
                f"they exceed model.max_position_embeddings={limit}. Shorten it, or "
                f"lower max_new_tokens."
            )
    if errors:
        raise config_lib.InputError("\n".join(errors))
