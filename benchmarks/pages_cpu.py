"""A group of rollouts with one prompt, with slots and with pages of the cache.

    taskset -c 0 python benchmarks/pages_cpu.py --group=16 --prompt=512

The bench shape in float32 with random weights. Prints one JSON line for slots and one
for pages: tokens of prompts that were read, CPU seconds until every request has its
first token, and CPU seconds of all (the second of two runs, so nothing is compiled).
"""

import argparse
import json
import time
from typing import Any

import jax
import numpy as np

from glm5_jax import presets
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import limits as limits_lib
from glm5_jax.model import transformer

CONFIG = presets.BENCH
NEW_TOKENS, PAGE_SIZE = 32, 64


def run(machine: engine_lib.Engine, prompt: list[int], group: int) -> dict[str, Any]:
    """Samples the group once."""
    num_read, first, began = 0, 0.0, time.process_time()
    completions = [
        machine.submit(engine_lib.Request(i, prompt, NEW_TOKENS)) for i in range(group)
    ]
    while machine.num_pending:
        machine.step()
        assert machine.dispatch is not None
        if machine.dispatch.kind != "decode":
            num_read += sum(len(part.tokens) for part in machine.dispatch.parts)
        if not first and all(completion.tokens for completion in completions):
            first = time.process_time() - began
    return {
        "read": num_read,
        "first_token_cpu_s": round(first, 2),
        "cpu_s": round(time.process_time() - began, 2),
    }


def main() -> None:
    """Parses flags and prints the JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", type=int, default=16, help="rollouts")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    args = parser.parse_args()
    init = jax.jit(transformer.init_params, static_argnums=0)
    params = init(CONFIG, jax.random.key(0))
    capacity = -(-(args.prompt + NEW_TOKENS) // PAGE_SIZE) * PAGE_SIZE
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, CONFIG.vocab_size, (2, args.prompt)).tolist()
    for num_pages in (0, args.group * capacity // PAGE_SIZE):
        machine = engine_lib.Engine(
            params,
            CONFIG,
            num_slots=args.group,
            capacity=capacity,
            limits=limits_lib.Limits(num_pages=num_pages, page_size=PAGE_SIZE),
        )
        results = [run(machine, prompt, args.group) for prompt in prompts]
        what = {"num_pages": num_pages, "group": args.group, "prompt": args.prompt}
        print(json.dumps(what | results[-1]), flush=True)


if __name__ == "__main__":
    main()
