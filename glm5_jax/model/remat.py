"""Decides what a layer keeps for its backward pass; all else is computed again.

A layer names the results that a policy may keep. Kernels name theirs themselves
(`pallas_kernels.SAVED`): attention, the indexer's choice, and the gradient of its loss.
What each costs, of GLM-5 with rows of 4096 tokens on v5p: docs/scaling.md.
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

import pallas_kernels
from glm5_jax import config as config_lib

INPUT = "layer_input"
ATTENDED = "attended"  # the states between attention and the feed-forward layer
EXPERTS = "experts"  # the products of the routed experts with gate_proj and up_proj

_names = jax.checkpoint_policies.save_only_these_names
_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    # With ATTENDED no output projection is computed again.
    "kernels": _names(pallas_kernels.SAVED, ATTENDED),
    "experts": _names(pallas_kernels.SAVED, ATTENDED, EXPERTS),
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        _names(pallas_kernels.SAVED),
    ),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def rematerialized(
    function: Callable, policy: config_lib.RematPolicy, num_steps: int
) -> Callable:
    """Wraps the body of a scan, so that its backward pass recomputes what is not kept.

    One step is no loop (`pallas_kernels.loops`): XLA must then be kept from merging the
    recomputation with the forward pass.

    "none" keeps everything, "full" only the inputs, "offload" keeps these in host
    memory, "kernels" keeps the results of kernels and the states after attention,
    "experts" also the first products of the routed experts, and "dots" the results of
    matrix products and kernels.
    """
    if policy == "none":
        return function
    return jax.checkpoint(
        function, policy=_POLICIES[policy], prevent_cse=num_steps == 1
    )


def named(x: Array, name: str) -> Array:
    """Gives an array of a layer one of the names above."""
    return checkpoint_name(x, name)
