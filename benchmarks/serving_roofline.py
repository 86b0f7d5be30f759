"""Prints how fast all of GLM-5 could be served, and what its cache has room for.

    python benchmarks/serving_roofline.py

reads docs/serving_roofline.json, the figures of compiled decoding steps, and prints two
Markdown tables: of the compiled programs, and of estimates that follow from the step in
bfloat16 alone. New figures are of files that `python -m glm5_jax.aot --program=decode
--out=STEM` writes (docs/scaling.md has the commands); given, they replace the old ones:

    python benchmarks/serving_roofline.py --reports 32k.json 198k.json

--acceptance gives the share of rounds that keep the first, second, ... draft.
"""

import argparse
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from glm5_jax import presets
from glm5_jax.scale.estimate import serving

POINTS = pathlib.Path(__file__).parents[1] / "docs" / "serving_roofline.json"
KEPT = (
    *("config", "topology", "devices", "mesh", "sequence_length", "tokens"),
    *("hbm_limit_gib", "hbm_temp_gib", "hbm_code_gib", "hbm_traffic_gib", "flops"),
    *("collective_gib", "arguments_gib", "roofline_seconds", "device", "versions"),
    *("quantize", "num_drafts", "hbm_total_gib"),
)
FORMS = {"stored": "bfloat16", "fp8": "FP8", "w4a8": "W4A8"}  # by --quantize
# Z.ai's GLM-5 with three drafts, by position (vllm-project/vllm-ascend, issue 9803).
ACCEPTANCE = (0.891, 0.717, 0.549)
COMPILED = (
    *("tokens of each", "expert x tensor", "weights", "drafts", "sequences"),
    *("GiB of a chip", "HBM GiB", "ms: HBM", "links", "FLOPs"),
    *("tokens/s a chip", "pays from kept drafts", "cache tokens a chip"),
)
COLUMNS = (
    *("tokens of each", "expert x tensor", "weights"),
    *("few sequences", "ms", "tokens/s of each", "with 3 drafts"),
    *("as many as fit", "ms", "tokens/s a chip", "with 3 drafts"),
    "cache tokens, millions",
)


def main() -> None:
    """Reads and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reports", nargs="+", default=[], type=pathlib.Path)
    parser.add_argument("--points", type=pathlib.Path, default=POINTS)
    parser.add_argument("--acceptance", nargs="+", default=ACCEPTANCE, type=float)
    args = parser.parse_args()
    if args.reports:
        found = [json.loads(path.read_text()) for path in args.reports]
        points = [{k: report[k] for k in KEPT if k in report} for report in found]
        args.points.write_text(json.dumps(points, indent=1) + "\n")
    points = json.loads(args.points.read_text())
    print("Compiled:\n")
    print(table(COMPILED, compiled_rows(points, args.acceptance)))
    print("\nEstimated from the steps in bfloat16 without drafts:\n")
    print(table(COLUMNS, rows([p for p in points if _is_plain(p)], args.acceptance)))


def table(columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    """Returns a Markdown table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def compiled_rows(
    reports: list[dict], acceptance: Sequence[float]
) -> Iterator[tuple[str, ...]]:
    """Yields a row for each compiled program."""
    plain = {
        _key(report): serving.Measured.of_report(report)
        for report in reports
        if not report.get("num_drafts")
    }
    for report in reports:
        found, mesh = serving.Measured.of_report(report), report["mesh"]
        seconds, before = report["roofline_seconds"], plain.get(_key(report))
        is_drafted = found.num_drafts > 0 and before is not None
        total = report["hbm_temp_gib"] + report["hbm_code_gib"]
        total += sum(report["arguments_gib"].values())
        yield (
            f"{report['sequence_length']:,}",
            f"{mesh['expert']} x {mesh['tensor']}",
            FORMS[report.get("quantize", "stored")],
            str(found.num_drafts or "none"),
            f"{found.sequences:,}",
            f"{total:.1f}",
            f"{report['hbm_traffic_gib']:.1f}",
            *(f"{1e3 * seconds[kind]:.1f}" for kind in ("HBM", "ICI", "FLOPs")),
            f"{found.tokens_a_second(acceptance):.0f}",
            f"{found.break_even(before):.2f}" if is_drafted else "",
            f"{found.cache_tokens:,}",
        )


def _key(report: dict) -> tuple:
    """Returns what programs with and without drafts have in common."""
    form = report.get("quantize", "stored")
    return report["config"], report["sequence_length"], report["tokens"], form


def _is_plain(report: dict) -> bool:
    """Returns whether it is of a step in bfloat16 without drafts."""
    return report.get("quantize", "stored") == "stored" and not report.get("num_drafts")


def rows(reports: list[dict], acceptance: Sequence[float]) -> Iterator[tuple[str, ...]]:
    """Yields a row for each step and format, with and without drafts."""
    for report in reports:
        compiled, mesh = serving.Compiled.of_report(report), report["mesh"]
        for form in serving.FORMATS:
            few, many = (
                [
                    serving.step(presets.GLM5, compiled, form, drafts, sequences=number)
                    for drafts in ((), acceptance)
                ]
                for number in (int(compiled.sequences), None)
            )
            yield (
                f"{compiled.length:,}",
                f"{mesh['expert']} x {mesh['tensor']}",
                form.name,
                f"{few[0].sequences * compiled.caches:,}",
                f"{1e3 * few[0].seconds:.1f}",
                *(f"{step.tokens / step.seconds:.0f}" for step in few),
                f"{many[0].sequences * compiled.caches:,}",
                f"{1e3 * many[0].seconds:.1f}",
                *(f"{step.tokens_a_second(compiled):.0f}" for step in many),
                f"{many[0].cache_tokens / 1e6:.1f}",
            )


if __name__ == "__main__":
    main()
