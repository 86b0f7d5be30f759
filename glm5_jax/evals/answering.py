"""Lets a model answer tasks: by greedy generation, many at a time."""

from collections.abc import Callable, Iterator

import numpy as np

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.evals import record
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import limits, placement

NUM_SLOTS = 16  # tasks that each device answers at the same time

Score = Callable[[record.Task, str], float]
Make = Callable[[tokenizer_lib.Tokenizer, int, np.random.Generator], record.Task]


def share_of_answers(task: record.Task, text: str) -> float:
    """Returns which share of the answers a text contains, in any case of letters.

    RULER scores so (string_match_all, arXiv 2404.06654).
    """
    said = text.lower()
    return sum(answer.lower() in said for answer in task.answers) / len(task.answers)


def suite(
    name: str,
    asks: str,
    make: Make,
    is_share: bool = False,
    score: Score = share_of_answers,
) -> record.Suite:
    """Returns a suite of tasks that a model answers greedily.

    Args:
      name: of the suite.
      asks: what it asks.
      make: a task, of the tokenizer, the length and the random numbers.
      is_share: whether a score is 0 or 1.
      score: of a task and an answer.
    """

    def tasks(setting: record.Setting, subject: record.Subject) -> list[record.Task]:
        rngs = [record.generator(name, setting, i) for i in range(setting.num_tasks)]
        return [make(subject.words, setting.length, rng) for rng in rngs]

    def answer(
        subject: record.Subject, setting: record.Setting, tasks: record.Tasks
    ) -> Iterator[tuple[int, record.Answer]]:
        del setting
        return generated(subject, tasks, score)

    return record.Suite(
        name=name,
        asks=asks,
        tasks=tasks,
        answer=answer,
        needs=frozenset({"tokenizer"}),
        is_share=is_share,
    )


def generated(
    subject: record.Subject, tasks: record.Tasks, score: Score
) -> Iterator[tuple[int, record.Answer]]:
    """Yields the greedy answer to each task with its score, as they come.

    Args:
      subject: the model.
      tasks: of type `record.Task`, numbered.
      score: of a task and the text of its answer, 0..1.
    """
    by_number = dict(tasks)
    if not by_number:
        return
    vocab_size, tokenizer = subject.config.vocab_size, subject.words
    stops = {*subject.config.eos_token_id, tokenizer.eos_id}
    stop_ids = frozenset(i for i in stops if i < vocab_size)
    longest = max(len(t.prompt) + t.max_new_tokens for t in by_number.values())
    limit = subject.config.max_position_embeddings
    shares = placement.num_shares(placement.in_use())
    engine = engine_lib.Engine(
        subject.params,
        subject.config,
        num_slots=NUM_SLOTS * shares,
        capacity=min(engine_lib.bucket(longest), limit),
        limits=limits.Limits(
            max_stop_ids=max(len(stop_ids), limits.Limits.max_stop_ids)
        ),
    )
    for number, task in by_number.items():
        request = engine_lib.Request(
            number, list(task.prompt), task.max_new_tokens, stop_ids, temperature=0.0
        )
        engine.submit(request)
    while engine.num_pending:
        for number, completion in engine.step():
            ids = [i for i in completion.tokens if i not in stop_ids]
            text = tokenizer.decode(ids)
            value = score(by_number[number], text)
            yield number, record.Answer({"accuracy": (value, 1.0)}, text)
