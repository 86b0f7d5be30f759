"""Makes a folder that lasts as long as this process, whose end deletes it.

Imports no jax.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

# Reads until nobody is left who could write, which is when the parent has ended.
_DELETE = """
import shutil, sys
sys.stdin.read()
shutil.rmtree(sys.argv[1], True)
"""
_NOT_FOR_IT = signal.SIGTERM, signal.SIGHUP  # what ends a whole service


class OwnFolder:
    """A folder of this process, which another process deletes after it.

    Nothing of this process runs after SIGKILL or os._exit, and a folder in shared
    memory that stays takes memory until the machine restarts.

    Attributes:
      path: the folder.
    """

    def __init__(self, prefix: str, root: str | os.PathLike | None = None) -> None:
        """Makes the folder.

        Args:
          prefix: its name begins with it.
          root: folder to make it in; None: that of temporary files.
        """
        self.path = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        # It inherits what is blocked here, so they do not end it as it starts either.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_IT)
        try:
            self._deleter = subprocess.Popen(
                [sys.executable, "-E", "-S", "-c", _DELETE, str(self.path)],
                stdin=subprocess.PIPE,
                start_new_session=True,  # ctrl-C is not for it
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """Deletes the folder, also if nothing is left of the other process."""
        self._deleter.communicate()
        shutil.rmtree(self.path, ignore_errors=True)
