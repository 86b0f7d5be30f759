"""One row of a benchmark: a time and what it is worth, or what a compiler said."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import aot, block_sizes, cases, chips
from pallas_kernels.bench import operations
from pallas_kernels.cases import Case

SAMPLES = 15
SAMPLE_SECONDS = 0.02  # calls are queued until they take so long; dispatch is hidden
CHECKED_QUERIES = 128  # of the last queries of the full length, against plain XLA
DEFINITION_BYTES = 2**30  # of all scores of a layer at once
SLOW_SECONDS = 0.5  # a call that takes longer is not repeated
TOLERANCE = 2e-2  # of errors: gradients in bfloat16, keys that rounding may swap
MODES = ("fwd", "bwd", "det")


@dataclasses.dataclass(frozen=True)
class Job:
    """What to run."""

    op: str
    length: int
    mode: str  # "fwd", "bwd" (forward and backward) or "det" (the same, reproducible)
    implementation: str | None = None
    pattern: str = "random"
    lists: Any = None
    small: bool = False
    queries: int | None = None  # a chip's share under context parallelism
    heads: int | None = None  # or under tensor parallelism
    row_multiple: int = 1  # of the numbers of a latent row
    blocks: str = ""  # another entry of the chip's row of `block_sizes`

    @property
    def case(self) -> Case:
        """Sizes."""
        case = operations.at(self.op, self.length, self.small)
        return dataclasses.replace(
            case,
            queries=min(self.queries or case.queries, case.queries),
            heads=self.heads or case.heads,
            row_padding=-(case.latent + case.rope) % self.row_multiple,
        )

    def on(self, chip: chips.Chip | None) -> "Job":
        """The same as a model has it there: a cache's rows fill the tiles of a TPU."""
        is_tpu = chip is not None and chip.platform == "tpu"
        is_padded = is_tpu and self.op == "decode_sparse_mla"
        return dataclasses.replace(self, row_multiple=128) if is_padded else self

    def function(self, implementation: str | None, case: Case) -> Callable:
        """The op, or its gradient, as a function of its inputs."""
        op = operations.OPERATIONS[self.op]
        call = op.call(case, implementation, self.mode == "det")
        if self.mode == "fwd":
            return call

        def scalar(*args: Any) -> jax.Array:
            leaves = jax.tree.leaves(call(*args))
            return sum((jnp.sum(x, dtype=jnp.float32) for x in leaves), jnp.zeros(()))

        # With the value, or XLA drops the forward pass where nothing needs it.
        return jax.value_and_grad(scalar, argnums=op.differentiable)


def runnable(op: str, mode: str) -> bool:
    """Whether the op has such a mode."""
    has_gradient = bool(operations.OPERATIONS[op].differentiable)
    return mode == "fwd" or (has_gradient and (mode == "bwd" or op == "sparse_mla"))


def floor(job: Job, chip: chips.Chip) -> dict[str, Any]:
    """FLOPs and bytes that the op needs, and the time below which no chip can be."""
    forward, read, backward, moved = operations.OPERATIONS[job.op].work(job.case)
    if job.mode != "fwd":
        forward, read = forward + backward, read + moved
    matrix, memory = forward / chip.matrix_tflops / 1e9, read / chip.memory_tbps / 1e9
    bound = "matrix" if matrix > memory else "memory"
    floor_ms = max(matrix, memory)
    return {"flops": forward, "bytes": read, "bound": bound, "floor_ms": floor_ms}


def timed(job: Job, chip: chips.Chip | None, baseline: bool) -> dict[str, Any]:
    """Runs a job on the device at hand, values first."""
    with _tried(job, chip):
        return _timed(job.on(chip), chip, baseline)


def _timed(job: Job, chip: chips.Chip | None, baseline: bool) -> dict[str, Any]:
    op, case = operations.OPERATIONS[job.op], job.case
    is_whole = job.mode == "fwd" and op.has_rows
    error = None if is_whole else _error(job)
    args = operations.make(case, op.inputs, job.pattern, job.lists)
    run = jax.jit(job.function(job.implementation, case))
    compiled = run.lower(*args).compile()
    memory = compiled.memory_analysis()
    if error is None:
        error = _error_of_last_rows(job, args, compiled(*args))
    row: dict[str, Any] = {"error": error, "is_wrong": not error < TOLERANCE}
    row |= _milliseconds(functools.partial(compiled, *args))
    row["temp_mib"] = memory.temp_size_in_bytes / 2**20 if memory else None
    if baseline:
        plain = jax.jit(job.function(_plain(job.op), case)).lower(*args).compile()
        plain_ms = _milliseconds(functools.partial(plain, *args), samples=3)
        row["ratio_to_xla"] = plain_ms["median_ms"] / row["median_ms"]
    if chip is not None:
        least = floor(job, chip)
        seconds = row["median_ms"] / 1e3
        row |= least | {
            "tflops": least["flops"] / seconds / 1e12,
            "gbps": least["bytes"] / seconds / 1e9,
            "share": least["floor_ms"] / row["median_ms"],
        }
    return row


