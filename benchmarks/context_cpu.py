"""Time of a token against the length of its context, on a CPU.

    taskset -c 0 python benchmarks/context_cpu.py --out=docs/context.png

The bench shape in float32 with random weights and one sequence. For each length an
engine of just that capacity reads a random prompt and draws tokens. The same with dense
attention stands beside it. Prints a table, and a straight line through the points: what
grows with the context is the indexer's scores over all keys (sparse), or all of
attention (dense). Writes the plot.
"""

import argparse
import dataclasses
import json
import statistics
import time

import jax
import matplotlib
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.inference import engine as engine_lib
from glm5_jax.model import transformer

matplotlib.use("Agg")
from matplotlib import pyplot

NUM_STEPS, CHUNK = 16, 1024


def measure(config: config_lib.ModelConfig, context: int, runs: int) -> float:
    """Returns the milliseconds of a token after `context` others, as a median."""
    capacity = context + (runs + 2) * NUM_STEPS
    config = dataclasses.replace(config, max_position_embeddings=capacity)
    init = jax.jit(transformer.init_params, static_argnums=0)
    machine = engine_lib.Engine(
        init(config, jax.random.key(0)),
        config,
        num_slots=1,
        capacity=capacity,
        chunk=CHUNK,
        num_steps=NUM_STEPS,
    )
    prompt = np.random.default_rng(0).integers(1, config.vocab_size, context).tolist()
    request = engine_lib.Request(0, prompt, capacity - context, temperature=0.0)
    completion = machine.submit(request)
    seconds = []
    while machine.num_pending:
        before, began = len(completion.tokens), time.perf_counter()
        machine.step()
        new = len(completion.tokens) - before
        if machine.dispatch is not None and machine.dispatch.kind == "decode":
            seconds.append((time.perf_counter() - began) / new)
    return 1e3 * statistics.median(seconds[1:])  # the first compiles


def plot(lengths: list[int], rows: dict[str, list[float]], path: str) -> None:
    """Draws a line for each form of attention."""
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, values in rows.items():
        axes.plot(lengths, values, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the context")
    axes.set_ylabel("milliseconds a token")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Parses flags; prints the table and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768")
    parser.add_argument("--runs", type=int, default=6, help="timed dispatches")
    parser.add_argument("--out", default="context.png", help="the plot's file")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    dense = dataclasses.replace(presets.BENCH, attention="dense")
    configs = {f"DSA, top {presets.BENCH.index_topk}": presets.BENCH, "dense": dense}
    rows: dict[str, list[float]] = {name: [] for name in configs}
    print(f"| context | {' | '.join(f'{name}, ms a token' for name in rows)} |")
    print("|---" * (len(rows) + 1) + "|")
    for length in lengths:
        for name, config in configs.items():
            rows[name].append(measure(config, length, args.runs))
        shown = " | ".join(f"{values[-1]:.2f}" for values in rows.values())
        print(f"| {length} | {shown} |", flush=True)
    for name, values in rows.items():
        slope, start = np.polyfit(lengths, values, 1)
        print(f"{name}: {start:.2f} ms + {slope * 1024:.3f} ms for every 1,024 tokens")
    plot(lengths, rows, args.out)
    print(json.dumps({"jax": jax.__version__, "runs": args.runs}))


if __name__ == "__main__":
    main()
