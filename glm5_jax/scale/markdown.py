"""Renders a report as a Markdown page."""

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

NUM_SCOPES = 40  # rows of the table by named scope


def page(line: dict[str, Any], tables: dict[str, Any], refusal: str) -> str:
    """Writes the whole report."""
    what = f"{line['program']} ({line['stage']})"
    parts = [
        f"# {line['config']}: {what} on {_where(line)}",
        *(f"```\n{line[key]}\n```" for key in ("command",) if key in line),
        "Compiled for chips that are not there, and not timed: sizes and counts are "
        "the compiler's, seconds are rooflines. All figures are of one device and one "
        "run of the program.",
        f"**It does not fit.** {refusal}" if refusal else "It fits.",
        "## Setting\n\n" + _setting(line, tables),
        "## Memory\n\n" + _memory(line, tables),
    ]
    if "collectives" in tables:
        parts.append("## Collectives\n\n" + _collectives(line, tables))
    if tables.get("is_printed"):
        parts.append("## Work and time\n\n" + _time(line, tables))
    return "\n\n".join(parts) + "\n"


def write(stem: str, content: Any, page: str) -> None:
    """Writes content as STEM.json and a page as STEM.md."""
    path = pathlib.Path(stem).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1) + "\n"
    path.with_name(path.name + ".json").write_text(text, encoding="utf-8")
    path.with_name(path.name + ".md").write_text(page, encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in lines)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal: columns as wide as what is in them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _where(line: dict[str, Any]) -> str:
    times = f" x {line['slices']} slices" if line["slices"] > 1 else ""
    return f"{line['topology']}{times}, {line['devices']} devices"


def _setting(line: dict[str, Any], tables: dict[str, Any]) -> str:
    mesh = " x ".join(f"{axis} {n}" for axis, n in line["mesh"].items() if n > 1)
    versions = ", ".join(f"{k} {v}" for k, v in tables["versions"].items())
    return table(
        ("what", "value"),
        [
            ("mesh", mesh or "one device"),
            ("model.expert_chunks", line["expert_chunks"]),
            ("optim.accumulation_steps", line["accumulation_steps"]),
            ("layers", line["num_hidden_layers"]),
            ("tokens of a run, all devices", f"{line['tokens']:,}"),
            ("tokens of a row", f"{line['sequence_length']:,}"),
            ("trace and compile, s", f"{line['trace_s']} and {line['compile_s']}"),
            ("peak memory of the host, GiB", line["host_peak_gib"]),
            ("versions", versions),
        ],
    )


def _memory(line: dict[str, Any], tables: dict[str, Any]) -> str:
    names = {
        "hbm_args_gib": "arguments",
        "hbm_outputs_gib": "outputs in new memory",
        "hbm_temp_gib": "temporaries",
        "hbm_code_gib": "program",
        "hbm_total_gib": "sum",
        "hbm_reference_gib": "weights of other policies (rl.reference, rl.teachers)",
        "hbm_critic_gib": "critic and its moments, beside the program",
        "hbm_limit_gib": "limit",
        "host_gib": "beside it in the host's memory",
    }
    sizes = [
        (name, line[key]) for key, name in names.items() if line.get(key) is not None
    ]
    parts = [
        table(("HBM of a device", "GiB"), sizes),
        "Arguments by kind (donated ones are written in place):",
        table(("kind", "GiB"), tables["arguments_gib"].items()),
        "Largest arguments:",
        _arrays(tables["largest_arguments"]),
        "Largest arrays of which several devices hold the same part:",
        _arrays(tables["largest_replicated"]),
    ]
    if tables.get("is_printed"):
        parts += [
            "Temporaries that live at the worst moment, by shape: an estimate from "
            f"the schedule, {tables['live_temporaries_gib']} GiB in all, where the "
            f"compiler allocated {line['hbm_temp_gib']}:",
            table(
                ("shape of the first", "GiB each", "live", "scope of the first"),
                (
                    (t["shape"], _gib(t["num_bytes"]), t["count"], t["scope"])
                    for t in tables["largest_temporaries"]
                ),
            ),
        ]
    if tables.get("largest_allocations"):
        rows = tables["largest_allocations"]
        parts += [
            "Largest buffers, as the compiler says:",
            table(
                ("shape", "GiB", "scope"),
                ((a["shape"], _gib(a["num_bytes"]), a["scope"]) for a in rows),
            ),
        ]
    return "\n\n".join(parts)


