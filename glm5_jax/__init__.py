"""GLM-5 in JAX: the model, its kernels, its optimizer, its training stages.

`glm5_jax.load` and `glm5_jax.new` give a `glm5_jax.Model`; they are imported, and jax
with them, when they are first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5_jax.api import Model, load, new

__version__ = "0.1.0"
__all__ = ["Model", "load", "new"]


def __getattr__(name: str) -> Any:
    """Imports what `__all__` names from glm5_jax.api."""
    if name not in __all__:
        raise AttributeError(f"module 'glm5_jax' has no attribute {name!r}")
    from glm5_jax import api

    return getattr(api, name)
