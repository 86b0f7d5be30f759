"""The programs that can be compiled ahead of time: a training step, prefill, decode."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from glm5_jax import config as config_lib
from glm5_jax import sharding
from glm5_jax.inference import engine, steps
from glm5_jax.model import transformer
from glm5_jax.training import program as program_lib

NAMES = ("train", "prefill", "decode")
NUM_STOP_IDS = 4
# Dims of what serving keeps, as the letters of shapes.py: leaves are found by name.
CACHE_DIMS = {"kv": ("L", "B", "S", "C+R"), "k_index": ("L", "B", "S", "J")}


@dataclasses.dataclass(frozen=True)
class Job:
    """A jitted function and its arguments, as shapes with shardings."""

    name: str
    mesh: Any  # a Mesh; or an AbstractMesh, for shapes alone
    step: jax.stages.Wrapped
    arguments: tuple[Any, ...]
    names: tuple[str, ...]  # of the arguments
    num_tokens: int  # that a run reads or writes, over all devices


def make(
    config: config_lib.TrainConfig, mesh: Mesh | AbstractMesh, name: str = "train"
) -> Job:
    """Builds one of NAMES; for an abstract mesh its shapes, not to be compiled.

    prefill reads data.batch_size prompts of data.sequence_length tokens each; decode
    writes a token to as many sequences, of which the cache holds as much.
    """
    if name not in NAMES:
        raise config_lib.InputError(
            f"program must be one of {', '.join(NAMES)}, got {name!r}."
        )
    if name != "train":
        return _serving(config, mesh, name)
    program = program_lib.make_program(config, mesh)
    return Job(
        name=name,
        mesh=mesh,
        step=program.step,
        arguments=program.arguments,
        names=("params", "opt_state", "batch"),
        num_tokens=program.batch["tokens"].size,
    )


def _serving(
    config: config_lib.TrainConfig, mesh: Mesh | AbstractMesh, name: str
) -> Job:
    """The engine's two programs; every slot is in use."""
    model, data = config.model, config.data
    batch, length = data.batch_size, data.sequence_length
    params = jax.eval_shape(
        functools.partial(engine.cast_params, config=model),
        transformer.abstract_params(model),
    )
    places = sharding.shardings(transformer.param_dims(model), mesh)
    params = jax.tree.map(_placed, params, places)
    state, to_state = _shapes(lambda: steps.empty(model, batch, length, NUM_STOP_IDS))
    state = _by_batch(state, mesh)
    parts, to_parts = _shapes(lambda: _parts(batch, length))
    parts = _by_batch(parts, mesh)

    def decode(params: Any, state: Any) -> tuple[Any, Any]:
        out, drawn = steps.decode(params, model, to_state(state), num_steps=1)
        return _by_name(out), drawn.ids

    def prefill(params: Any, state: Any, parts: Any) -> tuple[Any, Any]:
        out, drawn = steps.prefill(
            params, model, to_state(state), to_parts(parts), is_fresh=True
        )
        return _by_name(out), drawn.ids

    is_decode = name == "decode"
    return Job(
        name=name,
        mesh=mesh,
        step=jax.jit(
            decode if is_decode else prefill,
            donate_argnums=1,
            out_shardings=(program_lib.places(state), None),
        ),
        arguments=(params, state) if is_decode else (params, state, parts),
        names=("params", "cache", "batch")[: 2 if is_decode else 3],
        num_tokens=batch if is_decode else batch * length,
    )


def _parts(batch: int, length: int) -> steps.Parts:
    """Whole prompts for all slots."""
    slots = jnp.arange(batch)
    return steps.Parts(
        tokens=jnp.zeros((batch, length), jnp.int32),
        num_tokens=jnp.full(batch, length),
        slots=slots,
        start=jnp.zeros_like(slots),
        is_last=jnp.ones(batch, bool),
        plan=steps.empty(config_lib.ModelConfig(), batch, 1, NUM_STOP_IDS).plan,
    )


def _shapes(make: Callable[[], Any]) -> tuple[dict[str, Any], Callable]:
    """Shapes of a tree's leaves by name, and what makes the tree of arrays by name."""
    seen: list[Any] = []

    def leaves() -> dict[str, Any]:
        tree = make()
        seen.append(jax.tree.structure(tree))
        seen.append(list(_by_name(tree)))
        return _by_name(tree)

    shapes = jax.eval_shape(leaves)
    structure, names = seen
    return shapes, lambda arrays: structure.unflatten([arrays[n] for n in names])


def _by_name(tree: Any) -> dict[str, Any]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(key.name for key in path): x for path, x in flat}


def _by_batch(shapes: dict[str, Any], mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """Places arrays whose first dim, or a cache's second, is the batch."""

    def place(name: str) -> NamedSharding:
        dims = CACHE_DIMS.get(name.rpartition(".")[2], ("B",))
        return NamedSharding(mesh, sharding.spec(dims))

    return {name: _placed(x, place(name)) for name, x in shapes.items()}


def _placed(x: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
