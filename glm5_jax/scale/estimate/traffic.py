"""Collectives of a training step and their bytes, from shapes alone.

Bytes are those that a device puts on its links, as in ../hlo/communication.py.
Every function is one reason to send. Gradients go back the same way: the gradient of a
gather is a scattered sum.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

from glm5_jax import config as config_lib
from glm5_jax import depth as depth_lib
from glm5_jax.config import attention as attention_config
from glm5_jax.model import transformer
from glm5_jax.optim import matrix_groups
from glm5_jax.optim import optimizer as optimizer_lib
from glm5_jax.scale.estimate import setting as setting_lib
from glm5_jax.scale.hlo import communication

Setting = setting_lib.Setting
Collective = communication.Collective
GATHER, SCATTER = "all-gather", "reduce-scatter"
REDUCE, EXCHANGE = "all-reduce", "all-to-all"


def of(setting: Setting) -> communication.Traffic:
    """Returns all collectives of a step that send anything."""
    terms = (layers, mtp, tokens, keys, words, shares)
    of_a_part = [c for term in terms for c in term(setting)]
    reads = setting.reads * [c for c in of_a_part if c.phase == "forward"]
    of_an_update = [*replicas(setting), *optimizer(setting)]
    found = [_times(c, setting.all_parts) for c in [*of_a_part, *reads]]
    found += [_times(c, setting.updates) for c in of_an_update]
    found += critic(setting)
    return communication.Traffic(tuple(c for c in found if c.wire_bytes > 0), ())


def critic(s: Setting) -> Iterator[Collective]:
    """Sends of a critic: its values of all rows, and each of its updates with all.

    Counted as if it had the output matrix, which it lacks, and trained its attention.
    """
    if not s.critic_updates:
        return
    of_a_part = [c for t in (layers, tokens, keys, words, shares) for c in t(s.trunk)]
    for c in of_a_part:
        times = s.critic_updates + (c.phase == "forward")
        yield _times(c, times * s.all_parts)
    for c in (*replicas(s.trunk), *optimizer(s.trunk)):
        yield _times(c, s.critic_updates)


def of_tokens(setting: Setting) -> communication.Traffic:
    """Returns the collectives that bring tokens to their experts and back."""
    found = [_times(c, setting.all_parts) for c in tokens(setting)]
    found += [c for c in critic(setting) if c.scope == "moe"]
    return communication.Traffic(tuple(c for c in found if c.wire_bytes > 0), ())


def layers(s: Setting) -> Iterator[Collective]:
    """Weights of each layer, fetched for each pass that needs them, and gradients.

    The backward pass fetches them again unless everything was kept.
    """
    again = s.model.remat_policy != "none"
    for kind, count in s.layer_kinds.items():
        for weight in s.layer(kind):
            scope = "expert weights" if weight.is_expert else "dense weights"
            yield from _fetch(s, weight, count, "forward", scope)
            yield from _fetch(s, weight, count * again, "backward", scope)
            yield from _return(s, weight, count, scope)


def mtp(s: Setting) -> Iterator[Collective]:
    """Weights of the module, once for all of its steps."""
    if not s.mtp_steps:
        return
    for weight in (*s.layer(s.mtp_kind), s.others["eh_proj"]):
        yield from _fetch(s, weight, 1, "forward", "mtp")
        yield from _return(s, weight, 1, "mtp")


def tokens(s: Setting) -> Iterator[Collective]:
    """Tokens to their experts and the results back, over the expert axis.

    With gathers, the forward pass sends there and back, the backward pass there, back
    and there again. MTP sends back once more, as its output is needed again, and there
    once more where chunks are recomputed one by one. With an exchange, each of a
    token's experts gets a row.
    """
    group, count = s.state * s.over("expert"), _expert_layer_runs(s)
    chunk = group // s.chunks
    runs = count * s.chunks
    if s.model.expert_transport == "exchange":
        rows = chunk // s.over("expert") * s.model.num_experts_per_tok
        again = s.mtp_steps * s.chunks * (not s.keeps("rest"))
        for phase, times in (("forward", 2 * runs), ("backward", 3 * runs + again)):
            yield _one(s, "ragged-all-to-all", "expert", phase, rows, times, "moe")
        return
    more = s.mtp_steps * s.chunks * (s.model.remat_policy != "none")
    for kind, phase, times in (
        (GATHER, "forward", runs),
        (SCATTER, "forward", runs),
        (GATHER, "backward", 2 * runs + more * (s.chunks > 1)),
        (SCATTER, "backward", runs + more),
    ):
        yield _one(s, kind, "expert", phase, chunk, times, "moe")


def keys(s: Setting) -> Iterator[Collective]:
    """Latents, rotated keys and indexer keys of a whole row, over context."""
    for kind, count in (*s.layer_kinds.items(), (s.mtp_kind, s.mtp_steps)):
        size = s.rows * s.keys * _key_width(s, kind) * s.item
        for collective, phase in (
            (GATHER, "forward"),
            (GATHER, "backward"),
            (SCATTER, "backward"),
        ):
            yield _one(s, collective, "context", phase, size, count, "attention")


def _key_width(s: Setting, kind: depth_lib.Kind) -> int:
    """Returns the numbers of a token that other devices' queries read."""
    if kind.attention in attention_config.GROUPED:
        sizes = s.model.variants
        return 2 * sizes.num_key_value_heads * sizes.head_dim // s.over("tensor")
    width = s.model.kv_lora_rank + s.model.qk_rope_head_dim
    has_index = kind.index != "none" and s.model.attention != "dense"
    return width + s.model.index_head_dim * has_index


