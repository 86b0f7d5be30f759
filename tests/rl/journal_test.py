"""What is under way goes on after a kill: no answer in a file is asked for again."""

import asyncio
import collections
import dataclasses
import json
import random
import shutil

import numpy as np
from absl.testing import parameterized

from glm5_jax.environments import protocol
from glm5_jax.inference import requests
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import trajectories
from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import journal as journal_lib
from glm5_jax.rl.actors import orchestrator as orchestrator_lib
from tests import environment, runs
from tests.data import templates_test
from tests.rl import orchestrator_test, trajectories_test, virtual_time

NUM_TURNS, GROUP_SIZE = 3, 2
NEVER = 1e6  # seconds
KNOWN = journal_lib.Known(7, 2)  # group 7, which began with version 2


def make_job(id=20):
    return episodes_lib.Job(trajectories_test.episode().task, 7, id)


def make_request(prompt=(1, 2, 3), session=20):
    return requests.Request(21, prompt, 8, session=session)


def make_completion(version=2, token=5, **fields):
    return requests.Completion(
        [token, 9], [-0.5, -1.0], "stop", [version] * 2, **fields
    )


class JournalTest(runs.FolderTest):
    def setUp(self):
        super().setUp()
        self.folder = self.root / self.id()
        self.path = self.folder / "7.jsonl"

    def write(self, *calls, known=KNOWN):
        journal = journal_lib.Journal(self.folder)
        journal.begin(known, [make_job(), make_job(24)])
        for call in calls:
            call(journal)
        journal.close()

    def read(self, version=2):
        return journal_lib.Journal(self.folder).read(version)

    def again(self, version=2):
        """The group, and its journal in the next life."""
        journal = journal_lib.Journal(self.folder)
        (known,) = journal.read(version)
        journal.begin(known, [make_job(), make_job(24)])
        self.addCleanup(journal.close)
        return known, journal

    def test_a_turn_comes_back_once_for_its_prompt(self):
        experts = np.arange(8).reshape(4, 1, 2).astype(np.int32)
        full = make_completion(
            cache_versions=[1, 2], alternatives=[[(5, -0.5)], []], experts=experts
        )
        self.write(lambda journal: journal.turn(make_request(), full))
        known, journal = self.again()
        self.assertEqual((known.index, known.version), (7, 2))
        self.assertIsNone(journal.repeated(make_request((1, 2))))
        self.assertIsNone(journal.repeated(make_request(session=24)))
        self.assertIsNone(journal.repeated(make_request(session=None)))
        found = journal.repeated(make_request())
        np.testing.assert_array_equal(found.experts, experts)
        without = [dataclasses.replace(x, experts=None) for x in (found, full)]
        self.assertEqual(*without)
        self.assertIsNone(journal.repeated(make_request()))

    def conversation(self, rng, num_turns, session=20, versions=None):
        """Turns whose experts grow, and are others from some row on now and then."""
        experts, found = np.zeros((0, 2, 2), np.int32), []
        for turn in range(num_turns):
            keeps = (
                len(experts) if rng.random() < 0.8 else rng.randrange(len(experts) + 1)
            )
            size = len(experts) + rng.randrange(1, 9)
            new = [rng.randrange(9) for _ in range((size - keeps) * 4)]
            new = np.array(new, np.int32).reshape(-1, 2, 2)
            experts = np.concatenate([experts[:keeps], new])
            version = versions[turn] if versions else 2
            completion = make_completion(version, turn, experts=experts)
            found.append((make_request((*range(turn + 1),), session), completion))
        return found

    def note(self, turns):
        return [lambda journal, turn=turn: journal.turn(*turn) for turn in turns]

    def assert_comes_back(self, journal, turns):
        for request, completion in turns:
            found = journal.repeated(request)
            np.testing.assert_array_equal(found.experts, completion.experts)
            self.assertEqual(found.tokens, completion.tokens)

    def stored_rows(self):
        """Of the experts, in each line."""
        lines = map(json.loads, self.path.read_text().splitlines())
        turns = [line["turn"]["completion"] for line in lines if "turn" in line]
        return [turn["experts"]["shape"][0] for turn in turns]

    def test_a_line_has_the_experts_that_the_turn_before_had_not(self):
        rng = random.Random(0)
        rows = np.arange(160).reshape(40, 2, 2).astype(np.int32)
        sizes = sorted(rng.sample(range(1, 40), 9))
        turns = [
            (make_request((n,)), make_completion(experts=rows[:n].copy()))
            for n in sizes
        ]
        self.write(*self.note(turns))
        self.assertEqual(self.stored_rows(), [*np.diff([0, *sizes])])
        known, journal = self.again()
        kept = [t.experts for turns in known.turns.values() for t in turns]
        for one in kept:  # memory has each row once, too
            self.assertTrue(np.shares_memory(one, kept[-1]))
        self.assert_comes_back(journal, turns)

    def test_experts_come_back_whatever_became_of_the_text(self):
        for seed in range(20):
            rng = random.Random(seed)
            first = self.conversation(rng, 8)
            second = self.conversation(rng, 8, session=24)
            both = [turn for pair in zip(first, second, strict=True) for turn in pair]
            self.path.unlink(missing_ok=True)
            self.write(*self.note(both[:10]))
            _, journal = self.again()  # the next life goes on in the same file
            for call in self.note(both[10:]):
                call(journal)
            journal.close()
            _, journal = self.again()
            self.assert_comes_back(journal, both)
            journal.close()  # its thread still writes what it has read

    def test_a_turn_after_one_that_is_left_out_is_left_out_too(self):
        """As where the next server has older weights."""
        rows = np.arange(40).reshape(10, 2, 2).astype(np.int32)
        turns = [
            (make_request((n,)), make_completion(v, experts=rows[:n].copy()))
            for n, v in ((2, 1), (4, 3), (6, 2), (8, 2))
        ]
        self.write(*self.note(turns))
        for _ in range(2):  # the file is as it was read
            _, journal = self.again(2)
            self.assert_comes_back(journal, turns[:1])
            found = [journal.repeated(request) for request, _ in turns[1:]]
            self.assertEqual(found, [None] * 3)
            journal.close()

    def test_the_same_prompt_asked_twice_gets_both_answers_in_order(self):
        self.write(
            *(
                lambda journal, t=t: journal.turn(make_request(), make_completion(2, t))
                for t in (5, 6)
            )
        )
        _, journal = self.again()
        found = [journal.repeated(make_request()).tokens[0] for _ in range(2)]
        self.assertEqual(found, [5, 6])

    def test_an_ended_episode_comes_back_whole(self):
        episode = trajectories_test.episode()
        self.write(
            lambda journal: journal.turn(make_request(), make_completion()),
            lambda journal: journal.end(make_job(), episode),
        )
        known, journal = self.again(max(episode.samples[0].versions))
        self.assertEqual(known.turns, {})  # memory has no need of them
        found = journal.ended(make_job())
        self.assertEqual(*map(trajectories.to_json, (found, episode)))
        self.assertIsNone(journal.ended(make_job(24)))

    def test_turns_of_other_requests_are_not_noted(self):
        held_out = make_request(session=400)
        self.write(lambda journal: journal.turn(held_out, make_completion()))
        self.assertLen(self.path.read_text().splitlines(), 1)

    def test_what_newer_weights_drew_is_left_out_and_deleted(self):
        episode = trajectories_test.episode()
        newest = max(v for s in episode.samples for v in s.versions)
        self.write(
            lambda journal: journal.turn(make_request(), make_completion(newest)),
            lambda journal: journal.turn(
                make_request((4,)), make_completion(newest - 1)
            ),
            lambda journal: journal.end(make_job(), episode),
            known=journal_lib.Known(7, 0),
        )
        known, _ = self.again(newest - 1)
        self.assertEqual((len(known.turns), known.ended), (1, {}))
        self.assertLen(self.path.read_text().splitlines(), 2)
        known, _ = self.again(newest)  # they are gone for good
        self.assertLen(known.turns, 1)

    def test_a_group_that_newer_weights_began_is_deleted(self):
        self.write(lambda journal: journal.turn(make_request(), make_completion()))
        self.assertEqual(self.read(1), [])
        self.assertFalse(self.path.exists())

    def test_a_file_that_is_cut_anywhere_loses_no_more_than_its_end(self):
        self.write(
            lambda journal: journal.turn(make_request(), make_completion()),
            lambda journal: journal.turn(make_request((4,)), make_completion()),
        )
        whole = self.path.read_bytes()
        ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
        for size in {0, 1, *ends, *(end - 1 for end in ends), *(e + 9 for e in ends)}:
            self.path.write_bytes(whole[:size])
            # A line without its end of line is whole, and the next one would join it.
            num_whole = sum(end <= size for end in ends)
            found = self.read()
            self.assertEqual(
                [len(known.turns) for known in found], [num_whole - 1][:num_whole]
            )
            left = self.path.read_bytes() if found else b""
            self.assertEqual(left, whole[: ends[num_whole - 1]] if num_whole else b"")

    def test_files_of_another_format_and_strange_names_are_left_out(self):
        self.folder.mkdir(parents=True)
        self.path.write_text(json.dumps({"format": 99, "version": 0}) + "\n")
        (self.folder / ".7-abc.jsonl").write_text("x")
        self.assertEqual(self.read(), [])

    def test_a_group_that_is_forgotten_begins_anew(self):
        self.write(
            lambda journal: journal.turn(make_request(), make_completion()),
            lambda journal: journal.forget(7),
            lambda journal: journal.begin(journal_lib.Known(7, 4), [make_job()]),
        )
        (known,) = self.read(4)
        self.assertEqual((known.version, known.turns), (4, {}))

    def test_a_disk_that_is_full_ends_the_run(self):
        journal = journal_lib.Journal(self.folder)
        self.path.mkdir()
        journal.turn(make_request(), make_completion())  # of no group
        journal.begin(KNOWN, [make_job()])
        journal.turn(make_request(), make_completion())
        journal._thread.shutdown()
        with self.assertRaises(IsADirectoryError):
            journal.turn(make_request(), make_completion())


