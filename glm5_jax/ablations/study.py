"""A study as a record: its arms, what is measured, and what the paper says.

A study is a file with a function `get_study(scale: str) -> Study`: one of studies/, or
one of your own, given by its path. Imports no jax, so that wrong input is refused
before anything compiles.
"""

import dataclasses
import pathlib
import re
import runpy
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.config import checks, fields

SCALES = ("tiny", "small", "base")
STUDIES = pathlib.Path(__file__).parent / "studies"
Changes = Mapping[str, Any]  # dotted path of a field of TrainConfig -> value

_RATES = ("optim.learning_rate", "optim.end_learning_rate")  # that a sweep sets

Plot = Literal["curve", "arms", ""]


class Checkpoint(NamedTuple):
    """A step of a finished run, to be measured."""

    folder: pathlib.Path  # of the run
    step: int
    overrides: tuple[command_line.Override, ...]  # of `Arm.measured_with`

    @property
    def path(self) -> pathlib.Path:
        """Returns the folder of the step."""
        return self.folder / "checkpoints" / str(self.step)


Measure = Callable[[Checkpoint], Mapping[str, float]]


@runtime_checkable
class Search(Protocol):
    """Finds fields of a model's config on its trained parameters; see searches.py."""

    @property
    def name(self) -> str:
        """Returns a name that no other search of the study has."""
        ...

    def __call__(self, checkpoint: Checkpoint, path: pathlib.Path) -> Changes:
        """Returns the fields; resumes from the file `path`, which it may write."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """A column of the table: a figure of each run."""

    label: str
    key: str  # in metrics.jsonl, in summary.json, or among the figures of `measure`
    unit: str
    better: Literal["lower", "higher", ""] = ""  # "": neither
    # The value of a run: its last one, its largest one, or the mean of the last quarter
    # of the logged ones.
    value: Literal["last", "max", "late"] = "last"
    # What the picture shows: the curve over training, the value of each arm, or none.
    plot: Plot = ""
    digits: int = 3  # decimals in the table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """A run for each seed, of the study's base config with changes."""

    name: str
    changes: Changes = dataclasses.field(default_factory=dict)
    # Name of an earlier arm, whose parameters of the same seed this one starts from.
    after: str = ""
    # Fields of model that differ when its checkpoints are measured.
    measured_with: Changes = dataclasses.field(default_factory=dict)
    # False: nothing is trained; the parameters of `after` are measured as they are.
    is_trained: bool = True
    # Runs on the parameters of `after`. What it finds joins `changes`, or, if nothing
    # is trained, `measured_with`.
    search: Search | None = None
    # False: a stage that others start from, and no row of the table.
    is_shown: bool = True
    x: float | int | None = None  # place on the picture's axis `Study.x_label`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """An order that a paper reports: one arm is better than another one."""

    better: str
    worse: str
    source: str  # e.g. "GLM-5, Table 1"
    label: str = ""  # of the metric; "": the study's first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Arms that are compared with a baseline over the same seeds."""

    question: str  # a sentence
    base: config_lib.TrainConfig
    arms: tuple[Arm, ...]
    metrics: tuple[Metric, ...]  # the first decides
    baseline: str = ""  # name of an arm; "": the first that is shown
    # Learning rates of which each arm takes the best, by the first metric, on the first
    # seed; the last rate of the schedule keeps its ratio. (): the base config's rate.
    rates: tuple[float, ...] = ()
    measure: Measure | None = None  # of every checkpoint that a run keeps
    claims: tuple[Claim, ...] = ()
    # Columns of the paper's own figures: name of an arm -> label -> text.
    paper: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    paper_says: str = ""  # in a sentence or two, with its source
    x_label: str = ""  # quantity and unit of `Arm.x`

    def __post_init__(self) -> None:
        """Checks that every name is that of an arm or a metric.

        Raises:
          InputError: with the message of every broken rule.
        """
        names = [arm.name for arm in self.arms]
        labels = [metric.label for metric in self.metrics]
        rules = [
            (bool(self.shown), "arms must hold at least one that is shown."),
            (bool(labels), "metrics must hold at least one."),
            (len({slug(n) for n in names}) == len(names), "two arms share a name."),
            *_known("baseline", [self.baseline] if self.baseline else [], names),
            *_known("claims", [c.better for c in self.claims], names),
            *_known("claims", [c.worse for c in self.claims], names),
            *_known("claims", [c.label for c in self.claims if c.label], labels),
            *_known("paper", self.paper, names),
        ]
        for i, arm in enumerate(self.arms):
            after = [arm.after] if arm.after else []
            trained = [other.name for other in self.arms[:i] if other.is_trained]
            rules += _known(f"arm {arm.name!r}: after", after, trained)
            rules.append(
                (
                    bool(after) or (arm.is_trained and arm.search is None),
                    f"arm {arm.name!r} needs `after`: the parameters that it searches "
                    f"or measures.",
                )
            )
            rules.append(
                (
                    arm.is_trained or not arm.changes,
                    f"arm {arm.name!r} trains nothing, so its changes have no effect; "
                    f"give them as measured_with.",
                )
            )
        checks.require(*rules)

    @property
    def shown(self) -> tuple[Arm, ...]:
        """Arms that are rows of the table."""
        return tuple(arm for arm in self.arms if arm.is_shown)

    @property
    def reference(self) -> Arm:
        """The arm that the others are compared with."""
        return next(a for a in self.shown if a.name == (self.baseline or a.name))

    def arm(self, name: str) -> Arm:
        """Returns the arm of a name."""
        return next(arm for arm in self.arms if arm.name == name)

    def metric(self, label: str = "") -> Metric:
        """Returns the metric of a label, or the first one."""
        return next(m for m in self.metrics if m.label == (label or m.label))

    def config(
        self, arm: Arm, changes: Changes, overrides: Sequence[command_line.Override]
    ) -> config_lib.TrainConfig:
        """Returns the config of an arm's runs; of equal fields, `changes` win.

        Raises:
          InputError: has a line for every unknown field and every broken rule.
        """
        given = dict(fields.flatten(command_line.to_json_dict(self.base)))
        given |= {path: fields.Text(text) for path, text in overrides}
        given |= dict(arm.changes) | dict(changes)
        try:
            return fields.build(config_lib.TrainConfig, given)
        except config_lib.InputError as error:
            lines = [f"arm {arm.name!r}: {line}" for line in str(error).splitlines()]
            raise config_lib.InputError("\n".join(lines)) from error

    def require_reach(self, overrides: Sequence[command_line.Override]) -> None:
        """Checks that overrides reach all arms.

        Raises:
          InputError: names what has a value of its own, for each override.
        """
        own = dict.fromkeys(_RATES, "each rate of the sweep") if self.rates else {}
        for arm in self.arms:
            own |= dict.fromkeys(arm.changes, f"arm {arm.name!r}")
        own["seed"] = "each run"
        checks.require(
            *(
                (
                    path not in own,
                    f"--config.{path} does not reach all arms: {own.get(path)} has its "
                    f"own; leave it out, or change the study's file.",
                )
                for path, _ in overrides
            )
        )


