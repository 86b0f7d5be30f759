"""FLOPs of a training step and its bytes of HBM, from shapes alone.

FLOPs are those of matrix products, recomputation included. Experts have equal loads: a
row for each token and chosen expert, not the worst case that the buffers hold.
"""

import math
from collections.abc import Callable, Mapping

from glm5_jax import depth as depth_lib
from glm5_jax.model import attention as attention_lib
from glm5_jax.optim import matrix_groups
from glm5_jax.scale.estimate import setting as setting_lib
from glm5_jax.scale.estimate import traffic

Setting = setting_lib.Setting
BACKWARD = 2  # products of a backward pass: for the input, and for the weights
KEY_BLOCK = 512  # keys that a kernel of attention masks or skips together
# Times that a layer reads or writes its hidden states in a forward pass, besides its
# large buffers: norms, residuals, projections.
STATE_READS = 30
# Of an expert buffer: spread, products in and out, gates, sum back; times its rows.
ROWS_READS = 5
WHOLE_ROWS_READS = 8  # ... where all are one chunk, seen in three programs
# Of a matrix in Newton-Schulz: five steps of three products, each read and written.
MUON_READS = 30
# Products of an attention's backward pass over those of its forward pass, where it has
# keys and values of equal width and masks: scores twice, dp twice, dq, dk, dv.
OTHERS_BACKWARD = 3.5
# Of the latents on a list by the backward kernel: fetched, and sums read and written.
LIST_READS = 4
LOGITS_READS = 6  # of a chunk's float32 logits: exponents, sums, gradient


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
    kernels = _passes(s, "kernels")
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

    def passes(weight: setting_lib.Weight) -> int:
        is_kept = weight.name.endswith(("o_proj", "wq_b", "weights_proj"))
        return _passes(s, "kernels" if is_kept else "rest") + BACKWARD

    return _dense_products(s, passes)


def _dense_products(s: Setting, passes: Callable[[setting_lib.Weight], int]) -> float:
    """Counts those of every token in so many passes of each matrix."""
    total = 0.0
    for kind, count in _layers(s).items():
        for weight in setting_lib.dense(s.layer(kind)):
            of_a_pass = 2 * count * _tokens_of(s, weight) * s.fetched(weight)
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
    """Three of each row and layer, and twice that for gradients; some again.

    The recomputation of a layer needs no result of the last product; that of MTP's
    does, as a norm follows, and its chunks are then computed once more.
    """
    count = sum(n for kind, n in s.layer_kinds.items() if kind.has_experts)
    layer = 3 + 3 * BACKWARD + 2 * (_passes(s, "experts") - 1)
    again = _passes(s, "rest") - 1
    module = layer + again * (3 if s.chunks > 1 else 1)
    return count * layer + s.mtp_steps * module


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
    passes = _passes(s, "kernels")
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
    return total * _passes(s, "kernels")


def newton_schulz(s: Setting) -> float:
    """Counts Muon's products, padding included (glm5_jax/optim/matrix_groups.py)."""
    if s.config.optim.name != "muon":
        return 0.0
    return matrix_groups.total(traffic.groups(s)).flops


def hbm_bytes(s: Setting, arguments: float | int, critic: float | int = 0) -> float:
    """Bytes read and written: a rough sum of what is large.

    Arguments in and out, casts and gradients; each layer's fetched weights written,
    and read by every chunk; rows of the experts, filled or not but for the products;
    rows of lists; hidden states; chunks of logits, each of which reads the head and
    adds to its gradient; Newton-Schulz.

    Args:
      s: the setting.
      arguments: bytes of parameters, moments and batch.
      critic: bytes of a critic's parameters and moments.
    """
    update = s.updates * (4.0 * arguments + newton_schulz_bytes(s))
    a_part = (1 + s.mtp_steps) * logits_bytes(s) + _layer_bytes(s, 1, s.reads)
    if number := s.critic_updates:
        update += number * (4.0 * critic + newton_schulz_bytes(s.trunk))
        a_part += _layer_bytes(s.trunk, number, 1)
    return update + s.all_parts * a_part


def _layer_bytes(s: Setting, learns: int, reads: int) -> float:
    """Returns the bytes of the layers, that learn from a part, or only read it.

    Args:
      s: the setting.
      learns: times that a part is learnt from.
      reads: forward passes alone.
    """
    passes = learns * (_passes(s, "rest") + BACKWARD) + reads
    a_part = 0.0
    for kind, count in _layers(s).items():
        weights = s.layer(kind)
        once = sum(s.fetched(w) * w.item for w in weights)
        own = sum(s.fetched(w) * w.item for w in setting_lib.experts(weights))
        a_part += count * passes * (once + own * s.chunks)
        a_part += count * learns * STATE_READS * s.state
        a_part += count * learns * listed_bytes(s) * (kind.index != "none")
        if kind.has_experts:
            times = ROWS_READS * s.chunks if s.chunks > 1 else WHOLE_ROWS_READS
            a_part += count * passes * times * rows_bytes(s)
    return a_part - learns * unfilled_bytes(s)


def unfilled_bytes(s: Setting) -> float:
    """Bytes of the rows after the last group, which grouped products skip."""
    rows = s.tokens * s.model.num_experts_per_tok * (s.spare - 1)
    width = s.model.moe_intermediate_size // s.over("tensor")
    a_product = rows * (s.model.hidden_size + width) * s.item
    return float(a_product * num_expert_products(s))


def listed_bytes(s: Setting) -> float:
    """Counts rows that a layer's kernels fetch one by one, those of the loss too."""
    if not s.has_lists:
        return 0.0
    model = s.model
    latent = model.kv_lora_rank + model.qk_rope_head_dim
    passes = _passes(s, "kernels")
    width = latent * (passes + LIST_READS)
    if s.has_indexer_loss:
        width += (latent + model.index_head_dim) * passes
    return float(s.tokens * model.index_topk * width * s.item)


def newton_schulz_bytes(s: Setting) -> float:
    """Counts the reads and writes of the matrices that a device orthogonalises."""
    if s.config.optim.name != "muon":
        return 0.0
    elements = sum(g.num_rounds * math.prod(g.shape) for g in traffic.groups(s))
    return float(MUON_READS * s.item * elements)


def logits_bytes(s: Setting) -> float:
    """Counts one pass over the vocabulary with gradients, in chunks of tokens."""
    group = s.tokens * s.over("expert")
    words = s.model.vocab_size // s.over("tensor", "expert")
    head = s.fetched(s.others["lm_head"])
    chunks = -(-group // s.config.loss.chunk_tokens)
    return 4.0 * LOGITS_READS * group * words + chunks * head * (2 * s.item + 2 * 4)


def rows_bytes(s: Setting) -> float:
    """Counts one expert buffer of hidden size, and its gate, up and product."""
    width = s.model.moe_intermediate_size // s.over("tensor")
    return float(s.expert_rows * s.item * (s.model.hidden_size + 3 * width))


def _tokens_of(s: Setting, weight: setting_lib.Weight) -> int:
    """Tokens that meet a matrix: keys and values are made of all keys of a row."""
    is_of_keys = weight.name.endswith(("k_b_proj", "v_b_proj")) and not s.has_lists
    return s.tokens * (s.over("context") if is_of_keys else 1)


def _visible(s: Setting) -> float:
    """Keys that a query meets on average; the last block counts whole."""
    return min((s.keys + KEY_BLOCK) / 2, float(s.keys))


def _passes(s: Setting, what: str) -> int:
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
