"""Compares quantization-aware training with rounding after training, seed by seed.

python benchmarks/quantization_aware.py --init_from=runs/quickstart --text=README.md

Both arms train on from the same weights, over the same batches; one computes with
rounded weights. Both are then rounded, and score a text. Negative differences are gains
of quantization-aware training. It prints a line a seed, and the mean with its 95%
interval. On two cores a seed of 100 steps takes about ten minutes.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from glm5_jax import intervals

ROOT = pathlib.Path(__file__).parent.parent


def run(command: str, *flags: str) -> str:
    """Runs a command of the package, and returns what it prints."""
    arguments = [sys.executable, "-m", f"glm5_jax.{command}", *flags]
    done = subprocess.run(arguments, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode()


def bits_per_byte(folder: pathlib.Path, text: str, scheme: str) -> float:
    """Scores a text with the weights of a run, rounded to a scheme."""
    flags = f"--checkpoint={folder}", f"--text={text}", f"--quantize={scheme}"
    return json.loads(run("evaluate", *flags).splitlines()[-1])["bits_per_byte"]


def main() -> None:
    """Trains both arms for every seed, and prints the scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--init_from", required=True, help="run to train on from")
    parser.add_argument("--text", required=True, help="held-out text file")
    parser.add_argument("--config", default=str(ROOT / "configs" / "quickstart.py"))
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num_steps", type=int, default=100)
    parser.add_argument("--workdir", required=True, help="folder for the runs")
    parser.add_argument("--override", action="append", default=[], help="model.X=v")
    args = parser.parse_args()
    args.text = str(pathlib.Path(args.text).absolute())
    differences = []
    print(
        "| seed | before | rounded after | trained with rounding |\n|---|---|---|---|"
    )
    for seed in range(args.seeds):
        scores = {}
        for arm in ("none", args.scheme):
            folder = pathlib.Path(args.workdir).absolute() / f"{arm}_{seed}"
            run(
                "train",
                f"--config={args.config}",
                f"--workdir={folder}",
                f"--config.init_from={args.init_from}",
                f"--config.quantization_aware={arm}",
                f"--config.seed={seed}",
                f"--config.num_steps={args.num_steps}",
                "--config.eval_every=0",
                "--config.checkpoint_every=0",
                "--config.sample_tokens=0",
                *(f"--config.{x}" for x in args.override),
            )
            scores[arm] = bits_per_byte(folder, args.text, args.scheme)
            if arm == "none":
                before = bits_per_byte(folder, args.text, "stored")
        after, aware = scores["none"], scores[args.scheme]
        differences.append(aware - after)
        print(f"| {seed} | {before:.4f} | {after:.4f} | {aware:.4f} |", flush=True)
    found = intervals.mean_interval(differences)
    print(
        f"difference {found.mean:+.5f} ({found.low:+.5f} to {found.high:+.5f}) bits "
        f"per byte, n = {args.seeds}"
    )


if __name__ == "__main__":
    main()
