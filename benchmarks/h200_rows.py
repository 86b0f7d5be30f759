"""The rows that h200.py runs, their files, and the table made of them: no device."""

import importlib.util
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from pallas_kernels.bench import table

REHEARSED = 64  # tokens, with --small
# Op, lengths, modes, and whether plain XLA is timed beside it; the most wanted first.
JOBS = (
    ("sparse_mla", (4096, 32768), ("fwd", "bwd"), True),
    ("indexer_topk", (4096, 32768), ("fwd",), True),
    ("indexer_topk", (131072,), ("fwd",), False),
    ("indexer_topk_fp8", (4096, 32768, 131072), ("fwd",), False),
    ("dense_attention", (4096, 32768), ("fwd", "bwd"), True),
    ("grouped_matmul", (8192,), ("fwd", "bwd"), False),
    ("grouped_matmul_fp8", (8192,), ("fwd",), False),
    ("decode_indexer_topk", (131072,), ("fwd",), True),
    ("decode_indexer_topk_fp8", (131072,), ("fwd",), False),
    ("decode_sparse_mla", (131072,), ("fwd",), True),
    ("decode_sparse_mla_fp8", (131072,), ("fwd",), False),
    ("sparse_mla", (4096, 32768), ("det",), False),
    ("sparse_indexer_kl_loss", (4096, 32768), ("bwd",), True),
    ("dense_attention_bits", (4096, 32768), ("fwd", "bwd"), False),
    ("sparse_mla", (131072,), ("fwd", "bwd", "det"), False),
    ("indexer_bits", (4096, 32768), ("fwd",), False),
    ("indexer_scores_at", (32768,), ("fwd", "bwd"), False),
    ("indexer_kl_loss", (4096,), ("bwd",), True),
    ("listed_layer", (4096, 32768, 131072), ("bwd",), False),
    ("masked_layer", (4096, 32768), ("bwd",), False),
    ("dense_attention", (131072,), ("fwd",), False),
)
# Other block sizes that compile for it; what wins belongs into
# pallas_kernels/capabilities.py.
TRIALS = (
    (
        "sparse_mla",
        32768,
        "det",
        ("sparse_mla_dq=64,32,8,1", "sparse_mla_dq=64,16,8,3"),
    ),
    (
        "dense_attention",
        32768,
        "fwd",
        ("dense_attention=128,32,8,4", "dense_attention=64,64,4,2"),
    ),
    ("dense_attention", 32768, "bwd", ("dense_attention_dq=128,64,8,1",)),
    ("dense_attention", 32768, "bwd", ("dense_attention_dk=32,128,8,2",)),
    ("dense_attention", 32768, "bwd", ("dense_attention_dv=32,128,8,3",)),
    ("indexer_topk", 32768, "fwd", ("indexer_scores=256,8,2",)),
    ("indexer_topk", 32768, "fwd", ("indexer_scores=128,4,3",)),
    ("grouped_matmul", 8192, "fwd", ("grouped_matmul=128,256,64,8,3",)),
    ("grouped_matmul", 8192, "bwd", ("grouped_matmul_dw=128,256,64,8,4",)),
    ("decode_sparse_mla", 131072, "fwd", ("decode_sparse_mla=64,32,8,3",)),
)
SLOWEST = 4096  # tokens at which plain XLA is timed; a gradient at 32K takes 18 s
BASELINE = 32768  # ... and at which the forward pass is
# Ops that torch has, and the most tokens of their gradients.
TORCH = {
    "dense_attention": BASELINE,
    "dense_attention_bits": SLOWEST,
    "grouped_matmul": BASELINE,
    "indexer_topk": BASELINE,
    "sparse_mla": SLOWEST,
}
FASTER = 0.97  # than this much of the time: less is noise
PHASES = ("ceiling", "values", "time", "baseline", "torch", "trial")
CEILINGS = ("matmul", "copy")
AGAIN = "again"  # that a child prints after a row that may have poisoned it


class Row(NamedTuple):
    """A row: one run of the child process."""

    phase: str  # of PHASES, in this order
    op: str
    length: int = 0
    mode: str = "fwd"
    blocks: str = ""

    @property
    def name(self) -> str:
        """Names its file, and itself on the child's command line."""
        return "+".join(map(str, self))

    @classmethod
    def named(cls, name: str) -> "Row":
        """The row of such a name."""
        phase, op, length, mode, blocks = name.split("+")
        return cls(phase, op, int(length), mode, blocks)


def plan(is_small: bool) -> list[Row]:
    """Lists all rows, values before times, ours before others'."""
    rows = list(_planned())
    if is_small:
        small = [r._replace(length=REHEARSED if r.length else 0) for r in rows]
        rows = [r for r in small if r.phase not in ("torch", "trial")]
    return list(dict.fromkeys(rows))


