"""A ranking as a table, for a terminal or as a page."""

from collections.abc import Iterator

from glm5_jax import mesh as mesh_lib
from glm5_jax.scale import markdown, slice_devices
from glm5_jax.scale.estimate import memory
from glm5_jax.scale.plan import planner

HEAD = (
    "rank",
    "mesh",
    "parts",
    "chunks",
    "moments",
    "arguments",
    "standing",
    "working",
    "GiB",
    "sent GiB",
)  # then the seconds of each resource
END = ("waits s", "binds", "MFU", "compiled GiB")
STANDING = (
    "casts",
    "gradients",
    "sums of parts",
    "carries",
    "kept results",
)  # temporaries that live in a whole pass


def text(ranking: planner.Ranking) -> str:
    """Writes it for a terminal."""
    rows = list(_rows(ranking))
    lines = [_head(ranking), *rows]
    return "\n\n".join([_title(ranking), markdown.aligned(lines), *_notes(ranking)])


def page(ranking: planner.Ranking, command: str) -> str:
    """Writes it for a reader, with the command that made it."""
    parts = [
        f"# {_title(ranking)}",
        f"```\n{command}\n```",
        markdown.table(_head(ranking), _rows(ranking)),
        *_notes(ranking),
    ]
    return "\n\n".join(parts) + "\n"


def _head(ranking: planner.Ranking) -> tuple[str, ...]:
    seconds = (f"{name} s" for name in _device(ranking).resources)
    return (*HEAD, *seconds, *END)


def _device(ranking: planner.Ranking) -> slice_devices.Device:
    return ranking.plans[0].setting.device


def _title(ranking: planner.Ranking) -> str:
    first = ranking.plans[0].config
    slices = f" x {first.mesh.slices} slices" if first.mesh.slices > 1 else ""
    devices = mesh_lib.num_devices(ranking.topology, first.mesh.slices)
    data = first.data
    return (
        f"{ranking.config_name} on {ranking.topology}{slices}, {devices} devices, "
        f"{data.batch_size} rows of {data.sequence_length} tokens: "
        f"{ranking.num_meshes} meshes, of which {ranking.num_fitting} fit"
    )


def _rows(ranking: planner.Ranking) -> Iterator[tuple[str, ...]]:
    for rank, plan in enumerate(ranking.plans, start=1):
        figures = planner.row(plan)
        kept = sum(figures["arguments_gib"].values())
        kept += figures["reference_gib"] + figures["critic_gib"]
        made = figures["temporaries_gib"]
        standing = sum(made.get(name, 0.0) for name in STANDING)
        seconds = figures["seconds"]
        yield (
            str(rank) if figures["fits"] else "none",
            " x ".join(f"{a} {n}" for a, n in figures["mesh"].items() if n > 1),
            str(figures["accumulation_steps"]),
            str(figures["expert_chunks"]),
            figures["moment_dtype"],
            f"{kept:.1f}",
            f"{standing:.1f}",
            f"{sum(made.values()) - standing:.1f}",
            f"{figures['total_gib']:.1f}",
            f"{sum(figures['wire_gib'].values()):.0f}",
            *(f"{seconds[name]:.2f}" for name in plan.setting.device.resources),
            f"{figures['waiting_seconds']:.2f}",
            figures["binds"],
            f"{100 * figures['mfu_bound']:.0f}%",
            _compiled(plan),
        )


def _compiled(plan: planner.Plan) -> str:
    """Returns what the compiler said: memory, and what is sent."""
    line = plan.compiled
    if line is None:
        return ""
    total = line["hbm_total_gib"] or line["hbm_temp_gib"]
    if not line["fits"]:
        return f"{total}: does not fit"
    return f"{total}, sends {line['collective_gib']}"


def _notes(ranking: planner.Ranking) -> tuple[str, ...]:
    is_gpu = _device(ranking).is_gpu
    of_gpus = (
        "Temporaries are those that libtpu makes of the same step: no program for GPUs "
        "was compared. NVLink: links of a node. network: the adapters of the GPUs, "
        "over which everything goes that leaves a node.",
    )
    return (
        "GiB, bytes sent and seconds of one device and step, from shapes; nothing was "
        "run. Arguments: parameters, moments and batch, and the weights of "
        "rl.reference where the loss compares with them, and a critic's. Standing: "
        + ", ".join(STANDING)
        + ". Working: what one layer needs. Parts: optim.accumulation_steps; chunks: "
        "model.expert_chunks. Seconds are rooflines, experts' load even: "
        "the slowest binds. Waits: of the links' seconds those in which tokens go to "
        "their experts and back, which products wait for; MFU counts them. Ranked by "
        "the slowest, what waits and "
        f"{100 * planner.EXPOSED:.0f}% of the others. A plan fits if it does with "
        f"{100 * memory.TOLERANCE:.0f}% more temporaries "
        f"(limits: {_limits(is_gpu)}).",
        *(of_gpus if is_gpu else ()),
    )


def _limits(is_gpu: bool) -> str:
    devices = (d for d in slice_devices.DEVICES.values() if d.is_gpu == is_gpu)
    return ", ".join(f"{d.chip.name} {d.hbm_limit_gib} GiB" for d in devices)
