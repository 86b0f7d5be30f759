"""The aot command's report on a program: a line of JSON, a page, or a refusal."""

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import jax

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.scale import inputs, markdown, programs, roofline, slice_devices
from glm5_jax.scale.compiled import compile as compile_lib
from glm5_jax.scale.compiled import refusal as refusal_lib
from glm5_jax.scale.estimate import memory
from glm5_jax.scale.estimate import setting as setting_lib
from glm5_jax.training.reporting import accounting
from glm5_jax.training.run import host_memory

NUM_SHOWN = 12  # largest arrays in a table
GIB = slice_devices.GIB


@dataclasses.dataclass(frozen=True)
class Report:
    """A report: `line` is printed, the rest is written to files."""

    line: dict[str, Any]
    tables: dict[str, Any]
    refusal: str  # empty if the program fits

    def write(self, stem: str) -> None:
        """Writes STEM.json and STEM.md."""
        page = markdown.page(self.line, self.tables, self.refusal)
        markdown.write(stem, {**self.line, **self.tables}, page)


def make(
    config: config_lib.TrainConfig,
    config_name: str,
    topology: str,
    *,
    program: str = "train",
    serving: programs.Serving = programs.AS_STORED,
    num_slices: int | None = None,
    depth: int | None = None,
    command: str = "",
) -> Report:
    """Compiles a program of a config for a topology.

    Args:
      config: a run's config.
      config_name: its name in the report.
      topology: name of a slice, see glm5_jax/mesh.py.
      program: one of `programs.NAMES`.
      serving: settings of the engine's programs.
      num_slices: replaces the config's mesh.slices.
      depth: replaces the model's number of layers.
      command: the command line, recorded so that it can be rerun.

    Raises:
      InputError: topology, mesh, program or depth is not possible.
    """
    config = programs.changed(config, num_slices, depth)
    slices = config.mesh.slices
    mesh = mesh_lib.make_mesh(config.mesh, mesh_lib.topology(topology, slices))
    programs.require_whole_rows(config, mesh.shape)
    job = programs.make(config, mesh, program, serving)
    made = compile_lib.compile(job, slices)
    line = {"command": command} if command else {}
    line |= _setting(config, config_name, topology, job)
    if program not in programs.OF_A_RUN:
        line |= dataclasses.asdict(serving)
    tables: dict[str, Any] = {
        "arguments_gib": _in_gib(inputs.by_kind(made.arrays)),
        "largest_arguments": _rows(made.arrays, "device_bytes"),
        "largest_replicated": _rows(inputs.replicated(made.arrays), "device_bytes"),
        "flops_by_kind": made.flops.by_kind,
        "device": _peaks(slice_devices.of_mesh(mesh)),
        "versions": _versions(),
    }
    refusal = ""
    if isinstance(made, compile_lib.Overflow):
        line |= _overflow_line(made)
        tables["largest_allocations"] = _rows(made.allocations, "num_bytes")
    else:
        more, shown = _compiled(config, job, made)
        line, tables = line | more, tables | shown
    if not line["fits"]:
        refusal = refusal_lib.text(config, line, tables)
    line |= {
        "flops": made.flops.total,
        "trace_s": round(made.trace_seconds, 1),
        "compile_s": round(made.compile_seconds, 1),
        "host_peak_gib": host_memory.peak_gib(),
    }
    return Report(line, tables, refusal)


def beside(
    config: config_lib.TrainConfig,
    sizes: Mapping[str, int],
    device: slice_devices.Device,
) -> dict[str, float]:
    """Returns the bytes of a device that a run keeps beside its training step.

    They are those of the weights of rl.reference (training/reference.py) and of a
    critic with its moments (training/critic.py), as far as there are such.

    Args:
      config: of a run.
      sizes: of the axes of its mesh.
      device: of the mesh.
    """
    setting = setting_lib.Setting(config, sizes, device)
    found = {"reference": memory.reference(setting), "critic": memory.critic(setting)}
    return {name: size for name, size in found.items() if size}


def _beside(config: config_lib.TrainConfig, job: programs.Job) -> dict[str, float]:
    """Returns the bytes of a device that a run keeps beside a program."""
    if job.name != "train":
        return {}
    device = slice_devices.of_mesh(job.mesh)
    return beside(config, dict(job.mesh.shape), device)


def _setting(
    config: config_lib.TrainConfig, config_name: str, topology: str, job: programs.Job
) -> dict[str, Any]:
    """Returns the config, program and topology as the report names them."""
    kept = _beside(config, job)
    return {
        "config": config_name,
        "program": job.name,
        "stage": config.stage,
        "topology": topology,
        "slices": config.mesh.slices,
        "devices": job.mesh.size,
        "mesh": dict(job.mesh.shape),
        "expert_chunks": config.model.expert_chunks,
        "expert_room": job.spare,
        "accumulation_steps": config.optim.accumulation_steps,
        "num_hidden_layers": config.model.num_hidden_layers,
        "sequence_length": config.data.sequence_length,
        "tokens": job.num_tokens,
        "hbm_limit_gib": slice_devices.of_mesh(job.mesh).hbm_limit_gib,
    } | {f"hbm_{name}_gib": _gib(size) for name, size in kept.items()}


