"""Pushes weights from a trainer's process to engines in processes of their own.

    python benchmarks/weight_push_cpu.py --models=glm5_1m,glm5_10m,glm5_100m

Weights in bfloat16 with signs of the learning rate added, as an optimizer would. Two
engines on this machine decode without end, follow the store's folder, prove each
version, and take it between two dispatches. Prints one JSON line for each push: bytes,
milliseconds until the version is complete (`write_ms`), from then until the last engine
draws with it (`pickup_ms`; `read_ms` of them reads and checks), and the longest time
between an engine's dispatches around the push (`gap_ms`) beside the usual (`step_ms`).
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import events
from glm5_jax.inference import service as service_lib
from glm5_jax.model import transformer
from glm5_jax.rl.weight_store import manifest, reader, writer

CAPACITY, NUM_STEPS, SLOTS = 4096, 4, 4
RATES = (1e-6, 1e-5, 1e-3)
REPEATS = 3  # pushes of a rate, of which the median counts
POLL = 0.005  # seconds
AROUND = 0.5  # seconds after a push whose gaps count
SIGNS = np.array([-1, 1], np.float32)


def config_of(model: str) -> config_lib.ModelConfig:
    """Returns the config of a preset, computed in bfloat16."""
    return dataclasses.replace(presets.MODELS[model], dtype="bfloat16")


def engine(root: str, model: str) -> None:
    """Follows a store while it decodes; prints one JSON line for each version."""
    config, eye = config_of(model), reader.Reader(root)
    like = abstract(config)
    while (held := eye.follow()) is None:
        time.sleep(POLL)
    machine = engine_lib.Engine(
        reader.place(held, like),
        config,
        num_slots=SLOTS,
        capacity=CAPACITY,
        num_steps=NUM_STEPS,
    )
    service, times = service_lib.Service(machine), []

    def endless(event: events.Event) -> None:
        times.append(time.time())
        if isinstance(event, events.End):
            again()

    def again() -> None:
        request = engine_lib.Request(service.new_id(), [1, 2, 3], CAPACITY - 8)
        service.submit(request, endless)

    again()
    while len(times) < 20:
        time.sleep(POLL)
    print(json.dumps({"version": held.version}), flush=True)
    while True:
        began = time.time()
        found = eye.follow(held)
        if found is None:
            time.sleep(POLL)
            continue
        read, held = time.time(), found
        service.publish(reader.place(held, like), held.version).result()
        done = time.time()
        time.sleep(AROUND)
        gaps = [b - a for a, b in itertools.pairwise(times) if b > began]
        fields = {"version": held.version, "read": read - began, "done": done}
        steps = {"gap": max(gaps), "step": statistics.median(gaps)}
        print(json.dumps(fields | steps), flush=True)


def abstract(config: config_lib.ModelConfig) -> dict:
    """Returns shapes of the parameters that engines get, on one device."""
    shapes = jax.eval_shape(lambda: transformer.cast(fresh(config), config))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), shapes
    )


def fresh(config: config_lib.ModelConfig) -> dict:
    """Returns parameters of the trainer, in float32."""
    return transformer.init_params(config, jax.random.key(0))


def updates(config: config_lib.ModelConfig, params: dict) -> Iterator[tuple]:
    """Yields learning rates and the engines' parameters after a step of each."""
    rng, params = np.random.default_rng(0), jax.device_get(params)
    for rate in RATES:
        for _ in range(REPEATS):
            params = jax.tree.map(
                lambda x, rate=rate: x + np.float32(rate) * rng.choice(SIGNS, x.shape),
                params,
            )
            yield (
                rate,
                transformer.cast(jax.tree.map(jax.numpy.asarray, params), config),
            )


def push(
    store: writer.Writer, version: int, params: dict, engines: list[subprocess.Popen]
) -> dict[str, Any]:
    """Publishes a version, and returns its figures once all engines draw with it."""
    jax.block_until_ready(params)
    began = time.time()
    made = store.publish(params, version)
    written = time.time()
    assert isinstance(made, manifest.Manifest)
    seen = [json.loads(process.stdout.readline()) for process in engines]
    return {
        "mib": made.num_bytes / 2**20,
        "write_ms": 1e3 * (written - began),
        "pickup_ms": 1e3 * (max(x["done"] for x in seen) - written),
        "read_ms": 1e3 * max(x["read"] for x in seen),
        "gap_ms": 1e3 * max(x["gap"] for x in seen),
        "step_ms": 1e3 * max(x["step"] for x in seen),
    }


def measure(model: str, root: str, num_engines: int) -> None:
    """Prints the figures of one model."""
    config = config_of(model)
    params = jax.jit(fresh, static_argnums=0)(config)
    store = writer.Writer(root, full_every=10**9)
    whole = store.publish(transformer.cast(params, config), 0)
    assert whole is not None
    command = [sys.executable, __file__, f"--engine={root}", f"--models={model}"]
    engines = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(num_engines)
    ]
    try:
        for process in engines:
            process.stdout.readline()
        size = sum(x.size for x in jax.tree.leaves(params))
        found: dict[float, list[dict]] = {}
        for version, (rate, new) in enumerate(updates(config, params), 1):
            found.setdefault(rate, []).append(push(store, version, new, engines))
        store.restart()
        found[0.0] = [push(store, 10**6, new, engines)]
    finally:
        for process in engines:
            process.kill()
    for rate, rows in found.items():
        figures = {k: round(statistics.median(r[k] for r in rows), 2) for k in rows[0]}
        kind = f"after a step at {rate:g}" if rate else "whole"
        print(json.dumps({"model": model, "params": size, "push": kind} | figures))


def main() -> None:
    """Parses flags and prints the JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="glm5_1m,glm5_10m", help="presets")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument(
        "--root", default="/dev/shm", help="folder in which the store is made"
    )
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        engine(args.engine, args.models)
        return
    for model in args.models.split(","):
        with tempfile.TemporaryDirectory(dir=args.root) as folder:
            measure(model, str(pathlib.Path(folder, "weights")), args.engines)


if __name__ == "__main__":
    main()
