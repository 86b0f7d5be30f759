"""Checks the choice of the number of drafts, without any device."""

import numpy as np
from absl.testing import parameterized

from glm5_jax.inference import drafter, steps
from tests import environment

ROWS = 4


def tally(number, accepted, rounds=10):
    """Returns counts of ROWS sequences, of which each accepts so many i-th drafts."""
    accepted = np.tile(np.asarray(accepted[:number], np.int32), (ROWS, 1))
    judged = np.full((ROWS, number), rounds, np.int32)
    return steps.Tally(np.full(ROWS, rounds, np.int32), judged, accepted)


def run(machine, accepted, seconds, dispatches):
    """Runs dispatches; returns the numbers of drafts that were chosen.

    Args:
      machine: a Drafter.
      accepted: of 10 rounds, those that keep the first i drafts.
      seconds: of a round, for each number of drafts.
      dispatches: to run.
    """
    numbers = []
    for _ in range(dispatches):
        number = machine.choose(ROWS)
        machine.record(ROWS, number, tally(number, accepted), 10 * seconds[number])
        numbers.append(number)
    return numbers


class DrafterTest(parameterized.TestCase):
    @parameterized.named_parameters(
        # Tokens of a round / its cost: 1, 1.9 / 1.1, 3.2 / 1.2.
        ("good_and_cheap_drafts", (9, 8, 5), {0: 1.0, 1: 1.1, 3: 1.2}, 3),
        # 1, 1.6 / 1.1, 1.8 / 1.5.
        ("one_good_draft", (6, 2, 0), {0: 1.0, 1: 1.1, 3: 1.5}, 1),
        # 1, 1.6 / 1.8, 1.8 / 2.5.
        ("dear_drafts", (6, 2, 0), {0: 1.0, 1: 1.8, 3: 2.5}, 0),
    )
    def test_takes_the_most_tokens_a_second(self, accepted, seconds, wanted):
        machine = drafter.Drafter(3, adapts=True)
        with self.assertLogs("absl", "INFO") as logs:
            numbers = run(machine, accepted, seconds, 200)
            drafter.logging.info("end")
        self.assertEqual(numbers[:4], [3] * 4)
        last = numbers[20:]
        self.assertGreater(last.count(wanted), 0.97 * len(last))
        self.assertLen(set(last), 3)  # the others are tried at times
        self.assertLen(logs.output, 1 if wanted == 3 else 2)  # one line tells why
        if wanted == 0:
            reason = "0 drafts a round for 4 rows instead of 3: a round of 3 draws 1.80"
            self.assertIn(reason, logs.output[0])

    def test_follows_new_weights(self):
        machine = drafter.Drafter(3, adapts=True)
        seconds = {0: 1.0, 1: 1.2, 3: 1.6}
        self.assertEqual(run(machine, (9, 8, 7), seconds, 300)[-1], 3)
        machine.renew()
        self.assertEqual(run(machine, (0, 0, 0), seconds, 100)[-1], 0)
        machine.renew()
        self.assertEqual(run(machine, (9, 8, 7), seconds, 3000)[-1], 3)

    def test_sizes_are_decided_by_themselves(self):
        machine = drafter.Drafter(1, adapts=True)
        for _ in range(40):
            for rows, cost in ((1, 1.1), (64, 2.0)):
                number = machine.choose(rows)
                seconds = 10 * (cost if number else 1.0)
                machine.record(rows, number, tally(number, (7,)), seconds)
        self.assertEqual((machine.choose(1), machine.choose(64)), (1, 0))

    def test_without_adaptation_it_is_always_the_same_number(self):
        machine = drafter.Drafter(3, adapts=False)
        self.assertEqual({*run(machine, (0, 0, 0), {3: 9.0}, 100)}, {3})

    def test_numbers_are_few(self):
        for most, wanted in ((1, [0, 1]), (3, [0, 1, 3]), (7, [0, 1, 3, 7]), (0, [0])):
            self.assertEqual(drafter.Drafter(most, adapts=True).numbers, wanted)

    def test_an_alarm_is_logged_once(self):
        machine = drafter.Drafter(3, adapts=False)
        with self.assertLogs("absl", "WARNING") as logs:
            run(machine, (2, 1, 0), {3: 1.0}, 100)
        self.assertLen(logs.output, 1)
        self.assertIn("Only 20% of the first drafts are accepted", logs.output[0])
        self.assertTrue(machine.acceptance.is_low)
        run(machine, (9, 1, 0), {3: 1.0}, 300)
        self.assertFalse(machine.acceptance.is_low)

    def test_counts(self):
        machine = drafter.Drafter(3, adapts=False)
        run(machine, (8, 4, 0), {3: 1.0}, 5)
        acceptance = machine.acceptance
        self.assertEqual(acceptance.rounds, 5 * 10 * ROWS)
        self.assertEqual(acceptance.shares, (0.8, 0.4, 0.0))
        self.assertEqual(acceptance.length, 2.2)
        self.assertEqual(drafter.Acceptance().length, 1.0)


if __name__ == "__main__":
    environment.main()
