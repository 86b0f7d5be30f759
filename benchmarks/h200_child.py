"""Runs some rows of h200.py: `h200_child.py DIR ROW... [--small]`.

Every part of a row is written as soon as it is measured; then the row's name is
printed. H200_FAULTS rehearses what may go wrong, as JSON: {ROW: "crash" | "hang" |
"wrong" | "raise"}.
"""

import dataclasses
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import h200_rows  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from h200_rows import Row  # noqa: E402

from pallas_kernels import cases, dispatch  # noqa: E402
from pallas_kernels.bench import measure  # noqa: E402

# Packed documents with an empty row, continued rows, and float32.
CHECKED = {"fwd": ("documents", "continued"), "bwd": ("documents", "float32")}
MATMUL, COPY = 8192, 2**30  # sides of a product; bytes
FEW = 3  # queries of a step of decoding
# Rows of GLM-5's width, for which Hopper has kernels of its own.
WIDE = {"heads": 64, "latent": 512}


def main(argv: list[str]) -> int:
    """Runs the rows one after the other, up to one that raises."""
    is_small = "--small" in argv
    out, *names = [a for a in argv if a != "--small"]
    faults = json.loads(os.environ.get("H200_FAULTS", "{}"))
    for name in names:
        row = Row.named(name)
        save = lambda found, row=row: h200_rows.write(pathlib.Path(out), row, found)
        save({"device": f"{jax.devices()[0].device_kind}, jax {jax.__version__}"})
        try:
            for found in _parts(row, is_small):
                save(found)
                _fault(faults.get(name), save)
        except Exception as error:  # the other rows still count
            save({"failure": f"{type(error).__name__}: {error}", "is_done": True})
            print(name, h200_rows.AGAIN, sep="\n", flush=True)
            return 1  # an illegal address stays with a process
        save({"is_done": True})
        print(name, flush=True)
    return 0


def _parts(row: Row, is_small: bool) -> Iterator[dict[str, Any]]:
    """Yields what is measured of a row, part by part."""
    if row.phase == "ceiling":
        with measure.alone():
            yield ceiling(row.op, MATMUL // 64 if is_small else MATMUL)
    elif row.phase == "torch":
        import h200_torch

        with measure.alone():
            yield h200_torch.timed(row.op, row.length, row.mode)
    elif row.phase == "values":
        yield from _values(row, is_small)
    else:
        name = None if is_small else "gpu"  # nothing else may run instead
        job = measure.Job(
            *row[1:4], implementation=name, small=is_small, blocks=row.blocks
        )
        measured = measure.plain if row.phase == "baseline" else measure.kernel
        yield from measured(job, dispatch.chip())


def _values(row: Row, is_small: bool) -> Iterator[dict[str, Any]]:
    errors = {}
    checked = [
        cases.SMALL[name] for name in CHECKED["fwd" if row.mode == "fwd" else "bwd"]
    ]
    if row.op == "sparse_mla":
        wide = dataclasses.replace(cases.SMALL["documents"], name="wide", **WIDE)
        checked.append(wide)
    for case in checked:
        name = case.name
        if row.op.startswith("decode"):
            case = dataclasses.replace(case, queries=FEW, documents=1)
        if is_small:
            few = min(case.queries, 9), min(case.keys, 20)
            case = dataclasses.replace(case, queries=few[0], keys=few[1], documents=1)
            case = dataclasses.replace(case, queries=min(case.queries, case.keys))
        implementation = None if is_small else "gpu"
        job = measure.Job(row.op, 0, row.mode, implementation, "local", sizes=case)
        found = measure.values(job)
        errors[name] = found["error"]
        yield {"errors": errors, "is_wrong": found["is_wrong"]}
        if found["is_wrong"]:
            return


def ceiling(op: str, side: int) -> dict[str, float]:
    """TFLOP/s of a large product, or TB/s read and written by a large copy."""
    if op == "matmul":
        # Random: a product of constants takes less power, and so a higher clock.
        x = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
        run = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.bfloat16))
        return {"tflops": 2 * side**3 / _seconds(run, x) / 1e12}
    x = jnp.zeros(side * side * COPY // MATMUL**2 // 4, jnp.float32)
    return {"tbps": 2 * x.nbytes / _seconds(jax.jit(lambda x: x + 1), x) / 1e12}


def _seconds(run: Any, x: jax.Array, calls: int = 20) -> float:
    """Returns the median of five samples of a number of calls."""
    jax.block_until_ready(run(x))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([run(x) for _ in range(calls)][-1])
        times.append((time.perf_counter() - start) / calls)
    return float(np.median(times))


def _fault(kind: str | None, save: Any) -> None:
    """Does what a kernel may do to its process, after the first part of a row."""
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "hang":
        time.sleep(10**6)
    elif kind == "raise":
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS, rehearsed")
    elif kind == "wrong":
        save({"is_wrong": True})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
