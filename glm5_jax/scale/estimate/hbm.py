"""Bytes of HBM that a training step reads and writes, from shapes alone.

Products read two matrices and write one, as often as they run. Beside them libtpu moves
large arrays: it gathers them, turns them to other layouts, adds gradients of parts.
How often it does is read from the schedules of two programs, with rows of 131,072
and of 32,768 tokens (docs/log.md, 2026-11-27); sizes are shapes. No GPU was compared.
"""

import math

from glm5_jax import depth as depth_lib
from glm5_jax.scale.estimate import setting as setting_lib
from glm5_jax.scale.estimate import traffic, work

Setting = setting_lib.Setting
BACKWARD = work.BACKWARD
UPDATE_READS = 4  # of parameters and moments, in and out
# Of a matrix in Newton-Schulz: five steps of three products and a copy, and as many
# times on its way to the device that multiplies it and back.
MUON_READS = 34 + 34
STATE_READS = 16  # of the hidden states, by norms and sums of a forward pass
STATE_READS_BACK = 24  # ... of a backward pass
# Of a chunk's float32 logits: exponents, sums, gradient, its layouts, both products.
LOGITS_READS = 10
# Matrices that products want in another layout than they are gathered in.
COPIED = ("experts.down_proj", "o_proj", "q_b_proj", "v_b_proj", "wq_b")
# Of the rows of hidden size, of experts' width, and of a group's tokens: spread over
# rows, multiplied by gates, put back in order and summed; times read or written.
FORWARD_ROWS = (4, 3, 4)
AGAIN_ROWS = (1, 0, 2)
BACKWARD_ROWS = (7, 6, 4)
WHOLE_ROWS = 2  # times that, where all rows are one chunk: seen in two programs' sums
# Of a row's keys over context: gathered, and put in the order of the row; and back.
KEY_READS = 10
# Of a device's queries in the latents' width: rotated, turned, joined; and back.
QUERY_READS = 8
QUERY_READS_BACK = 17
MASKED_READS = 2.5  # ... of the queries of attention over all keys: rotated and turned
MASKED_READS_BACK = 6  # ... of a backward pass, with the gradients of its results
LANES = 128


def total(s: Setting, arguments: float | int, critic: float | int = 0) -> float:
    """Counts the bytes that a device reads from and writes to HBM in a step.

    Args:
      s: the setting.
      arguments: bytes of parameters, moments and batch.
      critic: bytes of a critic's parameters and moments.
    """
    update = s.updates * (UPDATE_READS * arguments + newton_schulz(s))
    a_part = (1 + s.mtp_steps) * vocabulary(s) + _layers(s, 1, s.reads)
    if number := s.critic_updates:
        update += number * (UPDATE_READS * critic + newton_schulz(s.trunk))
        a_part += _layers(s.trunk, number, 1)
    return update + s.all_parts * a_part


def _layers(s: Setting, learns: int, reads: int) -> float:
    """Counts the layers, that learn from a part so often, or only read it."""
    found = 0.0
    for kind, count in s.layer_kinds.items():
        found += count * fetches(s, kind, learns, reads)
        found += count * a_layer(s, kind, learns, reads, is_mtp=False)
    if s.mtp_steps:
        found += fetches(s, s.mtp_kind, learns, reads)
        found += s.mtp_steps * a_layer(s, s.mtp_kind, learns, reads, is_mtp=True)
        # A step's gradients are added to those of the steps before.
        sums = sum(s.fetched(w) * w.item for w in s.layer(s.mtp_kind))
        found += learns * s.mtp_steps * 3 * sums
    return found


def fetches(s: Setting, kind: depth_lib.Kind, learns: int, reads: int) -> float:
    """Counts a layer's matrices as gathered, and gradients as summed over devices."""
    times = learns * work.num_passes(s, "rest") + reads
    found = 0.0
    for w in s.layer(kind):
        size = s.fetched(w) * w.item
        copies = 2 * w.name.endswith(COPIED)
        found += (times + learns) * (1 + copies) * size
    return found


def a_layer(
    s: Setting, kind: depth_lib.Kind, learns: int, reads: int, is_mtp: bool
) -> float:
    """Counts a run of a layer with fetched parameters."""
    times = learns * work.num_passes(s, "rest") + reads
    found = learns * STATE_READS_BACK * s.state + times * STATE_READS * s.state
    found += products(s, kind, learns, reads)
    if kind.index != "none":
        found += attention(s, learns, reads)
    if kind.has_experts:
        found += experts(s, kind, learns, reads, is_mtp)
    return found


