"""Muon by its definition: float64, one matrix at a time."""

import numpy as np


def in_float64(matrix, steps):
    """Returns one matrix after Newton-Schulz."""
    x = np.float64(matrix)
    x /= np.linalg.norm(x)
    for a, b, c in steps:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
