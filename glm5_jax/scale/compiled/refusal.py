"""Why a program does not fit: what is large in it, and which settings take memory.

Where libtpu lists no buffers, the arrays that a training step makes are named by their
shapes, and its temporaries by the planner's model, which also says what a setting would
save. Of other programs, and of steps that it does not know, only names are given.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.scale import slice_devices
from glm5_jax.scale.compiled import arrays
from glm5_jax.scale.estimate import memory, search, setting

NUM_NAMED = 4  # arrays of a kind
WORTH = 0.02  # of the whole: what saves less is not named

Change = tuple[str, config_lib.TrainConfig]


def text(
    config: config_lib.TrainConfig, line: dict[str, Any], tables: dict[str, Any]
) -> str:
    """Returns why it does not fit, the largest arrays, and what to change.

    Args:
      config: of a run.
      line: of the report.
      tables: of the report.
    """
    names = ("args", "temp", "total")
    sizes = [f"{name} {line[k]}" for name in names if line.get(k := f"hbm_{name}_gib")]
    parts = [
        f"{line['config']} does not fit {line['topology']}: a device has "
        f"{line['hbm_limit_gib']} GiB, it needs {', '.join(sizes)}{beside(line)}",
        f"Largest arguments: {'; '.join(_arguments(tables['largest_arguments']))}",
    ]
    is_training, is_known = line["program"] == "train", False
    made = tables.get("largest_allocations") or tables.get("largest_temporaries")
    if made:
        listed = [f"{_gib(a['num_bytes'])} {a['shape']}" for a in made[:NUM_NAMED]]
        parts.append(f"Largest temporaries: {'; '.join(listed)}")
    if is_training:
        place = line["topology"], line["mesh"]
        is_known = is_modelled(config)
        if not made:
            parts += _by_shapes(config, *place, is_known)
        knobs = settings(config, *place)
    else:
        knobs = _of_serving(line["mesh"])
    by_model = ", savings by the planner's model" if is_known else ""
    knobs.append("more chips")
    return ". ".join([*parts, f"Change{by_model}: {'; '.join(knobs)}."])


def beside(line: dict[str, Any]) -> str:
    """Returns what a run keeps on the devices beside the program."""
    kept = {
        "the weights of other policies": line.get("hbm_reference_gib"),
        "the critic": line.get("hbm_critic_gib"),
    }
    named = [f"{size} for {what}" for what, size in kept.items() if size]
    return f", and beside it {' and '.join(named)}" if named else ""


def is_modelled(config: config_lib.TrainConfig) -> bool:
    """Returns whether the planner's model of memory knows a training step."""
    is_known = search.is_known(config.stage_record)
    return is_known and config.model.remat_policy in (*search.POLICIES, "offload")


def settings(
    config: config_lib.TrainConfig, topology: str, mesh: Mapping[str, int]
) -> list[str]:
    """Settings of a training step that take memory, those that save most first."""
    changes = list(_changes(config, mesh))
    if not is_modelled(config):
        return [name for name, _ in changes]
    now = _estimate(config, topology).total
    left = {name: _estimate(other, topology).total for name, other in changes}
    helps = sorted(
        (n for n in left if left[n] < (1 - WORTH) * now), key=left.__getitem__
    )
    return [f"{name} (saves {_gib(now - left[name])})" for name in helps]


def _arguments(rows: list[dict[str, Any]]) -> Iterator[str]:
    for array in rows[:NUM_NAMED]:
        copies = array["num_copies"]
        same = f" (the same on {copies} devices)" if copies > 1 else ""
        yield f"{_gib(array['device_bytes'])} {array['name']}{same}"


def _by_shapes(
    config: config_lib.TrainConfig,
    topology: str,
    mesh: Mapping[str, int],
    is_known: bool,
) -> Iterator[str]:
    """Sentences on what a training step makes, without the compiler."""
    found = arrays.of_program(
        config, slice_devices.abstract_mesh(config.mesh, topology)
    )
    made = [a for a in found if a.kind.startswith(arrays.MADE_BY_THE_STEP)]
    made.sort(key=lambda array: -array.device_bytes)
    names = [f"{_gib(a.device_bytes)} {a.name}" for a in made[:NUM_NAMED]]
    yield f"Largest of what the step is known to make: {'; '.join(names)}"
    if is_known:
        needs = _estimate(config, topology)
        parts = sorted(needs.moments[needs.worst].items(), key=lambda part: -part[1])
        names = [f"{_gib(size)} {name}" for name, size in parts[:NUM_NAMED]]
        whole = _gib(needs.temporaries)
        yield f"Of temporaries the planner's model knows {whole}: {'; '.join(names)}"


