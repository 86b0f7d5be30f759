"""Spares a fork the garbage collections; a fork server imports it after all else.

A fork that collects touches, and so copies, the pages that it shares with the server.
conftest.py does the same for the processes of pytest.
"""

import gc

gc.set_threshold(50_000, 20, 50)
gc.freeze()
