"""Counts what becomes of walks, and what questions of the search world take.

    python benchmarks/search_world.py [--collection=foldoc] [--questions=260]

Prints walks by what became of them, the yield, distinct questions and answers, the
links that they take, seconds to index the collection and for a question, and the peak
of memory.
"""

import argparse
import collections
import json
import resource
import time

from glm5_jax import environments
from glm5_jax.environments.worlds.search import world


def main() -> None:
    """Walks until there are as many questions as asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--collection", default="foldoc")
    parser.add_argument("--questions", type=int, default=260)
    arguments = parser.parse_args()
    began = time.perf_counter()
    taskset = environments.make(f"{world.PREFIX}{arguments.collection}")
    assert isinstance(taskset, world.Search)
    taskset.task("train", 0, 0)
    ready = time.perf_counter()
    reasons, hops, answers = collections.Counter(), {}, set()
    for index in range(arguments.questions):
        for question, reason in taskset.walks("train", 0, index):
            reasons[reason or "good"] += 1
            if question is not None and not reason:
                hops[question.text()] = question.hops
                answers.add(question.path[-1])
                break
    seconds = time.perf_counter() - ready
    walks = reasons.total() - reasons["of the other split"]
    figures = {
        "walks": dict(reasons.most_common()),
        "yield": round(reasons["good"] / walks, 4),
        "distinct_questions": len(hops),
        "distinct_answers": len(answers),
        "by_links": dict(sorted(collections.Counter(hops.values()).items())),
        "seconds_to_begin": round(ready - began, 2),
        "seconds_a_question": round(seconds / arguments.questions, 3),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
