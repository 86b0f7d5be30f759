"""Measures how long a save blocks a step and slows the next one.

    python benchmarks/checkpoint_cpu.py [--copies]

Trains the quickstart and saves after every third step. Prints one JSON line: medians of
step_seconds (of steps that no save is under way in), blocked_seconds (until save
returns), slowed_seconds (of the step while files are written and hashed, beyond
step_seconds), background_seconds (until the manifest is on the disk); the same of the
first save, which imports and compiles; and what a core hashes of 1 GiB in memory.
With --copies it makes copies that hosts keep (docs/checkpoints.md), not checkpoints.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import pathlib
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable

import jax
import numpy as np
from absl import logging

from glm5_jax import command_line
from glm5_jax.checkpoint import manifest, step_folder
from glm5_jax.training.run import state as run_lib

GIB = 2**30
HASHES = {
    "sha256": lambda data: hashlib.sha256(data),
    "blake2b": lambda data: hashlib.blake2b(data),
    "crc32": zlib.crc32,
}


def main() -> None:
    """Parses flags and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--copies", action="store_true")
    args = parser.parse_args()
    logging.set_verbosity(logging.ERROR)
    config = command_line.Arguments(config="configs/quickstart.py").train_config()
    with tempfile.TemporaryDirectory() as folder:
        if args.copies:
            host = f"{folder}/host"
            config = dataclasses.replace(
                config, host_copy_every=1, host_copy_folder=host
            )
        mesh = run_lib.make_mesh(config)
        run = run_lib.start(config, pathlib.Path(folder), mesh)
        with jax.set_mesh(mesh):
            times = _train(run, args.saves)
        bytes_saved = _bytes_saved(run)
        run.checkpoints.close()
    step_seconds = times.pop("step_seconds")
    result = {
        "jax": jax.__version__,
        "checkpoint_bytes": bytes_saved,
        "step_seconds": round(step_seconds, 4),
        **{name: round(seconds, 4) for name, seconds in times.items()},
        "blocked_of_a_step": round(times["blocked_seconds"] / step_seconds, 4),
        "hash_gb_per_second": _hash_rates(),
    }
    print(json.dumps(result))


def _train(run: run_lib.Run, num_saves: int) -> dict[str, float]:
    """Medians, the first save left out."""
    names = ("step_seconds", "blocked_seconds", "slowed", "background_seconds")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(2):
        _step(run)
    for _ in range(num_saves + 1):
        times["step_seconds"].append(_seconds(functools.partial(_step, run)))
        _step(run)
        save = run.copy if run.copies else run.save
        times["blocked_seconds"].append(_seconds(save))
        began = time.perf_counter()
        times["slowed"].append(_seconds(functools.partial(_step, run)))
        (run.copies or run.checkpoints).wait()
        times["background_seconds"].append(time.perf_counter() - began)
    medians = {name: statistics.median(all_[1:]) for name, all_ in times.items()}
    medians["slowed_seconds"] = medians.pop("slowed") - medians["step_seconds"]
    medians["first_blocked_seconds"] = times["blocked_seconds"][0]
    return medians


def _bytes_saved(run: run_lib.Run) -> int:
    """Returns the bytes of the last checkpoint or copy."""
    if run.copies:
        folder = pathlib.Path(run.config.host_copy_folder)
        return max(path.stat().st_size for path in folder.rglob("*.shards"))
    return sum(manifest.files(step_folder.find(run.workdir)).values())


def _step(run: run_lib.Run) -> None:
    batch, _ = run.feed.next(run.params, run.step)
    run.params, run.opt_state, metrics = run.train_step(
        run.params, run.opt_state, run.to_devices(batch)
    )
    run.step += 1
    jax.block_until_ready((run.params, metrics))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _hash_rates() -> dict[str, float]:
    data = np.random.default_rng(0).bytes(GIB)
    rates = {}
    for name, function in HASHES.items():
        best = min(_seconds(functools.partial(function, data)) for _ in range(2))
        rates[name] = round(GIB / best / 1e9, 2)
    return rates


if __name__ == "__main__":
    main()