class RestartTest(runs.FolderTest):
    def test_a_group_that_an_engine_lost_keeps_nothing_of_it(self):
        folder, fails = self.root / self.id(), [True]
        engine = orchestrator_test.Engine(fails=lambda: fails[0])
        groups = groups_lib.Groups(1, 1)
        journal = journal_lib.Journal(folder)
        made = make(engine, orchestrator_test.Lucky(), groups, journal)

        async def play():
            task = asyncio.create_task(made.run())
            await asyncio.sleep(0.1)  # the group has failed, and waits
            made.published(1)
            fails[0] = False
            await made.take(NEVER)
            task.cancel()
            await asyncio.wait({task})

        virtual_time.run(play())
        found = journal_lib.Journal(folder).read(1)
        self.assertEqual({known.version for known in found}, {1})

    def test_a_group_that_is_dropped_leaves_no_file_once_its_step_has_one(self):
        folder, groups = self.root / self.id(), groups_lib.Groups(1, 0, max_dropped=3)
        made = make(
            orchestrator_test.Engine(lambda: 1.0),
            orchestrator_test.Lucky(),
            groups,
            journal_lib.Journal(folder),
            drop_equal=True,
        )

        async def play():
            task = asyncio.create_task(made.run())
            for step in range(1, 4):
                self.assertEqual(await made.take(NEVER), [])
                made.published(step)
            task.cancel()
            await asyncio.wait({task})

        virtual_time.run(play())
        self.assertEqual(groups.ledger()["dropped_equal"], 9)
        left = {int(path.stem) for path in folder.iterdir()}
        self.assertFalse({0, 1, 2} & left)


