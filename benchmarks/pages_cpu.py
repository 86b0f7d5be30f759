"""A group of rollouts with one prompt, and conversations, with pages of the cache.

    taskset -c 0 python benchmarks/pages_cpu.py --group=16 --prompt=512
    taskset -c 0 python benchmarks/pages_cpu.py --turns=4

The bench shape in float32 with random weights. The first prints one JSON line for slots
and one for pages: tokens of prompts that were read, CPU seconds until every request has
its first token, and CPU seconds of all (the second of two runs, so nothing is
compiled). The second plays conversations in turn, whose pages do not fit the device:
one line without and one with host memory.
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


def play(machine: engine_lib.Engine, texts: list[list[int]], turns: int) -> dict:
    """Plays turns of all conversations, one after another."""
    texts, num_read = [[*text] for text in texts], 0
    began = time.process_time()
    for turn in range(turns):
        for i, text in enumerate(texts):
            id = turn * len(texts) + i
            completion = machine.submit(engine_lib.Request(id, text, NEW_TOKENS))
            while machine.num_pending:
                machine.step()
                assert machine.dispatch is not None
                if machine.dispatch.kind != "decode":
                    num_read += sum(len(part.tokens) for part in machine.dispatch.parts)
            text += completion.tokens
    return {
        "read": num_read,
        "restored_pages": machine.num_restored,
        "cpu_s": round(time.process_time() - began, 2),
    }


def conversations(params: dict, prompt: int, group: int, turns: int) -> None:
    """Prints a line without host memory and one with it."""
    capacity = -(-(prompt + turns * NEW_TOKENS) // PAGE_SIZE) * PAGE_SIZE
    rng = np.random.default_rng(0)
    texts = rng.integers(1, CONFIG.vocab_size, (2, group, prompt)).tolist()
    width = capacity // PAGE_SIZE
    for host_pages in (0, group * width):
        num_pages = max(group // 4, 1) * width  # for a quarter of the conversations
        limits = limits_lib.Limits(
            num_pages=num_pages, page_size=PAGE_SIZE, host_pages=host_pages
        )
        machine = engine_lib.Engine(
            params, CONFIG, num_slots=1, capacity=capacity, limits=limits
        )
        play(machine, texts[0], turns)  # compiles
        before = machine.num_restored
        result = play(machine, texts[1], turns)
        result["restored_pages"] -= before
        what = {"host_pages": host_pages, "conversations": group, "turns": turns}
        print(json.dumps(what | result), flush=True)


def main() -> None:
    """Parses flags and prints the JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", type=int, default=16, help="rollouts")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--turns", type=int, default=0, help="of conversations")
    args = parser.parse_args()
    init = jax.jit(transformer.init_params, static_argnums=0)
    params = init(CONFIG, jax.random.key(0))
    if args.turns:
        conversations(params, args.prompt, args.group, args.turns)
    else:
        rollouts(params, args.prompt, args.group)


def rollouts(params: dict, size: int, group: int) -> None:
    """Prints a line for slots and one for pages."""
    capacity = -(-(size + NEW_TOKENS) // PAGE_SIZE) * PAGE_SIZE
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, CONFIG.vocab_size, (2, size)).tolist()
    for num_pages in (0, group * capacity // PAGE_SIZE):
        machine = engine_lib.Engine(
            params,
            CONFIG,
            num_slots=group,
            capacity=capacity,
            limits=limits_lib.Limits(num_pages=num_pages, page_size=PAGE_SIZE),
        )
        results = [run(machine, prompt, group) for prompt in prompts]
        what = {"num_pages": num_pages, "group": group, "prompt": size}
        print(json.dumps(what | results[-1]), flush=True)


if __name__ == "__main__":
    main()
