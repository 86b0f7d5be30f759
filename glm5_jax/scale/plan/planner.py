"""Ranks every mesh of some chips for a training step: prune by memory, then by time.

    meshes --memory--> the fastest knobs of each that fit --roofline--> order
    --compile--> the compiler's figures of the first few

The rooflines are of figures from shapes (glm5_jax/scale/estimate); only
compiling tells whether a program fits and what it sends.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.scale import markdown, roofline, slice_devices
from glm5_jax.scale.compiled import report
from glm5_jax.scale.estimate import hbm, memory, search, torus, traffic, work
from glm5_jax.scale.estimate import setting as setting_lib
from glm5_jax.scale.hlo import communication
from glm5_jax.training.reporting import accounting

# Share of the seconds that the slowest resource could hide and, we assume, does not.
# `Plan.waiting` is what no schedule of this program can hide.
EXPOSED = 0.1
NUM_TRIED = 8  # meshes of which `best` turns the knobs


@dataclasses.dataclass(frozen=True)
class Plan:
    """A candidate with its estimates."""

    topology: str
    config: config_lib.TrainConfig
    setting: setting_lib.Setting
    memory: memory.Memory
    compiled: dict[str, Any] | None = None  # of glm5_jax.aot, where it was verified

    @property
    def arguments_gib(self) -> float:
        """Parameters, moments and batch."""
        return sum(self.memory.arguments.values()) / slice_devices.GIB

    @property
    def needed_gib(self) -> float:
        """GiB with a margin for the error of the estimated temporaries."""
        margin = memory.TOLERANCE * self.memory.temporaries
        return (self.memory.total + margin) / slice_devices.GIB

    @property
    def fits(self) -> bool:
        """True if the plan fits a device's memory."""
        return self.needed_gib <= self.setting.device.hbm_limit_gib

    @functools.cached_property
    def traffic(self) -> communication.Traffic:
        """The collectives of a step."""
        return traffic.of(self.setting)

    @property
    def wire_gib(self) -> float:
        """Bytes that leave a device in a step."""
        return sum(c.wire_bytes for c in self.traffic.collectives) / slice_devices.GIB

    @functools.cached_property
    def roofline(self) -> roofline.Roofline:
        """The least time of a step."""
        return _timed(
            self,
            sum(work.flops(self.setting).values()),
            hbm.total(
                self.setting,
                self.arguments_gib * slice_devices.GIB,
                self.memory.critic,
            ),
            self.traffic,
        )

    @functools.cached_property
    def waiting(self) -> float:
        """Seconds of links for which products wait.

        Tokens of a chunk go to their experts, through them and back one after the
        other, and a chunk begins when the one before has ended (model/experts.py).
        """
        sent = traffic.of_tokens(self.setting)
        return max(_timed(self, 0.0, 0.0, sent).seconds.values())

    @property
    def seconds(self) -> float:
        """The least time of a step in which products wait for their tokens."""
        of = self.roofline.seconds
        return max(self.roofline.total, max(of["FLOPs"], of["HBM"]) + self.waiting)

    @property
    def score(self) -> float:
        """Seconds by which plans are ranked."""
        roof = self.roofline
        return self.seconds + EXPOSED * (sum(roof.seconds.values()) - roof.total)


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The best plans of a topology, or where none fits those that need least."""

    config_name: str
    topology: str
    plans: list[Plan]
    num_meshes: int
    num_fitting: int
    refusal: str  # empty where something fits

    def write(self, stem: str, page: str, command: str) -> None:
        """Writes STEM.md, which is `page`, and STEM.json."""
        content = {
            "command": command,
            "config": self.config_name,
            "topology": self.topology,
            "plans": [row(plan) for plan in self.plans],
        }
        markdown.write(stem, content, page)


def make(
    config: config_lib.TrainConfig,
    config_name: str,
    topology: str,
    *,
    num_slices: int = 1,
    num_shown: int = 10,
    num_verified: int = 0,
) -> Ranking:
    """Plans a training step of a config on a topology.

    Args:
      config: its mesh, expert_chunks and moment_dtype are varied, all else stays.
      config_name: what it is called.
      topology: of a slice, see glm5_jax/mesh.py.
      num_slices: number of slices of that shape.
      num_shown: plans to keep; more where more are verified.
      num_verified: plans to compile, some minutes each; needs libtpu.

    Raises:
      InputError: there is no such topology, no mesh divides the config, or plans for
        GPUs are to be compiled.
    """
    if num_verified:
        mesh_lib.require_compiler(topology)
    num_shown = max(num_shown, num_verified)
    found = search.candidates(config, topology, num_slices)
    plans = [_best(candidate, topology) for candidate in found]
    fitting = [plan for plan in plans if plan.fits]
    refusal = ""
    if fitting:
        fitting.sort(key=lambda plan: plan.score)
        best = fitting[:num_shown]
    else:
        best = sorted(plans, key=lambda plan: plan.needed_gib)[:num_shown]
        refusal = _refusal(config_name, best[0], topology)
        num_verified = 0
    verified = [_verified(p, config_name, topology) for p in best[:num_verified]]
    return Ranking(
        config_name=config_name,
        topology=topology,
        plans=verified + best[num_verified:],
        num_meshes=len(plans),
        num_fitting=len(fitting),
        refusal=refusal,
    )


def best(
    config: config_lib.TrainConfig,
    config_name: str,
    topology: str,
    num_slices: int = 1,
) -> tuple[Plan, str]:
    """Returns one good plan in a tenth of the time of `make`.

    It turns the knobs of NUM_TRIED meshes alone: the fastest among those that fit with
    the knobs that take least memory.

    Args:
      config: of `make`.
      config_name: of `make`.
      topology: of `make`.
      num_slices: of `make`.

    Returns:
      The plan, and why it does not fit; "" where it does.

    Raises:
      InputError: as of `make`.
    """
    found = [
        (candidate, estimate(search.least(candidate), topology))
        for candidate in search.candidates(config, topology, num_slices)
    ]
    fitting = [(c, least) for c, least in found if least.fits]
    found.sort(key=lambda pair: pair[1].needed_gib)
    fitting.sort(key=lambda pair: pair[1].score)
    tried = [_best(c, topology) for c, _ in (fitting or found)[:NUM_TRIED]]
    if fits := [plan for plan in tried if plan.fits]:
        return min(fits, key=lambda plan: plan.score), ""
    least = min(tried, key=lambda plan: plan.needed_gib)
    return least, _refusal(config_name, least, topology)


def estimate(config: config_lib.TrainConfig, topology: str) -> Plan:
    """A config's memory; time is computed when it is asked for."""
    num_devices = mesh_lib.num_devices(topology, config.mesh.slices)
    sizes = mesh_lib.axis_sizes(config.mesh, num_devices)
    setting = setting_lib.Setting(config, sizes, slice_devices.named(topology))
    return Plan(topology, config, setting, memory.of(setting))


