"""FLOPs of a training step, from shapes alone.

FLOPs are those of matrix products, recomputation included. Experts have equal loads: a
row for each token and chosen expert, not the worst case that the buffers hold.
"""

from collections.abc import Callable, Mapping

from glm5_jax import depth as depth_lib
from glm5_jax.model import attention as attention_lib
from glm5_jax.optim import matrix_groups
from glm5_jax.scale.estimate import setting as setting_lib
from glm5_jax.scale.estimate import traffic

Setting = setting_lib.Setting
BACKWARD = 2  # products of a backward pass: for the input, and for the weights
KEY_BLOCK = 512  # keys that a kernel of attention masks or skips together
# Products of an attention's backward pass over those of its forward pass, where it has
# keys and values of equal width and masks: scores twice, dp twice, dq, dk, dv.
OTHERS_BACKWARD = 3.5


def flops(s: Setting) -> dict[str, float]:
    """Counts the FLOPs of a device by purpose."""
    of_a_part = {
        "dense products": dense_products(s),
        "experts": expert_products(s),
        "vocabulary": vocabulary(s),
        "attention": attention(s),
        "indexer": indexer(s),
    }
    found = {name: s.all_parts * value for name, value in of_a_part.items()}
    found["reference"] = s.config.num_other_policies * s.all_parts * forward(s)
    if s.updates > 1:
        found["log-probs before"] = s.all_parts * forward(s)
    found["critic"] = s.all_parts * critic(s)
    found["optimizer"] = s.updates * newton_schulz(s)
    found["optimizer"] += s.critic_updates * newton_schulz(s.trunk)
    return {name: value for name, value in found.items() if value}


def critic(s: Setting) -> float:
    """Counts a critic's products: values of a part, then updates with all of it.

    It has the layers and no output matrix; attention, which it does not train, is
    counted as if it did.
    """
    if not s.critic_updates:
        return 0.0
    own = s.trunk
    layers = dense_products(own) + expert_products(own) + attention(own) + indexer(own)
    values = forward(own) - vocabulary(own) / (1 + BACKWARD)
    return values + s.critic_updates * layers


def forward(s: Setting) -> float:
    """Counts the products of a forward pass alone, as where a text is only read."""
    of_layers = 3 * sum(n for kind, n in s.layer_kinds.items() if kind.has_experts)
    kernels = num_passes(s, "kernels")
    return (
        _dense_products(s, lambda weight: 1)
        + expert_products(s) * of_layers / max(num_expert_products(s), 1)
        + vocabulary(s) / (1 + BACKWARD)
        + attention(s) / (kernels + OTHERS_BACKWARD)
        + indexer(s) / kernels
    )


def dense_products(s: Setting) -> float:
    """Projections, dense and shared widths, router: of every token.

    What keeps the states after attention, and the gradients of the indexer's loss, does
    not compute the output of the one and the queries of the other again.
    """
    return _dense_products(s, lambda weight: passes_of(s, weight) + BACKWARD)


def passes_of(s: Setting, weight: setting_lib.Weight) -> int:
    """Counts forward passes of a dense matrix, as `dense_products` says."""
    is_kept = weight.name.endswith(("o_proj", "wq_b", "weights_proj"))
    return num_passes(s, "kernels" if is_kept else "rest")


def _dense_products(s: Setting, passes: Callable[[setting_lib.Weight], int]) -> float:
    """Counts those of every token in so many passes of each matrix."""
    total = 0.0
    for kind, count in _layers(s).items():
        for weight in setting_lib.dense(s.layer(kind)):
            of_a_pass = 2 * count * tokens_of(s, weight) * s.fetched(weight)
            total += of_a_pass * passes(weight)
    if s.mtp_steps:
        weight = s.others["eh_proj"]
        total += 2 * s.mtp_steps * s.tokens * s.fetched(weight) * passes(weight)
    return total


def expert_products(s: Setting) -> float:
    """Counts the products of every token's rows."""
    rows = s.tokens * s.model.num_experts_per_tok
    width = s.model.moe_intermediate_size // s.over("tensor")
    return 2.0 * rows * s.model.hidden_size * width * num_expert_products(s)


def num_expert_products(s: Setting) -> int:
    """Counts the products of all layers with experts."""
    count = sum(n for kind, n in s.layer_kinds.items() if kind.has_experts)
    return count * num_products(s) + s.mtp_steps * num_products(s, is_mtp=True)


