"""Muon Split for any parameters, and the optimizer and learning rate of a run."""

from glm5_jax.optim.dimension_numbers import DimensionNumbers
from glm5_jax.optim.muon import muon_split, scale_by_muon_split

__all__ = ["DimensionNumbers", "muon_split", "scale_by_muon_split"]
