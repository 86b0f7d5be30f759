"""The memory that a training step needs on a device, from shapes alone.

Arguments are exact. Temporaries are those of the worst of four moments: a layer's
backward pass, that of MTP's layer, the head, the update. Each term is a function of
shapes. How many copies of a buffer live at once is the compiler's choice; the constants
are fitted to what libtpu 0.0.51 reports (tests/scale/estimate/compiled.json). Where a
run of RL stays near a policy, its weights stay beside the step, and so does a critic.
A critic's own step needs no more: it has the same layers, and no output matrix.
"""

import dataclasses
import functools

import jax

from glm5_jax import config as config_lib
from glm5_jax import depth as depth_lib
from glm5_jax.config import attention as attention_config
from glm5_jax.scale import inputs, programs, slice_devices
from glm5_jax.scale.estimate import setting as setting_lib
from glm5_jax.training import critic as critic_lib
from glm5_jax.training import program as program_lib

Setting = setting_lib.Setting
TOLERANCE = 0.1  # of the temporaries, as tested

# How many copies live at once.
FETCHED = 1.0  # of a layer's weights
STAGED = {"tpu7x": 1.0}  # ... and again where SparseCores gather them
SUMS = 1.0  # of the gradients of its experts; one more while chunks add to them
ROWS = 2.0  # of the experts' rows of hidden size
ROWS_ADDED = 1.0  # ... one more where the devices of tensor add theirs
WIDE_ROWS = 3.0  # of their gate, up and product
GROUP = 3.0  # of the tokens that a chunk has gathered
QUERIES = 3.0  # of queries, outputs and their gradients, all heads
KEYS = 2.0  # of keys and values, all heads
STATES = 6.0  # of the hidden states in a layer
MTP_STATES = 4.0  # ... of each step of MTP
WORDS = 4.0  # of head and embedding, with their gradients
LOGITS = 2.0  # of a chunk's logits
INDEX_BYTES = 4  # of a gradient of the indexer's loss


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a device."""

    arguments: dict[str, float]  # by kind
    moments: dict[str, dict[str, float]]  # temporaries of each moment, by kind
    reference: float = 0.0  # a second copy of the weights (training/reference.py)
    critic: float = 0.0  # its parameters and moments (training/critic.py)

    @property
    def beside(self) -> float:
        """Weights of a reference and a critic, which stay between the steps."""
        return self.reference + self.critic

    @property
    def worst(self) -> str:
        """The name of the moment that takes most."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def temporaries(self) -> float:
        """The temporaries of the worst moment."""
        return sum(self.moments[self.worst].values())

    @property
    def total(self) -> float:
        """Arguments, temporaries, and what stays beside the step together."""
        return sum(self.arguments.values()) + self.temporaries + self.beside


def of(s: Setting) -> Memory:
    """Estimates the memory of a candidate."""
    computed = gradients(s)
    standing = {
        "casts": computed if s.model.param_dtype != s.model.dtype else 0.0,
        "gradients": computed,
        "carries": carries(s),
        "kept results": sum(n * kept(s, kind) for kind, n in s.layer_kinds.items()),
        "sums of parts": accumulated(s),
    }
    copies = FETCHED + STAGED.get(s.device.chip.name, 0.0)
    layer = {
        "fetched weights": copies * fetched(s) + sums(s),
        "experts": expert_buffers(s),
        "attention": attention(s),
        "hidden states": STATES * s.state,
    }
    before = {k: v for k, v in standing.items() if k != "gradients"}
    later = before | {"vocabulary": vocabulary(s)}
    added = "sums of parts" if s.parts > 1 else "gradients"
    update = {added: standing[added], "update": optimizer(s)}
    moments = {"layer": standing | layer, "update": update, "head": later}
    if s.mtp_steps:
        states = MTP_STATES * s.mtp_steps * s.state
        states += s.mtp_steps * kept(s, s.mtp_kind)
        moments["mtp"] = later | layer | {"states of MTP": states}
    return Memory(arguments(s), moments, reference(s), critic(s))


