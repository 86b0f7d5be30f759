"""Models and batches so small that a CPU compiles and runs them in seconds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.config import attention as config_attention
from glm5_jax.model import transformer

SIZES_OF_VARIANTS = config_lib.AttentionVariants(
    num_key_value_heads=2, head_dim=12, sliding_window=5
)


def model(**changes):
    """Two kinds of layers, and fewer keys selected than a document has."""
    sizes = {
        "vocab_size": 80,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 6,
        "mtp_num_steps": 2,
        "rope_theta": 1e4,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # logits of a trained size, in a narrow model
        "eos_token_id": (0,),
        "pad_token_id": 0,
        "dtype": "float32",
    }
    return config_lib.ModelConfig(**(sizes | changes))


def index_share(**changes):
    """A dense layer, then twice a sharing and a selecting one."""
    return model(num_hidden_layers=5, index_topk_pattern="FSFSF", **changes)


def variants(**changes):
    """A layer of every type, and two of GLM-5's that share an index around them."""
    types = ("latent", *config_attention.LAYER_TYPES)
    has_index = (name == "latent" for name in types)
    pattern = "F" + "".join("S" if x else "-" for x in has_index)[1:]
    return model(
        num_hidden_layers=len(types),
        first_k_dense_replace=len(types) - 1,  # compiles faster
        index_topk_pattern=pattern,
        layer_types=types,
        variants=SIZES_OF_VARIANTS,
        **changes,
    )


def params(config, seed=0):
    """Random parameters; norms are about 1, no bias is 0. numpy compiles nothing."""
    rng = np.random.default_rng(seed)
    init = config.initializer_range

    def draw(param):
        noise = rng.normal(size=param.shape)
        if len(param.dims) - ("L" in param.dims) == 1:  # a norm or a bias
            mean = param.fill
            noise = mean + 0.1 * noise
        else:
            noise *= init
        return jnp.asarray(noise.astype(jnp.dtype(config.param_dtype)))

    return transformer.map_table(draw, transformer.table(config))


@functools.partial(jax.jit, static_argnames="config")
def logits(params, config, tokens):
    """Of every token; a row is one document."""
    hidden = transformer.forward(params, config, tokens).hidden
    return transformer.logits(params, config, hidden)


def batch(config, document_lengths, num_tokens, seed=0):
    """Random documents of these lengths in each row, then padding.

    Args:
      config: of the model, for its vocabulary.
      document_lengths: a tuple for each row.
      num_tokens: of a row.
    """
    rng = np.random.default_rng(seed)
    shape = (len(document_lengths), num_tokens)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, lengths in enumerate(document_lengths):
        starts = np.cumsum([0, *lengths])
        for i, (start, n) in enumerate(zip(starts, lengths, strict=False)):
            segments[row, start : start + n] = i + 1
            positions[row, start : start + n] = np.arange(n)
    tokens, targets = rng.integers(0, config.vocab_size, (2, *shape))
    return {
        "tokens": jnp.asarray(tokens, jnp.int32),
        "targets": jnp.asarray(targets, jnp.int32),
        "loss_mask": jnp.asarray(segments > 0, jnp.float32),
        "segment_ids": jnp.asarray(segments),
        "positions": jnp.asarray(positions),
    }


def by_layer(config, stacked):
    """Values of the scanned groups (traces or aux), one entry a layer, in order."""
    layers, stacked = {}, jax.device_get(stacked)  # numpy compiles no slices
    for g, group in enumerate(depth.layer_groups(config)):
        for p in range(len(group.unit)):
            values = stacked[f"layers_{g}"][f"block_{p}"]
            for repeat in range(group.repeats):
                layers[group.layer(repeat, p)] = jax.tree.map(
                    lambda x, r=repeat: x[r], values
                )
    return [layers[i] for i in range(config.num_hidden_layers)]