def row(plan: Plan) -> dict[str, Any]:
    """Returns all figures of a plan, for one device and step."""
    roof, setting = plan.roofline, plan.setting
    tokens = setting.all_parts * setting.tokens / setting.over("tensor")
    model = accounting.flops_per_token(setting.model, setting.keys) * tokens
    sent = {axes: wire for (axes,), (_, wire) in plan.traffic.total("axes").items()}
    gib = lambda sizes: {k: round(v / slice_devices.GIB, 3) for k, v in sizes.items()}
    return {
        "mesh": dict(setting.sizes),
        "slices": plan.config.mesh.slices,
        "accumulation_steps": setting.parts,
        "expert_chunks": setting.model.expert_chunks,
        "moment_dtype": plan.config.optim.moment_dtype,
        "arguments_gib": gib(plan.memory.arguments),
        "worst_moment": plan.memory.worst,
        "temporaries_gib": gib(plan.memory.moments[plan.memory.worst]),
        "reference_gib": round(plan.memory.reference / slice_devices.GIB, 3),
        "critic_gib": round(plan.memory.critic / slice_devices.GIB, 3),
        "total_gib": round(plan.memory.total / slice_devices.GIB, 2),
        "fits": plan.fits,
        "wire_gib": gib(sent),
        "flops": work.flops(setting),
        "seconds": {name: float(f"{s:.4g}") for name, s in roof.seconds.items()},
        "binds": roof.binding,
        "waiting_seconds": float(f"{plan.waiting:.4g}"),
        "mfu_bound": round(model / (setting.device.flops * plan.seconds), 4),
        "compiled": plan.compiled,
    }


