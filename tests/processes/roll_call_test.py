"""Checks, with threads as processes, that all meet or all learn who is missing."""

import socket
import threading
import time
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.processes import roll_call
from tests import environment
from tests.processes import launch

SECONDS = 60.0  # for what takes milliseconds
SOME_SECONDS = 4.0  # where one comes in time, and it ends only with them
FEW_SECONDS = 0.7  # where nobody comes


def call(*numbers, port=None, seconds=SECONDS):
    """Returns the error of each (num_processes, process_id), or None."""
    address = f"127.0.0.1:{port or launch.free_port()}"
    heard = [None] * len(numbers)

    def hold(i, count, number):
        try:
            roll_call.hold(address, count, number, seconds)
        except config_lib.InputError as error:
            heard[i] = str(error)

    threads = [
        threading.Thread(target=hold, args=(i, *pair)) for i, pair in enumerate(numbers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    return heard


class RollCallTest(parameterized.TestCase):
    def test_all_come_in_any_order(self):
        self.assertEqual(call((3, 2), (3, 0), (3, 1)), [None] * 3)

    def test_nobody_listens(self):
        began = time.monotonic()
        with socket.socket() as silent:  # which holds the port and does not listen
            silent.bind(("127.0.0.1", 0))
            port = silent.getsockname()[1]
            (message,) = call((2, 1), port=port, seconds=FEW_SECONDS)
        self.assertRegex(message, r"cannot reach the coordinator .* within 0.7 s")
        self.assertLess(time.monotonic() - began, SECONDS / 2)

    def test_somebody_is_missing_and_all_hear_who(self):
        messages = call((4, 0), (4, 2), seconds=SOME_SECONDS)
        for message in messages:
            self.assertIn("of 4 processes only 2 came within 4 s", message)
            self.assertIn("missing: 1, 3", message)

    def test_counts_disagree(self):
        for message in call((2, 0), (3, 1)):
            self.assertIn("--num_processes=3, process 0 has 2", message)

    def test_two_of_one_number(self):
        for message in call((3, 0), (3, 1), (3, 1)):
            self.assertIn("two processes have --process_id=1", message)

    def test_port_is_taken(self):
        with socket.create_server(("", 0)) as server:
            (message,) = call((2, 0), port=server.getsockname()[1])
        self.assertIn("cannot listen on port", message)

    def test_loopback_is_not_heard_elsewhere(self):
        with roll_call._server(f"127.0.0.1:{launch.free_port()}") as server:
            self.assertEqual(server.getsockname()[0], "127.0.0.1")
        # An address reserved for documentation: no machine has it.
        with roll_call._server(f"192.0.2.1:{launch.free_port()}") as server:
            self.assertEqual(server.getsockname()[0], "0.0.0.0")

    @parameterized.parameters(
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"glm5_jax": "here"}\n',
        b'{"glm5_jax": "here", "num_processes": "2", "process_id": 1}\n',
        b'{"glm5_jax": "here", "num_processes": 2, "process_id": 77}\n',
        b'{"glm5_jax": "here", "num_processes": 2, "process_id": 0}\n',
        b"[" * 4000 + b"\n",
    )
    def test_a_stranger_is_hung_up_on(self, words):
        port, report, came = launch.free_port(), roll_call._report, []

        def scan_and_report(*args):
            deadline = time.monotonic() + SECONDS / 2
            while not came and time.monotonic() < deadline:
                try:
                    with socket.create_connection(("127.0.0.1", port), 9) as stranger:
                        stranger.sendall(words)
                        came.append(True)
                except OSError:  # process 0 does not listen yet
                    time.sleep(0.01)
            report(*args)

        with mock.patch.object(roll_call, "_report", scan_and_report):
            self.assertEqual(call((2, 0), (2, 1), port=port), [None] * 2)
        self.assertEqual(came, [True])


if __name__ == "__main__":
    environment.main()
