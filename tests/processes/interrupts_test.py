"""A signal ends a process at once, without a traceback or a core dump."""

import signal
import subprocess
import sys

from absl.testing import parameterized

from glm5_jax.processes import interrupts
from tests import environment

# C++ code that holds the main thread for a minute, as a compilation does.
COMPILE = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2 * 10**8)"
TRACE = "while True: pass"
CHILD = """
from glm5_jax.processes import interrupts
with interrupts.ending_at_once():
    print("ready", flush=True)
    {work}
"""


class EndingTest(parameterized.TestCase):
    @parameterized.product(work=[COMPILE, TRACE], number=interrupts.SIGNALS)
    def test_at_any_moment(self, work, number):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD.format(work=work)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            child.stdout.readline()
            child.send_signal(number)
            _, message = child.communicate(timeout=20)
        self.assertEqual(child.returncode, interrupts.EXIT_TERMINATED)
        self.assertEqual(message.count("\n"), 2, message)
        self.assertIn("error: interrupted; rerun the same command to resume", message)

    def test_clean_up_runs_before_the_exit(self):
        work = (
            "with interrupts.undoing(lambda: print('outer', flush=True)):\n"
            "        with interrupts.undoing(lambda: print('inner', flush=True)):\n"
            "            with interrupts.undoing(lambda: print('left')): pass\n"
            "            with interrupts.undoing(lambda: 1 / 0):\n"
            "                interrupts.end_at_once()"
        )
        done = subprocess.run(
            [sys.executable, "-c", CHILD.format(work=work)],
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, interrupts.EXIT_TERMINATED)
        self.assertEqual(done.stdout.split(), ["ready", "inner", "outer"])

    def test_other_handlers_go_first_and_come_back(self):
        before = signal.getsignal(signal.SIGTERM)
        heard = []
        with interrupts.ending_at_once():
            signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
            signal.raise_signal(signal.SIGTERM)
        self.assertEqual(heard, [True])
        self.assertEqual(signal.getsignal(signal.SIGTERM), before)


if __name__ == "__main__":
    environment.main()
