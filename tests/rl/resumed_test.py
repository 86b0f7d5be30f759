"""What goes on after a kill stalls nothing, floods nothing and leaves no files."""

import asyncio
import itertools

from glm5_jax.environments import protocol
from glm5_jax.inference import requests
from glm5_jax.rl import completer
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import journal as journal_lib
from tests import environment, runs
from tests.rl import journal_test, orchestrator_test, virtual_time

NUM_TURNS, GROUP_SIZE = 4, journal_test.GROUP_SIZE
STALL = 100.0  # seconds
SLOW = 60.0  # of a call of a tool


class Slow(orchestrator_test.Lucky):
    """Tasks of four turns, after each of which a tool takes a minute."""

    def environment(self):
        return _Slow()


class _Slow:
    under_way = most_under_way = 0

    def __init__(self):
        self._num_turns = 0

    async def reset(self, task):
        _Slow.under_way += 1
        _Slow.most_under_way = max(_Slow.most_under_way, _Slow.under_way)
        return ({"role": "user", "content": f"say OK to {task.id}"},)

    async def step(self, message):
        await asyncio.sleep(SLOW)
        self._num_turns += 1
        is_over = self._num_turns == NUM_TURNS
        said = {"role": "user", "content": f"and {self._num_turns}"}
        reward = protocol.Reward(1.0) if is_over else None
        return protocol.StepResult(() if is_over else (said,), reward, is_over, False)

    async def close(self):
        _Slow.under_way -= 1


def make(engine, groups, folder, *, taskset=None, **settings):
    settings = {"num_concurrent": 8, "call_timeout": 2 * SLOW} | settings
    journal = journal_lib.Journal(folder)
    return journal_test.make(
        engine, taskset or Slow(), groups, journal, max_turns=NUM_TURNS, **settings
    )


async def play(made, meanwhile):
    """Plays until `meanwhile` is over; returns its result."""
    task = asyncio.create_task(made.run())
    try:
        return await meanwhile
    finally:
        task.cancel()
        await asyncio.wait({task})


class ResumedTest(runs.FolderTest):
    def setUp(self):
        super().setUp()
        self.folder = self.root / self.id()

    def test_an_episode_that_is_played_again_does_not_stall_the_run(self):
        engine = journal_test.Noting()
        made = make(engine, groups_lib.Groups(1, 0), self.folder)
        virtual_time.run(play(made, asyncio.sleep((NUM_TURNS - 0.5) * SLOW)))
        made = make(engine, groups_lib.Groups(1, 0), self.folder)
        virtual_time.run(play(made, made.take(STALL)))
        self.assertEqual({*engine.answered.values()}, {1})

    def test_a_group_that_was_dropped_is_not_played_again(self):
        engine = journal_test.Noting()
        groups = groups_lib.Groups(1, 0, max_dropped=9)
        saved = groups.state(0)
        made = make(engine, groups, self.folder, drop_equal=True)
        virtual_time.run(play(made, asyncio.sleep((NUM_TURNS + 1.5) * SLOW)))
        self.assertEqual(groups.ledger()["dropped_equal"], 1)
        groups = groups_lib.Groups(1, 0, saved, max_dropped=2)
        made = make(engine, groups, self.folder, drop_equal=True)
        taken, _ = virtual_time.run(play(made, made.take(9 * STALL)))
        self.assertEqual(taken, [])
        self.assertEqual(groups.ledger()["dropped_equal"], 2)
        self.assertEqual({*engine.answered.values()}, {1})

    def test_the_error_that_ended_the_run_is_told_after_the_groups_that_are_ready(self):
        engine, taken = journal_test.Noting(), []
        made = make(engine, groups_lib.Groups(1, 3), self.folder)

        async def meanwhile():
            with self.assertRaises(completer.EngineError):
                for step in range(1, 9):
                    taken.extend(await made.take(9 * STALL))
                    made.published(step)
                    if step == 2:  # two are ready, and others are under way
                        engine.fails = lambda: True
                        await asyncio.sleep(9 * STALL)

        virtual_time.run(play(made, meanwhile()))
        self.assertLen(taken, 4)

    def test_a_group_that_is_too_old_leaves_no_file(self):
        engine, groups = journal_test.Noting(), groups_lib.Groups(1, 0)
        made = make(engine, groups, self.folder)

        async def meanwhile():
            engine.version = -1
            made.published(1)
            await asyncio.sleep((NUM_TURNS + 1) * SLOW)
            for version in range(1, 4):
                engine.version = version
                await made.take(9 * STALL)
                made.published(version + 1)

        virtual_time.run(play(made, meanwhile()))
        self.assertEqual(groups.ledger().get("dropped_stale"), 1)
        self.assertNotIn("0.jsonl", [path.name for path in self.folder.iterdir()])

    def test_groups_go_on_within_the_bounds_of_this_start(self):
        groups, engine = groups_lib.Groups(4, 0), journal_test.Noting()
        saved = groups.state(0)
        made = make(engine, groups, self.folder)
        virtual_time.run(play(made, asyncio.sleep(1.5 * SLOW)))
        for bound in ({"num_concurrent": 2}, {"concurrency": (2,)}):
            _Slow.under_way = _Slow.most_under_way = 0
            groups = groups_lib.Groups(4, 0, saved)
            made = make(engine, groups, self.folder, **bound)
            virtual_time.run(play(made, asyncio.sleep(SLOW / 2)))
            self.assertEqual(_Slow.most_under_way, 2)

    def test_an_environment_that_is_repaired_gets_its_episodes_again(self):
        """The second episode of each group failed, and the first hung."""
        engine, taskset, num = journal_test.Noting(), Slow(), 64
        saved, made_by = groups_lib.Groups(num, 0).state(0), taskset.environment
        numbers = itertools.count()

        def broken():
            made, number = made_by(), next(numbers)

            async def step(message):
                if number % GROUP_SIZE:
                    raise RuntimeError("the service is down")
                await asyncio.sleep(9 * STALL)

            made.step = step
            return made

        def orchestrator():
            groups, many = groups_lib.Groups(num, 0, saved), GROUP_SIZE * num
            return make(
                engine, groups, self.folder, taskset=taskset, num_concurrent=many
            )

        taskset.environment = broken
        virtual_time.run(play(orchestrator(), asyncio.sleep(SLOW)))
        taskset.environment = made_by
        made = orchestrator()
        taken, _ = virtual_time.run(play(made, made.take(9 * STALL)))
        self.assertLen(taken, num)

    def test_a_turn_without_a_token_is_no_damage(self):
        journal = journal_lib.Journal(self.folder)
        job = episodes_lib.Job(Slow().task("train", 0, 0), 7, 20)
        journal.begin(journal_lib.Known(7, 2), [job])
        empty = requests.Completion([], [], "length", [])
        request = requests.Request(20, (1, 2), 8, session=20)
        journal.turn(request, empty)
        journal.close()
        (known,) = journal_lib.Journal(self.folder).read(2)
        self.assertLen(known.turns, 1)


if __name__ == "__main__":
    environment.main()
