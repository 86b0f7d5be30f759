"""Every mesh of some chips that divides a config, with the knobs that matter."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.config import stages

POLICIES = ("full", "kernels", "experts")  # of rematerialisation that are known
CHUNKS = (1, 2, 4, 8)  # model.expert_chunks
PARTS = (1, 2, 4, 8)  # optim.accumulation_steps
LANES = 128  # of a matrix unit: products of narrower shares leave it idle
NUM_NEAR = 4  # batch sizes that a message names


def candidates(
    config: config_lib.TrainConfig, topology: str, num_slices: int = 1
) -> list[config_lib.TrainConfig]:
    """Configs that differ from one in their mesh; `variants` turns the knobs of each.

    Raises:
      InputError: there is no such topology, the stage trains the indexers alone,
        layers keep more than their inputs, MTP has several modules, or nothing divides.
    """
    num_devices = mesh_lib.num_devices(topology, num_slices)
    if not is_known(config.stage_record):
        known = [stage.name for stage in stages.STAGES if is_known(stage)]
        raise config_lib.InputError(
            f"stage must be one of {', '.join(known)}, got {config.stage!r}: the plan "
            "knows steps that train the model, not its indexers alone; compile others "
            "with python -m glm5_jax.aot."
        )
    if config.model.remat_policy not in POLICIES:
        raise config_lib.InputError(
            f"model.remat_policy must be {', '.join(POLICIES[:-1])} or {POLICIES[-1]}, "
            f"got {config.model.remat_policy!r}: the plan does not know what else a "
            "step keeps; set --config.model.remat_policy=full."
        )
    if config.model.num_nextn_predict_layers > 1:
        raise config_lib.InputError(
            "model.num_nextn_predict_layers must be 0 or 1, got "
            f"{config.model.num_nextn_predict_layers}: the plan knows the MTP module "
            "that all steps share; compile others with python -m glm5_jax.aot."
        )
    found, broken = [], {}
    rows = config.num_rows // config.updates_per_step
    for sizes in meshes(num_devices, num_slices, rows):
        if is_too_narrow(config.model, sizes["tensor"]):
            continue
        try:
            found.append(_with_mesh(config, sizes, num_slices))
        except config_lib.InputError as error:
            for line in str(error).splitlines():
                rule = line.partition(" of mesh, got")[0]
                broken[rule] = broken.get(rule, 0) + 1
    if not found:
        raise config_lib.InputError(_refusal(config, num_devices, num_slices, broken))
    return found


def is_known(stage: stages.Stage) -> bool:
    """Tells whether the plan knows a stage's steps.

    A policy's differ from those of the whole model in the frozen indexers, a thousandth
    of the weights, which are counted as if they learned.
    """
    return stage.trains_everything or stage.update == "policy"


def meshes(
    num_devices: int, num_slices: int, batch_size: int
) -> Iterator[dict[str, int]]:
    """Sizes of the axes that make up the devices and share whole rows."""
    for parts in _factorizations(num_devices, len(mesh_lib.AXES)):
        sizes = dict(zip(mesh_lib.AXES, parts, strict=True))
        rows = sizes["data"] * sizes["fsdp"] * sizes["expert"]
        if sizes["data"] % num_slices == 0 and batch_size % rows == 0:
            yield sizes


def is_too_narrow(model: config_lib.ModelConfig, tensor: int) -> bool:
    """Tells whether shares of an expert are narrower than a matrix unit is wide."""
    width = model.moe_intermediate_size
    return tensor > 1 and width // tensor < min(LANES, width)


def variants(config: config_lib.TrainConfig) -> Iterator[config_lib.TrainConfig]:
    """Yields the settings of a mesh; those that round the moments come last.

    Parts of a batch fetch all weights more often: the fewest that fit are best. Of
    chunks neither the fewest nor the most need be: they read the experts' weights more
    often, and buffers of rows less.
    """
    return (_turned(config, *knobs) for knobs in _knobs(config))


def least(config: config_lib.TrainConfig) -> config_lib.TrainConfig:
    """Returns the last of `variants`, of most parts and chunks and rounded moments."""
    *_, last = _knobs(config)
    return _turned(config, *last)


def _knobs(
    config: config_lib.TrainConfig,
) -> Iterator[tuple[config_lib.OptimConfig, int, int]]:
    """Yields the moments, the parts and the chunks of each variant."""
    mesh, data, optim = config.mesh, config.data, config.optim
    rounded = dataclasses.replace(optim, moment_dtype="bfloat16")
    for kept, parts, chunks in itertools.product(
        dict.fromkeys((optim, rounded)), PARTS, CHUNKS
    ):
        rows = mesh.data * mesh.fsdp * mesh.expert * parts * config.updates_per_step
        if config.num_rows % rows or data.sequence_length % (mesh.context * chunks):
            continue
        yield kept, parts, chunks


def _turned(
    config: config_lib.TrainConfig,
    optim: config_lib.OptimConfig,
    parts: int,
    chunks: int,
) -> config_lib.TrainConfig:
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, expert_chunks=chunks),
        optim=dataclasses.replace(optim, accumulation_steps=parts),
    )


def _with_mesh(
    config: config_lib.TrainConfig, sizes: dict[str, int], num_slices: int
) -> config_lib.TrainConfig:
    """The config on another mesh, one expert chunk; it checks itself.

    The slots of an engine must be divisible by the devices: here they are as many.
    """
    slots = math.prod(sizes.values())
    return dataclasses.replace(
        config,
        rl=dataclasses.replace(config.rl, slots=slots),
        mesh=config_lib.MeshConfig(slices=num_slices, **sizes),
        model=dataclasses.replace(config.model, expert_chunks=1),
        optim=dataclasses.replace(config.optim, accumulation_steps=1),
    )


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields every way to write a number as an ordered product."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorizations(number // first, count - 1):
                yield (first, *rest)


def _refusal(
    config: config_lib.TrainConfig,
    num_devices: int,
    num_slices: int,
    broken: dict[str, int],
) -> str:
    """Says why no mesh divides the config, and names batch sizes that would do."""
    rows, length = config.num_rows, config.data.sequence_length
    fields = config.stage_record.rows_of(config)
    head = (
        f"no mesh of {num_devices} devices in {num_slices} slices divides "
        f"{' * '.join(fields)}={rows} rows of data.sequence_length={length} tokens: "
        f"rows go "
        f"over data * fsdp * expert, tokens over context, heads and widths over tensor"
    )
    if broken:
        rules = sorted(broken, key=lambda rule: -broken[rule])[:NUM_NEAR]
        head += f" ({'; '.join(rules)})"
    if not config.stage_record.has_batch_size:
        return f"{head}. Set {fields[0]} to a multiple of a large part of the devices."
    if near := _near_batch_sizes(config, num_devices, num_slices):
        return f"{head}. Set data.batch_size to {' or '.join(map(str, near))}."
    return f"{head}. Take other chips, or another data.sequence_length."


def _near_batch_sizes(
    config: config_lib.TrainConfig, num_devices: int, num_slices: int
) -> list[int]:
    """Finds those nearest to the config's for which some mesh divides everything."""
    wanted = config.data.batch_size
    parts = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    tried = {n * k for n in parts for k in (1, max(wanted // n, 1), wanted // n + 1)}
    found = []
    for rows in sorted(tried, key=lambda n: (abs(math.log(n / wanted)), n)):
        data = dataclasses.replace(config.data, batch_size=rows)
        for sizes in meshes(num_devices, num_slices, rows):
            if is_too_narrow(config.model, sizes["tensor"]):
                continue
            try:
                changed = dataclasses.replace(config, data=data)
                _with_mesh(changed, sizes, num_slices)
            except config_lib.InputError:
                continue
            found.append(rows)
            break
        if len(found) == NUM_NEAR:
            break
    return sorted(found)
