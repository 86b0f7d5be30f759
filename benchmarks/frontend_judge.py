"""Judges front-end submissions and compares the judge with the oracle.

    python benchmarks/frontend_judge.py [--numbers=3] [--error_rate=0.06]
        [--base_url=URL --model=NAME] [--out=FOLDER]
    python benchmarks/frontend_judge.py --verify=FOLDER

Submissions are the reference of every brief and its flawed versions. The judge is a
script that errs at the given rate or, with --base_url, a model behind an
OpenAI-compatible endpoint. Prints one JSON object: build success, checklist and
instance rates, agreement and Spearman's rank correlation, labels that the oracle
confirms, and, where --out names a folder, what a verification of its traces finds.
--verify plays the traces of such a folder again, without a model; it ends with 1 if
something is different.
"""

import argparse
import asyncio
import json
import pathlib
import sys
import time

from glm5_jax.environments import browser, endpoint
from glm5_jax.environments.worlds.frontend import (
    draft,
    families,
    judge,
    oracle,
    rates,
    scripted,
    traces,
)

_AT_ONCE = 3  # submissions


def main() -> None:
    """Judges the submissions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numbers", type=int, default=3)
    parser.add_argument("--families", default=",".join(sorted(families.ALL)))
    parser.add_argument("--error_rate", type=float, default=0.06)
    parser.add_argument("--base_url", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--sees", action="store_true", help="gives it screenshots")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--verify", type=pathlib.Path, help="folder of stored traces")
    arguments = parser.parse_args()
    renderer = browser.Browser()
    try:
        if arguments.verify:
            figures = asyncio.run(verify(renderer, arguments.verify))
        else:
            figures = asyncio.run(_run(renderer, arguments))
    finally:
        renderer.close()
    print(json.dumps(figures, indent=2))
    if arguments.verify and figures["verification_differs_in"]:
        sys.exit(1)


async def verify(renderer: browser.Browser, folder: pathlib.Path) -> dict:
    """Plays stored traces again, and returns what is different."""
    began, wrong, count = time.perf_counter(), [], 0
    for trace in traces.read(folder):
        wrong += await traces.verify(renderer, trace)
        count += 1
    seconds = round(time.perf_counter() - began)
    told = {"verified": count, "verification_differs_in": wrong}
    return {**told, "verification_seconds": seconds}


async def _run(renderer: browser.Browser, arguments: argparse.Namespace) -> dict:
    gate = asyncio.Semaphore(_AT_ONCE)
    began = time.perf_counter()
    names = arguments.families.split(",")
    briefs = [(name, n) for name in names for n in range(arguments.numbers)]
    work = [
        _judged(renderer, gate, arguments, brief, name, html)
        for brief in briefs
        for name, html in traces.draft(*brief).submissions().items()
    ]
    found = await asyncio.gather(*work)
    seconds = time.perf_counter() - began
    figures = {
        "briefs": len(briefs),
        "items_of_briefs": sum(len(traces.draft(*brief).items) for brief in briefs),
        "labels_confirmed": f"{sum(map(_is_as_labelled, found))} of {len(found)}",
        **rates.summarize([trace.instance() for trace in found]),
        "seconds": round(seconds),
    }
    if arguments.out:
        traces.write(arguments.out, found)
        figures |= await verify(renderer, arguments.out)
    return figures


async def _judged(
    renderer: browser.Browser,
    gate: asyncio.Semaphore,
    arguments: argparse.Namespace,
    brief: tuple[str, int],
    name: str,
    html: str,
) -> traces.Trace:
    """Decides a submission, by the oracle and by the judge."""
    made = traces.draft(*brief)
    seed = f"{brief[0]}/{brief[1]}/{name}"

    def model(item: draft.Item) -> judge.Ask:
        if arguments.base_url:
            return endpoint.ask(arguments.base_url, arguments.model)
        return scripted.ask(item, arguments.error_rate, seed)

    async with gate:
        files = await traces.site(made, html)
        decided = oracle.decide(renderer, files, made.items, made.framework)
        builds, truth = await decided
        hands = judge.Hands(renderer, files)
        judgements = [
            await judge.judge(hands, made, item, model(item), arguments.sees)
            for item in made.items
        ]
        await hands.close()
    texts = {path: text.decode() for path, text in files.items()}
    return traces.Trace(*brief, name, texts, builds, truth, tuple(judgements))


def _is_as_labelled(trace: traces.Trace) -> bool:
    """Returns whether the items fail that the submission's name says, and no others."""
    named = set() if trace.submission == "reference" else {*trace.submission.split("+")}
    return {item for item, passes in trace.truth.items() if not passes} == named


if __name__ == "__main__":
    main()
