"""Rows of several sources by a schedule, each row a function of (seed, index)."""

from collections.abc import Mapping

import grain
import numpy as np

from glm5_jax.data.rows import packing
from glm5_jax.data.rows import schedule as schedule_lib

_MAX_SEED = 2**32  # Grain's shuffle takes 32 bits


class Mixture:
    """An endless sequence of rows; each epoch of a source has its own shuffle."""

    def __init__(
        self,
        sources: Mapping[str, packing.Rows],
        schedule: schedule_lib.Schedule,
        seed: int,
    ) -> None:
        """Mixes rows of sources by a schedule.

        Args:
            sources: rows by name, in the order of the schedule's weights.
            schedule: the order of the sources.
            seed: seeds the shuffles.
        """
        self._names = tuple(sources)
        self._sizes = np.array([len(rows) for rows in sources.values()])
        self._schedule = schedule
        self._ordered = [
            grain.MapDataset.source(rows).shuffle(seed=seed % _MAX_SEED).repeat()
            for rows in sources.values()
        ]

    def __getitem__(self, index: int) -> packing.Row:
        """Returns row `index`, counted from 0."""
        source, place = self._schedule.locate(index)
        row = self._ordered[source][place]
        assert row is not None  # only a filter gives None
        return row

    def epochs(self, num_rows: int) -> dict[str, float]:
        """Returns how often each source has been read after so many rows."""
        epochs = self._schedule.counts(num_rows) / self._sizes
        return dict(zip(self._names, epochs.tolist(), strict=True))


def only(rows: packing.Rows, seed: int) -> Mixture:
    """Returns a mixture of one source without a name."""
    return Mixture(
        {"": rows}, schedule_lib.Schedule([schedule_lib.Stage(0, (1.0,))]), seed
    )
