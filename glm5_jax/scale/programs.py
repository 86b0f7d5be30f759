"""The programs that can be compiled ahead of time: a training run's, the engine's."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import arrays
from glm5_jax.config import checks
from glm5_jax.inference import engine, limits, placement, rounds, steps, weights
from glm5_jax.model import expert_rounds, transformer
from glm5_jax.quantization import schemes
from glm5_jax.rl import publisher
from glm5_jax.training import program as program_lib

OF_A_RUN = ("train", "init", "restore", "save", "push")
NAMES = (*OF_A_RUN, "prefill", "extend", "decode")
NUM_STOP_IDS = 4


@dataclasses.dataclass(frozen=True)
class Serving:
    """The engine's settings beside the config.

    Attributes:
      quantize: scheme to which the weights are rounded; STORED: they stay as they are.
      num_drafts: tokens that multi-token prediction drafts for a sequence in a round.
    """

    quantize: str = config_lib.STORED
    num_drafts: int = 0

    def require_used(self, name: str) -> None:
        """Checks that the program `name` has these settings."""
        is_default = self == Serving()
        checks.require(
            (
                name not in OF_A_RUN or is_default,
                f"--quantize and --num_drafts are of the engine's programs "
                f"(prefill, extend, decode), not of {name!r}; leave them out.",
            )
        )


AS_STORED = Serving()


@dataclasses.dataclass(frozen=True)
class Job:
    """A jitted function and its arguments, as shapes with shardings."""

    name: str
    mesh: Any  # a Mesh; or an AbstractMesh, for shapes alone
    step: jax.stages.Wrapped
    arguments: tuple[Any, ...]
    names: tuple[str, ...]  # of the arguments
    num_tokens: int  # that a run reads or writes, over all devices
    spare: float | int = 1  # times an even load that experts' buffers have room for


def make(
    config: config_lib.TrainConfig,
    mesh: Mesh | AbstractMesh,
    name: str = "train",
    serving: Serving = AS_STORED,
) -> Job:
    """Builds one of NAMES; for an abstract mesh its shapes, not to be compiled.

    The engine's programs are for a cache of data.batch_size sequences, of
    data.sequence_length tokens each. prefill reads the first tokens of these prompts,
    a chunk of each; extend a later chunk of each; decode draws a token for each, or
    with drafts runs one round: it drafts tokens and verifies them in one pass.
    """
    if name not in NAMES:
        raise config_lib.InputError(
            f"program must be one of {', '.join(NAMES)}, got {name!r}."
        )
    serving.require_used(name)
    if name not in OF_A_RUN:
        return _serving(config, mesh, name, serving)
    program = program_lib.make_program(config, mesh)
    if name != "train":
        return _of_state(program, name, config)
    return Job(
        name=name,
        mesh=mesh,
        step=program.step,
        arguments=program.arguments,
        names=("params", "opt_state", "batch"),
        num_tokens=program.batch["tokens"].size,
        spare=_spare(config.model, mesh),
    )


def changed(
    config: config_lib.TrainConfig, num_slices: int | None, depth: int | None
) -> config_lib.TrainConfig:
    """The config with other slices and another depth."""
    if num_slices is not None:
        mesh = dataclasses.replace(config.mesh, slices=num_slices)
        config = dataclasses.replace(config, mesh=mesh)
    if depth is not None:
        model = config.model
        pattern = model.index_topk_pattern
        model = dataclasses.replace(
            model,
            num_hidden_layers=depth,
            first_k_dense_replace=min(model.first_k_dense_replace, max(depth, 0)),
            index_topk_pattern=pattern[:depth] if pattern else None,
            layer_types=model.layer_types[:depth],
        )
        config = dataclasses.replace(config, model=model)
    return config


def require_whole_rows(
    config: config_lib.TrainConfig, sizes: Mapping[str, int]
) -> None:
    """A batch must be divisible by the devices that share it."""
    num_shares = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    checks.require(*config.batch_rules(num_shares))


def _of_state(
    program: program_lib.Program, name: str, config: config_lib.TrainConfig
) -> Job:
    """Returns a program that a run applies to its state outside of its steps.

    init draws the state. restore allocates it for the hosts to fill, and computes
    nothing. save tests whether it is finite and copies it to the hosts' memory. push
    rounds the parameters as stage async_rl does for the servers (rl.rollout_weights),
    where they are: what a host then writes is what its devices hold.
    """
    state, names = (program.params, program.opt_state), ("params", "opt_state")
    places = program_lib.places(state)
    if name == "init":
        key = jax.eval_shape(jax.random.key, 0)
        key = _placed(key, NamedSharding(program.mesh, PartitionSpec()))
        return Job(name, program.mesh, program.init, (key,), ("key",), num_tokens=0)
    if name == "restore":
        empty = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
        step = jax.jit(empty, out_shardings=places)
        return Job(name, program.mesh, step, (), (), num_tokens=0)
    if name == "push":
        model, weights = config.model, config.rl.rollout_weights
        push = jax.jit(lambda x: publisher.rollout_params(x, model, weights))
        return Job(name, program.mesh, push, state[:1], names[:1], num_tokens=0)
    on_hosts = jax.tree.map(lambda place: place.with_memory_kind("pinned_host"), places)
    save = lambda *state: (arrays.total(state), state)
    step = jax.jit(save, out_shardings=(None, on_hosts))
    return Job(name, program.mesh, step, state, names, num_tokens=0)


def _serving(
    config: config_lib.TrainConfig,
    mesh: Mesh | AbstractMesh,
    name: str,
    serving: Serving,
) -> Job:
    """Builds one of the engine's programs; every slot is in use."""
    model, data, num_drafts = config.model, config.data, serving.num_drafts
    batch, length = data.batch_size, data.sequence_length
    mesh = placement.engine_mesh(mesh)
    placement.require_whole("data.batch_size", batch, mesh)
    has_drafts = limits.Limits(num_drafts=num_drafts).drafter(model).is_on
    params = _engine_params(model, mesh, serving.quantize)
    with placement.using(mesh):  # of a TPU, whose cache has wider rows
        state, to_state = placement.shapes(
            lambda: steps.empty(
                model, batch, length, NUM_STOP_IDS, with_drafts=has_drafts
            ),
            mesh,
        )
    chunk = min(length, engine.CHUNK)
    num_slots = batch // placement.num_shares(mesh)
    parts, to_parts = placement.shapes(lambda: _parts(batch, chunk, num_slots), mesh)

    def decode(params: Any, state: Any) -> tuple[Any, Any]:
        now = to_state(state)
        if has_drafts:
            settings = rounds.Settings(1, num_drafts, by_rejection=False)
            out, drawn = rounds.decode(params, model, now, settings=settings)
        else:
            out, drawn = steps.decode(
                params, model, now, num_steps=1, with_experts=False
            )
        return placement.named(out), drawn.ids

    def prefill(params: Any, state: Any, parts: Any) -> tuple[Any, Any]:
        now, new, is_fresh = to_state(state), to_parts(parts), name == "prefill"
        out, drawn = steps.prefill(
            params, model, now, new, is_fresh=is_fresh, with_experts=False
        )
        return placement.named(out), drawn.ids

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
        num_tokens=batch if is_decode else batch * chunk,
        spare=_spare(model, mesh),
    )


