"""The cost of a model before it runs: parameters, FLOPs of a token, bytes of the state.

All of it is computed from the table of parameters, without arrays.
"""

import collections
import functools
import math
from collections.abc import Iterator

import jax
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.model import attention, cached, layers, transformer
from glm5_jax.model.attention import protocol
from glm5_jax.training import accumulation, critic
from glm5_jax.training import step as step_lib
from pallas_kernels import chips


def count_parameters(config: config_lib.ModelConfig) -> dict[str, int]:
    """Returns the parameters by part, in total, and active for a token.

    Active are those of the main model with only the chosen experts, with the head,
    without the embedding (of which a token reads one row) and without MTP.
    """
    parts: dict[str, int] = {}
    inactive = 0
    for path, param in _leaves(config):
        size = math.prod(param.shape)
        part = _part(path)
        parts[part] = parts.get(part, 0) + size
        if part == "routed experts":
            idle = config.n_routed_experts - config.num_experts_per_tok
            inactive += size * idle // config.n_routed_experts
    total = sum(parts.values())
    active = total - inactive - parts["embedding"] - parts.get("mtp", 0)
    return {**parts, "total": total, "active": active}


def flops_per_token(config: config_lib.ModelConfig, length: int) -> float:
    """FLOPs of a training step for one token: 6 per active weight, and attention.

    The attention of each layer says what it computes without weights; forward once,
    backward twice. MTP counts once a step. Recomputation is not counted: this is the
    numerator of MFU.
    """
    of_weights, layers = _layers(config)
    return of_weights + 3 * sum(n * layer.flops(length) for layer, n in layers)


@functools.lru_cache(maxsize=16)  # a step asks for every length of a document
def _layers(
    config: config_lib.ModelConfig,
) -> tuple[int, list[tuple[protocol.Attention, int]]]:
    """Returns the FLOPs of a token's weights, and how often a step has each layer."""
    counts = count_parameters(config)
    weights = counts["active"]
    if config.has_mtp:
        expert = 3 * config.hidden_size * config.moe_intermediate_size
        idle = config.n_routed_experts - config.num_experts_per_tok
        module = counts["mtp"] // config.num_nextn_predict_layers - idle * expert
        head = config.vocab_size * config.hidden_size
        weights += config.mtp_num_steps * (module + head)
    kinds = [*depth.layer_kinds(config)]
    if config.has_mtp and config.mtp_num_steps:
        module = depth.mtp_kind(config)
        later = module._replace(index="shared")  # whose indexer counts once
        kinds += [module, *[later] * (config.mtp_num_steps - 1)]
    numbers = collections.Counter(kinds)
    return 6 * weights, [(attention.make(config, k), n) for k, n in numbers.items()]


def flops_of_documents(
    config: config_lib.ModelConfig, segment_ids: np.ndarray
) -> float:
    """Returns the FLOPs of a training step for the documents of some rows.

    A token attends within its document, and padding needs nothing: of short documents
    or rows that are not full it is less than `flops_per_token` of whole rows.

    Args:
      config: of the model.
      segment_ids: [B, T], each document's own number in its row; 0 is padding.
    """
    rows = [np.bincount(row)[1:] for row in segment_ids]
    lengths, counts = np.unique(np.concatenate(rows), return_counts=True)
    return math.fsum(
        count * length * flops_per_token(config, length)
        for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)
        if length
    )


def state_bytes(config: config_lib.TrainConfig) -> dict[str, int]:
    """Returns the bytes of parameters, gradients and optimizer state of all devices.

    And of the weights of rl.reference and rl.teachers, where the loss needs them, and
    of a critic with its optimizer state.
    """
    params = transformer.abstract_params(config.model)
    state = jax.eval_shape(step_lib.make_optimizer(config).init, params)

    def size(tree: object) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    parts = {
        "parameters": size(params),
        "gradients": size(accumulation.abstract_gradients(config)),
        "optimizer state": size(state),
    }
    if config.num_other_policies:
        cast = functools.partial(transformer.cast, config=config.model)
        one = size(jax.eval_shape(cast, params))
        parts["reference"] = config.num_other_policies * one
    if config.stage_record.has_critic(config):
        own = jax.eval_shape(critic.first_params, params)
        moments = jax.eval_shape(critic.make_optimizer(config).init, own)
        parts["critic"] = size(own) + size(moments)
    return {**parts, "total": sum(parts.values())}


def cache_bytes_per_token(config: config_lib.ModelConfig) -> int:
    """Returns the cache bytes of one token in decoding: latents and indexer keys."""
    return cached.bytes_per_token(config)


def peak_flops() -> float | None:
    """Returns the dense bfloat16 FLOP/s of all devices; None for an unknown kind."""
    chip = chips.find(jax.devices()[0].device_kind)
    return None if chip is None else chip.bf16_tflops * 1e12 * jax.device_count()


def _leaves(
    config: config_lib.ModelConfig,
) -> Iterator[tuple[tuple[str, ...], layers.Param]]:
    flat = jax.tree_util.tree_flatten_with_path(
        transformer.table(config), is_leaf=lambda x: isinstance(x, layers.Param)
    )[0]
    return ((tuple(k.key for k in path), param) for path, param in flat)


def _part(path: tuple[str, ...]) -> str:
    """Returns the part of the model that a parameter is counted under."""
    names = {
        "embed_tokens": "embedding",
        "lm_head": "head",
        "mtp": "mtp",
        "indexer": "indexer",
        "self_attn": "attention",
        "experts": "routed experts",
        "shared_experts": "shared experts",
        "gate": "router",
        "e_score_correction_bias": "router",
        "mlp": "dense feed-forward",
    }
    for part in names:
        if part in path and (part != "mlp" or len(path) == 4):
            return names[part]
    return "norms"