def arguments(s: Setting) -> dict[str, float]:
    """Parameters, moments and batch by kind: exact but for the padding of tiles."""
    sums: dict[str, float] = {}
    for kind, size, axes in _arguments(_plain(s)):
        sums[kind] = sums.get(kind, 0.0) + size / s.over(*axes)
    return sums


def critic(s: Setting) -> float:
    """Counts a critic's parameters and moments, as `arguments` counts the policy's."""
    if not s.critic_updates:
        return 0.0
    return sum(size / s.over(*axes) for size, axes in _critic(_plain(s)))


def gradients(s: Setting) -> float:
    """Counts those of all parameters, in the type they are computed in, placed alike.

    Their values in that type take the same, where parameters are kept in another.
    """
    total = 0.0
    for kind, count in s.layer_kinds.items():
        total += count * sum(s.stored(w) * w.item for w in s.layer(kind))
    if s.mtp_steps:
        total += sum(s.stored(w) * w.item for w in s.layer(s.mtp_kind))
    return total + sum(s.stored(w) * w.item for w in s.others.values())


def reference(s: Setting) -> float:
    """Counts the weights of rl.reference and rl.teachers as they are computed with.

    They are placed like the parameters, MTP's among them, and stay between the steps.
    """
    number = s.config.num_other_policies
    if not number:
        return 0.0
    mtp = s.layer(s.mtp_kind) if s.model.has_mtp and not s.mtp_steps else ()
    return number * (gradients(s) + sum(s.stored(w) * w.item for w in mtp))


def accumulated(s: Setting) -> float:
    """Sums of the gradients of parts of the batch, in float32."""
    return gradients(s) * 4 / s.item if s.parts > 1 else 0.0


def carries(s: Setting) -> float:
    """Hidden states that each layer was given, kept for its backward pass."""
    if s.model.remat_policy == "offload":  # in the host's memory
        return 0.0
    return float(s.state * sum(s.layer_kinds.values()))


def kept(s: Setting, kind: depth_lib.Kind) -> float:
    """Counts the results of a layer that its backward pass does not compute again.

    Of kernels: outputs and sums of attention, the selected keys, and the gradients of
    the indexer's loss; the states after attention; the experts' first products.
    """
    if s.keeps("rest") or not s.keeps("kernels"):
        return 0.0
    model, size = s.model, float(s.state)
    if kind.index != "none":
        heads = model.num_attention_heads // s.over("tensor")
        width = model.kv_lora_rank if s.has_lists else model.v_head_dim
        size += s.tokens * heads * (width * s.item + 4)
    if kind.owns_indexer and s.selects:
        size += s.tokens * (4 * model.index_topk if s.has_lists else s.keys / 8)
    if s.has_indexer_loss and kind.index != "none":
        queries = s.tokens * model.index_n_heads * (model.index_head_dim + 1)
        size += INDEX_BYTES * (queries + s.rows * s.keys * model.index_head_dim)
    if s.keeps("experts") and kind.has_experts:
        width = model.moe_intermediate_size // s.over("tensor")
        size += 2 * s.chunks * s.expert_rows * width * s.item
    return size


def fetched(s: Setting) -> float:
    """Bytes of a layer's weights as gathered, of experts those on this device."""
    return float(max(_bytes(s, kind) for kind in s.layer_kinds))


def sums(s: Setting) -> float:
    """Gradients of a layer's experts, whole before they are scattered."""
    largest = max(
        sum(s.fetched(w) * w.item for w in setting_lib.experts(s.layer(kind)))
        for kind in s.layer_kinds
    )
    return (SUMS + (s.chunks > 1)) * largest