def products(s: Setting, kind: depth_lib.Kind, learns: int, reads: int) -> float:
    """Counts matrices that every token meets, with input and output."""
    found = 0.0
    for w in setting_lib.dense(s.layer(kind)):
        times = learns * (work.passes_of(s, w) + BACKWARD) + reads
        found += times * (s.fetched(w) * w.item + _sides(s, w))
    return found


def _sides(s: Setting, w: setting_lib.Weight) -> float:
    """Bytes of a product's input and output."""
    shape, num_in = w.param.shape, w.param.num_in or 1
    sides = math.prod(shape[:num_in]) + math.prod(shape[num_in:])
    if s.has_lists and w.name.endswith(("k_b_proj", "v_b_proj")):  # of each head
        latent, heads, dim = shape
        sides = heads * (latent + dim)
    return float(work.tokens_of(s, w) * s.item * sides // s.over("tensor"))


def experts(
    s: Setting, kind: depth_lib.Kind, learns: int, reads: int, is_mtp: bool
) -> float:
    """Counts grouped products, and what becomes of rows before and after them."""
    own = sum(s.fetched(w) * w.item for w in setting_lib.experts(s.layer(kind)))
    model, again = s.model, work.num_passes(s, "rest") - 1
    width = model.moe_intermediate_size // s.over("tensor")
    even = s.tokens * model.num_experts_per_tok * s.item * (model.hidden_size + width)
    number = learns * work.num_products(s, is_mtp) + 3 * reads
    found = number * (s.chunks * own / 3 + even)
    if s.chunks > 1:  # gradients of chunks are added up
        found += learns * s.chunks * 3 * own
    whole = s.expert_rows * s.item * (s.chunks if s.chunks > 1 else WHOLE_ROWS)
    is_gathered = model.expert_transport != "exchange"
    group = s.state * (s.over("expert") if is_gathered else 1)
    rows = (whole * model.hidden_size, whole * width, group)
    runs = [(learns + reads, FORWARD_ROWS), (learns, BACKWARD_ROWS)]
    runs.append((learns * again, AGAIN_ROWS))
    if is_mtp and s.chunks > 1:
        runs.append((learns * again, FORWARD_ROWS))
    for times, numbers in runs:
        found += times * sum(n * size for n, size in zip(numbers, rows, strict=True))
    return found


def attention(s: Setting, learns: int, reads: int) -> float:
    """Counts what attention and indexer read and write besides products."""
    model = s.model
    times = learns * work.num_passes(s, "kernels") + reads
    heads, latent = _heads(s), _latent(s)
    keys = s.rows * s.keys * s.item
    gathered = KEY_READS * keys * (latent + model.has_indexer * model.index_head_dim)
    found = 0.0
    if s.over("context") > 1:
        found += (times + learns) * gathered
    if not s.has_lists:
        return found + times * masked(s) + learns * masked_back(s)
    queries = s.tokens * heads * latent * s.item
    found += (times * QUERY_READS + learns * QUERY_READS_BACK) * queries
    return found + times * listed(s) + learns * listed_back(s)


def masked(s: Setting) -> float:
    """Counts a forward pass of attention over all keys of a row, made for each head.

    Its kernel and those of the indexer and its loss read each array once.
    """
    model = s.model
    queries, keys, values = _expanded(s)
    index = s.tokens * model.index_n_heads * (model.index_head_dim * s.item + 4)
    index += s.rows * s.keys * model.index_head_dim * s.item
    rotated = keys * model.qk_rope_head_dim / model.qk_head_dim
    found = MASKED_READS * queries + queries + values + 3 * keys + rotated
    found += index * s.selects
    if s.has_indexer_loss:
        found += model.num_attention_heads / _heads(s) * (queries + keys)
        found += 2 * index + s.tokens * s.keys / 8
        found += 3 * 4 * _sums(s) * s.rows * s.keys * model.index_head_dim
    return found


def masked_back(s: Setting) -> float:
    """Counts its gradients: a kernel for queries, one for keys, and the shared part."""
    queries, keys, values = _expanded(s)
    out = s.tokens * _heads(s) * (s.model.v_head_dim * s.item + 8)
    reads = queries + keys + values + out + s.tokens * s.keys / 8 * s.selects
    rotated = keys * s.model.qk_rope_head_dim / s.model.qk_head_dim
    found = 2 * reads + queries + keys + values + keys + 2 * rotated
    return found + MASKED_READS_BACK * queries


def _expanded(s: Setting) -> tuple[float, float, float]:
    """Returns bytes of the queries of a device's tokens, and of all keys and values."""
    queries = float(_heads(s) * s.model.qk_head_dim * s.item * s.tokens)
    a_token = float(_heads(s) * s.item * s.rows * s.keys)
    return queries, a_token * s.model.qk_head_dim, a_token * s.model.v_head_dim


def _heads(s: Setting) -> int:
    """Heads of a device."""
    return s.model.num_attention_heads // s.over("tensor")


def listed(s: Setting) -> float:
    """Counts a forward pass of attention and the indexer's loss over listed rows.

    Rows are packed for a kernel that fetches them one by one.
    """
    attention, loss, _ = listed_kernels(s)
    latent, index = _latent(s), s.model.index_head_dim
    found = _packed(s, latent) + attention
    if s.has_indexer_loss:
        found += _packed(s, latent + index) + loss
        # Zeros that the gradient of the indexer's keys is added to; its sum over cores.
        found += 2 * 4 * _sums(s) * s.rows * s.keys * index
    return found


def listed_back(s: Setting) -> float:
    """Counts the gradients of attention over listed rows."""
    padded = -(-_latent(s) // LANES) * LANES
    # Zeros to add to, in float32; summed over cores; its rows without padding.
    width = 2 * 4 * _sums(s) + 5 * s.item
    return listed_kernels(s)[2] + s.rows * s.keys * padded * width


def listed_kernels(s: Setting) -> tuple[float, float, float]:
    """Returns what attention, the indexer's loss and attention's gradients declare.

    They are the kernels' own estimates (pallas_kernels/sparse_mla/tpu.py and
    tpu_backward.py, indexer_kl/tpu_listed.py).
    """
    model, latent, tokens = s.model, _latent(s), s.tokens
    heads, picks = model.num_attention_heads, tokens * model.index_topk
    own, value = heads // s.over("tensor"), model.kv_lora_rank
    attention = picks * (4 + latent * s.item) + tokens * own * latent * s.item
    back = picks * (4 + 4 * latent * s.item)
    back += tokens * own * ((latent + value) * s.item + 8)
    wide, index_heads = latent + model.index_head_dim, model.index_n_heads
    queries = 2 * index_heads * (model.index_head_dim * s.item + 4)
    queries += heads * (latent * s.item + 4) + 4
    loss = picks * (4 + wide * s.item) + tokens * queries
    loss += 4 * _sums(s) * s.rows * s.keys * model.index_head_dim
    return float(attention), float(loss), float(back)


def _sums(s: Setting) -> int:
    """Sums of keys' gradients that a kernel keeps: one for each TensorCore."""
    chip = s.device.chip
    return chip.cores if chip.platform == "tpu" else 1


def _latent(s: Setting) -> int:
    """Width of the latents that all heads share."""
    return s.model.kv_lora_rank + s.model.qk_rope_head_dim


def _packed(s: Setting, width: int) -> float:
    """Joins keys, pads them, makes words of pairs, and puts these into lines."""
    padded = -(-width // (2 * LANES)) * 2 * LANES
    return float(s.rows * s.keys * s.item * (3 * width + 5 * padded))


def vocabulary(s: Setting) -> float:
    """Counts one pass over the vocabulary with gradients, in chunks of tokens.

    A chunk reads the head twice and adds to its gradient. The sum of the gradients is
    added to that of other passes, and words are fetched, looked up and sent.
    """
    group = s.tokens * s.over("expert")
    words = s.model.vocab_size // s.over("tensor", "expert")
    head = s.fetched(s.others["lm_head"])
    chunks = -(-group // s.config.loss.chunk_tokens)
    found = 4.0 * LOGITS_READS * group * words + chunks * head * (2 * s.item + 2 * 4)
    return found + 12 * head * s.item + 12 * group * s.model.hidden_size * s.item


def newton_schulz(s: Setting) -> float:
    """Counts the reads and writes of the matrices that a device orthogonalises."""
    if s.config.optim.name != "muon":
        return 0.0
    elements = sum(g.num_rounds * math.prod(g.shape) for g in traffic.groups(s))
    return float(MUON_READS * s.item * elements)
