"""All kernels on one H200 in under ten minutes: values first, then times.

    XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=. python benchmarks/h200.py --out=DIR

Needs jax for CUDA, triton and jax-triton (the extra `gpu`); with torch, its own path is
timed on the same card. Writes rows.json after every row, table.md and times.png; stops
at --seconds, most wanted rows first, and says what it left out.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.bench import measure, plot, table

# Op, lengths, modes, and whether plain XLA is timed beside it; the most wanted first.
JOBS = (
    ("sparse_mla", (4096, 32768), ("fwd", "bwd"), True),
    ("indexer_topk", (4096, 32768), ("fwd",), True),
    ("indexer_topk", (131072,), ("fwd",), False),
    ("masked_mla", (4096, 32768), ("fwd", "bwd"), True),
    ("grouped_matmul", (8192,), ("fwd", "bwd"), False),
    ("grouped_matmul_fp8", (8192,), ("fwd",), False),
    ("decode_indexer_topk", (131072,), ("fwd",), True),
    ("decode_sparse_mla", (131072,), ("fwd",), True),
    ("sparse_mla", (4096, 32768), ("det",), False),
    ("sparse_indexer_kl_loss", (4096, 32768), ("bwd",), True),
    ("masked_mla_bits", (4096, 32768), ("fwd", "bwd"), False),
    ("sparse_mla", (131072,), ("fwd", "bwd", "det"), False),
    ("indexer_bits", (4096, 32768), ("fwd",), False),
    ("indexer_scores_at", (32768,), ("fwd", "bwd"), False),
    ("indexer_kl_loss", (4096,), ("bwd",), True),
    ("listed_layer", (4096, 32768, 131072), ("bwd",), False),
    ("masked_layer", (4096, 32768), ("bwd",), False),
    ("masked_mla", (131072,), ("fwd",), False),
)
# Other block sizes that compile for it; what wins belongs into
# pallas_kernels/block_sizes.py.
TRIALS = (
    ("sparse_mla", 32768, "fwd", ("sparse_mla=32,8,2", "sparse_mla=32,8,3")),
    ("sparse_mla", 32768, "bwd", ("sparse_mla_dq=32,8,1", "sparse_mla_dq=16,8,3")),
    ("sparse_mla", 32768, "bwd", ("sparse_mla_dkv=64,8,1",)),
    ("masked_mla", 32768, "fwd", ("masked_mla=128,32,8,4", "masked_mla=64,64,4,2")),
    ("masked_mla", 32768, "bwd", ("masked_mla_dq=128,64,8,1",)),
    ("masked_mla", 32768, "bwd", ("masked_mla_dk=32,128,8,2",)),
    ("masked_mla", 32768, "bwd", ("masked_mla_dv=32,128,8,3",)),
    ("indexer_topk", 32768, "fwd", ("indexer_scores=256,8,2",)),
    ("indexer_topk", 32768, "fwd", ("indexer_scores=128,4,3",)),
    ("grouped_matmul", 8192, "fwd", ("grouped_matmul=128,256,64,8,3",)),
    ("grouped_matmul", 8192, "bwd", ("grouped_matmul_dw=128,256,64,8,4",)),
    ("decode_sparse_mla", 131072, "fwd", ("decode_sparse_mla=32,8,3",)),
)
FASTER = 0.97  # than this much of the time: less is noise
REHEARSED = 64  # tokens, with --small


def main() -> int:
    """Runs what time allows; 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a folder")
    parser.add_argument("--seconds", type=float, default=480, help="to stop after")
    parser.add_argument("--small", action="store_true", help="a rehearsal anywhere")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0].device_kind
    title, rows = f"{device}, jax {jax.__version__}", []
    lines = [title, "", table.header(table.TIMED)]
    print("\n".join(lines))  # noqa: T201
    for row in _rows(time.monotonic() + args.seconds, args.small):
        rows.append(row)
        lines.append(table.line(row, table.TIMED))
        print(lines[-1], flush=True)  # noqa: T201
        text = json.dumps({"device": device, "rows": rows}, indent=1)
        (args.out / "rows.json").write_text(text)
        (args.out / "table.md").write_text("\n".join(lines) + "\n")
    winners = [f"- {line}" for line in _winners(rows)]
    if winners:
        lines += ["", "Faster than pallas_kernels/block_sizes.py:", "", *winners]
        (args.out / "table.md").write_text("\n".join(lines) + "\n")
        print("\n".join(lines[-len(winners) - 1 :]))  # noqa: T201
    plot.save([r for r in rows if "blocks" not in r], args.out / "times.png", device)
    return int(any("failure" in row or row.get("is_wrong") for row in rows))


def _rows(deadline: float, is_small: bool) -> Iterator[dict[str, Any]]:
    for job, with_baseline in _jobs(is_small):
        name = {"op": job.op, "length": job.length, "mode": job.mode}
        name |= {"blocks": job.blocks} if job.blocks else {}
        if time.monotonic() > deadline:
            yield name | {"failure": "left out: no time"}
            continue
        try:
            row = measure.timed(job, dispatch.chip(), baseline=with_baseline)
            if not is_small and not job.blocks:
                row |= _torch(job.op, job.length, job.mode)
        except Exception as error:  # the others still count
            row = {"failure": f"{type(error).__name__}: {error}"}
        yield name | row


def _jobs(is_small: bool) -> Iterator[tuple[measure.Job, bool]]:
    """By the kernels' name: nothing else may run instead."""
    if is_small:
        for op, _, modes, with_baseline in JOBS:
            for mode in modes:
                yield measure.Job(op, REHEARSED, mode, small=True), with_baseline
        return
    for op, lengths, modes, with_baseline in JOBS:
        for length in lengths:
            for mode in modes:
                yield measure.Job(op, length, mode, "gpu"), with_baseline
    for op, length, mode, entries in TRIALS:
        for blocks in entries:
            yield measure.Job(op, length, mode, "gpu", blocks=blocks), False


def _winners(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Block sizes that were faster than what the table has."""
    names = ("op", "length", "mode")
    timed = [row for row in rows if "median_ms" in row and not row["is_wrong"]]
    known = {
        tuple(r[n] for n in names): r["median_ms"] for r in timed if "blocks" not in r
    }
    for row in timed:
        before = known.get(tuple(row[n] for n in names))
        if "blocks" in row and before and row["median_ms"] < FASTER * before:
            share, op = row["median_ms"] / before, f"{row['op']} {row['mode']}"
            yield f"{row['blocks']}: {share:.2f} of the time of {op}"


def _torch(op: str, length: int, mode: str) -> dict[str, float]:
    """Milliseconds of torch's own way, where it has one and is installed."""
    try:
        import h200_torch  # beside this file

        return h200_torch.timed(op, length, mode)
    except Exception as error:  # ours has been timed
        print(f"torch: {error}", file=sys.stderr)  # noqa: T201
        return {}


if __name__ == "__main__":
    sys.exit(main())
