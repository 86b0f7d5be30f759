"""Groups of episodes: none lost, none taught twice, none too stale, no deadlock."""

import json
import math

from absl.testing import absltest, parameterized
from hypothesis import settings, stateful, strategies

from glm5_jax.rl.actors import groups as groups_lib


class Run(stateful.RuleBasedStateMachine):
    """A trainer, its checkpoints and workers, which do anything in any order."""

    @stateful.initialize(
        batch_size=strategies.integers(1, 4),
        max_staleness=strategies.integers(0, 3),
        max_dropped=strategies.sampled_from([1, 2, 5, math.inf]),
    )
    def start(
        self, batch_size: int, max_staleness: int, max_dropped: float | int
    ) -> None:
        self.max_dropped, self.num_dropped = max_dropped, 0  # since the last step
        self.groups = groups_lib.Groups(
            batch_size, max_staleness, max_dropped=max_dropped
        )
        self.learnt: dict[int, list[int]] = {}  # by step, in the trainer's weights
        self.dropped: set[int] = set()
        self.running: set[int] = set()
        self.oldest: dict[int, int] = {}  # version of the tokens of a finished group
        self.taken: list[int] | None = None
        self.latest = 0
        self.saved = (
            0,
            json.dumps(self.groups.state(self.groups.version)),
            frozenset(),
        )
        self.told = self.saved  # with the last step's groups

    @stateful.rule(count=strategies.integers(1, 8))
    def begin(self, count: int) -> None:
        for _ in range(count):
            index = self.groups.begin()
            if index is None:
                return
            assert index not in self.running
            self.running.add(index)

    @stateful.rule(data=strategies.data(), behind=strategies.integers(0, 4))
    def finish(self, data: strategies.DataObject, behind: int) -> None:
        """Of tokens that a server may have drawn with weights from before it began."""
        if self.running:
            index = data.draw(strategies.sampled_from(sorted(self.running)))
            self.running.remove(index)
            self._finish(index, behind)

    def _finish(self, index: int, behind: int) -> None:
        self.oldest[index] = self.groups.version - behind
        self.groups.finish(index, f"group {index}", self.oldest[index])

    @stateful.rule(
        data=strategies.data(), how=strategies.sampled_from(["dies", "spoilt", "skip"])
    )
    def fail(self, data: strategies.DataObject, how: str) -> None:
        if self.running:
            index = data.draw(strategies.sampled_from(sorted(self.running)))
            self.running.remove(index)
            if how == "dies":
                self.groups.restart(index)
                return
            self.dropped.add(index)
            if how == "spoilt":
                self.groups.drop(index, "spoilt")
                self.num_dropped += 1
            else:  # another takes its place, without end
                self.groups.skip(index)

    @stateful.rule(data=strategies.data())
    def renew(self, data: strategies.DataObject) -> None:
        """Of a group that has waited for a place."""
        if self.running:
            index = data.draw(strategies.sampled_from(sorted(self.running)))
            self.groups.renew(index)
            assert self.groups.staleness([index]) == 0

    @stateful.rule()
    def drop_stale(self) -> None:
        """Drops what the next step may not learn from, and nothing else."""
        limit = self.groups.version - self.groups.max_staleness
        for index, content in self.groups.drop_stale():
            assert content == f"group {index}"
            assert self.oldest[index] < limit
            self.dropped.add(index)
            self.num_dropped += 1

    @stateful.rule(remainder=strategies.integers(0, 2))
    def drop_ready(self, remainder: int) -> None:
        """Drops a third of the finished groups; steps wait for others, without end."""

        def is_bad(content: str) -> bool:
            return int(content.removeprefix("group ")) % 3 == remainder

        before = self.groups.num_ready
        dropped = self.groups.drop_ready(is_bad, "quarantined")
        assert self.groups.num_ready == before - len(dropped)
        assert all(is_bad(content) for _, content in dropped)
        assert not self.groups.drop_ready(is_bad, "quarantined")
        self.dropped |= {index for index, _ in dropped}

    @stateful.rule()
    def take(self) -> None:
        if self.taken is None:
            self.drop_stale()
        batch = self.groups.take() if self.taken is None else None
        if batch is None:
            return
        if self.num_dropped < self.max_dropped:
            assert len(batch) == self.groups.batch_size
        self.num_dropped = 0
        indices = [index for index, _ in batch]
        assert [content for _, content in batch] == [f"group {i}" for i in indices]
        assert self.groups.staleness(indices) <= self.groups.max_staleness
        ages = [self.groups.version - self.oldest[index] for index in indices]
        assert max(ages, default=0) <= self.groups.max_staleness
        self.taken = indices
        version = self.groups.version + 1
        state = json.dumps(self.groups.state(version))
        self.told = (version, state, frozenset(self.dropped))

    @stateful.precondition(lambda self: self.taken is not None)
    @stateful.rule()
    def publish(self) -> None:
        self.learnt[self.groups.version] = self.taken
        self.taken = None
        assert self.groups.publish() == len(self.learnt)

    @stateful.rule()
    def save(self) -> None:
        version = self.groups.version
        if self.taken is not None:  # it is written before the weights are published
            self.learnt[version] = self.taken
            version += 1
        state = json.dumps(self.groups.state(version))
        self.saved = (version, state, frozenset(self.dropped))
        self.groups.commit(version)

    @stateful.rule()
    def kill_the_trainer(self) -> None:
        self._go_back()
        self.groups.rewind(self.saved[0])

    @stateful.rule()
    def kill_everything(self) -> None:
        self._go_back()
        self.running.clear()
        self.dropped = set(self.saved[2])  # later ones may come again
        self.groups = groups_lib.Groups(
            self.groups.batch_size,
            self.groups.max_staleness,
            json.loads(self.saved[1]),
            self.max_dropped,
        )
        self.num_dropped = 0

    @stateful.precondition(
        lambda self: self.taken is None and self.told[0] == self.groups.version
    )
    @stateful.rule(data=strategies.data())
    def go_on_after_a_kill(self, data: strategies.DataObject) -> None:
        """The last step's state is known, and some of the groups that are not done."""
        known = {i: g.version for i, g in self.groups._groups.items() if g.step is None}
        left = data.draw(strategies.sets(strategies.sampled_from([-1, *known]))) - {-1}
        self.dropped = set(self.told[2])
        self.groups = groups_lib.Groups(
            self.groups.batch_size,
            self.groups.max_staleness,
            json.loads(self.told[1]),
            self.max_dropped,
        )
        self.num_dropped = 0
        for index in sorted(left):
            assert self.groups.resume(index, known[index])
        for indices in self.learnt.values():
            assert not any(self.groups.resume(index, 0) for index in indices)
        self.running = left

    def _go_back(self) -> None:
        self.learnt = {s: v for s, v in self.learnt.items() if s < self.saved[0]}
        self.taken = None

    @stateful.invariant()
    def no_group_teaches_twice(self) -> None:
        learnt = [i for indices in self.learnt.values() for i in indices]
        assert len(learnt) == len(set(learnt))
        assert not self.dropped & set(learnt)

    @stateful.invariant()
    def no_more_groups_begin_than_the_steps_to_come_can_take(self) -> None:
        ledger, learnt = self.groups.ledger(), sum(map(len, self.learnt.values()))
        num_open = sum(
            ledger.get(n, 0) for n in ("running", "ready", "in_flight", "done")
        )
        steps = self.groups.version + self.groups.max_staleness + 1
        if self.groups.version == self.latest:
            assert num_open <= steps * self.groups.batch_size
        assert ledger.get("done", 0) <= learnt
        self.latest = max(self.latest, self.groups.version)

    @stateful.invariant()
    def the_ledger_closes(self) -> None:
        counts = self.groups.ledger()
        begun = counts.pop("begun", 0)
        assert begun == sum(counts.values()), counts

    def teardown(self) -> None:
        """From any state a fair schedule goes on, and skips no task."""
        if not hasattr(self, "groups"):
            return
        goal = self.groups.version + 4
        for _ in range(1000):
            self.begin(8)
            for index in sorted(self.running):
                self._finish(index, 0)
            self.running.clear()
            self.take()
            if self.taken is not None:
                self.publish()
            if self.groups.version == goal:
                break
        else:
            raise AssertionError("no progress")
        learnt = {i for indices in self.learnt.values() for i in indices}
        state = self.groups.state(self.groups.version)
        missing = set(range(state["next"])) - learnt - self.dropped
        assert missing == set(state["again"])


