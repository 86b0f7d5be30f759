"""What process 0 makes of what the others say of new weights."""

import json
import pickle
import signal
import threading
from unittest import mock

import jax
from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import leader
from glm5_jax.processes import calls
from tests import environment

REFUSED = {"error": "of another model", "is_input": True}
FAILED = {"error": "a disk", "is_input": False}


class ComingTest(parameterized.TestCase):
    def wait(self, *said):
        answers = [json.dumps(x).encode() for x in said]
        with mock.patch.object(calls, "answers", return_value=answers) as asked:
            leader.Coming(1).wait()
        asked.assert_called_once_with("engine/read/1", jax.process_count())

    def test_all_have_read(self):
        self.wait({}, {})

    @parameterized.parameters(
        (config.InputError, "of another model", {}, REFUSED),
        (RuntimeError, "a disk", FAILED, {}),
        # It may go another time, which a refusal does not.
        (RuntimeError, "a disk", REFUSED, FAILED),
    )
    def test_one_has_not(self, kind, message, *said):
        with self.assertRaisesRegex(kind, message):
            self.wait(*said)


class MemberTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.member = object.__new__(leader.Member)  # an engine of no model
        self.enterContext(mock.patch.object(calls, "answer"))
        publish = mock.patch.object(engine_lib.Engine, "publish")
        self.published = self.enterContext(publish)

    def read(self, number, read):
        self.member.begin_to_read(number, read)
        for thread in threading.enumerate():
            if thread.name == "new weights":
                thread.join()

    def test_the_weights_that_were_read_are_taken_once(self):
        self.read(4, lambda engine: {"w": 1})
        self.member.take(4, 9)
        self.published.assert_called_once_with(self.member, {"w": 1}, 9)
        with self.assertRaisesRegex(config.InputError, "read meanwhile"):
            self.member.take(4, 9)

    def test_others_than_the_last_ones_are_refused(self):
        self.read(4, lambda engine: {"w": 1})
        self.read(5, lambda engine: {"w": 2})
        with self.assertRaisesRegex(config.InputError, "read meanwhile"):
            self.member.take(4, 9)
        self.published.assert_not_called()
        self.member.take(5, 9)
        self.published.assert_called_once_with(self.member, {"w": 2}, 9)


class FollowTest(parameterized.TestCase):
    @parameterized.parameters(signal.SIGTERM, signal.SIGINT)
    def test_signals_are_left_to_process_0(self, number):
        """A cluster sends them to all processes, of which this one waits for calls."""
        for each in (signal.SIGTERM, signal.SIGINT):
            self.addCleanup(signal.signal, each, signal.getsignal(each))

        def heard(name):
            signal.raise_signal(number)
            yield pickle.dumps((setattr, ("asked", 7)))
            yield pickle.dumps(None)
            self.fail("it was dismissed")

        engine = mock.create_autospec(leader.Member, instance=True)
        with (
            mock.patch.object(calls, "heard", heard),
            self.assertLogs("absl", "INFO") as said,
        ):
            leader.follow(engine)
        self.assertIn(f"{number.name}: process 0 ends the server", said.output[0])
        self.assertEqual(engine.asked, 7)


if __name__ == "__main__":
    environment.main()