def compiled(job: Job, chip: chips.Chip) -> dict[str, Any]:
    """Compiles a job for a chip that need not be there."""
    with _tried(job, chip):
        return _compiled(job.on(chip), chip)


def _compiled(job: Job, chip: chips.Chip) -> dict[str, Any]:
    case, table = job.case, cases.shapes(job.case)
    args = tuple(table[name] for name in operations.OPERATIONS[job.op].inputs)
    report = aot.compile(job.function(job.implementation, case), args, chip)
    return floor(job, chip) | {
        "compile_seconds": report.compile_seconds,
        "argument_mib": report.argument_bytes / 2**20,
        "temp_mib": report.temp_bytes / 2**20,
        "gpu_kernels": [dataclasses.asdict(k) for k in report.gpu_kernels],
        "tpu_kernels": [dataclasses.asdict(k) for k in report.tpu_kernels],
    }


def _tried(job: Job, chip: chips.Chip | None) -> contextlib.AbstractContextManager:
    """The job's block sizes, if it brings any."""
    if not job.blocks or chip is None:
        return contextlib.nullcontext()
    sizes = block_sizes.changed(block_sizes.of(chip.name), job.blocks)
    return block_sizes.tried(sizes)


def _plain(op: str) -> str:
    """Name of an op's XLA form; `ragged_dot` would expand rows E times on a GPU."""
    if op.startswith("grouped"):
        return "blocked"
    return "reference" if op.startswith("decode") else "tiled"


def _error(job: Job) -> float:
    """Largest error of an output or gradient, for a case of the last queries alone."""
    op, case = operations.OPERATIONS[job.op], _last(job.case)
    if op.inputs[0] == "rows":
        case = job.case
    args = operations.make(case, op.inputs, job.pattern, job.lists)
    got = jax.jit(job.function(job.implementation, case))(*args)
    return _largest(got, _wanted(job, case, args))


def _error_of_last_rows(job: Job, args: tuple, out: Any) -> float:
    """The same for what was computed at the full size: its last rows."""
    case, size = _last(job.case), job.case.queries

    def last(x: jax.Array) -> jax.Array:
        axis = x.shape.index(size, 1)
        return jax.lax.slice_in_dim(x, size - case.queries, size, axis=axis)

    names = operations.OPERATIONS[job.op].inputs
    pairs = zip(names, args, strict=True)
    part = tuple(last(x) if n in operations.OF_QUERIES else x for n, x in pairs)
    return _largest(jax.tree.map(last, out), _wanted(job, case, part))


def _last(case: Case) -> Case:
    return dataclasses.replace(case, queries=min(case.queries, CHECKED_QUERIES))


def _wanted(job: Job, case: Case, args: tuple) -> Any:
    """By the definition where its scores fit, else by plain XLA."""
    scores = 4 * case.batch * case.queries * case.keys * case.heads
    name = "reference" if scores < DEFINITION_BYTES else _plain(job.op)
    return jax.jit(job.function(name, case))(*args)


def _largest(got: Any, want: Any) -> float:
    return max(map(_distance, jax.tree.leaves(got), jax.tree.leaves(want)))


def _distance(got: jax.Array, want: jax.Array) -> float:
    """Relative L2 distance; of bits and lists, the share of keys that differ."""
    if want.dtype == jnp.uint32:
        count = lambda x: jnp.sum(jax.lax.population_count(x), dtype=jnp.float32)
        return float(count(got & ~want) / jnp.maximum(count(want), 1))
    if jnp.issubdtype(want.dtype, jnp.integer):
        rows = lambda x: x.reshape(-1, x.shape[-1])
        return float(1 - jnp.mean(jax.vmap(jnp.isin)(rows(got), rows(want))))
    g, w = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(g - w) / jnp.maximum(jnp.linalg.norm(w), 1e-30))


def _milliseconds(call: Callable, samples: int = SAMPLES) -> dict[str, float]:
    """Median, 10th and 90th percentile of a call's time, many calls a sample."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    once = time.perf_counter() - start
    if once > SLOW_SECONDS:
        return dict.fromkeys(("median_ms", "p10_ms", "p90_ms"), once * 1e3)
    calls = max(1, round(SAMPLE_SECONDS / max(once, 1e-6)))
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)])
        times.append((time.perf_counter() - start) / calls * 1e3)
    p10, median, p90 = np.percentile(times, (10, 50, 90))
    return {"median_ms": median, "p10_ms": p10, "p90_ms": p90}