class Patient(orchestrator_test.Lucky):
    """Tasks of three turns, after each of which the environment takes its time."""

    def __init__(self, rng):
        super().__init__()
        self.rng, self.paid = rng, collections.Counter()  # by task

    def environment(self):
        return _Patient(self)


class _Patient:
    def __init__(self, taskset):
        self._taskset, self._num_turns = taskset, 0

    async def reset(self, task):
        self._id = task.id
        return ({"role": "user", "content": f"say OK to {task.id}"},)

    async def step(self, message):
        await asyncio.sleep(self._taskset.rng.uniform(1, 20))
        self._num_turns += 1
        is_over = self._num_turns == NUM_TURNS
        self._taskset.paid[self._id] += is_over
        reward = protocol.Reward(1.0) if is_over else None
        said = {"role": "user", "content": f"and {self._num_turns}"}
        return protocol.StepResult(() if is_over else (said,), reward, is_over, False)

    async def close(self):
        pass


class Noting(orchestrator_test.Engine):
    """Counts its answers by their conversation and prompt."""

    def __init__(self, seconds=lambda: 1.0):
        super().__init__(seconds)
        self.answered = collections.Counter()

    async def complete(self, request):
        completion = await super().complete(request)
        self.answered[request.session, tuple(request.prompt)] += 1
        return completion


