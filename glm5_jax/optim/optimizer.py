"""The optimizer of a run: Muon Split, AdamW, and a guard against NaNs."""

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
from glm5_jax.config import batches as batches_lib
from glm5_jax.optim import dimension_numbers, matrix_groups, muon, schedule

Path = tuple[str, ...]
Label = Literal["muon", "adamw", "adamw_no_decay", "frozen"]


class State(NamedTuple):
    """The state of an Optimizer."""

    inner: optax.OptState
    num_updates: Int[Array, ""]  # updates that were applied
    skipped_in_a_row: Int[Array, ""]
    skipped_total: Int[Array, ""]

    @property
    def num_calls(self) -> Int[Array, ""]:
        """Returns the number of updates, skipped ones included."""
        return self.num_updates + self.skipped_total


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The update rule of a run, and the settings of `update_if_finite`."""

    transform: optax.GradientTransformation  # updates for a learning rate of 1
    learning_rate: optax.Schedule
    labels: optax.Params  # tree of `Label`s
    dims: optax.Params  # tree of logical dim names
    clip_norm: float  # largest norm of the gradient; 0: no clipping
    is_offloaded: bool  # whether moments are kept in the host's memory

    def init(self, params: optax.Params) -> State:
        """Returns the state before the first update."""
        counts = jnp.zeros(3, jnp.int32)
        return State(self.transform.init(_in_float32(params)), *counts)

    def forgetting(self, state: State, params: optax.Params) -> State:
        """Returns the state with the moments of `init`, and its counts of updates."""
        inner = self.transform.init(_in_float32(params))
        return state._replace(inner=_moved(self, inner, jax.memory.Space.Host))

    def state_dims(self, state: State, params: optax.Params) -> State:
        """Returns the logical dims of every array of a state, for `sharding.shardings`.

        A moment has the dims of its parameter: its path ends with the parameter's.
        Counts have no dims, and neither has the vector that holds the moments of all
        norms and biases: both are replicated.

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
        """Returns `places` with the moments on the host, if they are offloaded."""
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
    batches: batches_lib.Batches | None = None,
) -> Optimizer:
    """Builds the optimizer for a tree of parameters.

    The weight decay W <- (1 - lr wd) W applies to Muon and AdamW, as in xtuner, but not
    to norms and biases, as in Megatron (in which GLM was trained).

    Args:
        config: settings of the optimizer.
        model: sizes at which fused weights are cut.
        dims: tree of logical dim names, like the parameters.
        num_steps: updates of the run, skipped ones included, for the schedule.
        is_trained: returns by path whether a parameter is trained; default: all are. A
            frozen parameter has no moments and no weight decay, and its gradient is not
            part of the norm: it does not move.
        slow_axes: see `muon.scale_by_muon_split`.
        batches: see `schedule.learning_rate`.
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
        # Many tiny arrays: joined to one vector, they need one kernel instead of many.
        "adamw_no_decay": optax.flatten(_adamw(config, 0.0)),
        "frozen": optax.set_to_zero(),
    }
    used = set(jax.tree.leaves(labels))  # optax.flatten needs a leaf
    branches = {label: branches[label] for label in branches if label in used}
    transform = optax.partition(branches, labels)
    rate = schedule.learning_rate(config, num_steps, batches)
    return Optimizer(
        transform, rate, labels, dims, config.clip_norm, config.offload_moments
    )


def label_parameters(
    config: config_lib.OptimConfig,
    dims: optax.Params,
    is_trained: Callable[[Path], bool] | None = None,
) -> optax.Params:
    """Returns a tree of `Label`s: the branch that updates each parameter."""

    def label(key_path: tuple[jax.tree_util.DictKey, ...], names: Path) -> Label:
        path = tuple(key.key for key in key_path)
        if is_trained is not None and not is_trained(path):
            return "frozen"
        return _label(config, path[-1], names)

    def is_names(node: object) -> bool:
        return isinstance(node, tuple)

    return jax.tree_util.tree_map_with_path(label, dims, is_leaf=is_names)


def _label(config: config_lib.OptimConfig, name: str, dims: Path) -> Label:
    """Returns the branch that updates a parameter which the stage trains.

    Attention variants other than GLM-5's have convolutions ("taps") and gates of one
    number per head (D, N), which AdamW updates too.
    """
    if name == "e_score_correction_bias":  # follows the load, see moe.py
        return "frozen"
    if len([dim for dim in dims if dim != "L"]) < 2:  # norms and biases
        return "adamw_no_decay"
    if config.name == "adamw" or dims[-1] == "taps" or dims[-2:] == ("D", "N"):
        return "adamw"
    on_adamw = {
        "embed_tokens": True,
        "lm_head": not config.muon_lm_head,
        "gate": config.router_gate == "adamw",  # the router
    }
    return "adamw" if on_adamw.get(name, False) else "muon"


def muon_leaves(
    config: config_lib.OptimConfig,
    model: config_lib.ModelConfig,
    dims: optax.Params,
    shapes: optax.Params,
) -> list[matrix_groups.Leaf]:
    """Returns shape, layout and sharding of the parameters that Muon updates.

    Args:
        config: decides which parameters these are.
        model: sizes at which fused weights are cut.
        dims: tree of logical dim names, like the parameters.
        shapes: the parameters, or anything with their shapes.
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
    if config.muon_split_rope and "Q" in names:  # not those of a gated delta net
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
    """Returns new parameters, state and metrics; skips the update on a NaN or infinity.

    Reinforcement learning skips more updates, by is_allowed=False (training/policy.py).
    The run aborts after health.max_skipped_in_a_row skipped updates whose gradient was
    not finite. Arithmetic is float32.
    """
    norm = _trained_norm(optimizer, _in_float32(grads))  # of what the stage trains
    is_finite = jnp.isfinite(norm)
    is_applied = is_finite & is_allowed
    # num_calls = num_updates + skipped_total: the schedule ends with the run. In the
    # cond, XLA would compute the schedule again in every parameter's kernel.
    rate = jnp.asarray(optimizer.learning_rate(state.num_calls))

    def apply() -> tuple[optax.Params, optax.OptState]:
        # Here, because operands of the cond are kept: all gradients in float32.
        clipped = _clipped(_in_float32(grads), norm, optimizer.clip_norm)
        updates, inner = _transformed(optimizer, clipped, state.inner, params)
        # Muon's are -(S + weight_decay W), AdamW's alike; those of frozen ones are 0.
        updates = jax.tree.map(lambda u: rate * u, updates)
        return optax.apply_updates(params, updates), inner

    # A cond works in place on donated buffers; jnp.where would keep old and new moments
    # alive together (docs/faults.md).
    new_params, inner = lax.cond(is_applied, apply, lambda: (params, state.inner))
    # A skipped update with a finite gradient does not change the count.
    in_a_row = jnp.where(is_applied, 0, state.skipped_in_a_row + ~is_finite)
    total = state.skipped_total + ~is_applied
    metrics = {
        "train/grad_norm": norm,  # before clipping
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


def _transformed(
    optimizer: Optimizer,
    grads: optax.Updates,
    inner: optax.OptState,
    params: optax.Params,
) -> tuple[optax.Updates, optax.OptState]:
    """Returns what the learning rate multiplies before it is added, and new moments.

    It is -(S + weight_decay W) for a matrix of Muon (muon.py), likewise for AdamW, and
    0 for a frozen parameter.
    """
    inner = _moved(optimizer, inner, jax.memory.Space.Device)
    updates, inner = optimizer.transform.update(grads, inner, _in_float32(params))
    return updates, _moved(optimizer, inner, jax.memory.Space.Host)


def _moved(
    optimizer: Optimizer, state: optax.OptState, space: jax.memory.Space
) -> optax.OptState:
    """Moves offloaded moments to the device's or the host's memory."""
    if not optimizer.is_offloaded:
        return state
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, state)


def _trained_norm(optimizer: Optimizer, grads: optax.Updates) -> Float[Array, ""]:
    """Returns the Euclidean norm of all gradients but those of frozen parameters.

    On a mesh every device sums over its shards, replicated ones as a fraction, so that
    one all-reduce of one number suffices instead of one for each parameter.
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


def _clipped(
    grads: optax.Updates, norm: Float[Array, ""], limit: float
) -> optax.Updates:
    """Scales gradients of this norm down to the limit; 0 is no limit."""
    if not limit:
        return grads
    scale = limit / jnp.maximum(norm, limit)
    return jax.tree.map(lambda g: g * scale, grads)


def _in_float32(tree: optax.Params) -> optax.Params:
    return optax.tree.cast(tree, jnp.float32)
