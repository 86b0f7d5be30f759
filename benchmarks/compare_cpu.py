"""Ours and the peers in turn on the same core: rates, ratios and peak memory.

    python benchmarks/compare_cpu.py train --transformers=/tmp/peer/bin/python \
        --maxtext=/tmp/maxtext/bin/python
    python benchmarks/compare_cpu.py decode --transformers=/tmp/peer/bin/python
    python benchmarks/compare_cpu.py mixed --transformers=/tmp/peer/bin/python

The interpreters are those of the environments that the peers' programs ask for. Every
round runs each once, so that a busy machine slows all alike; prints a line for each
run, then the medians and our ratio to them.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

HERE = pathlib.Path(__file__).parent
TRAIN = "--config=configs/bench_cpu.py:like_transformers"


def commands(args: argparse.Namespace, folder: str) -> Iterator[tuple[str, list[str]]]:
    """Name and command line of every program of a round."""
    if args.what == "train":
        train = ["-m", "glm5_jax.train", TRAIN, f"--workdir={folder}"]
        yield "ours", [sys.executable, *train]
        if args.transformers:
            yield "transformers", [args.transformers, str(HERE / "transformers_cpu.py")]
        if args.maxtext:
            yield "maxtext", [args.maxtext, str(HERE / "maxtext_cpu.py")]
        return
    if args.what == "mixed":
        ours = [sys.executable, str(HERE / "decode_cpu.py"), "--mixed"]
        yield "ours", ours
        yield "ours in turn", [*ours, "--in_turn"]
        if args.transformers:
            program = [str(HERE / "transformers_cpu.py"), "--mixed"]
            yield "transformers in turn", [args.transformers, *program]
        return
    for batch in (1, 8):
        flag = f"--batch={batch}"
        yield (
            f"ours, batch {batch}",
            [sys.executable, str(HERE / "decode_cpu.py"), flag],
        )
        if args.transformers:
            program = [str(HERE / "transformers_cpu.py"), "--decode", flag]
            yield f"transformers, batch {batch}", [args.transformers, *program]


def run(command: list[str], core: int) -> dict[str, float]:
    """Runs one program on a core; its figures."""
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *command],
        cwd=HERE.parent,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate()
    if process.returncode:
        sys.exit(err[-2000:])
    figures = json.loads(out)
    return {key.removeprefix("perf/"): value for key, value in figures.items()}


def main() -> None:
    """Parses flags, runs the rounds and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("train", "decode", "mixed"))
    parser.add_argument("--transformers", help="interpreter that has transformers")
    parser.add_argument("--maxtext", help="interpreter that has MaxText")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=0)
    args = parser.parse_args()
    measured: dict[str, list[dict]] = {}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, command in commands(args, folder):
                figures = run(command, args.core)
                measured.setdefault(name, []).append(figures)
                row = {k: figures.get(k) for k in ("tokens_per_second", *COLUMNS)}
                print(f"{name:22}", json.dumps(row), flush=True)
    rates = {
        name: statistics.median(figures["tokens_per_second"] for figures in runs)
        for name, runs in measured.items()
    }
    for name, rate in rates.items():
        ours = rates["ours" + name[len(name.partition(",")[0]) :]]
        print(f"{name:22} {rate:8.1f} tokens/s, ours {ours / rate:5.2f} x")


COLUMNS = (
    "tokens_per_cpu_second",
    "without_prefill_tokens_per_second",
    "peak_rss_gib",
    "compile_seconds",
)

if __name__ == "__main__":
    main()
