"""Agents whose texts do not all fit the cache: as many at once as may be, or as fit.

    python benchmarks/concurrency_cpu.py [--at_once=24] [--fit=6] [--groups=16]

The orchestrator of asynchronous RL plays episodes of 6 turns, each with 100 tokens of
observations after a call of 0.1 s, at an engine with pages for --fit whole episodes.
The model is the bench shape with two layers and random weights. Prints one JSON line
with --at_once episodes under way all the time, and one where window.py adapts their
number: seconds, tokens of prompts that were read, and what the orchestrator says. The
first groups compile and find the number, and are not counted.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import time
from typing import Any

import jax

from glm5_jax import presets
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.environments import protocol
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import limits as limits_lib
from glm5_jax.inference import service as service_lib
from glm5_jax.model import transformer
from glm5_jax.rl import episodes, pump
from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import orchestrator

CONFIG = dataclasses.replace(presets.BENCH, num_hidden_layers=2)
TURNS, OBSERVED, DRAWN, SECONDS = 6, 100, 8, 0.1
GROUP_SIZE, SLOTS, PAGE_SIZE, CAPACITY = 4, 8, 64, 768
PAGES_OF_EPISODE = CAPACITY // PAGE_SIZE


class Reader:
    """Tasks that show a text after each turn, which nothing depends on."""

    name = "reader"

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task."""
        said = {"role": "user", "content": f"{index:08}".ljust(OBSERVED, ".")}
        return protocol.Task(f"reader/{split}/{seed}/{index}", (said,))

    def environment(self) -> "Reader":
        """Returns an environment of its own for an episode."""
        return Reader()

    async def reset(self, task: protocol.Task) -> tuple:
        """Begins."""
        self._number, self._turn = task.id.rpartition("/")[2], 0
        return task.messages

    async def step(self, message: dict) -> protocol.StepResult:
        """Shows the next text, which begins as no other does."""
        await asyncio.sleep(SECONDS)
        self._turn += 1
        is_over = self._turn == TURNS
        text = f"{self._number}/{self._turn}".ljust(OBSERVED, ".")
        shown = () if is_over else ({"role": "user", "content": text},)
        reward = protocol.Reward(1.0) if is_over else None
        return protocol.StepResult(shown, reward, is_over, False)

    async def close(self) -> None:
        """Frees nothing."""


async def play(
    service: service_lib.Service, args: argparse.Namespace, is_adapted: bool
) -> dict[str, Any]:
    """Returns the figures of some groups, after as many that are not counted."""
    taskset = Reader()
    settings = episodes.Settings(
        max_new_tokens=DRAWN,
        max_turns=TURNS,
        num_concurrent=args.at_once,
        continue_truncated=True,
    )
    tokenizer = tokenizer_lib.named("byte_chat")
    template = templates.Template(tokenizer, "glm5", False, False)

    def jobs(index: int) -> list[episodes.Job]:
        index += 10**6 * is_adapted  # other texts
        first = index * GROUP_SIZE
        return [
            episodes.Job(taskset.task("train", 0, index), index, TURNS * number)
            for number in range(first, first + GROUP_SIZE)
        ]

    engine = pump.Pump(service)
    context = episodes.Context(engine, taskset, template, settings)
    groups = groups_lib.Groups(4, 1_000)
    made = orchestrator.Orchestrator(context, jobs, groups, drop_equal=False)
    if not is_adapted:
        made.window.drew = lambda request, completion: None
    running = asyncio.create_task(made.run())
    try:
        for part in range(2):
            before, began = service.stats(), time.perf_counter()
            made.figures()
            for step in range(args.groups // groups.batch_size):
                await made.take(600.0)
                made.published(part * (args.groups // groups.batch_size) + step + 1)
            seconds, after = time.perf_counter() - began, service.stats()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        engine.close()
    return {
        "is_adapted": is_adapted,
        "seconds": round(seconds, 1),
        "read": after.prompt_tokens - before.prompt_tokens,
        "drawn": after.drawn_tokens - before.drawn_tokens,
        "preemptions": after.preemptions - before.preemptions,
        **made.figures(),
    }


def main() -> None:
    """Parses flags and prints two JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at_once", type=int, default=24, help="episodes")
    parser.add_argument("--fit", type=int, default=6, help="episodes in the cache")
    parser.add_argument("--groups", type=int, default=16, help="of four episodes")
    args = parser.parse_args()
    params = jax.jit(transformer.init_params, static_argnums=0)(
        CONFIG, jax.random.key(0)
    )
    limits = limits_lib.Limits(
        num_pages=args.fit * PAGES_OF_EPISODE, page_size=PAGE_SIZE
    )
    for is_adapted in (False, True):
        machine = engine_lib.Engine(
            params,
            CONFIG,
            num_slots=SLOTS,
            capacity=CAPACITY,
            chunk=256,
            limits=limits,
        )
        service = service_lib.Service(machine)
        with contextlib.closing(service):
            print(json.dumps(asyncio.run(play(service, args, is_adapted))), flush=True)


if __name__ == "__main__":
    main()
