"""Measures a row of a benchmark: a time and its rates, or a compiler's report."""

import contextlib
import dataclasses
import fcntl
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import aot, block_sizes, capabilities, cases, chips, dispatch
from pallas_kernels.bench import operations, steps
from pallas_kernels.cases import Case

SAMPLES = 15
SAMPLE_SECONDS = 0.02  # time of a batch of queued calls, which hides dispatch
CHECKED_QUERIES = 128  # last queries, compared with plain XLA at full length
DEFINITION_BYTES = 2**30  # of a layer's scores, to run the definition at all
SLOW_SECONDS = 0.5  # a call that takes longer is not repeated
TOLERANCE = 2e-2  # bfloat16 gradients, and keys swapped by rounding
FLOAT32_TOLERANCE = 1e-3  # for kernels that multiply float32 exactly
STEPS = 100  # decoding steps in a program
MODES = ("fwd", "bwd", "det")
# Of the environment: a file that a process locks to have the device alone, while others
# compile for it.
CARD = "PALLAS_BENCH_CARD"


@dataclasses.dataclass(frozen=True)
class Job:
    """An op with sizes and an implementation."""

    op: str
    length: int
    mode: str  # "fwd", "bwd" (forward and backward) or "det" (the same, reproducible)
    implementation: str | None = None
    pattern: str = "random"
    lists: Any = None
    small: bool = False
    queries: int | None = None  # per device under context parallelism
    heads: int | None = None  # per device under tensor parallelism
    row_multiple: int = 1  # pads the width of latent rows, of cached bytes too
    blocks: str = ""  # another entry of the chip's row of `block_sizes`
    sizes: Case | None = None  # replaces the op's sizes at a length
    varied: bool = False  # varies the cotangents instead of ones

    @property
    def case(self) -> Case:
        """The sizes of the op's arguments."""
        case = self.sizes or operations.at(self.op, self.length, self.small)
        in_bytes = self.op.startswith("decode_sparse_mla_")  # q has no padding then
        numbers, width = case.latent + case.rope, case.row_form("int8").width
        return dataclasses.replace(
            case,
            queries=min(self.queries or case.queries, case.queries),
            heads=self.heads or case.heads,
            row_padding=0 if in_bytes else -numbers % self.row_multiple,
            byte_padding=-width % self.row_multiple,
        )

    def on(self, chip: chips.Chip | None) -> "Job":
        """Returns the job as a model runs it: a TPU's cached rows fill whole tiles."""
        is_tpu = chip is not None and chip.platform == "tpu"
        is_padded = is_tpu and self.op.startswith("decode_sparse_mla")
        return dataclasses.replace(self, row_multiple=128) if is_padded else self

    def function(self, implementation: str | None, case: Case) -> Callable:
        """The op, or its gradient, as a function of its inputs."""
        op = operations.OPERATIONS[self.op]
        call = op.call(case, implementation, self.mode == "det")
        if self.mode == "fwd":
            return call

        def scalar(*args: Any) -> jax.Array:
            leaves = jax.tree.leaves(call(*args))
            weighed = map(_waved, leaves) if self.varied else leaves
            return sum((jnp.sum(x, dtype=jnp.float32) for x in weighed), jnp.zeros(()))

        # Returns the value too, else XLA may drop the forward pass.
        return jax.value_and_grad(scalar, argnums=op.differentiable)


def _waved(x: jax.Array) -> jax.Array:
    """Multiplies entries by different factors: 1, 0.54, -0.42, ..."""
    return x.astype(jnp.float32) * jnp.cos(jnp.arange(x.size)).reshape(x.shape)


def runnable(op: str, mode: str) -> bool:
    """Returns whether the op has the job's mode."""
    has_gradient = bool(operations.OPERATIONS[op].differentiable)
    return mode == "fwd" or (has_gradient and (mode == "bwd" or op == "sparse_mla"))


