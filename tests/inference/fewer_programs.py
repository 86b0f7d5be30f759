"""Engines with fewer programs, for tests that are not about the shapes of dispatches.

tests/inference/shapes_test.py and engine_test.py have all of them.
"""

from unittest import mock

from glm5_jax.inference import parts


def of_all_rows():
    """Lets the engines that are made meanwhile read prompts in arrays of all slots.

    They have no programs for fewer rows, which would compute the same.
    """
    return mock.patch.object(parts, "row_counts", lambda num_slots: [num_slots])