def _timed(
    plan: Plan, flops: float, hbm_bytes: float, sent: communication.Traffic
) -> roofline.Roofline:
    mesh, slices = torus.mesh(plan.config.mesh, plan.topology), plan.config.mesh.slices
    return roofline.roofline(mesh, flops, hbm_bytes, _merged(sent), slices)


def _merged(found: communication.Traffic) -> communication.Traffic:
    """Merges the collectives of a kind and axes: a route is found once."""
    sums: dict[tuple, float] = {}
    for c in found.collectives:
        sums[c.kind, c.axes] = sums.get((c.kind, c.axes), 0.0) + c.wire_bytes
    first = {(c.kind, c.axes): c for c in reversed(found.collectives)}
    merged = (
        dataclasses.replace(first[key], wire_bytes=wire) for key, wire in sums.items()
    )
    return communication.Traffic(tuple(merged), ())


def _best(config: config_lib.TrainConfig, topology: str) -> Plan:
    """The fastest knobs of a mesh that fit, or those that need least."""
    variants = list(search.variants(config))
    least = estimate(variants[-1], topology)
    if least.arguments_gib > least.setting.device.hbm_limit_gib:
        return least
    tried = [least]
    for _, alike in itertools.groupby(variants, lambda variant: variant.optim):
        own = [estimate(variant, topology) for variant in alike]
        if fitting := [plan for plan in own if plan.fits]:
            return min(fitting, key=lambda plan: plan.score)
        tried += own
    return min(tried, key=lambda plan: plan.needed_gib)


def _verified(plan: Plan, config_name: str, topology: str) -> Plan:
    """Adds the compiler's figures to a plan."""
    line = report.make(plan.config, config_name, topology).line
    names = ("hbm_args_gib", "hbm_temp_gib", "hbm_total_gib", "collective_gib", "fits")
    return dataclasses.replace(plan, compiled={name: line.get(name) for name in names})


def _refusal(config_name: str, least: Plan, topology: str) -> str:
    """Returns why nothing fits, and how many chips would do."""
    limit, needed = least.setting.device.hbm_limit_gib, least.needed_gib
    kept = least.arguments_gib + least.memory.beside / slice_devices.GIB
    times = 2 ** math.ceil(math.log2(needed / limit))
    mesh = " x ".join(f"{a} {n}" for a, n in least.setting.sizes.items() if n > 1)
    worst = max(_parts(least), key=lambda part: part[1])
    rows = least.config.stage_record.rows_of(least.config)[0]
    return (
        f"{config_name} fits no mesh of {topology}: a device has {limit} GiB, the "
        f"least is {needed:.1f} (mesh {mesh}: {kept:.1f} of arguments, most of the "
        f"rest {worst[0]}, {worst[1]:.1f}). Take about {times} times as many chips, "
        f"or fewer tokens a device ({rows}, data.sequence_length)."
    )


def _parts(plan: Plan) -> Iterator[tuple[str, float]]:
    for name, size in plan.memory.moments[plan.memory.worst].items():
        yield name, size / slice_devices.GIB