def changes(
    base: config_lib.TrainConfig, other: config_lib.TrainConfig
) -> dict[str, Any]:
    """Returns the fields in which `other` differs from `base`, with its values."""
    ours, theirs = (
        dict(fields.flatten(command_line.to_json_dict(config)))
        for config in (base, other)
    )
    return {path: value for path, value in theirs.items() if value != ours[path]}


def slug(name: str) -> str:
    """Returns a name as a folder's: "MLA-256 + Muon Split" is mla_256_muon_split."""
    return re.sub(r"[^a-z0-9.]+", "_", name.lower()).strip("_")


def names() -> list[str]:
    """Returns the names of the studies that come with the package."""
    return sorted(p.stem for p in STUDIES.glob("*.py") if not p.stem.startswith("_"))


def load(name: str, scale: str) -> Study:
    """Returns the study of a name, or of a file that is given by its path.

    Raises:
      InputError: there is no such study or scale, or its file is wrong.
    """
    if scale not in SCALES:
        guess = fields.did_you_mean(scale, SCALES)
        raise config_lib.InputError(
            f"there is no scale {scale!r}.{guess} Scales: {', '.join(SCALES)}."
        )
    path = _find(name)
    try:
        get_study = runpy.run_path(str(path)).get("get_study")
        if get_study is None:
            raise config_lib.InputError(
                "the file has no get_study; define get_study(scale: str) that returns "
                "a glm5_jax.ablations.study.Study."
            )
        study = get_study(scale)
    except config_lib.InputError as error:
        lines = [f"{name}: {line}" for line in str(error).splitlines()]
        raise config_lib.InputError("\n".join(lines)) from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        numbers = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f" (line {numbers[-1]})" if numbers else ""
        raise config_lib.InputError(
            f"{name}: {type(error).__name__}: {error}{where}"
        ) from error
    if not isinstance(study, Study):
        raise config_lib.InputError(
            f"{name}: get_study must return a Study, got {type(study).__name__}."
        )
    return study


def _find(name: str) -> pathlib.Path:
    """Returns the file of a study."""
    path = pathlib.Path(name)
    if path.suffix == ".py":
        if path.is_file():
            return path
        raise config_lib.InputError(f"there is no file {name}.")
    if name in names():
        return STUDIES / f"{name}.py"
    guess = fields.did_you_mean(name, names())
    raise config_lib.InputError(
        f"there is no study {name!r}.{guess} Studies: {', '.join(names())}; or give "
        f"the path of a file of your own."
    )


def _known(
    field: str, given: Iterable[str], known: Sequence[str]
) -> list[tuple[bool, str]]:
    """Returns the rules that names are known."""
    return [
        (
            name in known,
            f"{field} names {name!r}, which is none of {', '.join(known) or 'none'}.",
        )
        for name in given
    ]
