"""The optimizer of a run: Muon Split on matrices, AdamW on the rest, a finite guard."""

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from glm5_jax import config as config_lib
from glm5_jax import sharding
from glm5_jax.optim import dimension_numbers, matrix_groups, muon, schedule

Path = tuple[str, ...]
Label = Literal["muon", "adamw", "adamw_no_decay", "frozen"]


class State(NamedTuple):
    """State of an Optimizer."""

    inner: optax.OptState
    num_updates: Int[Array, ""]  # applied ones
    skipped_in_a_row: Int[Array, ""]
    skipped_total: Int[Array, ""]

    @property
    def num_calls(self) -> Int[Array, ""]:
        """Updates that were asked for: a skipped one takes its turn in the schedule."""
        return self.num_updates + self.skipped_total


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """What `update_if_finite` needs: the update rule and what surrounds it."""

    transform: optax.GradientTransformation  # updates for a learning rate of 1
    learning_rate: optax.Schedule
    labels: optax.Params  # tree of `Label`s
    dims: optax.Params  # tree of logical dim names
    clip_norm: float  # 0: off
    is_offloaded: bool  # moments wait in the host's memory

    def init(self, params: optax.Params) -> State:
        """State before the first step."""
        counts = jnp.zeros(3, jnp.int32)
        return State(self.transform.init(_in_float32(params)), *counts)

    def state_dims(self, state: State, params: optax.Params) -> State:
        """Returns the logical dims of every array of a state, from which its sharding.

        A moment has the dims of its parameter: its path ends with the parameter's.
        Counts have none, nor has the vector that holds the moments of all norms and
        biases: they are whole on every device.

        Args:
            state: from `init`; shapes suffice.
            params: the parameters; shapes suffice.

        Raises:
            ValueError: a matrix of the state is at no parameter's path, or has
                another shape than the parameter.
        """
        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        by_path = {
            path: (param.shape, dims)
            for (path, param), dims in zip(
                leaves, tree.flatten_up_to(self.dims), strict=True
            )
        }

        def dims_of(path: tuple, leaf: Any) -> tuple[str, ...]:
            ends = (path[start:] for start in range(len(path)))
            found = next((by_path[end] for end in ends if end in by_path), None)
            if found is not None and found[0] == leaf.shape:
                return found[1]
            if leaf.ndim < 2:
                return ()
            raise ValueError(
                f"The optimizer's state{jax.tree_util.keystr(path)} of shape "
                f"{leaf.shape} mirrors no parameter, so that its sharding is unknown: "
                "store it under its parameter's path, or extend Optimizer.state_dims."
            )

        return jax.tree_util.tree_map_with_path(dims_of, state)

    def kept(self, state: State, places: optax.OptState) -> optax.OptState:
        """Returns the places of a state between updates, sharded like `places`."""
        if not self.is_offloaded:
            return places
        return jax.tree.map(
            lambda x, place: place.with_memory_kind("pinned_host") if x.ndim else place,
            state,
            places,
        )


def make_optimizer(
    config: config_lib.OptimConfig,
    model: config_lib.ModelConfig,
    dims: optax.Params,
    num_steps: int,
    is_trained: Callable[[Path], bool] | None = None,
    slow_axes: tuple[str, ...] = (),
) -> Optimizer:
    """Builds the optimizer for a tree of parameters.

    The decay W <- (1 - lr wd) W is on both branches, as in xtuner, but not on norms
    and biases, as in Megatron (in which GLM was trained).

    Args:
        config: every knob.
        model: sizes at which fused weights are cut.
        dims: tree of logical dim names, as the parameters.
        num_steps: updates of the run, skipped ones too, for the schedule.
        is_trained: says by path whether a parameter is trained; default all. A frozen
            one has no optimizer state, and its gradient does not enter the norm.
        slow_axes: see `muon.scale_by_muon_split`.
    """
    labels = label_parameters(config, dims, is_trained)
    numbers = jax.tree.map(
        lambda label, names: (
            dimension_numbers_of(names, config, model) if label == "muon" else None
        ),
        labels,
        dims,
    )
    branches: dict[Hashable, optax.GradientTransformation] = {
        "muon": _muon(config, numbers, sharding.specs(dims), slow_axes),
        "adamw": _adamw(config, config.weight_decay),
        # Many and tiny: as one vector they take a kernel, not several for each.
        "adamw_no_decay": optax.flatten(_adamw(config, 0.0)),
        "frozen": optax.set_to_zero(),
    }
    used = set(jax.tree.leaves(labels))  # optax.flatten needs a leaf
    branches = {label: branches[label] for label in branches if label in used}
    transform = optax.partition(branches, labels)
    rate = schedule.learning_rate(config, num_steps)
    return Optimizer(
        transform, rate, labels, dims, config.clip_norm, config.offload_moments
    )


