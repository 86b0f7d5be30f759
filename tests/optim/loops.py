"""Muon by its definition: float64, one matrix at a time."""

import numpy as np


def in_float64(matrix, steps):
    """Newton-Schulz on one matrix."""
    x = np.float64(matrix)
    x /= np.linalg.norm(x)
    for a, b, c in steps:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
