"""Compiles a program and collects its sizes and counts."""

import dataclasses
import re
import time
from typing import Any

import jax

from glm5_jax.scale import inputs, programs, slice_devices
from glm5_jax.scale.compiled import flops
from glm5_jax.scale.hlo import communication, hbm, liveness, schedule
from glm5_jax.scale.hlo import parser as hlo


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes that a device needs according to the compiler, of HBM but for `host`."""

    arguments: int
    outputs: int  # that do not reuse a donated argument
    temporaries: int
    code: int
    host: int  # of the host's memory, for what is offloaded

    @property
    def total(self) -> int:
        """The sum of all bytes on the device."""
        return self.arguments + self.outputs + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The figures of a program that fits."""

    sizes: Sizes
    arrays: list[inputs.Array]
    peak: liveness.Peak  # an estimate of what `temporaries` hold
    temporaries: list[liveness.Temporary]
    traffic: communication.Traffic
    beside: dict[str, schedule.Work]  # the schedule's work beside collectives, by name
    hbm_bytes: float  # read and written in a run, at an even load of the experts
    flops: flops.Flops
    trace_seconds: float
    compile_seconds: float
    is_printed: bool  # whether libtpu could print it: else no traffic is known


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A buffer of a program that does not fit, one of the largest."""

    num_bytes: float
    shape: str
    scope: str


@dataclasses.dataclass(frozen=True)
class Overflow:
    """The figures of a program that does not fit."""

    needed: float  # bytes, of temporaries alone or of all; 0 where it is not said
    is_temporaries: bool
    allocations: list[Allocation]
    arrays: list[inputs.Array]
    flops: flops.Flops
    trace_seconds: float
    compile_seconds: float
    message: str


def compile(job: programs.Job, num_slices: int = 1) -> Compiled | Overflow:
    """Traces and compiles for the devices of the job's mesh."""
    began = time.perf_counter()
    with jax.set_mesh(job.mesh):
        traced = job.step.trace(*job.arguments)
        work = flops.of_traced(traced, job.mesh.size)
        work = work.at_even_load(job.spare)
        lowered = traced.lower()
        arrays = inputs.arguments(job.arguments, job.names)
        traced_at = time.perf_counter()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            seconds = time.perf_counter() - traced_at
            return overflow(str(error), arrays, work, (traced_at - began, seconds))
    seconds = time.perf_counter() - traced_at
    try:
        text = compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:  # jax 0.10 with libtpu 0.0.51
        text = ""
    module = hlo.parse(text)
    return Compiled(
        sizes=_sizes(compiled),
        arrays=arrays,
        peak=liveness.peak(module),
        temporaries=liveness.temporaries(module),
        traffic=communication.find(module, dict(job.mesh.shape), num_slices),
        beside=schedule.beside(module, job.spare),
        hbm_bytes=hbm.traffic(module, job.spare),
        flops=work,
        trace_seconds=traced_at - began,
        compile_seconds=seconds,
        is_printed=bool(text),
    )


def overflow(
    message: str,
    arrays: list[inputs.Array],
    work: flops.Flops,
    seconds: tuple[float, float],
) -> Overflow:
    """Reads libtpu's message, which may or may not list allocations."""
    needed = re.search(r"Used ([\d.]+\w) of [\d.]+\w hbm", message)
    temporaries = re.search(r"temporaries \(([\d.]+\w)\) exceeds", message)
    found = needed or temporaries
    allocations = [
        Allocation(
            _bytes(size),
            shape,
            communication.scope(name.group(1))
            if (name := _OP_NAME.search(text))
            else "",
        )
        for size, text, shape in re.findall(
            r"Size: ([\d.]+\w)(.*?)Shape: ([^\n]+)", message, re.DOTALL
        )
    ]
    return Overflow(
        needed=_bytes(found.group(1)) if found else 0.0,
        is_temporaries=needed is None and temporaries is not None,
        allocations=allocations,
        arrays=arrays,
        flops=work,
        trace_seconds=seconds[0],
        compile_seconds=seconds[1],
        message=message,
    )


_OP_NAME = re.compile(r'op_name="([^"]*)"')


def _sizes(compiled: Any) -> Sizes:
    stats = compiled.memory_analysis()
    return Sizes(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        host=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes,
    )


def _bytes(text: str) -> float:
    """Reads "51.88G", as libtpu writes GiB."""
    units = {"K": 2**10, "M": 2**20, "G": slice_devices.GIB, "T": 2**40}
    number, unit = float(text[:-1]), text[-1]
    return number * units[unit] if unit in units else float(text.rstrip("B"))
