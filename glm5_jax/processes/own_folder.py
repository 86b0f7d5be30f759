"""Makes a folder that lasts as long as this process, whose end deletes it.

Imports no jax.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

# Reads until nobody is left who could write, which is when the parent has ended. What
# ends a whole service by SIGTERM is not for it.
_DELETE = """
import shutil, signal, sys
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.stdin.read()
shutil.rmtree(sys.argv[1], True)
"""


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
        self._deleter = subprocess.Popen(
            [sys.executable, "-E", "-S", "-c", _DELETE, str(self.path)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # ctrl-C is not for it
        )

    def close(self) -> None:
        """Deletes the folder, also if nothing is left of the other process."""
        self._deleter.communicate()
        shutil.rmtree(self.path, ignore_errors=True)
