"""Host microseconds of an engine's step, with few and with many waiting requests.

    taskset -c 0 python benchmarks/scheduling_cpu.py --slots=64 --waiting=64,1024
    taskset -c 0 python benchmarks/scheduling_cpu.py --slots=64 --alone

The host plans a dispatch, makes its arrays and writes its results down; the programs
are timed apart and taken off. A one-layer model keeps them short. Prints one JSON line
for each number of waiting requests, with medians over the steps of each kind.

With --alone, one request of the bench shape decodes in engines of 1 and of many slots,
in turn: one JSON line for each, with the median of tokens per second.
"""

import argparse
import collections
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import programs
from glm5_jax.model import transformer

CONFIG = config_lib.ModelConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    first_k_dense_replace=1,
    num_nextn_predict_layers=0,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    attention="dense",
    max_position_embeddings=256,
    dtype="float32",
)
PROMPT, NEW_TOKENS, CHUNK = 48, 32, 16  # at most; a small chunk has few programs


class Timed:
    """A program that adds up the seconds of its calls."""

    def __init__(self, program: Callable[..., Any]) -> None:
        """Wraps a compiled program."""
        self.program, self.seconds = program, 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Runs the program to its end."""
        began = time.perf_counter()
        result = jax.block_until_ready(self.program(*args, **options))
        self.seconds += time.perf_counter() - began
        return result


def measure(num_slots: int, num_waiting: int) -> dict[str, Any]:
    """Returns the host's microseconds a step while requests replace each other."""
    params = transformer.init_params(CONFIG, jax.random.key(0))
    machine = engine_lib.Engine(
        params, CONFIG, num_slots=num_slots, capacity=PROMPT + NEW_TOKENS, chunk=CHUNK
    )
    machine.warm_up()
    programs.prefill, programs.decode = timed = (
        Timed(programs.prefill),
        Timed(programs.decode),
    )
    rng, seconds = np.random.default_rng(0), collections.defaultdict(list)
    began = time.perf_counter()
    for id in range(num_slots + num_waiting):
        prompt = rng.integers(1, 256, rng.integers(8, PROMPT)).tolist()
        new = int(rng.integers(4, NEW_TOKENS))
        machine.submit(engine_lib.Request(id, prompt, new))
    submit = (time.perf_counter() - began) / (num_slots + num_waiting)
    while machine.num_waiting > num_waiting // 2:
        before, began = sum(t.seconds for t in timed), time.perf_counter()
        machine.step()
        spent = time.perf_counter() - began - sum(t.seconds for t in timed) + before
        assert machine.dispatch is not None
        seconds[machine.dispatch.kind].append(spent)
    programs.prefill, programs.decode = (t.program for t in timed)
    return {
        "slots": num_slots,
        "waiting": num_waiting,
        "submit_us": round(1e6 * submit, 1),
        "steps": {kind: len(values) for kind, values in seconds.items()},
        "host_us_per_step": {
            kind: round(1e6 * statistics.median(values))
            for kind, values in seconds.items()
        },
    }


def alone(num_slots: int, runs: int = 7) -> list[dict[str, Any]]:
    """Returns the decoded tokens per second of one request, with 1 slot and many."""
    config, prompt, new = presets.BENCH, 256, 128
    params = transformer.init_params(config, jax.random.key(0))
    machines = {
        n: engine_lib.Engine(params, config, num_slots=n, capacity=prompt + new)
        for n in (1, num_slots)
    }
    rng, rates = np.random.default_rng(0), collections.defaultdict(list)
    for id in range(runs + 1):  # the first one compiles
        tokens = rng.integers(1, config.vocab_size, prompt).tolist()
        for n, machine in machines.items():
            machine.submit(engine_lib.Request(id, tokens, new))
            machine.step()  # reads the prompt and draws a token
            began = time.perf_counter()
            while machine.num_pending:
                machine.step()
            rates[n].append((new - 1) / (time.perf_counter() - began))
    return [
        {"slots": n, "tokens_per_second": round(statistics.median(found[1:]), 1)}
        for n, found in rates.items()
    ]


def main() -> None:
    """Parses flags and prints the JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--waiting", default="64,1024", help="numbers, with commas")
    parser.add_argument("--alone", action="store_true", help="one request only")
    args = parser.parse_args()
    if args.alone:
        for line in alone(args.slots):
            print(json.dumps(line), flush=True)
        return
    for number in args.waiting.split(","):
        print(json.dumps(measure(args.slots, int(number))), flush=True)


if __name__ == "__main__":
    main()
