"""A run that hangs is ended, and says where it hung."""

import pathlib
import subprocess
import sys
import time
from unittest import mock

from absl.testing import absltest

from glm5_jax.training.run import watchdog as watchdog_lib
from tests import environment

LONG = 1000.0  # seconds
ROOT = pathlib.Path(__file__).parent.parent.parent
# The watchdog looks at a clock that no stall of the machine moves.
HANGS = """
import pathlib, sys, time, types
from glm5_jax.training.run import watchdog

now = 0.0
watchdog.time = types.SimpleNamespace(monotonic=lambda: now, ctime=time.ctime)

def a_collective_that_never_ends():
    global now
    now += 1.0
    time.sleep(600)

with watchdog.Watchdog(pathlib.Path(sys.argv[1]), 0.5) as dog:
    for _ in range(10):
        dog.beat(0.01)
        now += 0.4
        time.sleep(0.1)  # in which it looks, every 50 ms
    print("went on", flush=True)
    a_collective_that_never_ends()
"""


class WatchdogTest(absltest.TestCase):
    def test_a_process_that_hangs_leaves_its_stacks(self):
        path = pathlib.Path(self.create_tempdir().full_path) / "stacks_0.txt"
        command = [sys.executable, "-c", HANGS, str(path)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        self.assertEqual(done.returncode, watchdog_lib.EXIT_HUNG)
        self.assertEqual(done.stdout, "went on\n")
        self.assertIn("health.watchdog_seconds", done.stderr)
        self.assertIn(str(path), done.stderr)
        self.assertIn("in a_collective_that_never_ends", path.read_text())

    def test_the_limit_follows_the_median_step(self):
        watchdog = watchdog_lib.Watchdog(pathlib.Path("unused"), 600.0)
        self.assertEqual(watchdog.limit, 600)
        for seconds in (90.0, 90.0, 4000.0):
            watchdog.beat(seconds)
        self.assertEqual(watchdog.limit, 900)

    def test_a_save_may_take_its_time(self):
        watchdog, end = make_watchdog(0.05)  # looks every 5 ms
        watchdog.beat(LONG)  # allows more than a slow machine takes between two lines
        with watchdog:
            with watchdog.paused():
                watchdog._last -= 20 * LONG
                time.sleep(0.3)
            end.assert_not_called()
            watchdog._last -= 20 * LONG
            wait_for(lambda: end.called)

    def test_a_pause_that_ends_while_the_watchdog_looks(self):
        watchdog, end = make_watchdog(0.05)
        looks = mock.patch.object(watchdog._is_over, "wait", side_effect=[False, True])
        pause = watchdog.paused()
        pause.__enter__()
        watchdog._last -= 20 * LONG

        def ends_the_pause():
            pause.__exit__(None, None, None)
            return LONG

        limit = mock.PropertyMock(side_effect=ends_the_pause)
        with mock.patch.object(watchdog_lib.Watchdog, "limit", limit), looks:
            watchdog._watch()
        end.assert_not_called()

    def test_no_limit(self):
        watchdog, end = make_watchdog(0.0)
        with watchdog:
            watchdog._last -= LONG
            time.sleep(0.1)
        end.assert_not_called()


def make_watchdog(min_seconds):
    """One that counts instead of ending this process."""
    watchdog = watchdog_lib.Watchdog(pathlib.Path("unused"), min_seconds)
    end = mock.patch.object(watchdog, "_end").start()
    return watchdog, end


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


if __name__ == "__main__":
    environment.main()