def label_parameters(
    config: config_lib.OptimConfig,
    dims: optax.Params,
    is_trained: Callable[[Path], bool] | None = None,
) -> optax.Params:
    """Returns which branch updates each parameter: a tree of `Label`s.

    Vectors (per layer) are norms and biases; the embedding is AdamW's, and head and
    router where the config says so; everything else is a matrix for Muon, so that
    nothing falls to AdamW unnamed.
    """
    on_adamw = {
        "embed_tokens": True,
        "lm_head": not config.muon_lm_head,
        "gate": config.router_gate == "adamw",
    }

    def label(key_path: tuple[jax.tree_util.DictKey, ...], names: Path) -> Label:
        path = tuple(key.key for key in key_path)
        is_frozen = is_trained is not None and not is_trained(path)
        if is_frozen or path[-1] == "e_score_correction_bias":  # moved by the load
            return "frozen"
        if len([name for name in names if name != "L"]) < 2:
            return "adamw_no_decay"
        if config.name == "adamw":
            return "adamw"
        return "adamw" if on_adamw.get(path[-1], False) else "muon"

    def is_names(node: object) -> bool:
        return isinstance(node, tuple)

    return jax.tree_util.tree_map_with_path(label, dims, is_leaf=is_names)


def muon_leaves(
    config: config_lib.OptimConfig,
    model: config_lib.ModelConfig,
    dims: optax.Params,
    shapes: optax.Params,
) -> list[matrix_groups.Leaf]:
    """Returns shape, layout and sharding of the parameters that Muon updates.

    Args:
        config: says which these are.
        model: sizes at which fused weights are cut.
        dims: tree of logical dim names, as the parameters.
        shapes: likewise, of anything that has a shape.
    """
    labels = label_parameters(config, dims)
    flat, tree = jax.tree.flatten(labels)
    leaves = zip(flat, *map(tree.flatten_up_to, (dims, shapes)), strict=True)
    return [
        (
            x.shape,
            dimension_numbers_of(names, config, model).layout(len(names)),
            sharding.spec(names),
        )
        for label, names, x in leaves
        if label == "muon"
    ]


def dimension_numbers_of(
    names: Path, config: config_lib.OptimConfig, model: config_lib.ModelConfig
) -> dimension_numbers.DimensionNumbers:
    """Returns which matrices a parameter with these dim names holds for Muon."""
    cuts = {}
    if config.muon_split_rope:
        cuts["H"] = model.qk_nope_head_dim
    if config.muon_split_kv_a:
        cuts["C+R"] = model.kv_lora_rank
    return dimension_numbers.from_names(names, config.muon_split, cuts)


