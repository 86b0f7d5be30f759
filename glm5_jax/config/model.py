"""The architecture, by the names of the Hugging Face config.json."""

import dataclasses
from typing import Literal

from glm5_jax.config import checks
from glm5_jax.config.rope import RopeScaling

AttentionMode = Literal["dense", "sparse", "dense_with_indexer_loss"]
ExpertTransport = Literal["gather", "exchange"]
RematPolicy = Literal["none", "full", "dots", "offload"]
Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture; defaults are zai-org/GLM-5 config.json (arXiv 2602.15763)."""

    vocab_size: int = 154880  # ids that have an embedding; at least the tokenizer's
    hidden_size: int = 6144  # width of the residual stream
    intermediate_size: int = 12288  # width of a dense layer's SwiGLU
    moe_intermediate_size: int = 2048  # width of one expert, routed or shared
    num_hidden_layers: int = 78  # layers, without that of multi-token prediction
    first_k_dense_replace: int = 3  # leading layers without experts
    num_attention_heads: int = 64  # heads of the main attention
    q_lora_rank: int = 2048  # width of the latent that queries are made from
    # Width of the latent that keys and values are made from, and that is cached.
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 192  # dims of a query or key head without rotation
    qk_rope_head_dim: int = 64  # dims of a query or key head that RoPE rotates
    v_head_dim: int = 256  # dims of a value head
    n_routed_experts: int = 256  # experts of a layer that the router chooses among
    num_experts_per_tok: int = 8  # routed experts that a token meets
    n_shared_experts: int = 1  # experts that every token meets
    routed_scaling_factor: float = 2.5  # factor on the sum of the routed experts
    norm_topk_prob: bool = True  # gates of a token sum to routed_scaling_factor
    index_n_heads: int = 32  # heads of the indexer
    index_head_dim: int = 128  # dims of an indexer head
    index_topk: int = 2048  # keys that a query may attend to
    # Which layers own an indexer ("F") and which reuse the one before them ("S"):
    # a pattern, one letter a layer, or else every index_topk_freq-th layer.
    index_topk_pattern: str | None = None
    # One layer in so many owns an indexer, where there is no pattern.
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2  # leading layers that own an indexer in any case
    index_share_for_mtp_iteration: bool = False  # later MTP steps reuse KV and index
    num_nextn_predict_layers: int = 1  # MTP modules stored: 0 or 1
    mtp_num_steps: int = 3  # times that it is applied in training (paper 2.1)
    # Added to the mean square in every norm but those of the latents.
    rms_norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6  # as transformers; vLLM, SGLang: rms_norm_eps
    rope_theta: float = 1e6  # base of RoPE's wavelengths
    rope_scaling: RopeScaling = RopeScaling()
    # Longest context that the model is made for, in tokens.
    max_position_embeddings: int = 202752
    initializer_range: float = 0.02  # standard deviation of initial weights
    eos_token_id: tuple[int, ...] = (154820, 154827, 154829)  # ids that end a text
    pad_token_id: int | None = 154820  # fills rows that stopped; None: 0
    # Keys that a query sees: the indexer's, or all; dense_with_indexer_loss: all, and
    # the indexer learns from them. This and the fields below are no architecture.
    attention: AttentionMode = "sparse"
    dtype: Dtype = "bfloat16"  # number type of activations and matrix products
    param_dtype: Dtype = "float32"  # number type of parameters and gradients
    # What the backward pass computes again to save memory: nothing, all but the layers'
    # inputs, all but matrix products; offload keeps those inputs on the host.
    remat_policy: RematPolicy = "none"
    # How tokens reach experts on other devices: everybody gets all, or each gets its
    # own; the numbers are the same.
    expert_transport: ExpertTransport = "gather"
    expert_chunks: int = 1  # parts of a device's tokens that meet the experts in turn
    # A token's numbers do not depend on what is computed beside it, so that trainer and
    # engine choose the same keys and experts (glm5_jax/model/invariance.py). None: in
    # stage rl with bfloat16.
    batch_invariant: bool | None = None

    def __post_init__(self) -> None:
        """Checks every field."""
        checks.require(
            *checks.choices(self),
            *self._layer_rules(),
            *checks.positive(
                self,
                *("vocab_size", "hidden_size", "intermediate_size"),
                *("moe_intermediate_size", "num_hidden_layers", "num_attention_heads"),
                *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
                *("qk_rope_head_dim", "v_head_dim", "n_routed_experts"),
                *("num_experts_per_tok", "index_n_heads", "index_head_dim"),
                *("index_topk", "index_topk_freq", "max_position_embeddings"),
                "expert_chunks",
                most=checks.MAX_SIZE,
            ),
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
            (
                self.num_nextn_predict_layers in (0, 1),
                f"num_nextn_predict_layers must be 0 or 1 (MTP steps share one "
                f"module), got {self.num_nextn_predict_layers}.",
            ),
            (
                self.mtp_num_steps >= 0,
                f"mtp_num_steps must not be negative, got {self.mtp_num_steps}.",
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

    def _layer_rules(self) -> list[tuple[bool, str]]:
        """Rules of the fields that say what kind each layer is."""
        n, pattern = self.num_hidden_layers, self.index_topk_pattern
        dense = self.first_k_dense_replace
        return [
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
                pattern is None or (len(pattern) == n and set(pattern) <= set("FS")),
                f"index_topk_pattern must be {n} letters F or S, got {pattern!r}.",
            ),
            (
                not pattern or pattern[0] == "F",
                "index_topk_pattern must begin with F: the first layer has no "
                "earlier index to share.",
            ),
            (
                pattern is not None or n < 1 or self.is_full_index_layer[0],
                f"index_skip_topk_offset must leave the first layer full, got "
                f"{self.index_skip_topk_offset} with index_topk_freq "
                f"{self.index_topk_freq}.",
            ),
        ]

    @property
    def qk_head_dim(self) -> int:
        """Dims of a query or key head: no-rope part, then rope part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on the attention scores."""
        return self.qk_head_dim**-0.5 * self.rope_scaling.score_factor

    @property
    def has_mtp(self) -> bool:
        """Returns whether the multi-token-prediction module exists."""
        return self.num_nextn_predict_layers > 0

    @property
    def is_full_index_layer(self) -> tuple[bool, ...]:
        """Per layer: does it own an indexer (else it reuses an earlier one's keys).

        IndexShare, arXiv 2603.12201: layer i is full iff
        max(i - index_skip_topk_offset + 1, 0) % index_topk_freq == 0.
        """
        if self.index_topk_pattern:
            return tuple(letter == "F" for letter in self.index_topk_pattern)
        skip = self.index_skip_topk_offset - 1
        return tuple(
            max(i - skip, 0) % max(self.index_topk_freq, 1) == 0
            for i in range(self.num_hidden_layers)
        )
