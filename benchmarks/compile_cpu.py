"""Seconds to trace and compile the quickstart's training step at several depths.

    python benchmarks/compile_cpu.py --layers=6,78 --rounds=3

Layers run under a scan, so depth must not cost compile time. Prints one JSON line a
round, then the medians and their ratio to the first depth.
"""

import argparse
import dataclasses
import json
import statistics
import time

import jax
import jax.numpy as jnp

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib
from glm5_jax.config import files
from glm5_jax.model import transformer
from glm5_jax.training import step as step_lib

CONFIG = "configs/quickstart.py"


def seconds(config: config_lib.TrainConfig) -> dict[str, float]:
    """Traces and compiles a step for abstract arguments."""
    jax.clear_caches()
    params = transformer.abstract_params(config.model)
    optimizer = step_lib.make_optimizer(config)
    state = jax.eval_shape(optimizer.init, params)
    shape = (config.data.batch_size, config.data.sequence_length)
    ints = jax.ShapeDtypeStruct(shape, jnp.int32)
    names = ("tokens", "targets", "segment_ids", "positions")
    batch = dict.fromkeys(names, ints)
    batch["loss_mask"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    step = step_lib.make_train_step(config, optimizer)
    began = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch)
    traced = time.perf_counter()
    lowered.compile()
    compiled = time.perf_counter() - traced
    return {"trace": round(traced - began, 2), "compile": round(compiled, 2)}


def main() -> None:
    """Parses flags and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="6,78", help="depths, the first is 1.0")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    base = command_line.resolve(files.load(CONFIG), [])
    depths = [int(number) for number in args.layers.split(",")]
    found: dict[int, list[float]] = {depth: [] for depth in depths}
    for _ in range(args.rounds):
        for depth in depths:
            model = dataclasses.replace(presets.GLM5_1M, num_hidden_layers=depth)
            times = seconds(dataclasses.replace(base, model=model))
            found[depth].append(sum(times.values()))
            print(json.dumps({"layers": depth} | times), flush=True)
    first = statistics.median(found[depths[0]])
    for depth, values in found.items():
        middle = statistics.median(values)
        print(f"{depth} layers: {middle:.1f} s, {middle / first:.2f} x")


if __name__ == "__main__":
    main()