def _planned() -> Iterator[Row]:
    yield from (Row("ceiling", name) for name in CEILINGS)
    for op, _, modes, _ in JOBS:
        yield from (Row("values", op, 0, mode) for mode in modes)
    timed = [
        (Row("time", op, length, mode), with_baseline)
        for op, lengths, modes, with_baseline in JOBS
        for length in lengths
        for mode in modes
    ]
    yield from (row for row, _ in timed)
    for row, with_baseline in timed:
        most = BASELINE if row.mode == "fwd" or "masked" in row.op else SLOWEST
        if with_baseline and (row.length <= most or row.op.startswith("decode")):
            yield row._replace(phase="baseline")
    for row, _ in timed:
        most = BASELINE if row.mode == "fwd" else TORCH.get(row.op, 0)
        if row.op in TORCH and row.mode != "det" and row.length <= most:
            yield row._replace(phase="torch")
    for op, length, mode, entries in TRIALS:
        yield from (Row("trial", op, length, mode, blocks) for blocks in entries)


def names() -> set[str]:
    """Returns what --only knows."""
    return {name for row in _planned() for name in row[:2]}


def read(out: pathlib.Path, row: Row) -> dict[str, Any]:
    """Returns what is known of a row; nothing where it was not begun."""
    path = out / "rows" / f"{row.name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(out: pathlib.Path, row: Row, found: dict[str, Any]) -> None:
    """Adds to what is known of a row, in one step."""
    path = out / "rows" / f"{row.name}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(read(out, row) | found, indent=1) + "\n")
    os.replace(draft, path)


def forget_failure(out: pathlib.Path, row: Row) -> None:
    """Keeps what was measured of a row, and nothing of how it failed."""
    kept = {k: v for k, v in read(out, row).items() if k not in ("failure", "is_done")}
    (out / "rows" / f"{row.name}.json").unlink(missing_ok=True)
    if kept:
        write(out, row, kept)


def brief(found: dict[str, Any]) -> str:
    """The numbers of a row in a few words."""
    shown = {k: v for k, v in found.items() if isinstance(v, float) and v}
    return ", ".join(f"{k} {v:.3g}" for k, v in list(shown.items())[:5]) or "done"


def report(out: pathlib.Path, found: dict[Row, dict[str, Any]]) -> str:
    """Writes table.md, rows.json and times.png; the table."""
    rows = _joined(found)
    device = next((f["device"] for f in found.values() if "device" in f), None)
    lines = [device or "no device", "", *_ceilings(found), table.header(table.TIMED)]
    lines += [table.line(row, table.TIMED) for row in rows if row["phase"] != "values"]
    lines += ["", "Values of small cases against the definition:", ""]
    lines += [_value(row) for row in rows if row["phase"] == "values"]
    winners = [f"- {line}" for line in _winners(rows)]
    if winners:
        lines += ["", "Faster than pallas_kernels/capabilities.py:", "", *winners]
    text = "\n".join(lines) + "\n"
    (out / "table.md").write_text(text)
    (out / "rows.json").write_text(json.dumps({"device": device, "rows": rows}))
    timed = [r for r in rows if r["phase"] == "time"]
    if device and timed and importlib.util.find_spec("matplotlib"):
        from pallas_kernels.bench import plot

        plot.save(timed, out / "times.png", device)
    return text


def _joined(found: dict[Row, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table: a time together with what others took."""
    rows = {}
    for row, values in found.items():
        if row.phase == "ceiling":
            continue
        where = (
            row._replace(phase="time") if row.phase in ("baseline", "torch") else row
        )
        name = where._asdict()
        if not where.blocks:
            del name["blocks"]
        kept = rows.setdefault(where, name)
        failure = values.get("failure")
        if failure and where != row:
            failure = f"{row.phase}: {failure}"
        kept |= {k: v for k, v in values.items() if k not in ("failure", "device")}
        if failure:
            kept["failure"] = "; ".join(filter(None, [kept.get("failure"), failure]))
        if "xla_ms" in kept and "median_ms" in kept:
            kept["ratio_to_xla"] = kept["xla_ms"] / kept["median_ms"]
    return list(rows.values())


def _ceilings(found: dict[Row, dict[str, Any]]) -> list[str]:
    lines = [
        f"- {row.op}: {brief(values)}{values.get('failure', '')}"
        for row, values in found.items()
        if row.phase == "ceiling"
    ]
    return ["What the card reaches by XLA, to hold shares against:", "", *lines, ""]


def _value(row: dict[str, Any]) -> str:
    errors = ", ".join(f"{k} {v:.1e}" for k, v in row.get("errors", {}).items())
    wrong = "WRONG VALUES " if row.get("is_wrong") else ""
    return f"- {row['op']} {row['mode']}: {wrong}{errors}{row.get('failure', '')}"


def _winners(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Block sizes that were faster than what the table has."""
    of = lambda row: (row["op"], row["length"], row["mode"])
    timed = [r for r in rows if "median_ms" in r and r.get("is_wrong") is False]
    known = {of(r): r["median_ms"] for r in timed if "blocks" not in r}
    for row in timed:
        before = known.get(of(row))
        if "blocks" in row and before and row["median_ms"] < FASTER * before:
            share, op = row["median_ms"] / before, f"{row['op']} {row['mode']}"
            yield f"{row['blocks']}: {share:.2f} of the time of {op}"