def _estimate(config: config_lib.TrainConfig, topology: str) -> memory.Memory:
    num_devices = mesh_lib.num_devices(topology, config.mesh.slices)
    sizes = mesh_lib.axis_sizes(config.mesh, num_devices)
    return memory.of(setting.Setting(config, sizes, slice_devices.named(topology)))


def _changes(
    config: config_lib.TrainConfig, mesh: Mapping[str, int]
) -> Iterator[Change]:
    """Configs that need less memory on the same devices, by what is changed."""
    whole = dataclasses.replace(config.mesh, **mesh)  # where data was -1
    config = dataclasses.replace(config, mesh=whole)
    model, optim = config.model, config.optim
    if model.remat_policy not in ("full", "offload"):
        name = f"model.remat_policy=full (is {model.remat_policy})"
        yield from _changed(config, name, "model", remat_policy="full")
    if mesh["expert"] > 1:
        for chunks in (2 * model.expert_chunks, 4 * model.expert_chunks):
            name = f"model.expert_chunks={chunks}"
            yield from _changed(config, name, "model", expert_chunks=chunks)
    yield from _meshes(config, mesh)
    parts = 2 * optim.accumulation_steps
    name = f"optim.accumulation_steps={parts}"
    yield from _changed(config, name, "optim", accumulation_steps=parts)
    yield from _smaller(config, mesh)
    bfloat16 = "bfloat16"
    if model.remat_policy == "full":
        name = "model.remat_policy=offload"
        yield from _changed(config, name, "model", remat_policy="offload")
    if not optim.offload_moments:
        name = "optim.offload_moments=True"
        yield from _changed(config, name, "optim", offload_moments=True)
    if not optim.offload_moments and optim.moment_dtype != bfloat16:
        name = "optim.moment_dtype=bfloat16"
        yield from _changed(config, name, "optim", moment_dtype=bfloat16)
    if config.reference is not None:
        name = "rl.kl_weight=0: no second copy of the weights"
        yield from _changed(config, name, "rl", kl_weight=0.0)
    if config.stage_record.has_critic(config):
        name = "rl.critic=False: no second model"
        yield from _changed(config, name, "rl", critic=False)
    if model.param_dtype != bfloat16:
        name = "model.param_dtype=bfloat16"
        yield from _changed(config, name, "model", param_dtype=bfloat16)


def _meshes(
    config: config_lib.TrainConfig, mesh: Mapping[str, int]
) -> Iterator[Change]:
    """State is cut over fsdp, expert, tensor and context, and whole over data."""
    slices = config.mesh.slices
    if mesh["data"] == slices:
        return
    sizes = {**mesh, "data": slices, "fsdp": mesh["fsdp"] * mesh["data"] // slices}
    name = f"mesh.fsdp={sizes['fsdp']} with mesh.data={slices}"
    cut = ("fsdp", "expert", "tensor", "context")
    if all(mesh[axis] == 1 for axis in cut):
        name += ": state is whole on every device"
    yield from _changed(config, name, "mesh", **sizes)


def _smaller(
    config: config_lib.TrainConfig, mesh: Mapping[str, int]
) -> Iterator[Change]:
    """Yields half the rows: fewer a device, or each on twice as many devices."""
    path = config.stage_record.rows_of(config)[0]
    section, field = path.split(".")
    rows = getattr(getattr(config, section), field) // 2
    name = f"{path}={rows}"
    found = [*_changed(config, name, section, **{field: rows})]
    if not found and mesh["fsdp"] % 2 == 0:
        sizes = {**mesh, "fsdp": mesh["fsdp"] // 2, "context": 2 * mesh["context"]}
        wider = dataclasses.replace(config.mesh, **sizes)
        name += f" with mesh.context={sizes['context']} and mesh.fsdp={sizes['fsdp']}"
        changed = dataclasses.replace(getattr(config, section), **{field: rows})
        found = [*_replaced(config, name, mesh=wider, **{section: changed})]
    yield from found


def _changed(
    config: config_lib.TrainConfig, name: str, section: str, **fields: Any
) -> Iterator[Change]:
    """The config with other fields of a section, where it can be."""
    changed = dataclasses.replace(getattr(config, section), **fields)
    yield from _replaced(config, name, **{section: changed})


def _replaced(
    config: config_lib.TrainConfig, name: str, **sections: Any
) -> Iterator[Change]:
    try:
        yield name, dataclasses.replace(config, **sections)
    except config_lib.InputError:
        return


def _of_serving(mesh: Mapping[str, int]) -> list[str]:
    """Settings of the engine's programs."""
    return [
        "a smaller data.batch_size or data.sequence_length: the cache",
        f"mesh.expert above {mesh['expert']}: experts, and slots of a device",
        f"mesh.tensor above {mesh['tensor']}: heads and widths",
        "a higher model.expert_chunks, where prompts are read",
    ]


def _gib(size: float | int) -> str:
    return f"{size / slice_devices.GIB:.3g} GiB"