def words(s: Setting) -> Iterator[Collective]:
    """Embedding and head: their columns over fsdp, tokens over what shares the words.

    Both are fetched once, the embedding again for every recomputed step of MTP, and
    return gradients of the text and of MTP. Tokens go to the words and back: looked up
    for each use and each recomputed step, and as hidden states in front of the head.
    """
    uses, steps = 1 + s.mtp_steps, s.mtp_steps
    embedding, head = s.others["embed_tokens"], s.others["lm_head"]
    for weight in (embedding, head):
        yield from _fetch(s, weight, 1, "forward", "words")
        yield from _return(s, weight, 1 + (steps > 0), "words")
    yield from _fetch(s, embedding, steps, "backward", "words")
    group = s.state * s.over("expert")
    for kind, phase, times in (
        (SCATTER, "forward", uses),  # looked up
        (SCATTER, "backward", steps),
        (GATHER, "backward", uses),  # gradients of what was looked up
        (GATHER, "forward", uses),  # to the head
        (SCATTER, "forward", uses),  # gradients from it
    ):
        yield _one(s, kind, "expert", phase, group, times, "words")


def shares(s: Setting) -> Iterator[Collective]:
    """Over tensor: sums of attention and of widths; all heads for the indexer's loss.

    Sums forward and their transposes, of which the shared expert has its own; that of
    attention again where it is recomputed, as are the heads that were gathered.
    """
    again = s.model.remat_policy != "none"
    heads, width = s.model.num_attention_heads * s.item, s.model.qk_head_dim
    latent = s.model.kv_lora_rank + s.model.qk_rope_head_dim
    queries = heads * s.tokens * (latent if s.has_lists else width)
    keys = 0 if s.has_lists else heads * s.rows * s.keys * width
    for kind, count in (*s.layer_kinds.items(), (s.mtp_kind, s.mtp_steps)):
        has_shared = kind.has_experts and s.model.n_shared_experts > 0
        sums = count * (2 + again + 2 + has_shared)
        yield _one(s, REDUCE, "tensor", "forward", s.state, sums, "shares")
        if s.has_indexer_loss and kind.index != "none":
            for size in (queries, keys):
                times = count * (1 + again)
                yield _one(s, GATHER, "tensor", "forward", size, times, "shares")


def replicas(s: Setting) -> Iterator[Collective]:
    """Gradients over axes that hold copies of a parameter; data goes over slices.

    Once a step: of parts of the batch what each device has added up, in float32.
    """
    for weight, count in _all_weights(s):
        kept = weight.stored_axes
        copies = [axis for axis in s.sizes if axis not in kept and s.sizes[axis] > 1]
        size = s.stored(weight) * (4 if s.parts > 1 else weight.item)
        for axis in copies:
            yield from _reduced(s, axis, size, count)


