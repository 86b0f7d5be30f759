"""Readies a fork server, which imports this after all else.

conftest.py spares the processes of pytest garbage collections in the same way.
"""

import gc
import os

from tests import environment

# As storage/bucket.py sets it: gcsfs reads it at its import.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

import gcsfs  # noqa: F401  takes 0.7 s

# A fork that collects touches, and so copies, the pages that it shares with the server.
gc.set_threshold(*environment.GARBAGE_THRESHOLDS)
gc.freeze()
