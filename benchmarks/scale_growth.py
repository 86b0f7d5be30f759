"""Plots a step's cost against length, chips and experts, from aot reports.

    python benchmarks/scale_growth.py --out=docs/scale_growth.png

draws docs/scale_growth.json and prints its points as a Markdown table. New points are
of files that `python -m glm5_jax.aot --out=STEM` writes (docs/scaling.md has the
commands); given, they are written to that file first:

    ... --length 4k.json 32k.json 128k.json 202k.json \
        --chips 256.json 512.json 2048.json --experts e64.json e128.json e256.json
"""

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib import figure, ticker

Report = dict[str, Any]
# Kernels by what they do; every other product is linear in the tokens, but for keys and
# values of each head, which masked attention makes of all tokens of a row. Two are
# quadratic where keys are listed: the indexer's scores, and the search for a list's
# members among the bits of all keys, which counts by products.
PARTS = {
    "indexer_bits": "indexer's scores of all keys (quadratic)",
    "list_from_bits": "lists of the selected keys (quadratic)",
    "dense_attention": "attention under a mask (quadratic)",
    "sparse_mla": "attention to listed keys",
    "kl": "indexer's loss",
}
REST = "everything else"
KEPT = (
    *("config", "topology", "slices", "devices", "mesh", "sequence_length", "tokens"),
    *("num_experts", "hbm_args_gib", "hbm_temp_gib", "collective_gib", "flops"),
    *("flops_by_kind", "versions"),
)
SIZES: dict[str, tuple[str, Callable[[Report], float]]] = {
    "length": ("tokens of a row", lambda r: r["sequence_length"]),
    "chips": ("chips", lambda r: r["devices"]),
    "experts": ("experts of a layer", lambda r: r["num_experts"]),
}


def main() -> None:
    """Reads, prints, draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in SIZES:
        parser.add_argument(f"--{name}", nargs="+", default=[], type=pathlib.Path)
    points = pathlib.Path(__file__).parents[1] / "docs" / "scale_growth.json"
    parser.add_argument("--points", type=pathlib.Path, default=points)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    given = {
        name: sorted(map(read, getattr(args, name)), key=SIZES[name][1])
        for name in SIZES
    }
    if any(given.values()):
        args.points.write_text(json.dumps(given, indent=1) + "\n", encoding="utf-8")
    reports = json.loads(args.points.read_text(encoding="utf-8"))
    print(table(reports))
    draw(reports).savefig(args.out, dpi=110)


def read(path: pathlib.Path) -> Report:
    """A report's figures, as far as they are drawn or tell where they are from."""
    report = json.loads(path.read_text(encoding="utf-8"))
    experts = [a for a in report["largest_arguments"] if ".experts." in a["name"]]
    report |= {"num_experts": experts[0]["shape"][1]}
    return {name: report[name] for name in KEPT}


def flops_by_part(report: Report) -> dict[str, float]:
    """TFLOP a device, kernels by PARTS and the rest."""
    found = dict.fromkeys([*PARTS.values(), REST], 0.0)
    for kind, flops in report["flops_by_kind"].items():
        names = [part for word, part in PARTS.items() if f" {word}" in kind]
        names += [PARTS["kl"]] * ("indexer_kl" in kind)
        found[names[0] if names else REST] += flops / 1e12
    return found


def table(reports: dict[str, list[Report]]) -> str:
    """Formats all points, a row each."""
    header = (
        "arguments GiB",
        "temporaries GiB",
        "sent GiB",
        "TFLOP",
        "TFLOP a 1K tokens",
    )
    rows = [f"| varied | topology | mesh | tokens a device | {' | '.join(header)} |"]
    rows.append("|" + " --- |" * (4 + len(header)))
    for name, points in reports.items():
        for r in points:
            mesh = " x ".join(f"{k} {n}" for k, n in r["mesh"].items() if n > 1)
            tokens = r["tokens"] / r["devices"]
            cells = (
                f"{name} {SIZES[name][1](r):,}",
                *(r["topology"], mesh, f"{tokens:,.0f}"),
                *(f"{r[key]:.2f}" for key in ("hbm_args_gib", "hbm_temp_gib")),
                f"{r['collective_gib']:.0f}",
                f"{r['flops'] / 1e12:,.0f}",
                f"{r['flops'] / 1e9 / tokens:,.0f}",
            )
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def draw(reports: dict[str, list[Report]]) -> figure.Figure:
    """A column for each size: memory on top, traffic and work below."""
    page = figure.Figure(figsize=(13, 7), layout="constrained")
    axes = page.subplots(2, 3)
    for column, (name, points) in enumerate(reports.items()):
        label, size = SIZES[name]
        memory, other = axes[:, column]
        x = [size(r) for r in points]
        memory.stackplot(
            x,
            [r["hbm_args_gib"] for r in points],
            [r["hbm_temp_gib"] for r in points],
            labels=["arguments", "temporaries"],
            colors=["#93c5fd", "#fdba74"],
        )
        memory.set_ylabel("GiB of a device")
        memory.set_ylim(
            0, 1.3 * max(r["hbm_args_gib"] + r["hbm_temp_gib"] for r in points)
        )
        if name == "length":
            parts = [flops_by_part(r) for r in points]
            for part in parts[0]:
                tokens = [r["tokens"] / r["devices"] / 1e3 for r in points]
                values = np.divide([p[part] for p in parts], tokens)
                other.plot(x, values, marker="o", label=part)
            other.set_ylabel("TFLOP a 1000 tokens")
            other.set_ylim(0, 1.9 * max(line.get_ydata().max() for line in other.lines))
        else:
            other.plot(
                x, [r["collective_gib"] for r in points], marker="o", label="sent, GiB"
            )
            tflop = [r["flops"] / 1e12 for r in points]
            other.plot(x, tflop, marker="s", label="products, TFLOP")
            other.set_ylabel("of a device and step")
            other.set_ylim(0, 1.3 * max(tflop))
        for axis in (memory, other):
            axis.set_xlabel(label)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(ticker.FuncFormatter(_number))
            axis.set_xticks(x)
            axis.minorticks_off()
            axis.legend(fontsize=8, loc="upper left")
    return page


def _number(value: float, _: object) -> str:
    return f"{value:.0f}" if value < 4096 else f"{value / 1024:.0f}K"


if __name__ == "__main__":
    main()
