"""Settings of the model, with the names of the Hugging Face config.json."""

import dataclasses
from typing import Literal

from glm5_jax.config import checks
from glm5_jax.config.attention import (
    GROUPED,
    LATENT,
    RECURRENT,
    AttentionVariants,
    layer_rules,
)
from glm5_jax.config.rope import RopeScaling

AttentionMode = Literal["dense", "sparse", "dense_with_indexer_loss"]
ExpertTransport = Literal["gather", "rounds", "exchange"]
RematPolicy = Literal["none", "full", "kernels", "experts", "dots", "offload"]
Dtype = Literal["float32", "bfloat16"]
CacheDtype = Literal["auto", "int8", "fp8"]
IndexDtype = Literal["auto", "fp8"]

# Fields that count something.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "index_topk_freq",
    "max_position_embeddings",
    "expert_chunks",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture; defaults are zai-org/GLM-5 config.json (arXiv 2602.15763)."""

    vocab_size: int = 154880  # rows of the embedding; at least the tokenizer's ids
    hidden_size: int = 6144  # width of the residual stream
    intermediate_size: int = 12288  # width of a dense layer's SwiGLU
    moe_intermediate_size: int = 2048  # width of one expert, routed or shared
    num_hidden_layers: int = 78  # layers, without the one of multi-token prediction
    first_k_dense_replace: int = 3  # leading layers without experts
    num_attention_heads: int = 64  # heads of the main attention
    q_lora_rank: int = 2048  # width of the queries' latent
    # Width of the latent of keys and values, which is cached.
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 192  # dims of a query or key head without rotation
    qk_rope_head_dim: int = 64  # dims of a query or key head that RoPE rotates
    v_head_dim: int = 256  # dims of a value head
    n_routed_experts: int = 256  # experts of a layer that the router chooses among
    num_experts_per_tok: int = 8  # routed experts that process a token
    n_shared_experts: int = 1  # experts that process every token
    routed_scaling_factor: float = 2.5  # factor on the sum of the routed experts
    norm_topk_prob: bool = True  # gates of a token sum to routed_scaling_factor
    index_n_heads: int = 32  # heads of the indexer
    index_head_dim: int = 128  # dims of an indexer head
    index_topk: int = 2048  # keys that a query may attend to
    # One letter a layer: "F" has an indexer of its own, "S" reuses the keys of the one
    # before it, "-" is a layer whose type has none. None: index_topk_freq decides.
    index_topk_pattern: str | None = None
    # Layers per indexer, if index_topk_pattern is None.
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2  # leading layers that always have an indexer
    # Later MTP steps reuse the first one's keys, values and index.
    index_share_for_mtp_iteration: bool = False
    # Stored MTP modules: 1 is shared by all steps; of more, each step has its own.
    num_nextn_predict_layers: int = 1
    mtp_num_steps: int = 3  # times that training applies the MTP module (paper 2.1)
    # Added to the mean square in every norm except those of the latents.
    rms_norm_eps: float = 1e-5
    # Added to the mean square in the latents' norms: 1e-6 in transformers, rms_norm_eps
    # in vLLM and SGLang.
    latent_norm_eps: float = 1e-6
    rope_theta: float = 1e6  # base of RoPE's wavelengths
    rope_scaling: RopeScaling = RopeScaling()
    # Longest context that the model supports, in tokens.
    max_position_embeddings: int = 202752
    initializer_range: float = 0.02  # standard deviation of initial weights
    eos_token_id: tuple[int, ...] = (154820, 154827, 154829)  # ids that end a text
    pad_token_id: int | None = 154820  # id that pads finished rows; None: 0
    # Attention of each layer, by name: "latent" is GLM-5's, docs/variants.md explains
    # the others. (): all layers are "latent". The layer of multi-token prediction has
    # the last layer's type.
    layer_types: tuple[str, ...] = ()
    variants: AttentionVariants = AttentionVariants()
    # Keys that a query of a "latent" layer attends to. "sparse": those that the indexer
    # selects; "dense": all; "dense_with_indexer_loss": all, while the indexer is
    # trained. This and the fields below are not part of the architecture.
    attention: AttentionMode = "sparse"
    dtype: Dtype = "bfloat16"  # number type of activations and matrix products
    param_dtype: Dtype = "float32"  # number type of parameters and gradients
    # What the backward pass recomputes to save memory. "none": nothing; "full": all but
    # the layers' inputs; "kernels": as full, but neither attention, nor the indexer's
    # choice and loss; "experts": as kernels, without the experts' first products;
    # "dots": all but matrix products; "offload": as full, with the inputs in the host's
    # memory.
    remat_policy: RematPolicy = "none"
    # How tokens reach experts on other devices. "gather": every device gets all tokens;
    # "rounds": the same, with buffers for 1.5 times an even load, which are filled
    # again where the load is uneven; "exchange": each gets the tokens of its experts,
    # through buffers of that size. The results are the same.
    expert_transport: ExpertTransport = "gather"
    # Parts of a device's tokens that the experts process: in turn and with smaller
    # buffers; with remat_policy "experts" side by side, so that one part's exchange
    # overlaps another's products.
    expert_chunks: int = 1
    # Number type of cached latents: "auto" is `dtype`; "int8" and "fp8" take half the
    # memory, and "fp8" rounds the indexer's keys, too.
    kv_cache_dtype: CacheDtype = "auto"
    # Number type of the indexer's queries and keys: "auto" is `dtype`. "fp8" rounds
    # both, in training as in decoding, for GPUs that multiply 8 bits at twice the rate.
    index_dtype: IndexDtype = "auto"
    # Makes a token's results independent of the rest of the batch, so that trainer and
    # engine select the same keys and experts (glm5_jax/model/invariance.py). None: true
    # in stage rl with bfloat16.
    batch_invariant: bool | None = None

    def __post_init__(self) -> None:
        """Checks every field."""
        checks.require(
            *checks.choices(self),
            *self._layer_rules(),
            *checks.positive(self, *_SIZES, most=checks.MAX_SIZE),
            (
                self.num_experts_per_tok <= self.n_routed_experts,
                f"num_experts_per_tok must not exceed n_routed_experts, got "
                f"{self.num_experts_per_tok} of {self.n_routed_experts}.",
            ),
            (
                self.n_shared_experts >= 0,
                f"n_shared_experts must not be negative, got {self.n_shared_experts}.",
            ),
            (
                self.qk_rope_head_dim % 2 == 0,
                f"qk_rope_head_dim must be even (RoPE turns pairs), got "
                f"{self.qk_rope_head_dim}.",
            ),
            (
                self.index_head_dim >= self.qk_rope_head_dim,
                f"index_head_dim must be at least qk_rope_head_dim (the indexer "
                f"turns its first {self.qk_rope_head_dim} dims), got "
                f"{self.index_head_dim}.",
            ),
            *self._mtp_rules(),
            (
                self.kv_cache_dtype == "auto" or not self.batch_invariant,
                f"kv_cache_dtype={self.kv_cache_dtype!r} rounds what decoding reads "
                f"and so cannot select the keys of training; drop batch_invariant.",
            ),
            (
                self.index_dtype == "auto" or LATENT in self.layer_attention,
                f"index_dtype={self.index_dtype!r} is of indexers, which no layer has "
                f"with layer_types={self.layer_types}; drop it.",
            ),
            (
                not self.batch_invariant or self.attention == "sparse",
                f"batch_invariant needs attention='sparse', whose lists of keys "
                f"training and decoding share, got {self.attention!r}.",
            ),
            *(
                (value > 0, f"{name} must be > 0: {value}.")
                for name in ("rms_norm_eps", "latent_norm_eps")
                for value in (getattr(self, name),)
            ),
            (self.rope_theta > 1, f"rope_theta must exceed 1, got {self.rope_theta}."),
        )
        if set(self.layer_types) == {LATENT}:  # one spelling of GLM-5
            object.__setattr__(self, "layer_types", ())

    def _mtp_rules(self) -> list[tuple[bool, str]]:
        """Returns the rules of multi-token prediction."""
        modules, steps = self.num_nextn_predict_layers, self.mtp_num_steps
        return [
            (modules >= 0, f"num_nextn_predict_layers is negative: {modules}."),
            (steps >= 0, f"mtp_num_steps must not be negative, got {steps}."),
            (
                modules < 2 or steps in (0, modules),
                f"mtp_num_steps must be num_nextn_predict_layers={modules}, one step "
                f"for each module, or 0; got {steps}.",
            ),
            (
                modules < 2 or not self.index_share_for_mtp_iteration,
                f"index_share_for_mtp_iteration needs one MTP module, which all steps "
                f"share; num_nextn_predict_layers is {modules}.",
            ),
        ]

    def _layer_rules(self) -> list[tuple[bool, str]]:
        """Returns the rules of the fields that decide the kind of each layer."""
        n, pattern = self.num_hidden_layers, self.index_topk_pattern
        dense = self.first_k_dense_replace
        grouped = self.variants.grouped_rules(
            self.num_attention_heads, self.qk_rope_head_dim
        )
        has_index = [name == LATENT for name in self.layer_attention]
        letters = ["FS" if has else "-" for has in has_index]
        first = has_index.index(True) if True in has_index else None
        return [
            *layer_rules(self.layer_types, n, self.batch_invariant),
            *(grouped if self.has_grouped else ()),
            *checks.positive(self, "num_hidden_layers", most=2**12),
            *checks.positive(self, "n_routed_experts", most=2**16),
            (
                self.initializer_range >= 0,
                f"initializer_range is negative: {self.initializer_range}.",
            ),
            (
                0 <= dense <= n,
                f"first_k_dense_replace must lie in 0..{n} (num_hidden_layers), "
                f"got {dense}.",
            ),
            (
                pattern is None or (len(pattern) == n and set(pattern) <= set("FS-")),
                f"index_topk_pattern must be {n} letters F or S, got {pattern!r}.",
            ),
            (
                not pattern or all(map(str.__contains__, letters, pattern)),
                f"index_topk_pattern must have '-' for layers without an indexer, and "
                f"for them alone: layer_types asks for "
                f"{''.join(x[0] for x in letters)!r} (F or S), got {pattern!r}.",
            ),
            (
                not pattern or pattern.strip("-")[:1] in ("", "F"),
                "index_topk_pattern must begin with F (after any '-'): the first layer "
                "has no earlier index to share.",
            ),
            (
                pattern is not None or first is None or self.is_full_index_layer[first],
                f"index_skip_topk_offset must leave the first layer full, got "
                f"{self.index_skip_topk_offset} with index_topk_freq "
                f"{self.index_topk_freq}.",
            ),
        ]

    @property
    def qk_head_dim(self) -> int:
        """Returns the dims of a query or key head: no-rope part, then rope part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Returns the factor on the attention scores."""
        return self.qk_head_dim**-0.5 * self.rope_scaling.score_factor

    @property
    def has_mtp(self) -> bool:
        """Returns whether the multi-token-prediction module exists."""
        return self.num_nextn_predict_layers > 0

    @property
    def layer_attention(self) -> tuple[str, ...]:
        """Returns the type of attention of each layer."""
        return self.layer_types or (LATENT,) * self.num_hidden_layers

    @property
    def has_grouped(self) -> bool:
        """Returns whether some layer has grouped-query attention."""
        return not set(GROUPED).isdisjoint(self.layer_types)

    @property
    def is_recurrent(self) -> bool:
        """Returns whether some layer keeps a state of the tokens before."""
        return not set(RECURRENT).isdisjoint(self.layer_types)

    @property
    def has_indexer(self) -> bool:
        """Returns whether some layer computes an index."""
        return self.attention != "dense" and LATENT in self.layer_attention

    @property
    def shares_index(self) -> bool:
        """Returns whether some layer uses the index of an earlier one."""
        pairs = zip(self.layer_attention, self.is_full_index_layer, strict=True)
        return self.has_indexer and (LATENT, False) in pairs

    @property
    def is_full_index_layer(self) -> tuple[bool, ...]:
        """Returns for each layer whether it has an indexer, or else reuses keys.

        IndexShare, arXiv 2603.12201: layer i is full iff
        max(i - index_skip_topk_offset + 1, 0) % index_topk_freq == 0. A layer whose
        type has no indexer is not full.
        """
        if self.index_topk_pattern:
            return tuple(letter == "F" for letter in self.index_topk_pattern)
        skip = self.index_skip_topk_offset - 1
        return tuple(
            name == LATENT and max(i - skip, 0) % max(self.index_topk_freq, 1) == 0
            for i, name in enumerate(self.layer_attention)
        )