def _compiled(
    config: config_lib.TrainConfig, job: programs.Job, made: compile_lib.Compiled
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns figures and tables of a program that compiled."""
    device, sizes, slices = (
        slice_devices.of_mesh(job.mesh),
        made.sizes,
        config.mesh.slices,
    )
    roof = roofline.roofline(
        job.mesh, made.flops.total, made.hbm_bytes, made.traffic, slices, made.beside
    )
    totals = made.traffic.total
    by_axes = {axes: wire for (axes,), (_, wire) in totals("axes").items()}
    line: dict[str, Any] = {
        "hbm_args_gib": _gib(sizes.arguments),
        "hbm_outputs_gib": _gib(sizes.outputs),
        "hbm_temp_gib": _gib(sizes.temporaries),
        "hbm_code_gib": _gib(sizes.code),
        "hbm_total_gib": _gib(sizes.total),
        "host_gib": _gib(sizes.host),
        "fits": sizes.total + sum(_beside(config, job).values())
        <= device.hbm_limit_gib * GIB,
        "collective_gib": _gib(sum(by_axes.values())),
        "collective_gib_by_axes": _in_gib(by_axes),
        "hbm_traffic_gib": _gib(made.hbm_bytes),
        "optimal_seconds": float(f"{roof.total:.4g}"),
        "bound": roof.binding,
        "exposed_seconds": float(f"{roof.exposed:.4g}"),
    }
    if job.name == "train":
        model = accounting.flops_per_token(config.model, config.data.sequence_length)
        active = accounting.count_parameters(config.model)["active"]
        a_device = job.num_tokens / job.mesh.size
        mfu = model * a_device / (device.flops * roof.total)
        line |= {
            "model_flops": model * a_device,
            "six_n_tokens": 6 * active * a_device,
            "mfu_bound": round(mfu, 4),
            "mfu_scheduled": round(mfu * roof.total / roof.scheduled, 4),
        }
    tables = {
        "roofline_seconds": roof.seconds,
        "link_seconds_by_axes": {" x ".join(k): v for k, v in roof.by_axes.items()},
        "collectives": _traffic_rows(totals("kind", "axes")),
        "collectives_by_scope": _traffic_rows(
            totals("phase", "scope", "kind", "axes", "shape")
        ),
        "largest_temporaries": [
            dataclasses.asdict(t) for t in made.temporaries[:NUM_SHOWN]
        ],
        "live_temporaries_gib": _gib(made.peak.num_bytes),
        "uncounted_loops": list(made.traffic.uncounted_loops),
        "uncounted_loops_of_flops": made.flops.num_unknown_loops,
        "is_printed": made.is_printed,
    }
    if not made.is_printed:
        line |= dict.fromkeys(_OF_THE_TEXT)
    return line, tables


# Fields that stay unknown if libtpu could not print the program.
_OF_THE_TEXT = (
    *("collective_gib", "collective_gib_by_axes", "hbm_traffic_gib"),
    *("optimal_seconds", "bound", "mfu_bound", "exposed_seconds", "mfu_scheduled"),
)


def _overflow_line(made: compile_lib.Overflow) -> dict[str, Any]:
    """Returns the sizes that the compiler's refusal names, if any."""
    size = _gib(made.needed) if made.needed else None
    return {
        "hbm_args_gib": _gib(sum(a.device_bytes for a in made.arrays)),
        "hbm_temp_gib": size if made.is_temporaries else None,
        "hbm_total_gib": None if made.is_temporaries else size,
        "fits": False,
        "error": made.message.splitlines()[0],
    }


def _traffic_rows(totals: dict[tuple[str, ...], tuple[int, float]]) -> list[list[Any]]:
    return [[*key, count, _gib(wire)] for key, (count, wire) in totals.items()]


def _rows(items: list[Any], size: str) -> list[dict[str, Any]]:
    """Returns the largest of these dataclasses as dicts."""
    ordered = sorted(items, key=lambda item: -getattr(item, size))
    return [dataclasses.asdict(item) for item in ordered[:NUM_SHOWN]]


def _peaks(device: slice_devices.Device) -> dict[str, Any]:
    return {
        "name": device.chip.name,
        "bf16_tflops": device.chip.reachable_tflops,
        "hbm_tbps": round(device.chip.reachable_tbps, 3),
        "link_gbps": device.chip.reachable_link_gbps,
        "dcn_gbps": device.chip.network_gbps,
    }


def _versions() -> dict[str, str]:
    return {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}


def _in_gib(sums: Mapping[str, float | int]) -> dict[str, float]:
    return {name: _gib(size) for name, size in sums.items()}


def _gib(size: float | int) -> float:
    return float(f"{size / GIB:.4g}")