def floor(job: Job, chip: chips.Chip) -> dict[str, Any]:
    """Returns an op's FLOPs and bytes, and the least time that a chip needs."""
    needed = work(job)
    has_float8 = (capabilities.named(chip.device_kind) or 0) >= capabilities.FLOAT8
    rate = operations.OPERATIONS[job.op].rate if has_float8 else 1
    matrix = needed["flops"] / (rate * chip.reachable_tflops) / 1e9
    memory = needed["bytes"] / chip.reachable_tbps / 1e9
    bound = "matrix" if matrix > memory else "memory"
    return needed | {"bound": bound, "floor_ms": max(matrix, memory)}


def work(job: Job) -> dict[str, float]:
    """Returns the FLOPs and bytes that an op needs by its definition."""
    forward, read, backward, moved = operations.OPERATIONS[job.op].work(job.case)
    if job.mode != "fwd":
        forward, read = forward + backward, read + moved
    return {"flops": forward, "bytes": read}


def timed(job: Job, chip: chips.Chip | None, baseline: bool) -> dict[str, Any]:
    """Runs a job on this machine's device; a failure keeps earlier measurements."""
    row: dict[str, Any] = {}
    stages = [kernel(job, chip)]
    stages += [plain(job, chip)] if baseline else []
    for stage in stages:
        try:
            for measured in stage:
                row |= measured
        except Exception as error:  # the rest of the row stays valid
            row["failure"] = f"{type(error).__name__}: {error}"
    return row | ratio(row)


