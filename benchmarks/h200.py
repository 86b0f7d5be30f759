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
    plot.save(rows, args.out / "times.png", device)
    return int(any("failure" in row or row.get("is_wrong") for row in rows))


def _rows(deadline: float, is_small: bool) -> Iterator[dict[str, Any]]:
    chip = dispatch.chip()
    for op, lengths, modes, with_baseline in JOBS:
        for length in (REHEARSED,) if is_small else lengths:
            for mode in modes:
                name = {"op": op, "length": length, "mode": mode}
                if time.monotonic() > deadline:
                    yield name | {"failure": "left out: no time"}
                    continue
                try:
                    # By name: nothing else may run instead.
                    kernel = None if is_small else "gpu"
                    job = measure.Job(op, length, mode, kernel, small=is_small)
                    row = measure.timed(job, chip, baseline=with_baseline)
                    row |= {} if is_small else _torch(op, length, mode)
                except Exception as error:  # the others still count
                    row = {"failure": f"{type(error).__name__}: {error}"}
                yield name | row


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
