"""Searches over the layers of a trained model, whose findings an arm starts with."""

import dataclasses
import pathlib

from glm5_jax import config as config_lib
from glm5_jax.ablations import study


@dataclasses.dataclass(frozen=True, kw_only=True)
class Indexers:
    """Removes indexers one by one, on text that the model was trained on."""

    num_indexers: int  # that are kept
    length: int  # tokens of a row
    num_rows: int = 32

    @property
    def name(self) -> str:
        """Names the search's folder."""
        return f"{self.num_indexers} indexers"

    def __call__(
        self, checkpoint: study.Checkpoint, path: pathlib.Path
    ) -> study.Changes:
        """Returns the pattern of layers with an indexer."""
        from glm5_jax.evals import calibration, index_share, subject  # jax

        model = subject.load(checkpoint.path, checkpoint.overrides)
        rows = calibration.rows_of_corpus(model, self.length, self.num_rows)
        rounds = index_share.search(
            model.params, model.config, rows, self.num_indexers, path
        )
        return {"model.index_topk_pattern": rounds[-1].pattern}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """Turns layers into windows by a beam search of the paper's width."""

    num_windows: int
    length: int  # tokens of a row
    num_rows: int = 32
    suite: str = ""  # whose tasks patterns are compared on; "": text of the training

    @property
    def name(self) -> str:
        """Names the search's folder."""
        return f"{self.num_windows} windows {self.suite}"

    def require_known(self) -> None:
        """Checks, before anything is trained, that the suite exists.

        Raises:
          InputError: it does not.
        """
        if self.suite:
            from glm5_jax.evals import catalogue  # jax

            catalogue.find([self.suite])

    def __call__(
        self, checkpoint: study.Checkpoint, path: pathlib.Path
    ) -> study.Changes:
        """Returns the type of every layer."""
        from glm5_jax.evals import calibration, sliding_layers, subject  # jax

        model = subject.load(checkpoint.path, checkpoint.overrides)
        size = self.length, self.num_rows
        if self.suite:
            rows = calibration.rows_of_tasks(model, self.suite, *size)
        else:
            rows = calibration.rows_of_corpus(model, *size)
        steps = sliding_layers.search(
            model.params, model.config, rows, self.num_windows, path=path
        )
        types = sliding_layers.layer_types(model.config, steps[-1].pattern)
        return {"model.layer_types": types}


def half_windows(base: config_lib.TrainConfig, scale: str) -> Windows:
    """Returns the search for the half of a model's layers that become windows.

    As in the paper, patterns are compared on needles in a haystack, but on text at
    scale tiny, whose models find none.
    """
    return Windows(
        num_windows=base.model.num_hidden_layers // 2,
        length=base.data.sequence_length,
        suite="" if scale == "tiny" else "needle",
    )
