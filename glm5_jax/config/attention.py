"""Attention variants: the names of their layers, and their sizes (docs/variants.md)."""

import dataclasses

from glm5_jax.config import checks, fields

LATENT = "latent"  # GLM-5's own: MLA, in which model.attention chooses the keys
# Names in ModelConfig.layer_types. Layers of other types than LATENT have no indexer.
LAYER_TYPES = (
    LATENT,
    *("latent_sliding", "grouped", "grouped_sliding"),
    *("gated_delta", "simple_gated_delta"),
)
GROUPED = ("grouped", "grouped_sliding")
# Those that cache a state, which a token overwrites, instead of rows of tokens.
RECURRENT = ("gated_delta", "simple_gated_delta")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionVariants:
    """Sizes of the layers whose type is not "latent"; GLM-5 itself reads none."""

    # Heads of keys and values of a grouped layer: as GLM-4.5, and GQA-8 of Table 1.
    num_key_value_heads: int = 8
    # Dims of such a head; RoPE rotates the last qk_rope_head_dim of them.
    head_dim: int = 128
    # Last keys that a query of a sliding layer reads, itself among them (paper 2.1.2).
    sliding_window: int = 4096
    # Tokens that the convolution of a "gated_delta" layer sums, its own among them.
    linear_conv_kernel_dim: int = 4

    def __post_init__(self) -> None:
        """Checks every field."""
        names = [field.name for field in dataclasses.fields(self)]
        checks.require(*checks.positive(self, *names, most=checks.MAX_SIZE))

    def grouped_rules(self, num_heads: int, rope_dim: int) -> list[tuple[bool, str]]:
        """Returns the rules of grouped layers: how their sizes fit the model's."""
        return [
            (
                num_heads % self.num_key_value_heads == 0,
                f"num_attention_heads must be divisible by "
                f"variants.num_key_value_heads, got {num_heads} and "
                f"{self.num_key_value_heads}.",
            ),
            (
                self.head_dim >= rope_dim,
                f"variants.head_dim must be at least qk_rope_head_dim, which of its "
                f"dims are rotated, got {self.head_dim} and {rope_dim}.",
            ),
        ]


def layer_rules(
    layer_types: tuple[str, ...], num_layers: int, batch_invariant: bool | None
) -> list[tuple[bool, str]]:
    """Returns the rules of ModelConfig.layer_types."""
    known = ", ".join(LAYER_TYPES)
    unknown = [name for name in dict.fromkeys(layer_types) if name not in LAYER_TYPES]
    others = [name for name in layer_types if name != LATENT]
    return [
        (
            len(layer_types) in (0, num_layers),
            f"layer_types must name the attention of each of the {num_layers} layers "
            f"(num_hidden_layers), or be empty, got {len(layer_types)} names.",
        ),
        *(
            (
                False,
                f"layer_types must be of {known}; got {name!r}."
                f"{fields.did_you_mean(name, LAYER_TYPES)}",
            )
            for name in unknown
        ),
        (
            not (batch_invariant and others),
            f"batch_invariant needs layers of type {LATENT!r} only, whose lists of "
            f"keys training and decoding share; layer_types has {others[:1]}.",
        ),
    ]
