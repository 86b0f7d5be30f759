"""Muon Split as a transformation of gradients: momentum, orthogonalisation, RMS.

M <- mu M + G;   U = G + mu M (Nesterov) or M;   0.2 sqrt(max(rows, cols)) NS(U)
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array

from glm5_jax import config as config_lib
from glm5_jax.optim import muon_mesh, muon_split

Layouts = optax.Params  # tree of muon_split.Layout, or optax.MaskedNode


def scale_by_muon_split(
    layouts: Layouts,
    config: config_lib.OptimConfig,
    specs: optax.Params | None = None,
    apart: tuple[str, ...] = (),
) -> optax.GradientTransformation:
    """Momentum, orthogonalisation, and the update RMS; no learning rate, no decay.

    On one device all matrices are its own. On a mesh (jax.set_mesh) of several, each
    matrix is put together on one of them, if `specs` says how parameters are sharded.

    Args:
        layouts: tree like the parameters; at each leaf a Layout, or an
            optax.MaskedNode where the parameter is masked.
        config: the muon_ and ns_ fields are used.
        specs: tree like the parameters; at each leaf its PartitionSpec.
        apart: axes of the mesh whose devices do not share the work, as what lies
            between them is slow.
    """

    @jax.named_scope("newton_schulz")
    def update(updates: optax.Updates, _: optax.Params | None) -> optax.Updates:
        num_devices = jax.sharding.get_abstract_mesh().size
        if specs is None or num_devices <= 1:
            return _here(updates, layouts, config)
        return _on_mesh(updates, layouts, specs, config, apart)

    return optax.chain(_momentum(config), optax.stateless(update))


def _momentum(config: config_lib.OptimConfig) -> optax.GradientTransformation:
    """Heavy-ball or Nesterov momentum in float32, rounded once to where it is kept.

    optax.trace would round mu M as well, before G is added, if M is kept in bfloat16.
    """
    dtype, mu = jnp.dtype(config.moment_dtype), config.muon_momentum

    def init(params: optax.Params) -> optax.TraceState:
        return optax.TraceState(optax.tree.zeros_like(params, dtype=dtype))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        assert isinstance(state, optax.TraceState)
        add = functools.partial(jax.tree.map, lambda g, m: g + mu * m)
        moment = add(updates, optax.tree.cast(state.trace, jnp.float32))
        updates = add(updates, moment) if config.muon_nesterov else moment
        return updates, optax.TraceState(optax.tree.cast(moment, dtype))

    return optax.GradientTransformation(init, update)


def _here(
    updates: optax.Updates, layouts: Layouts, config: config_lib.OptimConfig
) -> optax.Updates:
    """Orthogonalises every matrix where its parameter is."""
    function = _newton_schulz(config)

    def orthogonalized(x: Array) -> Array:
        return config.muon_update_rms * max(x.shape[-2:]) ** 0.5 * function(x)

    return jax.tree.map(
        lambda u, layout: layout.map(orthogonalized, u), updates, layouts
    )


def _on_mesh(
    updates: optax.Updates,
    layouts: Layouts,
    specs: optax.Params,
    config: config_lib.OptimConfig,
    apart: tuple[str, ...],
) -> optax.Updates:
    """Orthogonalises every matrix on one device of the mesh, or of each part of it."""
    dtype = jnp.dtype(config.ns_dtype)
    function = _newton_schulz(config)
    leaves, tree = jax.tree.flatten(updates)
    flat_layouts, flat_specs = map(tree.flatten_up_to, (layouts, specs))
    results = muon_mesh.map_matrices(
        lambda x: function(x).astype(dtype),
        [leaf.astype(dtype) for leaf in leaves],
        flat_layouts,
        flat_specs,
        apart,
    )
    # The barrier keeps the reshape in front of it: behind it all is elementwise and
    # joins the addition to the parameters, so that no float32 update exists.
    results = [lax.optimization_barrier(u) for u in results]
    scaled = [
        _rms(config, layout, u.shape) * u.astype(jnp.float32)
        for layout, u in zip(flat_layouts, results, strict=True)
    ]
    return tree.unflatten(scaled)


def _newton_schulz(config: config_lib.OptimConfig) -> Callable[[Array], Array]:
    return functools.partial(
        muon_split.orthogonalize,
        steps=muon_split.coefficients(config),
        dtype=jnp.dtype(config.ns_dtype),
    )


def _rms(
    config: config_lib.OptimConfig, layout: muon_split.Layout, shape: tuple[int, ...]
) -> float | np.ndarray:
    """Returns what gives the update of a parameter its root mean square."""
    scales: list[float] = []
    for part in layout.part_shapes(shape):
        sides = (
            math.prod(part[i] for i in axes) for axes in (layout.rows, layout.cols)
        )
        scales.append(config.muon_update_rms * max(sides) ** 0.5)
    if layout.cut is None:
        return scales[0]
    axis, index = layout.cut
    vector = np.repeat(np.array(scales, np.float32), [index, shape[axis] - index])
    return vector.reshape([-1 if i == axis else 1 for i in range(len(shape))])
