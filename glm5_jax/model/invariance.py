"""Batch invariance: a token's numbers do not depend on what is computed beside it.

In bfloat16, two programs of the same mathematics round differently, so that hidden
states get different scores. Whole rows in training and single tokens in decoding then
chose different keys for 5% of a trained model's tokens. With model.batch_invariant they
choose the same keys, because

1. attention has one form, the latent one over listed keys (indexer.py);
2. experts are computed in one way, and no product has a single row, which XLA on CPU
   would sum in another order (experts.py, cached.py);
3. the compiler rounds every result where the program does. By default XLA may keep
   float32 between two fused operations, and which ones it fuses depends on shapes.

On CPUs the numbers are then equal bit for bit. docs/design/0010-batch-invariance.md has
the measurements, and what is known about other chips and the cost there.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from glm5_jax import config as config_lib

_OPTIONS = {
    "xla_allow_excess_precision": False,
    # YNNPACK sums rows in an order that depends on their number. Compilers for chips
    # other than CPUs ignore this option.
    "xla_cpu_experimental_ynn_fusion_type": "",
}


def compiler_options(config: config_lib.ModelConfig) -> dict[str, Any] | None:
    """Returns the compiler options for programs of the model, or None."""
    return dict(_OPTIONS) if config.batch_invariant else None


def jit(function: Callable, **settings: Any) -> Callable:
    """Compiles function(params, config, ...) with the options of its config.

    Args:
      function: its second argument is a ModelConfig and named config; it is static.
      **settings: of `jax.jit`; static_argnames must name config.
    """
    usual = jax.jit(function, **settings)
    invariant = jax.jit(function, compiler_options=dict(_OPTIONS), **settings)

    @functools.wraps(function)
    def run(
        params: dict, config: config_lib.ModelConfig, *args: Any, **named: Any
    ) -> Any:
        compiled = invariant if config.batch_invariant else usual
        return compiled(params, config, *args, **named)

    return run