def _arrays(rows: list[dict[str, Any]]) -> str:
    return table(
        ("array", "kind", "shape", "spec", "GiB of a device", "copies"),
        (
            (
                a["name"],
                a["kind"],
                f"{a['dtype']}{list(a['shape'])}",
                a["spec"],
                _gib(a["device_bytes"]),
                a["num_copies"],
            )
            for a in rows
        ),
    )


def _collectives(line: dict[str, Any], tables: dict[str, Any]) -> str:
    if not tables["is_printed"]:
        return "This libtpu could not print the program: use jax 0.12 with its libtpu."
    parts = [
        f"{line['collective_gib']} GiB leave a device in a run (of n devices a ring "
        "sends (n - 1) / n of an array, an all-reduce twice that; loops count as often "
        "as they run).",
        table(("kind", "axes", "runs", "GiB"), tables["collectives"]),
        f"The largest {NUM_SCOPES}, by part of the step and named scope:",
        table(
            ("part", "scope", "kind", "axes", "shape", "runs", "GiB"),
            tables["collectives_by_scope"][:NUM_SCOPES],
        ),
    ]
    if loops := tables["uncounted_loops"]:
        parts.append(
            f"{len(loops)} loops run as often as data says and were counted once: "
            f"{', '.join(loops[:5])}."
        )
    return "\n\n".join(parts)


def _time(line: dict[str, Any], tables: dict[str, Any]) -> str:
    peaks = tables["device"]
    seconds = tables["roofline_seconds"]
    amounts = {
        "FLOPs": (f"{line['flops'] / 1e12:,.4g} TFLOP", f"{peaks['bf16_tflops']} TF/s"),
        "HBM": (f"{line['hbm_traffic_gib']:,} GiB", f"{peaks['hbm_tbps']} TB/s"),
        "ICI": ("by axes below", f"{peaks['link_gbps']} GB/s a link, one way"),
        "DCN": ("by axes below", f"{peaks['dcn_gbps']} GB/s"),
    }
    rows = [(name, *amounts[name], _seconds(s)) for name, s in seconds.items()]
    parts = [
        table(("what", "amount", f"peak of {peaks['name']}", "seconds"), rows),
        f"{line['bound']} binds: no less than {_seconds(line['optimal_seconds'])} s.",
        "Link seconds by mesh axes, one collective after another:",
        table(
            ("axes", "seconds"),
            ((k, _seconds(s)) for k, s in tables["link_seconds_by_axes"].items()),
        ),
        "By the schedule, in which only work between a collective's start and its end "
        f"hides it, links add {_seconds(line['exposed_seconds'])} s to the products or "
        "to HBM.",
        "FLOPs of matrix products, recomputation included, at an even load of the "
        f"experts (their buffers have room for {line['expert_room']} times the "
        "rows; of HBM the products move as much less, all else that spreads and sums "
        "rows moves whole buffers):",
        table(
            ("kind", "TFLOP"),
            ((k, f"{n / 1e12:,.4g}") for k, n in tables["flops_by_kind"].items()),
        ),
    ]
    if "mfu_bound" in line:
        parts.append(
            f"The model's own: {line['model_flops'] / 1e12:,.4g} TFLOP (6 N_active "
            f"tokens alone: {line['six_n_tokens'] / 1e12:,.4g}). So MFU is at most "
            f"{100 * line['mfu_bound']:.1f}%, and by the schedule "
            f"{100 * line['mfu_scheduled']:.1f}%."
        )
    if n := tables["uncounted_loops_of_flops"]:
        parts.append(f"{n} loops of unknown length with products were counted once.")
    return "\n\n".join(parts)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _gib(size: float | int) -> str:
    return f"{size / 2**30:.3g}"


def _seconds(value: float | int) -> str:
    return f"{value:.4g}"
