"""Rows of equal length and the batches of a step: packing, mixtures, pipelines."""
