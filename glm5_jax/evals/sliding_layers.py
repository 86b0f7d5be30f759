"""Searches layers whose attention can become a sliding window, without training.

GLM-5, 2.1.2: a beam search over patterns of layers. It begins with full attention (F)
in every layer. A step makes windows (S) of `layers_per_step` more layers in each
pattern of the beam, in all possible ways, and keeps the patterns with the least loss on
calibration rows. The paper turns half of 40 layers into windows of 4096 tokens with a
beam of 8 and 2 layers a step, and scores patterns by RULER at 16K: rows of tasks, from
`calibration.rows_of_tasks`, come closest. layerwise.py runs the patterns.
"""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Iterable, Sequence

import tqdm

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.config import checks
from glm5_jax.evals import layerwise
from glm5_jax.inference import scoring

# Types of full attention, and those of windows with the same parameters.
WINDOWS = {"latent": "latent_sliding", "grouped": "grouped_sliding"}


@dataclasses.dataclass(frozen=True)
class Step:
    """The patterns that a step of the search kept.

    Attributes:
        beam: pairs of a pattern and the mean loss of a calibration token in nats, the
            least loss first. F is a layer with full attention, S one with a window, and
            - one whose attention is neither.
    """

    beam: tuple[tuple[str, float], ...]

    @property
    def pattern(self) -> str:
        """The best pattern."""
        return self.beam[0][0]

    @property
    def nats(self) -> float:
        """The loss of the best pattern."""
        return self.beam[0][1]


def search(
    params: dict,
    config: config_lib.ModelConfig,
    rows: scoring.Rows,
    num_windows: int,
    *,
    beam: int = 8,
    layers_per_step: int = 2,
    path: pathlib.Path | None = None,
) -> list[Step]:
    """Turns layers into windows of model.variants.sliding_window tokens.

    A step computes the loss of up to beam * C(n, layers_per_step) patterns, where n
    layers still have full attention. A beam that holds every pattern finds the best.

    Args:
      params: of the model, on one device.
      config: of the model.
      rows: calibration rows, longer than a window.
      num_windows: layers that become windows.
      beam: patterns that a step keeps.
      layers_per_step: layers that a step turns; the last step may turn fewer.
      path: JSON file of the finished steps, from which a search resumes; None: none.

    Returns:
      The steps, from the model as it is; the last one has the pattern to use.

    Raises:
      InputError: the model's layers or the rows cannot be searched, or the file is of
        another search.
    """
    kinds = depth.layer_kinds(config)
    start = "".join("F" if kind.attention in WINDOWS else "-" for kind in kinds)
    _require_searchable(config, rows, start.count("F"), num_windows)
    checks.require(
        (beam >= 1, f"The beam must keep at least 1 pattern, got {beam}."),
        (
            layers_per_step >= 1,
            f"A step must turn at least 1 layer, got {layers_per_step}.",
        ),
    )
    digest = layerwise.digest(params, config, rows, num_windows, beam, layers_per_step)
    steps = [_step(fields) for fields in layerwise.finished_rounds(path, digest)]
    stack = _stack(params, config, rows, kinds)
    if not steps:
        steps.append(_best(stack, [start], beam))
        layerwise.write_rounds(path, digest, steps)
    done = steps[-1].pattern.count("S")
    for num_before in tqdm.tqdm(
        range(done, num_windows, layers_per_step),
        desc="windows",
        unit=" steps",
        disable=not sys.stderr.isatty(),
    ):
        size = min(layers_per_step, num_windows - num_before)
        steps.append(_best(stack, _next(steps[-1], size), beam))
        layerwise.write_rounds(path, digest, steps)
    return steps


def layer_types(config: config_lib.ModelConfig, pattern: str) -> tuple[str, ...]:
    """Returns model.layer_types of the model whose layers with S have windows."""
    pairs = zip(config.layer_attention, pattern, strict=True)
    return tuple(WINDOWS[name] if letter == "S" else name for name, letter in pairs)


def _require_searchable(
    config: config_lib.ModelConfig,
    rows: scoring.Rows,
    num_full: int,
    num_windows: int,
) -> None:
    """Checks the model and the rows before anything compiles."""
    length, window = rows["tokens"].shape[1], config.variants.sliding_window
    checks.require(
        (
            1 <= num_windows <= num_full,
            f"The windows must be 1 to {num_full}, the model's layers with full "
            f"attention; got {num_windows}.",
        ),
        (
            window < length,
            f"The rows of the calibration text must be longer than "
            f"model.variants.sliding_window={window}, got {length} tokens: a window "
            f"would hold all keys.",
        ),
        (
            not config.shares_index and config.index_topk_pattern is None,
            "A layer whose index others share cannot become a window: choose windows "
            "in a model with an indexer in every layer, and share indexers later.",
        ),
    )


def _next(step: Step, size: int) -> Sequence[str]:
    """Returns the patterns with `size` more windows than those of a step."""
    found = set()
    for pattern, _ in step.beam:
        full = [layer for layer, letter in enumerate(pattern) if letter == "F"]
        for chosen in itertools.combinations(full, size):
            letters = ["S" if i in chosen else x for i, x in enumerate(pattern)]
            found.add("".join(letters))
    return sorted(found)


def _best(stack: layerwise.Stack, patterns: Sequence[str], beam: int) -> Step:
    """Keeps the patterns with the least loss; of equals the first in the alphabet."""
    ranked = sorted(stack.losses(patterns).items(), key=lambda pair: pair[::-1])
    return Step(tuple(ranked[:beam]))


def _stack(
    params: dict,
    config: config_lib.ModelConfig,
    rows: scoring.Rows,
    kinds: Iterable[depth.Kind],
) -> layerwise.Stack:
    """Returns the model's layers: F is a layer as it is, S has a window."""
    kinds = [*kinds]
    windows = [
        kind._replace(attention=WINDOWS[kind.attention], index="none")
        if kind.attention in WINDOWS
        else kind
        for kind in kinds
    ]
    named = {"F": kinds, "-": kinds, "S": windows}
    return layerwise.Stack(params, config, rows, named)


def _step(fields: dict) -> Step:
    """Returns a step of the file."""
    return Step(tuple((pattern, nats) for pattern, nats in fields["beam"]))
