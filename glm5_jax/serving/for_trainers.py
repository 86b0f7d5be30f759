"""The flags of a server that trains with its clients; imports neither jax nor more."""

from typing import Any

from absl import flags

_WEIGHTS_ROOT = flags.DEFINE_string(
    "weights_root", None, "Folder below which clients may name new weights."
)
_WEIGHTS_URL = flags.DEFINE_string(
    "weights_url",
    None,
    "Address of python -m glm5_jax.serve_weights, where versions are read that are not "
    "below --weights_root, or damaged there.",
)
_ROUTED_EXPERTS = flags.DEFINE_bool(
    "routed_experts", False, "Lets /inference/v1/generate return each token's experts."
)


def given() -> dict[str, Any]:
    """Returns the settings of the server that they are, by name."""
    return {
        "weights_root": _WEIGHTS_ROOT.value,
        "weights_url": _WEIGHTS_URL.value,
        "routed_experts": _ROUTED_EXPERTS.value,
    }
