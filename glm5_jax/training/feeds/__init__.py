"""Feeds: the batches, evaluations, and samples of a stage."""
