"""A suite as a record: which tasks it has, how a model answers, what the figures are.

Every suite returns figures: a sum and a weight for each task, by the figure's name. A
figure of the suite is the ratio of the totals, with an interval over the tasks.
"""

import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib

Need = Literal["tokenizer", "latent", "softmax", "mtp", "experts", "questions"]
Rule = tuple[bool, str]  # whether it holds, and the message where it does not
# By name: a sum, and the weight that divides it.
Figures = dict[str, tuple[float, float]]
Purpose = Literal["evaluation", "training"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts of which some are held out.

    Attributes:
      source: "python", a file or a folder, as data.source.
      percent: percentage of the documents that are held out, by their names.
    """

    source: str = "python"
    percent: int = config_lib.DataConfig().held_out_percent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to evaluate.

    Attributes:
      config: of the model.
      params: of `transformer.table`, in the types that they are stored in.
      tokenizer: None where the model has none.
      identity: tells checkpoints apart, so that stored answers are used only for the
        model that gave them; "" computes it from the parameters where it is needed.
      corpus: the texts that it was trained on, whose held-out part suites read.
    """

    config: config_lib.ModelConfig
    params: dict
    tokenizer: tokenizer_lib.Tokenizer | None = None
    identity: str = ""
    corpus: Corpus = Corpus()

    @property
    def words(self) -> tokenizer_lib.Tokenizer:
        """Returns the tokenizer of a model that must have one."""
        assert self.tokenizer is not None, "runner.require comes first"
        return self.tokenizer

    def digest(self) -> str:
        """Returns a digest of the model: of its identity, config and tokenizer."""
        digest = hashlib.sha256(self.identity.encode())
        if not self.identity:
            for leaf in jax.tree.leaves(self.params):
                digest.update(np.asarray(leaf).tobytes())
        digest.update(repr(self.config).encode())
        digest.update(self.tokenizer.digest.encode() if self.tokenizer else b"")
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a suite is asked to do.

    Attributes:
      length: tokens of a task, prompt and answer together; of a row where a suite reads
        held-out text.
      num_tasks: tasks, or rows of held-out text.
      seed: of the tasks.
      corpus: whose held-out documents are read.
      questions: JSONL file of suite multiple_choice.
    """

    length: int
    num_tasks: int = 100
    seed: int = 0
    corpus: Corpus = Corpus()
    questions: str | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """A prompt to continue greedily.

    Attributes:
      prompt: token ids.
      answers: texts that the continuation must contain.
      max_new_tokens: of the continuation.
    """

    prompt: Sequence[int]
    answers: tuple[str, ...]
    max_new_tokens: int


class Answer(NamedTuple):
    """The figures of a task, and the text that the model wrote, if it wrote one."""

    figures: Figures
    text: str = ""


Tasks = Sequence[tuple[int, Any]]  # with the number of each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """A named kind of task.

    Attributes:
      name: on the command line.
      asks: one sentence: what a task asks, or what is measured.
      tasks: makes the tasks of a setting. Task i depends on its number and not on
        num_tasks, so that a later run with more tasks adds the missing ones; the only
        task of fewer rows than rows_per_task has num_tasks of them.
      answer: lets a model answer numbered tasks; yields them in any order.
      needs: parts that the model must have.
      rules: rules that a model and a length must keep.
      is_share: every figure counts successes, one trial a task: Wilson's interval.
      has_length: whether --suite_lengths says how long a task is.
      rows_per_task: rows of held-out text in a task; 0 where tasks are none.
    """

    name: str
    asks: str
    tasks: Callable[[Setting, Subject], Sequence[Any]]
    answer: Callable[[Subject, Setting, Tasks], Iterator[tuple[int, Answer]]]
    needs: frozenset[Need] = frozenset()
    rules: Callable[[config_lib.ModelConfig, int], list[Rule]] = lambda *_: []
    is_share: bool = False
    has_length: bool = True
    rows_per_task: int = 0


def generator(
    name: str, setting: Setting, index: int, purpose: Purpose = "evaluation"
) -> np.random.Generator:
    """Returns the random numbers of a task; those of training are others."""
    words = [zlib.crc32(text.encode()) for text in (name, purpose)]
    return np.random.default_rng([*words, setting.seed, setting.length, index])
