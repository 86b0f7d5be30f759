"""Muon Split as an optax transformation, for any dict of parameters.

For every matrix W of r rows and c columns, with gradient G and momentum M:

    M <- mu M + G
    U <- G + mu M                               without Nesterov: U <- M
    S <- update_rms sqrt(max(r, c)) NS(U)
    W <- (1 - lr weight_decay) W - lr S

NS, a few steps of Newton-Schulz, moves all singular values towards 1. A matrix whose
singular values are all 1 has the root mean square 1 / sqrt(max(r, c)). The root cancels
it, so S has the root mean square update_rms.

`scale_by_muon_split` computes S, as a chain of `_momentum` and `_orthogonalized`. A run
adds weight decay and learning rate in optimizer.py, `muon_split` for other programs.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from glm5_jax.optim import dimension_numbers as numbers_lib
from glm5_jax.optim import muon_mesh, newton_schulz

Layout = numbers_lib.Layout
Function = Callable[[Array], Array]  # orthogonalises [..., rows, cols]
# Elements of an array whose matrices share a call with those of others: 16 MiB. They
# are copied for it.
_MOST_TOGETHER = 1 << 22


def muon_split(
    learning_rate: optax.ScalarOrSchedule,
    dimension_numbers: optax.Params | None = None,
    *,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    update_rms: float = 0.2,
    ns_coefficients: str = "polar_express",
    ns_steps: int = 5,
    ns_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    moment_dtype: jax.typing.DTypeLike = jnp.float32,
) -> optax.GradientTransformation:
    """Muon Split: orthogonalises the momentum of each head as a matrix of its own.

    With S of `scale_by_muon_split`, W <- (1 - lr weight_decay) W - lr S. Norms, biases
    and embeddings belong to another optimizer: combine the two by `optax.partition`.

    Args:
      learning_rate: a number or a schedule.
      dimension_numbers: see `scale_by_muon_split`, also for the arguments below.
      weight_decay: share of W that a step at learning rate 1 subtracts.
      momentum: decay of the momentum.
      nesterov: whether to look one step of momentum ahead.
      update_rms: root mean square of S.
      ns_coefficients: polynomials of Newton-Schulz.
      ns_steps: number of Newton-Schulz steps.
      ns_dtype: type of their products.
      moment_dtype: type in which the momentum is stored.

    Returns:
      The corresponding `optax.GradientTransformation`.

    References:
      GLM-5: from Vibe Coding to Agentic Engineering, 2026, arXiv 2602.15763, 2.1.
      Muon: An optimizer for hidden layers in neural networks, Jordan et al., 2024.
      Muon is Scalable for LLM Training, 2025, arXiv 2502.16982 (update_rms).
      The Polar Express, 2025, arXiv 2505.16932 (ns_coefficients).
    """
    scale = scale_by_muon_split(
        dimension_numbers,
        momentum=momentum,
        nesterov=nesterov,
        update_rms=update_rms,
        ns_coefficients=ns_coefficients,
        ns_steps=ns_steps,
        ns_dtype=ns_dtype,
        moment_dtype=moment_dtype,
    )
    decay = optax.add_decayed_weights(weight_decay)
    return optax.chain(scale, decay, optax.scale_by_learning_rate(learning_rate))


def scale_by_muon_split(
    dimension_numbers: optax.Params | None = None,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    update_rms: float = 0.2,
    ns_coefficients: str = "polar_express",
    ns_steps: int = 5,
    ns_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    moment_dtype: jax.typing.DTypeLike = jnp.float32,
    specs: optax.Params | None = None,
    slow_axes: Sequence[str] = (),
) -> optax.GradientTransformation:
    """Rescales updates by Muon Split, without weight decay and learning rate.

    Every matrix becomes S = update_rms sqrt(max(rows, columns)) NS(U). NS is
    Newton-Schulz; U = G + mu M, or M without Nesterov, after M <- mu M + G.

    Args:
      dimension_numbers: tree like the parameters, with a `DimensionNumbers` for each; a
        parameter of two dims is one matrix by default.
      momentum: mu.
      nesterov: whether to look one step of momentum ahead.
      update_rms: root mean square of S.
      ns_coefficients: polynomials of Newton-Schulz, "quintic" or "polar_express".
      ns_steps: number of Newton-Schulz steps.
      ns_dtype: type of their products.
      moment_dtype: type in which the momentum is stored.
      specs: tree with each parameter's PartitionSpec or None, by which one device of a
        mesh collects a matrix and computes; without it the compiler chooses how.
      slow_axes: mesh axes with a slow network: devices along them repeat the work
        instead of sending matrices.

    Returns:
      The corresponding `optax.GradientTransformation`. Its update raises a ValueError
      that names an array without matrices or with impossible dimension numbers.
    """
    steps = newton_schulz.coefficients(ns_coefficients, ns_steps)
    dtype = jnp.dtype(ns_dtype)
    function = functools.partial(newton_schulz.orthogonalize, steps=steps, dtype=dtype)

    @jax.named_scope("newton_schulz")
    def update(updates: optax.Updates, _: optax.Params | None) -> optax.Updates:
        leaves, tree = jax.tree.flatten(updates)
        layouts = _layouts(dimension_numbers, updates)
        is_alone = jax.sharding.get_abstract_mesh().size <= 1
        if specs is None or is_alone:
            most = _MOST_TOGETHER if is_alone else 0
            scaled = functools.partial(_orthogonalized, function, update_rms)
            return tree.unflatten(_each_matrix(scaled, leaves, layouts, most))
        mapped = _on_mesh(function, dtype, updates, layouts, specs, slow_axes)
        return tree.unflatten(_scaled(update_rms, layouts, mapped))

    moments = _momentum(momentum, nesterov, jnp.dtype(moment_dtype))
    return optax.chain(moments, optax.stateless(update))


def _momentum(
    mu: float, nesterov: bool, dtype: jnp.dtype
) -> optax.GradientTransformation:
    """Heavy-ball or Nesterov momentum in float32, rounded once to its storage type.

    optax.trace would round mu M as well, before G is added, if M is kept in bfloat16.
    """

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
        updates = add(updates, moment) if nesterov else moment
        return updates, optax.TraceState(optax.tree.cast(moment, dtype))

    return optax.GradientTransformation(init, update)


def _layouts(
    dimension_numbers: optax.Params | None, updates: optax.Updates
) -> list[Layout]:
    """Returns the layout of every array of a tree."""
    kind = numbers_lib.DimensionNumbers
    given = _at_paths(dimension_numbers, updates, kind)
    layouts = []
    for (path, numbers), x in zip(given.items(), jax.tree.leaves(updates), strict=True):
        if numbers is None and x.ndim == 2:
            numbers = kind(rows=0, cols=1)
        if numbers is None:
            raise ValueError(
                f"Muon needs the dimension numbers of {jax.tree_util.keystr(path)}, "
                f"an array of shape {x.shape}: say which of its dims are rows and "
                "columns, or give it to another optimizer with optax.partition."
            )
        try:
            layouts.append(numbers.layout(x.ndim))
        except ValueError as error:
            raise ValueError(f"{jax.tree_util.keystr(path)}: {error}") from error
    return layouts


def _at_paths(tree: optax.Params | None, updates: optax.Updates, kind: type) -> dict:
    """Returns the value of a tree at the path of every array of another, or None.

    By path, as optax replaces arrays that another transformation updates by nodes
    without leaves, while the tree that the user gave has all.
    """
    flat = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kind))
    values: dict[Any, Any] = dict(flat)
    return {path: values.get(path) for path, _ in jax.tree.leaves_with_path(updates)}


def _each_matrix(
    function: Function, arrays: Sequence[Array], layouts: Sequence[Layout], most: int
) -> list[Array]:
    """Applies a function of [..., rows, cols] to every matrix, without communication.

    Matrices of one shape, or of its transpose, share a call, whichever arrays they are
    of: each call is a loop of its own to trace and compile. Arrays of more than `most`
    elements keep calls of their own, as theirs need no copy.
    """
    split = [layout.split(x) for layout, x in zip(layouts, arrays, strict=True)]
    calls: dict[Hashable, list[tuple[int, int]]] = {}
    for i, parts in enumerate(split):
        for j, x in enumerate(parts):
            sides = tuple(sorted(x.shape[-2:]))
            key = (sides, x.dtype) if x.size <= most else (i, j)
            calls.setdefault(key, []).append((i, j))
    for places in calls.values():
        done = _together(function, [split[i][j] for i, j in places])
        for (i, j), x in zip(places, done, strict=True):
            split[i][j] = x
    return [
        layout.join(parts, x.shape)
        for layout, parts, x in zip(layouts, split, arrays, strict=True)
    ]


def _together(function: Function, parts: Sequence[Array]) -> list[Array]:
    """Applies a function to [..., rows, cols] of one shape, or of its transpose."""
    if len(parts) == 1:
        return [function(parts[0])]
    are_tall = [x.shape[-2] > x.shape[-1] for x in parts]
    stacks = list(map(numbers_lib.stacked, parts, are_tall))
    ends = np.cumsum([len(stack) for stack in stacks])
    done = jnp.split(function(jnp.concatenate(stacks)), ends[:-1])
    shapes = [x.shape for x in parts]
    return list(map(numbers_lib.unstacked, done, are_tall, shapes))


def _orthogonalized(orthogonalize: Function, rms: float, x: Array) -> Array:
    """Returns S for every matrix [..., rows, cols] of x = U."""
    return rms * max(x.shape[-2:]) ** 0.5 * orthogonalize(x)


def _on_mesh(
    function: Function,
    dtype: jnp.dtype,
    updates: optax.Updates,
    layouts: Sequence[Layout],
    specs: optax.Params,
    slow_axes: Sequence[str],
) -> list[Array]:
    """Orthogonalises every matrix on one device of the mesh, and sends it in dtype."""
    found = _at_paths(specs, updates, PartitionSpec).values()
    places = [PartitionSpec() if spec is None else spec for spec in found]
    cast = [update.astype(dtype) for update in jax.tree.leaves(updates)]
    narrow = lambda x: function(x).astype(dtype)
    return muon_mesh.map_matrices(narrow, cast, layouts, places, slow_axes)


def _scaled(
    rms: float, layouts: Sequence[Layout], updates: Sequence[Array]
) -> list[Array]:
    """Scales arrays of orthogonal matrices to their root mean square, in float32."""
    # The barrier keeps the reshape in front of it: what follows is elementwise and
    # joins the addition to the parameters, so that no float32 update exists.
    updates = [lax.optimization_barrier(u) for u in updates]
    return [
        jnp.asarray(_scale(rms, layout, u.shape) * u.astype(jnp.float32))
        for layout, u in zip(layouts, updates, strict=True)
    ]


def _scale(rms: float, layout: Layout, shape: tuple[int, ...]) -> float | np.ndarray:
    """Returns the factor that gives the update of an array its root mean square."""
    parts = layout.part_shapes(shape)
    scales = [rms * max(layout.sides(part)) ** 0.5 for part in parts]
    if layout.cut is None:
        return scales[0]
    dim, index = layout.cut
    vector = np.repeat(np.array(scales, np.float32), [index, shape[dim] - index])
    return vector.reshape([-1 if i == dim else 1 for i in range(len(shape))])