def update_if_finite(
    optimizer: Optimizer,
    grads: optax.Updates,
    state: State,
    params: optax.Params,
    is_allowed: Array | bool = True,
) -> tuple[optax.Params, State, dict[str, Array]]:
    """Does one step; leaves parameters and state as they are on a NaN or infinity.

    So it does where the caller does not allow the update (`is_allowed`), which counts
    as skipped, but not in a row: nothing is wrong with the gradient.

    The caller counts: health.max_skipped_in_a_row ends the run.
    The schedule counts skipped updates too, so that its end is the end of the run.
    Arithmetic is float32 whatever the types of parameters and gradients.

    The choice is a lax.cond around update and addition: both branches then work in
    place on donated buffers. Choosing elementwise with jnp.where keeps the old and the
    new moments alive together: on 9 M parameters AdamW takes 10 ms bare, 14 ms so, and
    54 ms with jnp.where. In place also means that the jitted step takes (params,
    state) in the order in which it returns them: jax pairs donated with returned
    buffers by shape and order (52 ms when crossed).

    Returns:
        Parameters, state, and metrics: train/grad_norm (before clipping),
        optim/learning_rate, optim/skipped_in_a_row, optim/skipped_total.
    """
    grads = _in_float32(grads)
    norm = _trained_norm(optimizer, grads)
    is_finite = jnp.isfinite(norm)
    is_applied = is_finite & is_allowed
    # Outside of the cond, or every parameter's kernel computes the schedule anew.
    rate = jnp.asarray(optimizer.learning_rate(state.num_calls))

    def apply() -> tuple[optax.Params, optax.OptState]:
        clipped = grads
        if limit := optimizer.clip_norm:
            scale = limit / jnp.maximum(norm, limit)
            clipped = jax.tree.map(lambda g: g * scale, grads)
        update = optimizer.transform.update
        inner = _moved(optimizer, state.inner, jax.memory.Space.Device)
        updates, inner = update(clipped, inner, _in_float32(params))
        inner = _moved(optimizer, inner, jax.memory.Space.Host)
        updates = jax.tree.map(lambda u: rate * u, updates)
        return optax.apply_updates(params, updates), inner

    new_params, inner = lax.cond(is_applied, apply, lambda: (params, state.inner))
    in_a_row = jnp.where(is_applied, 0, state.skipped_in_a_row + ~is_finite)
    total = state.skipped_total + ~is_applied
    metrics: dict[str, Array] = {
        "train/grad_norm": norm,
        "optim/learning_rate": rate,
        "optim/skipped_in_a_row": in_a_row,
        "optim/skipped_total": total,
    }
    state = State(inner, state.num_updates + is_applied, in_a_row, total)
    return new_params, state, metrics


def _muon(
    config: config_lib.OptimConfig,
    numbers: optax.Params,
    specs: optax.Params,
    slow_axes: tuple[str, ...],
) -> optax.GradientTransformation:
    scale = muon.scale_by_muon_split(
        numbers,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        update_rms=config.muon_update_rms,
        ns_coefficients=config.ns_coefficients,
        ns_steps=config.ns_steps,
        ns_dtype=config.ns_dtype,
        moment_dtype=config.moment_dtype,
        specs=specs,
        slow_axes=slow_axes,
    )
    decay = optax.add_decayed_weights(config.weight_decay)
    return optax.chain(scale, decay, optax.scale_by_learning_rate(1.0))


def _adamw(
    config: config_lib.OptimConfig, weight_decay: float
) -> optax.GradientTransformation:
    return optax.adamw(
        config.adam_learning_rate_scale,
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=weight_decay,
        mu_dtype=config.moment_dtype,
    )


def _moved(
    optimizer: Optimizer, state: optax.OptState, space: jax.memory.Space
) -> optax.OptState:
    """Moments in the device's or in the host's memory, if they are offloaded."""
    if not optimizer.is_offloaded:
        return state
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, state)


def _trained_norm(optimizer: Optimizer, grads: optax.Updates) -> Float[Array, ""]:
    """Euclidean norm of all gradients but those of frozen parameters.

    On a mesh every device adds up its shards, a replica's as a fraction, so that one
    all-reduce of one number remains instead of one for each parameter.
    """
    mesh = jax.sharding.get_abstract_mesh()
    flat, tree = jax.tree.flatten(grads)
    others = map(tree.flatten_up_to, (optimizer.labels, optimizer.dims))
    trained = [
        (grad, sharding.spec(names))
        for grad, label, names in zip(flat, *others, strict=True)
        if label != "frozen"
    ]
    grads, specs = zip(*trained, strict=True)
    if mesh.size <= 1:
        return jnp.asarray(optax.tree.norm(grads))

    def norm(*shards: Array) -> Array:
        total = jnp.zeros(())
        for shard, spec in zip(shards, specs, strict=True):
            names = [name for name in jax.tree.leaves(tuple(spec)) if name]
            num_shards = math.prod(mesh.shape[name] for name in names)
            total += jnp.sum(jnp.square(shard)) * (num_shards / mesh.size)
        return jnp.sqrt(lax.psum(total, mesh.axis_names))

    return jax.shard_map(
        norm, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )(*grads)


def _in_float32(tree: optax.Params) -> optax.Params:
    return optax.tree.cast(tree, jnp.float32)
