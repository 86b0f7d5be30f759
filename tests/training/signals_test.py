"""A run that is asked to end by signals that come one within the other."""

import pathlib
import subprocess
import sys

from absl.testing import absltest

from tests import environment

ROOT = pathlib.Path(__file__).parent.parent.parent
# A second signal comes at each line that handles the first one.
TWICE = """
import signal, sys
from glm5_jax.training.run import signals

left = 9

def again(frame, event, arg):
    global left
    if event == "line" and left:
        left -= 1
        signal.raise_signal(signal.SIGTERM)
    return again

with signals.listening() as is_asked_to_end:
    print(is_asked_to_end(1))
    sys.settrace(again)
    signal.raise_signal(signal.SIGTERM)
    sys.settrace(None)
    print(is_asked_to_end(2), left < 9)
"""


class ListeningTest(absltest.TestCase):
    def test_a_second_signal_within_the_first_one_does_not_hang(self):
        command = [sys.executable, "-c", TWICE]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        self.assertEqual(done.stdout, "False\nTrue True\n", done.stderr)


if __name__ == "__main__":
    environment.main()
