"""Compares quantization-aware training with rounding after training, seed by seed.

python benchmarks/quantization_aware.py --workdir=runs/aware

For each seed it teaches a model a task by supervised fine-tuning, and trains on from
there in two arms, over the same batches; one arm computes with rounded weights. Both
are then rounded, and score held-out conversations in nats per token. A seed draws the
initial weights, the batches of the start, and those of the arms. It prints a line a
seed, and with 95% intervals the mean of the differences (negative ones are gains of
quantization-aware training) and the geometric mean of the ratios. The default, three
seeds, takes ten minutes of a core.
"""

import argparse
import math
import pathlib
import subprocess
import sys

import numpy as np

from glm5_jax import command_line, intervals
from glm5_jax import config as config_lib
from glm5_jax.config import files
from glm5_jax.data.rows import sft
from glm5_jax.inference import scoring
from glm5_jax.weights import quantized_loading

ROOT = pathlib.Path(__file__).parent.parent
OTHER_BATCHES = 1000  # added to the seed of a start, for that of its arms
ARMS = "none", "aware"


def train(config: str, folder: pathlib.Path, *settings: str) -> pathlib.Path:
    """Trains a model in a folder, without evaluations; returns the folder."""
    quiet = "eval_every=0", "checkpoint_every=0", "sample_tokens=0", "stop_metric="
    flags = [f"--config.{x}" for x in (*quiet, "eval_success=False", *settings)]
    command = [sys.executable, "-m", "glm5_jax.train", f"--config={config}"]
    command += [f"--workdir={folder}", *flags]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def held_out(data: config_lib.DataConfig) -> scoring.Rows:
    """Returns the rows of all held-out conversations."""
    batches = [*sft.make_pipeline(data, seed=0).eval_batches(sys.maxsize)]
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


def nll(folder: pathlib.Path, rows: scoring.Rows, scheme: str) -> float:
    """Returns the nats per token of a run's model, rounded to a scheme."""
    config, params, _ = quantized_loading.load_model(folder, scheme=scheme)
    return scoring.summarize(rows, scoring.score(params, config, rows))["nll"]


def main() -> None:
    """Trains the start and both arms of every seed, and prints the scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", required=True, help="folder for the runs")
    parser.add_argument("--config", default="configs/small_sft_reverse.py")
    parser.add_argument("--scheme", default="int4")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--start_steps", type=int, default=400)
    parser.add_argument("--num_steps", type=int, default=200, help="of an arm")
    parser.add_argument("--learning_rate", default="1e-3", help="of an arm; falls to 0")
    args = parser.parse_args()
    rows = held_out(command_line.resolve(files.load(args.config)).data)
    root, pairs = pathlib.Path(args.workdir).absolute(), []
    print("| seed | before | rounded after | trained with rounding |")
    print("|---|---|---|---|", flush=True)
    for seed in range(args.seeds):
        start = train(
            args.config,
            root / f"start_{seed}",
            f"seed={seed}",
            f"num_steps={args.start_steps}",
        )
        ours = [
            train(
                args.config,
                root / f"{arm}_{seed}",
                f"init_from={start}",
                f"seed={seed + OTHER_BATCHES}",
                f"num_steps={args.num_steps}",
                f"quantization_aware={scheme}",
                f"optim.learning_rate={args.learning_rate}",
                "optim.end_learning_rate=0",
                "optim.schedule=linear",
            )
            for arm, scheme in zip(ARMS, ("none", args.scheme), strict=True)
        ]
        before = nll(ours[0], rows, quantized_loading.STORED)
        after, aware = (nll(folder, rows, args.scheme) for folder in ours)
        pairs.append((after, aware))
        print(f"| {seed} | {before:.5f} | {after:.5f} | {aware:.5f} |", flush=True)
    found = intervals.mean_interval([aware - after for after, aware in pairs])
    print(
        f"difference {found.mean:+.5f} ({found.low:+.5f} to {found.high:+.5f}) nats a "
        f"token, n = {args.seeds}"
    )
    logs = intervals.mean_interval([math.log(aware / after) for after, aware in pairs])
    mean, low, high = map(math.exp, (logs.mean, logs.low, logs.high))
    print(f"ratio {mean:.3f} ({low:.3f} to {high:.3f}), n = {args.seeds}")


if __name__ == "__main__":
    main()
