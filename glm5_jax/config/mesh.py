"""The mesh: devices along each axis, and which sizes of a model they divide."""

import dataclasses
import math
import operator

from glm5_jax.config import checks
from glm5_jax.config.model import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices along each mesh axis."""

    # Slices of TPUs, which only the data axis may span. Hosts of GPUs may be counted as
    # slices too; with 1, every axis may span hosts.
    slices: int = 1
    # Devices that hold replicas and different rows; -1: all that the other axes leave.
    data: int = -1
    fsdp: int = 1  # devices that share rows, parameters and optimizer state
    expert: int = 1  # devices that share the experts
    # Devices that share attention heads, hidden dims of experts and the vocabulary.
    tensor: int = 1
    context: int = 1  # devices that share the tokens of a row

    @property
    def slow_axes(self) -> tuple[str, ...]:
        """Returns the axes that span slices, over a network slower than links."""
        return ("data",) if self.slices > 1 else ()

    def __post_init__(self) -> None:
        """Checks every field."""
        checks.require(
            *checks.choices(self),
            (
                self.data == -1 or self.data >= 1,
                f"data must be -1 or >= 1: {self.data}",
            ),
            *checks.positive(
                self,
                "slices",
                "fsdp",
                "expert",
                "tensor",
                "context",
                most=checks.MAX_SIZE,
            ),
        )

    def model_rules(self, model: ModelConfig) -> list[tuple[bool, str]]:
        """Returns the rules that each axis divides the sizes that it shards."""
        shares = self.fsdp * self.expert * max(self.data, 1)
        known = shares * self.context * self.tensor  # with data=-1 there are more
        stored = self.fsdp * self.context  # least number of parts of each matrix
        rules, grouped = [], ()
        if model.has_grouped:
            grouped = (("variants.num_key_value_heads", "tensor", self.tensor),)
        for name, axes, parts in (
            ("hidden_size", "fsdp * context * expert", stored * self.expert),
            ("q_lora_rank", "fsdp * context * expert", stored * self.expert),
            ("kv_lora_rank", "fsdp * context", stored),
            ("n_routed_experts", "expert", self.expert),
            ("vocab_size", "tensor * expert", self.tensor * self.expert),
            ("num_attention_heads", "tensor", self.tensor),
            ("intermediate_size", "tensor", self.tensor),
            ("moe_intermediate_size", "tensor", self.tensor),
            *grouped,
        ):
            size = operator.attrgetter(name)(model)
            near = checks.nearest_divisors(math.gcd(size, known), parts)
            remedy = f"{axes} to {checks.listed(near)}"
            rules.append(checks.divisible(f"model.{name}", size, axes, parts, remedy))
        return rules

    def token_rules(
        self, length: int, expert_chunks: int, num_devices: int
    ) -> list[tuple[bool, str]]:
        """Returns rules: context, then expert_chunks, divide the tokens of a row.

        Args:
          length: of a row.
          expert_chunks: of the model.
          num_devices: known to be there, for the remedy.
        """
        rules, name = [], "data.sequence_length"
        if expert_chunks > 1:
            most = max(length // self.context, 1)
            near = checks.nearest_divisors(most, expert_chunks)
            remedy = f"model.expert_chunks to {checks.listed(near)}"
            axes, parts = "context * expert_chunks", self.context * expert_chunks
            rules.append(checks.divisible(name, length, axes, parts, remedy))
        if self.context > 1:  # a device gets an early and a late part of each row
            halves = 1 if length % 2 else math.gcd(length // 2, num_devices)
            near = checks.nearest_divisors(halves, self.context)
            remedy = f"context to {checks.listed(near)}"
            parts = 2 * self.context
            rules.append(checks.divisible(name, length, "2 * context", parts, remedy))
        return rules
