"""Our cached decoding of the bench shape on a CPU, as benchmarks/transformers_cpu.py.

    taskset -c 0 python benchmarks/decode_cpu.py --batch=8
    taskset -c 0 python benchmarks/decode_cpu.py --mixed

Prompts of 256 random tokens, 128 new ones, greedy, float32, random weights. Prints one
JSON line; rates are medians over the timed runs, with and without the prefill. With
--mixed, 16 requests of mixed lengths come at once, or one after another.
"""

import argparse
import json
import statistics
import time

import jax
import numpy as np
from decode_lengths import MIXED, NEW_TOKENS, PROMPT

from glm5_jax import presets
from glm5_jax.inference import engine
from glm5_jax.model import transformer
from glm5_jax.training.run import host_memory

CONFIG = presets.BENCH


def mixed(num_runs: int, in_turn: bool) -> dict[str, float]:
    """Returns the rate of MIXED by an engine with a slot for each request."""
    init = jax.jit(transformer.init_params, static_argnums=0)
    params, rng = init(CONFIG, jax.random.key(0)), np.random.default_rng(0)
    capacity = max(map(sum, MIXED))
    machine = engine.Engine(params, CONFIG, num_slots=len(MIXED), capacity=capacity)
    total, rates = sum(new for _, new in MIXED), []
    for _ in range(1 + num_runs):
        prompts = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n, _ in MIXED]
        began = time.perf_counter()
        for id, (prompt, (_, new)) in enumerate(zip(prompts, MIXED, strict=True)):
            machine.submit(engine.Request(id, prompt, new, temperature=0.0))
            while in_turn and machine.num_pending:
                machine.step()
        while machine.num_pending:
            machine.step()
        rates.append(total / (time.perf_counter() - began))
    return {"tokens_per_second": round(statistics.median(rates[1:]), 1)}


def main() -> None:
    """Parses flags and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--mixed", action="store_true", help="16 requests of MIXED")
    parser.add_argument("--in_turn", action="store_true", help="one after another")
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    if args.mixed:
        print(json.dumps({"jax": jax.__version__} | mixed(args.runs, args.in_turn)))
        return
    init = jax.jit(transformer.init_params, static_argnums=0)
    params = init(CONFIG, jax.random.key(0))
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, CONFIG.vocab_size, (args.batch, PROMPT)).tolist()

    def seconds(new_tokens: int) -> np.ndarray:
        """Wall and CPU seconds of one call."""
        began = time.perf_counter(), time.process_time()
        engine.generate(
            params, CONFIG, prompts, max_new_tokens=new_tokens, temperature=0.0
        )
        now = time.perf_counter(), time.process_time()
        return np.subtract(now, began)

    seconds(1), seconds(NEW_TOKENS)  # compiles
    runs = [(seconds(1), seconds(NEW_TOKENS)) for _ in range(args.runs)]
    whole, cpu = np.median([whole for _, whole in runs], axis=0)
    decode = statistics.median(whole[0] - prefill[0] for prefill, whole in runs)
    tokens = args.batch * NEW_TOKENS
    result = {
        "jax": jax.__version__,
        "batch": args.batch,
        "tokens_per_second": round(tokens / whole, 1),
        "tokens_per_cpu_second": round(tokens / cpu, 1),
        "without_prefill_tokens_per_second": round((tokens - args.batch) / decode, 1),
        "peak_rss_gib": host_memory.peak_gib(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