def num_products(s: Setting, is_mtp: bool = False) -> int:
    """Three of each row and layer, and twice that for gradients; some again.

    The recomputation of a layer needs no result of the last product; that of MTP's
    does, as a norm follows, and its chunks are then computed once more.
    """
    number = 3 + 3 * BACKWARD + 2 * (num_passes(s, "experts") - 1)
    if is_mtp:
        number += (num_passes(s, "rest") - 1) * (3 if s.chunks > 1 else 1)
    return number


def vocabulary(s: Setting) -> float:
    """Logits and both gradients, chunk by chunk, of the text and of each MTP step."""
    size = s.model.hidden_size * s.model.vocab_size // s.over("tensor")
    return 2.0 * (1 + BACKWARD) * (1 + s.mtp_steps) * s.tokens * size


def attention(s: Setting) -> float:
    """Attention to all visible keys, or to the listed ones as latents.

    Forward: scores and outputs. Backward, as the kernels report it: scores, the
    gradients of the probabilities (as wide as the values), dq, dk and dv. The kernel
    for lists computes each of them once. Over all keys a second kernel computes dk and
    dv, and the scores and the gradients of the probabilities again. Variants count what
    their files say.
    """
    model, keys = s.model, _visible(s)
    score, value = model.qk_head_dim, model.v_head_dim
    backward = 4 * score + 3 * value
    if s.has_lists:
        keys = min(keys, model.index_topk)
        value = model.kv_lora_rank
        score = value + model.qk_rope_head_dim
        backward = 3 * score + 2 * value
    heads = model.num_attention_heads // s.over("tensor")
    passes = num_passes(s, "kernels")
    width = passes * (score + value) + backward
    total = 2.0 * s.tokens * keys * heads * width * _num_indexed(s)
    for kind, count in _layers(s).items():
        if kind.index == "none":
            forward = attention_lib.make(model, kind).flops(s.keys) / s.over("tensor")
            total += count * s.tokens * forward * (passes + OTHERS_BACKWARD)
    return total


def indexer(s: Setting) -> float:
    """Scores of all visible keys; and its loss, computed with its gradients.

    The loss: scores of the keys that may be attended to, their gradients, and the
    attention's own probabilities of all heads.
    """
    model = s.model
    if not model.has_indexer:
        return 0.0
    keys, width = _visible(s), model.index_n_heads * model.index_head_dim
    layers = sum(n for kind, n in _layers(s).items() if kind.owns_indexer)
    total = 2.0 * s.tokens * keys * width * layers * s.selects
    if s.has_indexer_loss:
        a_head = model.qk_head_dim
        if s.has_lists:
            keys = min(keys, model.index_topk)
            a_head = model.kv_lora_rank + model.qk_rope_head_dim
        products = model.num_attention_heads * a_head + (1 + BACKWARD) * width
        total += 2.0 * s.tokens * keys * products * _num_indexed(s)
    return total * num_passes(s, "kernels")


def newton_schulz(s: Setting) -> float:
    """Counts Muon's products, padding included (glm5_jax/optim/matrix_groups.py)."""
    if s.config.optim.name != "muon":
        return 0.0
    return matrix_groups.total(traffic.groups(s)).flops


def tokens_of(s: Setting, weight: setting_lib.Weight) -> int:
    """Tokens that meet a matrix: keys and values are made of all keys of a row."""
    is_of_keys = weight.name.endswith(("k_b_proj", "v_b_proj")) and not s.has_lists
    return s.tokens * (s.over("context") if is_of_keys else 1)


def _visible(s: Setting) -> float:
    """Keys that a query meets on average; the last block counts whole."""
    return min((s.keys + KEY_BLOCK) / 2, float(s.keys))


def num_passes(s: Setting, what: str) -> int:
    """Forward passes of what `Setting.keeps` names: two where it is recomputed."""
    return 1 if s.keeps(what) else 2


def _num_indexed(s: Setting) -> int:
    """Counts the runs of layers with GLM-5's attention, which an index may direct."""
    return sum(n for kind, n in _layers(s).items() if kind.index != "none")


def _layers(s: Setting) -> Mapping[depth_lib.Kind, int]:
    """Runs of each kind of layer, MTP's among them."""
    kinds = dict(s.layer_kinds)
    if s.mtp_steps:
        kinds[s.mtp_kind] = kinds.get(s.mtp_kind, 0) + s.mtp_steps
    return kinds