def optimizer(s: Setting) -> Iterator[Collective]:
    """Muon's matrices, whole on one device and back (docs/design/0006)."""
    if s.config.optim.name != "muon":
        return
    for group in groups(s):
        work, n = group.work, math.prod([s.over(*group.exchanged), 1])
        whole = work.exchanged_bytes * n / max(n - 1, 1)
        yield _one(s, EXCHANGE, group.exchanged, "optimizer", whole, 1, "newton_schulz")
        copies = s.over(*group.shared)
        whole = work.gathered_bytes * copies / max(copies - 1, 1)
        yield _one(s, GATHER, group.shared, "optimizer", whole, 1, "newton_schulz")


def groups(s: Setting) -> tuple[matrix_groups.Group, ...]:
    """Returns the groups in which Muon distributes its matrices."""
    plain = dataclasses.replace(s.model, expert_chunks=1)  # one plan for all of them
    apart = s.config.mesh.slow_axes
    shared = tuple((axis, n) for axis, n in s.sizes.items() if axis not in apart)
    return _groups(s.config.optim, plain, shared)


def _fetch(
    s: Setting, weight: setting_lib.Weight, count: int, phase: str, scope: str
) -> Iterator[Collective]:
    """Gathers of a parameter, the last axis first, each of what the one before made."""
    size = s.stored(weight) * weight.item
    for axis in reversed(weight.fetched_axes):
        size *= s.sizes[axis]
        yield _one(s, GATHER, axis, phase, size, count, scope)


def _return(
    s: Setting, weight: setting_lib.Weight, count: int, scope: str
) -> Iterator[Collective]:
    """Scattered sums of its gradient, of the whole one first."""
    size = s.fetched(weight) * weight.item
    for axis in weight.fetched_axes:
        yield _one(s, SCATTER, axis, "backward", size, count, scope)
        size //= s.sizes[axis]


def _reduced(s: Setting, axis: str, size: int, count: int) -> Iterator[Collective]:
    """A sum over copies; over data within each slice first, then between them."""
    slices = s.config.mesh.slices if axis == "data" else 1
    within = s.sizes[axis] // slices
    scope = "replicas"
    yield _made(REDUCE, (axis,), "backward", size, count, scope, within)
    if slices > 1:
        across = (communication.DCN,)
        yield _made(REDUCE, across, "backward", size, count, scope, slices)


def _one(
    s: Setting,
    kind: str,
    axes: str | tuple[str, ...],
    phase: str,
    size: float | int,
    count: int,
    scope: str = "moe",
) -> Collective:
    """`count` runs over one or several axes of whole arrays of `size` bytes."""
    axes = (axes,) if isinstance(axes, str) else axes
    return _made(kind, axes, phase, size, count, scope, s.over(*axes))


def _times(c: Collective, number: int) -> Collective:
    if number == 1:
        return c
    return dataclasses.replace(
        c, count=c.count * number, wire_bytes=c.wire_bytes * number
    )


def _made(
    kind: str,
    axes: tuple[str, ...],
    phase: str,
    size: float | int,
    count: int,
    scope: str,
    n: int,
) -> Collective:
    wire = communication.KINDS[kind] * size * (n - 1) / n * count
    return Collective(kind, axes, phase, scope, "", n, count, wire)


def _expert_layer_runs(s: Setting) -> int:
    """Runs of a layer with experts in a forward pass."""
    count = sum(n for kind, n in s.layer_kinds.items() if kind.has_experts)
    return count + s.mtp_steps


def _all_weights(s: Setting) -> Iterator[tuple[setting_lib.Weight, int]]:
    """Yields every parameter with the number of layers that have it."""
    for kind, count in (*s.layer_kinds.items(), (s.mtp_kind, int(s.mtp_steps > 0))):
        for weight in s.layer(kind):
            yield weight, count
    for weight in s.others.values():
        yield weight, 1


@functools.cache
def _groups(
    optim: config_lib.OptimConfig,
    model: config_lib.ModelConfig,
    sizes: tuple[tuple[str, int], ...],
) -> tuple[matrix_groups.Group, ...]:
    """Returns the groups in which the optimizer distributes its matrices."""
    dims, shapes = transformer.param_dims(model), transformer.abstract_params(model)
    leaves = optimizer_lib.muon_leaves(optim, model, dims, shapes)
    return matrix_groups.plan(leaves, dict(sizes))
