"""HumanEval: functions that the model continues, judged by their tests in the sandbox.

The prompt is the published one, the head of the function; the answer ends where the
next definition would begin, as in arXiv 2107.03374. It is greedy: one sample, pass@1.
"""

import asyncio
import re
from collections.abc import Iterator
from concurrent import futures

from glm5_jax.environments.worlds.code import human_eval, judge
from glm5_jax.evals import answering, record
from glm5_jax.inference import scoring

_MAX_NEW_TOKENS = 512
_END = re.compile(r"\n(?:class |def |#|if |print)")


def body(text: str) -> str:
    """Returns an answer up to its first line that is outside of the function."""
    return _END.split(text, maxsplit=1)[0]


def _tasks(setting: record.Setting, subject: record.Subject) -> list[record.Task]:
    """Returns the first num_tasks of HumanEval.

    Raises:
      InputError: the extra is not installed, or a prompt and its answer are longer than
        the model's positions.
    """
    tasks = [
        record.Task(subject.words.encode(problem.head), (problem.id,), _MAX_NEW_TOKENS)
        for problem in human_eval.problems()[: setting.num_tasks]
    ]
    longest = max(len(task.prompt) + task.max_new_tokens for task in tasks)
    scoring.require_positions(longest, subject.config)
    return tasks


def _score(task: record.Task, text: str) -> float:
    by_id = {problem.id: problem for problem in human_eval.problems()}
    problem = by_id[task.answers[0]]
    # A notebook's cell has an event loop already, in its thread.
    with futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(asyncio.run, judge.passes(problem, body(text)))
    return float(done.result())


def _answer(
    subject: record.Subject, setting: record.Setting, tasks: record.Tasks
) -> Iterator[tuple[int, record.Answer]]:
    del setting
    return answering.generated(subject, tasks, _score)


SUITE = record.Suite(
    name="humaneval",
    asks="A function of HumanEval, judged by its tests.",
    tasks=_tasks,
    answer=_answer,
    needs=frozenset({"tokenizer"}),
    is_share=True,
    has_length=False,
)
