"""Prepares jax and absl before pytest runs a test."""

import pytest
from absl import flags
from absl.testing import absltest  # noqa: F401  defines --test_tmpdir

from tests import environment

environment.configure()


@pytest.fixture(scope="session", autouse=True)
def absl_flags(tmp_path_factory):
    """Nobody parses absl's flags under pytest; absltest and Grain read some."""
    flags.FLAGS.mark_as_parsed()
    flags.FLAGS.test_tmpdir = str(tmp_path_factory.mktemp("absl"))