def make(engine, taskset, groups, journal, drop_equal=False, **changes):
    limits = {"max_turns": NUM_TURNS, "num_concurrent": 6, "call_timeout": 100.0}
    settings = episodes_lib.Settings(max_new_tokens=16, **(limits | changes))
    context = episodes_lib.Context(
        engine, taskset, templates_test.template(clear=False), settings
    )

    def jobs(index):
        task = dataclasses.replace(taskset.task("train", 0, index), id=f"task/{index}")
        first = index * GROUP_SIZE
        return [
            episodes_lib.Job(task, index, (first + i) * settings.max_turns)
            for i in range(GROUP_SIZE)
        ]

    return orchestrator_lib.Orchestrator(
        context, jobs, groups, drop_equal=drop_equal, journal=journal
    )


class Trainer:
    """A trainer that learns its kept steps again, and can be killed at any moment."""

    NUM_STEPS = 24

    def __init__(self, rng, folder):
        self.rng, self.folder = rng, folder
        self.engine = Noting(lambda: rng.uniform(1, 10))
        self.taskset = Patient(rng)
        self.kept: dict[int, tuple] = {}  # by step: its groups, and the state after it
        self.saved = 0, groups_lib.Groups(2, 2).state(0)
        self.num_kills, self.ages, self.ledger, self.state = 0, [], {}, {}

    async def live(self):
        step, state = self.saved
        if step == 0:  # as Stream.begin does
            shutil.rmtree(self.folder, ignore_errors=True)
            self.engine.answered.clear()
            self.taskset.paid.clear()
        while step + 1 in self.kept and step:
            step += 1
            state = self.kept[step][1]
            await asyncio.sleep(self.rng.uniform(0, 20))  # learns again
        self.kept = {s: kept for s, kept in self.kept.items() if s <= step}
        state = {**json.loads(json.dumps(state)), "version": step}
        groups = groups_lib.Groups(2, 2, state)
        self.engine.version = step
        made = make(self.engine, self.taskset, groups, journal_lib.Journal(self.folder))
        task = asyncio.create_task(made.run())
        try:
            while step < self.NUM_STEPS:
                taken = await made.take(NEVER)
                drawn = [v for _, g in taken for e in g for v in e.samples[0].versions]
                self.ages.append(step - min(v for v in drawn if v >= 0))
                after = groups.state(step + 1)
                await asyncio.sleep(self.rng.uniform(0, 20))  # learns
                step += 1
                self.kept[step] = [index for index, _ in taken], after
                if step % 4 == 0:
                    self.saved = step, groups.state(step)
                    groups.commit(step)
                self.engine.version = step
                made.published(step)
        finally:
            self.ledger, self.state = groups.ledger(), groups.state(step)
            task.cancel()
            await asyncio.wait({task})

    async def run(self):
        while True:
            is_late = self.saved[0] > 0
            most = 60 if is_late else 400
            limit = self.rng.uniform(0, most) if self.num_kills < 12 else None
            try:
                async with asyncio.timeout(limit):
                    return await self.live()
            except TimeoutError:
                self.num_kills += is_late


class KillTest(runs.FolderTest, parameterized.TestCase):
    @parameterized.parameters(range(3))
    def test_what_is_under_way_goes_on_after_any_kill(self, seed):
        trainer = Trainer(random.Random(seed), self.root / self.id())
        virtual_time.run(trainer.run())
        self.assertGreater(trainer.num_kills, 8)
        learnt = [index for indices, _ in trainer.kept.values() for index in indices]
        self.assertLen(set(learnt), 2 * trainer.NUM_STEPS)
        self.assertEqual(trainer.ledger.pop("begun"), sum(trainer.ledger.values()))
        self.assertNotIn("dropped_stale", trainer.ledger)
        self.assertLessEqual(max(trainer.ages), 2)
        left = {*range(trainer.state["next"])} - {*learnt}
        self.assertEqual(left, {*trainer.state["again"]})
        files = {int(path.stem) for path in trainer.folder.glob("*.jsonl")}
        self.assertEqual(files - {*learnt[-4:]}, left)  # the last two steps' may stay
        self.assertEqual(max(trainer.engine.answered.values()), 1)
        self.assertEqual(max(trainer.taskset.paid.values()), GROUP_SIZE)


if __name__ == "__main__":
    environment.main()
