"""Which implementation of an op runs."""

from typing import Any

import jax
from jax import ad_checkpoint

SAVED = "pallas_kernels"  # name of what a rematerialisation policy should keep


def platform() -> str:
    """Platform that a program traced now is meant for: "cpu", "gpu" or "tpu"."""
    return jax.default_backend()


def saved(tree: Any) -> Any:
    """Marks arrays that cost much more to compute again than to keep."""
    return jax.tree.map(lambda x: ad_checkpoint.checkpoint_name(x, SAVED), tree)


def choose(implementation: str | None, default: str, known: tuple[str, ...]) -> str:
    """Resolves `implementation`; a named one never falls back to another.

    Raises:
      NotImplementedError: if the name is not one of `known`.
    """
    if implementation is None:
        return default
    if implementation not in known:
        raise NotImplementedError(
            f"implementation must be one of {', '.join(known)} or None, "
            f"got {implementation!r}."
        )
    return implementation