def ratio(row: dict[str, Any]) -> dict[str, float]:
    """Returns the time of plain XLA divided by the kernel's, if both were timed."""
    both = "xla_ms" in row and "median_ms" in row
    return {"ratio_to_xla": row["xla_ms"] / row["median_ms"]} if both else {}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Waits for the device and has it alone, where CARD names a file for that."""
    path = os.environ.get(CARD)
    if path is None:
        yield
        return
    with open(path, "r+") as card:
        fcntl.flock(card, fcntl.LOCK_EX)
        card.write(str(os.getpid()))
        card.truncate()
        card.flush()
        yield


def _run(function: Callable, args: tuple) -> Any:
    """Compiles a function, then runs it alone on the device."""
    program = jax.jit(function).lower(*args).compile()
    with alone():
        return jax.block_until_ready(program(*args))


def _made(job: Job) -> tuple[jax.Array, ...]:
    with alone():
        names = operations.OPERATIONS[job.op].inputs
        return operations.make(job.case, names, job.pattern, job.lists)


def kernel(job: Job, chip: chips.Chip | None) -> Iterator[dict[str, Any]]:
    """Times a job, then checks its values; yields a row part by part."""
    with _tried(job, chip):
        job = job.on(chip)
        op, case, args = operations.OPERATIONS[job.op], job.case, _made(job)
        row = _timed(job, job.implementation, args, SAMPLES)
        yield row | (worth(job, chip, row["median_ms"]) if chip is not None else {})
        if job.mode == "fwd" and op.has_rows:
            out = _run(job.function(job.implementation, case), args)
            error = _error_of_last_rows(job, args, out)
        else:
            error = _error(job)
        yield {"error": error, "is_wrong": not error < TOLERANCE}


def plain(job: Job, chip: chips.Chip | None) -> Iterator[dict[str, Any]]:
    """Times plain XLA on the same job."""
    job = job.on(chip)
    yield {"xla_ms": _timed(job, _plain(job.op), _made(job), 3)["median_ms"]}


def values(job: Job) -> dict[str, Any]:
    """Compares a job with the definition in all rows and with varied cotangents.

    The definition runs on the host if jax may use it (JAX_PLATFORMS=cuda,cpu), and need
    not be compiled for the device.
    """
    job = dataclasses.replace(job, varied=True)
    args, cpu = _made(job), _host()
    got = _run(job.function(job.implementation, job.case), args)
    definition = job.function("reference", job.case)
    with jax.default_matmul_precision("highest"):  # not TF32, on a GPU
        if cpu is None:
            want = _run(definition, args)
        else:
            with alone():
                got, args = jax.device_put((got, args), cpu)
            with jax.default_device(cpu):
                want = jax.jit(definition)(*args)
    with alone() if cpu is None else jax.default_device(cpu):
        error = _largest(got, want)
    limit = TOLERANCE if job.case.dtype == "bfloat16" else FLOAT32_TOLERANCE
    return {"error": error, "is_wrong": not error < limit}


def _host() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS does not name it
        return None


def worth(job: Job, chip: chips.Chip, milliseconds: float) -> dict[str, Any]:
    """Returns a time's FLOP and byte rates, and their share of the chip's rates."""
    least, seconds = floor(job, chip), milliseconds / 1e3
    return least | {
        "tflops": least["flops"] / seconds / 1e12,
        "gbps": least["bytes"] / seconds / 1e9,
        "share": least["floor_ms"] / milliseconds,
    }


def _timed(job: Job, implementation: str | None, args: tuple, samples: int) -> Any:
    """Times an implementation, and returns the memory of the timed program.

    A decoding step takes some ten microseconds, as long as its dispatch, so one program
    runs many steps.
    """
    function = job.function(implementation, job.case)
    steps = STEPS if job.op.startswith("decode") else 1

    def repeated(q: jax.Array, *cache: jax.Array) -> Any:
        def step(_: jax.Array, carry: tuple) -> tuple:
            q, _ = carry
            # XLA must see new queries in each step, else it runs only one.
            return jax.lax.optimization_barrier((q, function(q, *cache)))

        shapes = jax.eval_shape(function, q, *cache)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.fori_loop(0, steps, step, (q, nothing))[1]

    run = jax.jit(repeated if steps > 1 else function)
    program = run.lower(*args).compile()
    with alone():
        times = _milliseconds(functools.partial(program, *args), samples)
    memory = program.memory_analysis()
    temp_mib = memory.temp_size_in_bytes / 2**20 if memory else None
    return {k: v / steps for k, v in times.items()} | {"temp_mib": temp_mib}


def compiled(job: Job, chip: chips.Chip) -> dict[str, Any]:
    """Compiles a job for a chip, which this machine need not have."""
    with _tried(job, chip):
        return _compiled(job.on(chip), chip)


def compiled_by_triton(job: Job, capability: int) -> dict[str, Any]:
    """Compiles a job's Triton kernels alone, for GPUs of a compute capability."""
    sizes = capabilities.GPUS[capability]
    sizes = block_sizes.changed(sizes, job.blocks) if job.blocks else sizes
    with block_sizes.tried(sizes):
        kind = capabilities.KINDS[capability]
        kernels = aot.kernels(job.function("gpu_interpret", job.case), _args(job), kind)
    return work(job) | _report(job, kernels)


def _args(job: Job) -> tuple[jax.ShapeDtypeStruct, ...]:
    table = cases.shapes(job.case)
    return tuple(table[name] for name in operations.OPERATIONS[job.op].inputs)


def _compiled(job: Job, chip: chips.Chip) -> dict[str, Any]:
    if chip.name not in aot.TOPOLOGIES:  # XLA's compiler for GPUs is set up for one
        function = job.function("gpu_interpret", job.case)
        kernels = aot.kernels(function, _args(job), chip.device_kind)
        return floor(job, chip) | _report(job, kernels)
    function = job.function(job.implementation, job.case)
    report = aot.compile(function, _args(job), chip)
    return (
        floor(job, chip)
        | _report(job, report.gpu_kernels)
        | {
            "compile_seconds": report.compile_seconds,
            "argument_mib": report.argument_bytes / 2**20,
            "temp_mib": report.temp_bytes / 2**20,
            "tpu_kernels": [dataclasses.asdict(k) for k in report.tpu_kernels],
        }
    )


