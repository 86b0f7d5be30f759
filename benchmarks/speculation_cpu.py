"""Speculative decoding of a trained model: accepted drafts, and tokens a second.

    python -m glm5_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
    taskset -c 0 python benchmarks/speculation_cpu.py --checkpoint=runs/quickstart

Continues pieces of a text with several numbers of drafts, and with a number that the
engine chooses by itself ("adapts"). Prints a table for each number of sequences at
once. "a round" is the mean number of tokens that a pass of the model draws, "kept" the
share of rounds that keep the first 1, 2, ... drafts. Times are medians of runs that
alternate between the rows. The first half of the runs does not count: they compile, and
the engine that adapts measures.
"""

import argparse
import dataclasses
import pathlib
import statistics
import textwrap
import time
from typing import Any

from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import limits as limits_lib
from glm5_jax.weights import loading

NO_DRAFTS = limits_lib.Limits()


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    machine: engine_lib.Engine
    seconds: list[float] = dataclasses.field(default_factory=list)
    num_drawn: list[int] = dataclasses.field(default_factory=list)

    def run(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> Any:
        """Continues all prompts; returns the tokens."""
        began = time.perf_counter()
        done = [
            self.machine.submit(
                engine_lib.Request(i, ids, new_tokens, temperature=temperature)
            )
            for i, ids in enumerate(prompts)
        ]
        while self.machine.num_pending:
            self.machine.step()
        self.seconds.append(time.perf_counter() - began)
        self.num_drawn.append(sum(len(completion.tokens) for completion in done))
        return [completion.tokens for completion in done]

    @property
    def rate(self) -> float:
        """Returns tokens a second, the median of the second half of the runs."""
        first = len(self.seconds) // 2
        pairs = zip(self.num_drawn[first:], self.seconds[first:], strict=True)
        return statistics.median(n / s for n, s in pairs)


def limits_of(names: list[int]) -> dict[str, limits_lib.Limits]:
    """Returns the limits of the rows: without drafts, with some, and adapting."""
    found = {"0": NO_DRAFTS}
    for number in names:
        found[f"{number}"] = limits_lib.Limits(num_drafts=number, adapts_drafts=False)
    found["adapts"] = limits_lib.Limits(num_drafts=max(names))
    return found


def main() -> None:
    """Parses flags and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", required=True, help="a run with a tokenizer")
    parser.add_argument("--text", default=textwrap.__file__, help="file of prompts")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--at_once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt_tokens", type=int, default=96)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=16)
    args = parser.parse_args()
    logging.set_verbosity(logging.INFO)  # the engine says why it changes the number
    config, params, tokenizer = loading.load_model(args.checkpoint, (), None)
    if tokenizer is None:
        raise config_lib.InputError("--checkpoint must have a tokenizer.")
    ids = tokenizer.encode(pathlib.Path(args.text).read_text("utf-8"))
    for at_once in args.at_once:
        starts = range(0, at_once * args.prompt_tokens, args.prompt_tokens)
        prompts = [ids[start : start + args.prompt_tokens] for start in starts]
        cases = []
        for name, limits in limits_of(args.drafts).items():
            machine = engine_lib.Engine(
                params,
                config,
                num_slots=at_once,
                capacity=engine_lib.bucket(args.prompt_tokens + args.new_tokens),
                limits=limits,
            )
            cases.append(Case(name, machine))
        for _ in range(args.repeats):
            texts = [
                case.run(prompts, args.new_tokens, args.temperature) for case in cases
            ]
            assert all(text == texts[0] for text in texts), "drafts changed a text"
        print(f"\n{at_once} at once, temperature {args.temperature}\n")
        print("| drafts | a round | kept | tokens a second | gain |")
        print("|---|---|---|---|---|")
        for case in cases:
            found = case.machine.drafter.acceptance
            kept = " ".join(f"{share:.2f}" for share in found.shares)
            gain = case.rate / cases[0].rate
            name = case.name
            if name == "adapts":
                name = f"adapts: now {found.num_drafts}"
            print(
                f"| {name} | {found.length:.2f} | {kept} | {case.rate:.0f} | "
                f"{gain:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