def _engine_params(
    model: config_lib.ModelConfig, mesh: Mesh | AbstractMesh, scheme: str
) -> Any:
    """Returns shapes of the engine's parameters, rounded to a scheme."""
    params = transformer.abstract_params(model)
    if scheme != config_lib.STORED:
        dims = transformer.param_dims(model)
        params = schemes.abstract(params, dims, schemes.SCHEMES[scheme])
    cast = functools.partial(weights.cast_params, config=model)
    params = jax.eval_shape(cast, params)
    return jax.tree.map(_placed, params, placement.params(params, model, mesh))


def _spare(model: config_lib.ModelConfig, mesh: Mesh | AbstractMesh) -> float | int:
    return expert_rounds.spare(model.expert_transport, mesh.shape["expert"])


def _parts(batch: int, length: int, num_slots: int) -> steps.Parts:
    """A part of a prompt for every slot, of which a device has `num_slots`."""
    rows = jnp.arange(batch)
    return steps.Parts(
        tokens=jnp.zeros((batch, length), jnp.int32),
        num_tokens=jnp.full(batch, length),
        slots=rows % num_slots,
        start=jnp.zeros_like(rows),
        is_last=jnp.ones(batch, bool),
        plan=steps.empty(config_lib.ModelConfig(), batch, 1, NUM_STOP_IDS).plan,
    )


def _placed(x: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