def _report(job: Job, kernels: tuple[aot.GpuKernel, ...]) -> dict[str, Any]:
    """Returns the figures of an op's Triton kernels.

    "issued" are the FLOPs of all instructions of the op over those that its definition
    needs: padding, products computed again and invisible keys of a tile are the rest.
    """
    figures = [
        dataclasses.asdict(kernel)
        | {
            "resident": kernel.resident,
            "waves": kernel.waves,
            "times": kernel.products.times,
        }
        for kernel in kernels
    ]
    counts = [steps.count(k.module, k.name, k.sizes, job.case) for k in kernels]
    if not kernels or None in counts:
        return {"gpu_kernels": figures}
    each = zip(kernels, counts, strict=True)
    issued = sum(k.products.issued_flops * (n or 0.0) for k, n in each)
    return {"gpu_kernels": figures, "issued": issued / work(job)["flops"]}


def _tried(job: Job, chip: chips.Chip | None) -> contextlib.AbstractContextManager:
    """Returns a context that uses the job's own block sizes, if it has any."""
    if not job.blocks or chip is None:
        return contextlib.nullcontext()
    sizes = block_sizes.changed(block_sizes.of(chip.name), job.blocks)
    return block_sizes.tried(sizes)


def _plain(op: str) -> str:
    """Names an op's XLA form; on GPU not `ragged_dot`, which expands rows E times."""
    if op.startswith("grouped"):
        return "batched" if dispatch.platform() == "gpu" else "blocked"
    return "reference" if op.startswith("decode") else "tiled"


def _error(job: Job) -> float:
    """Returns the largest error of outputs and gradients for only the last queries."""
    op, case = operations.OPERATIONS[job.op], _last(job.case)
    if op.inputs[0] == "rows":
        case = job.case
    with alone():
        args = operations.make(case, op.inputs, job.pattern, job.lists)
    got = _run(job.function(job.implementation, case), args)
    want = _wanted(job, case, args)
    with alone():
        return _largest(got, want)


def _error_of_last_rows(job: Job, args: tuple, out: Any) -> float:
    """Returns the same error for the last rows of full-size results."""
    case, size = _last(job.case), job.case.queries

    def last(x: jax.Array) -> jax.Array:
        axis = x.shape.index(size, 1)
        return jax.lax.slice_in_dim(x, size - case.queries, size, axis=axis)

    names = operations.OPERATIONS[job.op].inputs
    pairs = zip(names, args, strict=True)
    with alone():
        part = tuple(last(x) if n in operations.OF_QUERIES else x for n, x in pairs)
    want = _wanted(job, case, part)
    with alone():
        return _largest(jax.tree.map(last, out), want)


def _last(case: Case) -> Case:
    return dataclasses.replace(case, queries=min(case.queries, CHECKED_QUERIES))


def _wanted(job: Job, case: Case, args: tuple) -> Any:
    """Computes expected values by the definition if scores fit, else by plain XLA."""
    scores = 4 * case.batch * case.queries * case.keys * case.heads
    name = "reference" if scores < DEFINITION_BYTES else _plain(job.op)
    return _run(job.function(name, case), args)


def _largest(got: Any, want: Any) -> float:
    return max(map(_distance, jax.tree.leaves(got), jax.tree.leaves(want)))


def _distance(got: jax.Array, want: jax.Array) -> float:
    """Returns the relative L2 distance; for bits and lists, the share of other keys."""
    if want.dtype == jnp.uint32:
        count = lambda x: jnp.sum(jax.lax.population_count(x), dtype=jnp.float32)
        return float(count(got & ~want) / jnp.maximum(count(want), 1))
    if jnp.issubdtype(want.dtype, jnp.integer):
        rows = lambda x: x.reshape(-1, x.shape[-1])
        return float(1 - jnp.mean(jax.vmap(jnp.isin)(rows(got), rows(want))))
    g, w = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(g - w) / jnp.maximum(jnp.linalg.norm(w), 1e-30))


def _milliseconds(call: Callable, samples: int = SAMPLES) -> dict[str, float]:
    """Returns the median, 10th and 90th percentile of a call's time."""
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