def expert_buffers(s: Setting) -> float:
    """Rows of a chunk on their way through the experts."""
    if not any(kind.has_experts for kind in s.layer_kinds):
        return 0.0
    width = s.model.moe_intermediate_size // s.over("tensor")
    hidden = s.expert_rows * s.model.hidden_size * s.item
    group = s.state * s.over("expert") // s.chunks
    rows = ROWS + ROWS_ADDED * (s.over("tensor") > 1)
    return rows * hidden + WIDE_ROWS * s.expert_rows * width * s.item + GROUP * group


def attention(s: Setting) -> float:
    """Queries of a device's tokens, keys and values of whole rows; or latent queries.

    Where keys are listed they are read as latents, which all heads share.
    """
    return max(_attention(s, kind) for kind in s.layer_kinds)


def _attention(s: Setting, kind: depth_lib.Kind) -> float:
    model = s.model
    heads = model.num_attention_heads // s.over("tensor")
    if s.has_lists and kind.index != "none":
        width = model.kv_lora_rank + model.qk_rope_head_dim
        return QUERIES * s.tokens * heads * width * s.item
    is_grouped = kind.attention in attention_config.GROUPED
    width = model.variants.head_dim if is_grouped else model.qk_head_dim
    return heads * width * s.item * (QUERIES * s.tokens + KEYS * s.rows * s.keys)


def vocabulary(s: Setting) -> float:
    """Head and embedding with their gradients: the sum in float32, a use's, each use's.

    Besides it the logits of a chunk and their gradient, in float32.
    """
    head = s.fetched(s.others["lm_head"])
    words = s.model.vocab_size // s.over("tensor", "expert")
    logits = min(s.config.loss.chunk_tokens, s.tokens * s.over("expert")) * words
    copies = WORDS + s.mtp_steps
    return head * (copies * s.item + 4) + LOGITS * 4 * logits


def optimizer(s: Setting) -> float:
    """Newton-Schulz in pieces, and a leaf's update (docs/design/0006)."""
    largest = max(
        s.stored(w) * count
        for kind, count in s.layer_kinds.items()
        for w in s.layer(kind)
    )
    return 4.0 * largest


def _bytes(s: Setting, kind: depth_lib.Kind) -> int:
    return sum(s.fetched(w) * w.item for w in s.layer(kind))


def _plain(s: Setting) -> config_lib.TrainConfig:
    """Returns what all candidates of a moment_dtype share of their config."""
    return dataclasses.replace(
        s.config,
        mesh=config_lib.MeshConfig(data=1),
        model=dataclasses.replace(s.model, expert_chunks=1),
        optim=dataclasses.replace(s.config.optim, accumulation_steps=1),
    )


@functools.cache
def _critic(config: config_lib.TrainConfig) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Bytes and mesh axes of every array of a critic's state."""
    mesh = slice_devices.abstract_mesh(config.mesh, "v5e:1x1")
    state = critic_lib.make(config, program_lib.make_program(config, mesh)).state
    return tuple(
        (x.size * x.dtype.itemsize, tuple(jax.tree.leaves(tuple(x.sharding.spec))))
        for x in jax.tree.leaves(state)
        if x.sharding.memory_kind != "pinned_host"
    )


@functools.cache
def _arguments(
    config: config_lib.TrainConfig,
) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    """Kind, bytes and mesh axes of every argument."""
    mesh = slice_devices.abstract_mesh(config.mesh, "v5e:1x1")
    job = programs.make(config, mesh)
    arrays = inputs.arguments(job.arguments, job.names)
    leaves = jax.tree.leaves(job.arguments)
    sums: dict[tuple[str, tuple[str, ...]], int] = {}
    for array, x in zip(arrays, leaves, strict=True):
        key = array.kind, tuple(jax.tree.leaves(tuple(x.sharding.spec)))
        if x.sharding.memory_kind != "pinned_host":
            sums[key] = sums.get(key, 0) + array.device_bytes
    return tuple((kind, size, axes) for (kind, axes), size in sums.items())
