"""The flags of a server that trains with its clients; imports neither jax nor more."""

from absl import flags

WEIGHTS_ROOT = flags.DEFINE_string(
    "weights_root", None, "Folder below which clients may name new weights."
)
ROUTED_EXPERTS = flags.DEFINE_bool(
    "routed_experts", False, "Lets /inference/v1/generate return each token's experts."
)
