"""Prints how fast all of GLM-5 could be served, and what its cache has room for.

    python benchmarks/serving_roofline.py

reads docs/serving_roofline.json, the figures of compiled decoding steps, and prints a
Markdown table. New figures are of files that `python -m glm5_jax.aot --program=decode
--out=STEM` writes (docs/scaling.md has the commands); given, they replace the old ones:

    python benchmarks/serving_roofline.py --reports 32k.json 198k.json
"""

import argparse
import json
import pathlib
from collections.abc import Iterator

from glm5_jax import presets
from glm5_jax.scale.estimate import serving

POINTS = pathlib.Path(__file__).parents[1] / "docs" / "serving_roofline.json"
KEPT = (
    *("config", "topology", "devices", "mesh", "sequence_length", "tokens"),
    *("hbm_limit_gib", "hbm_temp_gib", "hbm_code_gib", "hbm_traffic_gib", "flops"),
    *("collective_gib", "arguments_gib", "roofline_seconds", "device", "versions"),
)
# Z.ai's GLM-5 with three drafts, by position (vllm-project/vllm-ascend, issue 9803).
ACCEPTANCE = (0.891, 0.717, 0.549)
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
    args = parser.parse_args()
    if args.reports:
        found = [json.loads(path.read_text()) for path in args.reports]
        points = [{name: report[name] for name in KEPT} for report in found]
        args.points.write_text(json.dumps(points, indent=1) + "\n")
    print(table(json.loads(args.points.read_text())))


def table(reports: list[dict]) -> str:
    """Returns a Markdown table with a row for each program, format and speculation."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows(reports)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows(reports: list[dict]) -> Iterator[tuple[str, ...]]:
    """Yields the rows."""
    for report in reports:
        compiled, mesh = serving.Compiled.of_report(report), report["mesh"]
        for form in serving.FORMATS:
            few, many = (
                [
                    serving.step(presets.GLM5, compiled, form, drafts, sequences=number)
                    for drafts in ((), ACCEPTANCE)
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
