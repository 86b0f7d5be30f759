"""Checks the choice of the number of drafts, without any device."""

import numpy as np
from absl.testing import parameterized

from glm5_jax.inference import drafter, steps
from tests import environment

ROWS = 4


def counts(judged, accepted, rounds=1):
    """Returns counts of one sequence, by position."""
    rounds = np.array([rounds], np.int32)
    return steps.Tally(rounds, *(np.array([x], np.int32) for x in (judged, accepted)))


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
        rounds = 10 if number else 20  # which are more, but no dearer
        counted = tally(number, accepted, rounds)
        machine.record(ROWS, number, counted, rounds * seconds[number])
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
        # 1, 1.6 / 1.1, 1.8 / 1.29: four percent are no reason for a change.
        ("almost_alike", (6, 2, 0), {0: 1.0, 1: 1.1, 3: 1.29}, 3),
    )
    def test_takes_the_most_tokens_a_second(self, accepted, seconds, wanted):
        machine = drafter.Drafter(3, adapts=True)
        with self.assertLogs("absl", "INFO") as logs:
            numbers = run(machine, accepted, seconds, 200)
            drafter.logging.info("end")
        # Each is timed three times after its first dispatch; then every 64th time
        # another one is tried.
        first = [n for n in (3, 1, 0) for _ in range(4)]
        others = [n for n in (0, 1, 3) if n != wanted]
        each = [wanted] * 63
        self.assertEqual(
            numbers,
            [*first, *each, others[1], *each, others[0], *each][:200],
        )
        self.assertLen(logs.output, 1 if wanted == 3 else 2)  # one line tells why
        if wanted == 0:
            reason = (
                "0 drafts a round for 4 rows instead of 3: a round of 3 draws 1.80 "
                "tokens and takes 2.50 times as long as one of 0, which draws 1.00."
            )
            self.assertIn(reason, logs.output[0])

    def test_the_others_are_tried_in_turn(self):
        machine = drafter.Drafter(7, adapts=True)
        seconds = {0: 1.0, 1: 2.0, 3: 3.0, 7: 4.0}
        numbers = run(machine, [0] * 7, seconds, 16 + 3 * 64)
        each = [0] * 63
        first = [n for n in (7, 3, 1, 0) for _ in range(4)]
        self.assertEqual(numbers, [*first, *each, 3, *each, 7, *each, 1])

    @parameterized.parameters((63, 3), (64, 1))
    def test_nothing_is_decided_before_some_drafts_were_judged(self, judged, wanted):
        machine = drafter.Drafter(3, adapts=True)
        machine.record(ROWS, 3, counts([judged] * 3, [2, 1, 0]), 1.0)
        for _ in range(3):
            machine.record(ROWS, 3, counts([0] * 3, [0] * 3), 1.0)
        self.assertEqual(machine.choose(ROWS), wanted)
        machine.renew()  # so few count no less
        self.assertEqual(machine.choose(ROWS), wanted)

    def test_a_dispatch_without_a_round_is_not_timed(self):
        machine = drafter.Drafter(3, adapts=True)
        for _ in range(9):
            machine.record(ROWS, 3, counts([64] * 3, [9] * 3, rounds=0), 1.0)
        self.assertEqual(machine.choose(ROWS), 3)

    def test_the_median_of_the_latest_dispatches_counts(self):
        """Of 16: eight dear ones draw level with eight cheap ones."""
        machine = drafter.Drafter(1, adapts=True)
        run(machine, (5,), {0: 1.0, 1: 1.0}, 8 + 16)
        numbers = run(machine, (5,), {0: 1.0, 1: 3.0}, 12)
        self.assertEqual(numbers, [1] * 8 + [0] * 4)

    def test_drafts_that_nobody_judged_count_as_rejected(self):
        """As those behind the last token of every request."""
        machine, numbers = drafter.Drafter(3, adapts=True), []
        seconds = {0: 1.0, 1: 1.1, 3: 1.2}
        for _ in range(20):
            numbers.append(machine.choose(ROWS))
            judged, accepted = [90, 90, 0], [45, 0, 0]
            found = counts(judged[: numbers[-1]], accepted[: numbers[-1]])
            machine.record(ROWS, numbers[-1], found, seconds[numbers[-1]])
        self.assertEqual(numbers[-8:], [1] * 8)

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

    @parameterized.parameters(
        ([(256, 0)], True),
        ([(255, 0)], False),
        ([(1000, 299)], True),
        ([(1000, 300)], False),
        # After 4096 drafts nothing is left of those before.
        ([(4096, 0), (4096, 1229)], False),
        ([(4096, 4096), (4095, 1228)], False),
        ([], False),
    )
    def test_an_alarm_has_reasons(self, dispatches, is_low):
        machine = drafter.Drafter(3, adapts=True)
        for judged, accepted in dispatches:
            machine.record(ROWS, 3, counts([judged] * 3, [accepted, 0, 0]), 1.0)
        self.assertEqual(machine.acceptance.is_low, is_low)

    def test_the_drafts_of_new_weights_soon_outweigh_the_others(self):
        machine = drafter.Drafter(3, adapts=True)
        machine.record(ROWS, 3, counts([4096] * 3, [409, 0, 0]), 1.0)
        machine.renew()
        machine.record(ROWS, 3, counts([256] * 3, [90, 0, 0]), 1.0)
        self.assertFalse(machine.acceptance.is_low)

    def test_an_engine_without_drafts(self):
        machine = drafter.Drafter(0, adapts=True)
        self.assertFalse(machine.is_on)
        self.assertEqual(machine.choose(ROWS), 0)
        self.assertEqual(machine.acceptance, drafter.Acceptance())
        self.assertEqual(machine.acceptance.length, 1.0)
        self.assertTrue(drafter.Drafter(1, adapts=True).is_on)

    def test_counts(self):
        machine = drafter.Drafter(3, adapts=False)
        run(machine, (8, 4, 0), {3: 1.0}, 5)
        acceptance = machine.acceptance
        self.assertEqual(acceptance.rounds, 5 * 10 * ROWS)
        self.assertEqual(acceptance.shares, (0.8, 0.4, 0.0))
        self.assertEqual(acceptance.length, 2.2)


if __name__ == "__main__":
    environment.main()
