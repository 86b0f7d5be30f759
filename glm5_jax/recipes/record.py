"""A recipe as a record: stages in their order, and what the report says of them.

A record is data: it names the corpora that it makes, a config for each stage, what is
measured after a stage, and what the measurements should show. runner.py executes it,
report.py describes the result.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Callable, Iterable
from typing import Literal

from glm5_jax import config as config_lib
from glm5_jax.config import checks

Relation = Literal["rises", "falls", "is no higher than", "is no lower than"]
DATA = "data"  # folder of the prepared corpora in a pipeline's folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents that are prepared once, into WORKDIR/data/NAME.

    Attributes:
      name: of the folder; data.mixture and data.source of a stage's config name it.
      prepare: settings; the source counts only where `documents` is None.
      documents: texts as a function of the seed, which replace the source.
    """

    name: str
    prepare: config_lib.PrepareConfig
    documents: Callable[[int], Iterable[str]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """Suites of evals that a model is measured by after a stage.

    Attributes:
      suites: names, see evals/catalogue.py.
      lengths: tokens of a task.
      num_tasks: of a suite and length.
    """

    suites: tuple[str, ...]
    lengths: tuple[int, ...]
    num_tasks: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage: a run of `train` that starts from the parameters of the one before.

    Attributes:
      name: of its folder in WORKDIR.
      train: its config; the runner sets init_from, the seed and the corpora's folders.
      minutes: expected on two idle cores, for the progress of the whole.
      measures: what its model is measured by.
    """

    name: str
    train: config_lib.TrainConfig
    minutes: float
    measures: tuple[Measure, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure that should move from the end of one stage to that of another.

    Attributes:
      text: the claim in words.
      figure: name of the figure among those of the stages.
      before: stage whose figure is the first one.
      after: stage whose figure is the second one.
      relation: how the second figure should compare with the first.
      tolerance: share of the first figure that the second may be off, for "is no
        higher than" and "is no lower than".
    """

    text: str
    figure: str
    before: str
    after: str
    relation: Relation
    tolerance: float = 0.0

    def holds(self, first: float, second: float) -> bool:
        """Tells whether two figures are as the claim says."""
        if self.relation == "rises":
            return second > first
        if self.relation == "falls":
            return second < first
        if self.relation == "is no higher than":
            return second <= first * (1 + self.tolerance)
        return second >= first * (1 - self.tolerance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole pipeline."""

    name: str
    description: str
    corpora: tuple[Corpus, ...]
    stages: tuple[Stage, ...]
    claims: tuple[Claim, ...] = ()

    def __post_init__(self) -> None:
        """Checks that names are distinct and known.

        Raises:
          InputError: with the message of every broken rule.
        """
        stages = [stage.name for stage in self.stages]
        corpora = [corpus.name for corpus in self.corpora]
        twice = [n for n, k in collections.Counter(stages + corpora).items() if k > 1]
        wanted = {n for stage in self.stages for n in stage.train.data.mixture}
        named = {n for claim in self.claims for n in (claim.before, claim.after)}
        checks.require(
            (bool(stages), f"recipe {self.name!r} has no stage; give at least one."),
            (not twice, f"names of stages and corpora must differ, got twice: {twice}"),
            (
                wanted <= {*corpora},
                f"data.mixture must name corpora of the recipe, {corpora}; got "
                f"{sorted(wanted - {*corpora})}.",
            ),
            (
                named <= {*stages},
                f"claims must name stages of the recipe, {stages}; got "
                f"{sorted(named - {*stages})}.",
            ),
        )

    @property
    def minutes(self) -> float:
        """Expected minutes of all stages on two idle cores."""
        return sum(stage.minutes for stage in self.stages)

    def folders(self, workdir: pathlib.Path) -> list[pathlib.Path]:
        """Returns the run folder of each stage, numbered in order."""
        return [
            workdir / f"{number}_{stage.name}"
            for number, stage in enumerate(self.stages, 1)
        ]

    def configs(self, workdir: pathlib.Path, seed: int) -> list[config_lib.TrainConfig]:
        """Returns the configs of the stages with their places in a folder."""
        folders = self.folders(workdir)
        return [
            dataclasses.replace(
                stage.train,
                seed=seed,
                init_from=None if before is None else str(before),
                data=_placed(stage.train.data, workdir),
            )
            for stage, before in zip(self.stages, [None, *folders[:-1]], strict=True)
        ]


def _placed(
    data: config_lib.DataConfig, workdir: pathlib.Path
) -> config_lib.DataConfig:
    """Returns the section with the folders of the corpora that its mixture names."""
    folders = tuple(str(workdir / DATA / name) for name in data.mixture)
    return dataclasses.replace(data, mixture=folders)