RunTest = Run.TestCase
RunTest.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class GroupsTest(parameterized.TestCase):
    def test_a_newer_group_does_not_take_the_place_that_an_older_one_needs(self):
        groups = groups_lib.Groups(3, max_staleness=2)
        for _ in range(9):  # of version 0, for the steps 0, 1 and 2
            groups.begin()
        for index in (0, 1, 2):
            groups.finish(index, "content")
        self.assertLen(groups.take(), 3)
        groups.publish()
        newer = groups.begin()
        for index in (3, 4, newer):
            groups.finish(index, "content")
        # Step 2 takes three of 5, 6, 7 and 8, and the fourth would be too old.
        self.assertIsNone(groups.take())
        groups.finish(5, "content")
        self.assertEqual([index for index, _ in groups.take()], [3, 4, 5])

    def test_a_step_takes_fewer_groups_once_too_many_were_dropped(self):
        groups = groups_lib.Groups(2, max_staleness=0, max_dropped=3)
        for step in range(3):
            first, second = groups.begin(), groups.begin()
            groups.finish(first, "content")
            for _ in range(3):
                self.assertIsNotNone(second)
                self.assertIsNone(groups.take())
                groups.drop(second, "equal")
                second = groups.begin()
            self.assertIsNone(second)
            self.assertEqual(groups.take(), [(first, "content")])
            self.assertIsNone(groups.begin())  # the step's other place is lost
            self.assertEqual(groups.publish(), step + 1)
        self.assertEqual(groups.ledger()["dropped_equal"], 9)

    def test_a_step_without_a_group_is_over_too(self):
        groups = groups_lib.Groups(1, max_staleness=1, max_dropped=1)
        groups.drop(groups.begin(), "equal")
        self.assertEqual(groups.take(), [])
        self.assertEqual([groups.begin() for _ in range(2)], [1, None])
        with self.assertRaisesRegex(RuntimeError, "step 0 has taken its groups"):
            groups.take()
        groups.rewind(0)
        self.assertEqual([groups.begin() for _ in range(2)], [2, None])

    def test_a_checkpoint_before_the_publication_admits_no_more_groups(self):
        groups = groups_lib.Groups(2, max_staleness=1)
        begun = [groups.begin() for _ in range(5)]
        self.assertEqual(begun, [0, 1, 2, 3, None])
        for index in begun[:4]:
            groups.finish(index, "content")
        groups.take()
        groups.commit(1)  # the step is done and saved, and version 1 not yet published
        self.assertIsNone(groups.begin())
        groups.publish()
        self.assertEqual([groups.begin() for _ in range(3)], [4, 5, None])
        groups.rewind(0)
        self.assertIsNone(groups.begin())

    def test_a_step_after_the_checkpoint_takes_its_groups_again(self) -> None:
        groups = groups_lib.Groups(1, max_staleness=0)
        for step in range(2):
            groups.finish(groups.begin(), step)
            self.assertEqual(groups.take(), [(step, step)])
            if step == 0:
                groups.commit(groups.publish())
        groups.rewind(1)
        self.assertEqual(groups.take(), [(1, 1)])

    def test_staleness_0_is_synchronous(self) -> None:
        groups = groups_lib.Groups(3, max_staleness=0)
        for version in range(4):
            begun = [groups.begin() for _ in range(4)]
            self.assertEqual(begun, [3 * version + i for i in range(3)] + [None])
            for index in reversed(begun[:3]):
                self.assertIsNone(groups.take())
                groups.finish(index, index)
            self.assertEqual([i for i, _ in groups.take()], begun[:3])
            groups.publish()

    def test_steps_go_on_while_a_slow_group_runs_but_not_past_its_turn(self) -> None:
        groups = groups_lib.Groups(2, max_staleness=2)
        slow = groups.begin()
        for version in range(3):
            while (index := groups.begin()) is not None:
                groups.finish(index, index)
            if version == 2:
                self.assertIsNone(groups.take())
                groups.finish(slow, slow)
            taken = [index for index, _ in groups.take()]
            self.assertEqual(slow in taken, version == 2)
            groups.publish()

    def test_a_ready_group_is_dropped_once_its_tokens_are_too_old(self) -> None:
        groups = groups_lib.Groups(1, max_staleness=1)
        groups.finish(groups.begin(), "first")
        groups.finish(groups.begin(), "fresh", oldest=0)
        groups.take()
        groups.publish()
        groups.finish(groups.begin(), "old", oldest=-1)
        self.assertEqual(groups.drop_stale(), [(2, "old")])
        self.assertEqual(groups.drop_stale(), [])
        self.assertEqual(groups.ledger()["dropped_stale"], 1)
        self.assertEqual(groups.take(), [(1, "fresh")])

    def test_what_is_not_running_cannot_finish(self) -> None:
        groups = groups_lib.Groups(1, max_staleness=0)
        index = groups.begin()
        groups.finish(index, "x")
        for call in (
            groups.restart,
            groups.renew,
            lambda i: groups.finish(i, "y"),
            lambda i: groups.drop(i, "spoilt"),
        ):
            with self.assertRaises(KeyError):
                call(index)


if __name__ == "__main__":
    absltest.main()
