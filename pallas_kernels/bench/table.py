"""Rows of a benchmark as Markdown."""

from typing import Any

TIMED = (
    ("median_ms", "ms", "{:.3f}"),
    ("p10_ms", "p10", "{:.3f}"),
    ("p90_ms", "p90", "{:.3f}"),
    ("tflops", "TFLOP/s", "{:.0f}"),
    ("gbps", "GB/s", "{:.0f}"),
    ("bound", "bound", "{}"),
    ("floor_ms", "floor ms", "{:.3f}"),
    ("share", "share", "{:.0%}"),
    ("ratio_to_xla", "x XLA", "{:.2f}"),
    ("torch_ms", "torch ms", "{:.3f}"),
    ("error", "error", "{:.1e}"),
    ("temp_mib", "temp MiB", "{:.1f}"),
)
COMPILED = (
    ("compile_seconds", "compile s", "{:.1f}"),
    ("temp_mib", "temp MiB", "{:.1f}"),
    ("argument_mib", "arguments MiB", "{:.1f}"),
    ("bound", "bound", "{}"),
    ("floor_ms", "floor ms", "{:.3f}"),
    ("issued", "issued / needed", "{:.2f}"),
)
_NAMES = ("op", "length", "mode")


def header(columns: tuple) -> str:
    """Returns the titles of TIMED or COMPILED, one for notes, and the rule below."""
    titles = [*_NAMES, *(title for _, title, _ in columns), ""]
    return f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}"


def line(row: dict[str, Any], columns: tuple) -> str:
    """Formats a row; missing figures stay empty."""
    cells = [str(row[name]) for name in _NAMES]
    for key, _, form in columns:
        value = row.get(key)
        cells.append("" if value is None else form.format(value))
    return f"| {' | '.join([*cells, '; '.join(_notes(row))])} |"


def _notes(row: dict[str, Any]) -> list[str]:
    """Returns other block sizes, an error, or the compiler's figures of each kernel."""
    tried = [row["blocks"]] if "blocks" in row else []
    if "failure" in row:
        failure = [(row["failure"].splitlines() or ["failed"])[0]]
    else:
        failure = []
    wrong = ["WRONG VALUES"] * row.get("is_wrong", False)
    gpu = map(_kernel, row.get("gpu_kernels", ()))
    tpu = [f"{k['name']} {k['bundles']} bundles" for k in row.get("tpu_kernels", ())]
    return [*tried, *failure, *wrong, *gpu, *tpu]


def _kernel(figures: dict[str, Any]) -> str:
    """Formats a Triton kernel."""
    times = figures["times"]
    instructions = " + ".join(figures["products"]["instructions"])
    parts = [
        f"{figures['name']} {figures['registers']} registers",
        f"{figures['spill_bytes']} B spilled",
        f"{figures['shared_bytes'] / 1024:.0f} KiB shared",
        f"{figures['resident']} at once",
        f"{figures['waves']:.2f} waves",
        *([] if times is None else [f"products {times:.2f} times ({instructions})"]),
        *(["products serialized"] if figures["is_serialized"] else []),
    ]
    return ", ".join(parts)
