"""Every failure of an episode ends with its label, and affects no other episode."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import random
import sys
import threading
import time
import tracemalloc
from unittest import mock

from absl.testing import absltest, parameterized

from glm5_jax import config
from glm5_jax import messages as messages_lib
from glm5_jax.environments import protocol, threads
from glm5_jax.rl import at_once, completer, rollouts
from glm5_jax.rl import calls as calls_lib
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import pump as pump_lib
from tests import environment
from tests.data import templates_test
from tests.rl import faults, orchestrator_test, scripted, virtual_time

TEMPLATE = templates_test.template(clear=False)
OK = templates_test.ids_of("</think>OK<|user|>")
SETTINGS = episodes_lib.Settings(
    max_new_tokens=16,
    max_turns=3,
    num_concurrent=4,
    call_timeout=0.2,  # seconds; the calls of these environments take microseconds
    episode_timeout=5.0,
)
Label, Fault = protocol.Label, faults.Fault


def answers_ok(request):
    return OK


def jobs(taskset, count, spacing=SETTINGS.max_turns):
    return [
        episodes_lib.Job(taskset.task("train", 0, i), i // 2, request_id=spacing * i)
        for i in range(count)
    ]


def collect(taskset, count=4, answer=answers_ok, settings=SETTINGS, **how):
    engine = how.pop("engine", None) or scripted.ScriptedEngine(answer)
    todo = jobs(taskset, count, settings.max_turns)
    found = scripted.collect(engine, taskset, TEMPLATE, todo, settings, **how)
    assert engine.num_pending == 0
    return found


class Scripted:
    """A taskset whose environments run a given coroutine function as `step`."""

    name, pays_when_cut = "scripted", False

    def __init__(self, step, reset=None):
        self.step, self.reset = step, reset
        self.num_open = self.max_open = self.num_closed = 0

    def task(self, split, seed, index):
        messages = ({"role": "user", "content": f"task {index}"},)
        pays = {"pays_when_cut": True} if self.pays_when_cut else {}  # not by default
        return protocol.Task(str(index), messages, **pays)

    def environment(self):
        return _Environment(self)

    def demonstration(self, task):
        return None


class _Environment:
    def __init__(self, taskset):
        self.taskset, self.num_turns = taskset, 0

    async def reset(self, task):
        self.taskset.num_open += 1
        self.taskset.max_open = max(self.taskset.max_open, self.taskset.num_open)
        if self.taskset.reset is not None:
            return await self.taskset.reset(task)
        self.task = task
        return task.messages

    async def step(self, message):
        self.num_turns += 1
        return await self.taskset.step(self, message)

    async def close(self):
        self.taskset.num_open -= 1
        self.taskset.num_closed += 1


def ends(total=1.0, **changes):
    """Returns a last step; `changes` may have types that only tests refuse."""
    result = protocol.StepResult((), faults.reward_of(total), True, False)
    for name, value in changes.items():
        object.__setattr__(result, name, value)
    return result


def goes_on(*contents, role="tool"):
    new = tuple({"role": role, "content": content} for content in contents)
    return protocol.StepResult(new, None, False, False)


def goes_on_with(messages):
    """Returns a step that continues with `messages`, of any type."""
    return ends(terminated=False, reward=None, messages=messages)


TOOL = {"role": "tool", "content": "more"}
OUTCOMES = (  # fault, label, reward, turns, reason
    (Fault.NONE, Label.OK, 1.0, 1, ""),
    (Fault.HANG_IN_RESET, Label.TIMEOUT, None, 0, "reset took longer"),
    (Fault.HANG_IN_STEP, Label.TIMEOUT, None, 1, "step took longer"),
    (Fault.HANG_IN_CLOSE, Label.OK, 1.0, 1, ""),
    (Fault.CRASH_IN_RESET, Label.ENV_ERROR, None, 0, "crash in reset"),
    (Fault.CRASH_IN_STEP, Label.ENV_ERROR, None, 1, "crash in step"),
    (Fault.CRASH_IN_CLOSE, Label.OK, 1.0, 1, ""),
    (Fault.FLOOD_IN_RESET, Label.ENV_ERROR, None, 0, "not fit the cache"),
    (Fault.FLOOD_IN_STEP, Label.TRUNCATED, 0.0, 1, "not fit the cache"),
    (Fault.ENDLESS, Label.TRUNCATED, 0.0, 3, "no end in 3 turns"),
    (Fault.REWARD_NAN, Label.REWARD_ERROR, None, 1, "nan is not finite"),
    (Fault.REWARD_INFINITE, Label.REWARD_ERROR, None, 1, "inf is not finite"),
    (Fault.REWARD_TEXT, Label.REWARD_ERROR, None, 1, "'1.0' is not a number"),
    (Fault.REWARD_NONE, Label.REWARD_ERROR, None, 1, "the reward is None"),
    (Fault.REWARD_TOTAL_NONE, Label.REWARD_ERROR, None, 1, "None is not a number"),
    (Fault.REWARD_RAISES, Label.REWARD_ERROR, None, 1, "the scorer fell over"),
)


class FaultTest(parameterized.TestCase):
    @parameterized.named_parameters(*((row[0].value, *row) for row in OUTCOMES))
    def test_a_fault_has_one_outcome(self, fault, label, reward, num_turns, reason):
        taskset = faults.FaultyTaskset(fault, every=2)
        found = collect(taskset, count=6)
        for i, episode in enumerate(found):
            is_faulty = i % 2 == 0
            self.assertIs(episode.label, label if is_faulty else Label.OK)
            expected = reward if is_faulty else 1.0
            self.assertEqual(episode.reward and episode.reward.total, expected)
            self.assertEqual(episode.num_turns, num_turns if is_faulty else 1)
            self.assertIn(reason if is_faulty else "", episode.reason)
            is_close = is_faulty and fault.value.endswith("in_close")
            self.assertEqual(bool(episode.close_error), is_close)
            trained = sum(sum(sample.mask) for sample in episode.samples)
            self.assertEqual(trained, len(OK) * episode.num_turns)
        self.assertEqual(taskset.counts.closes, 6)
        self.assertEqual(taskset.counts.resets, 6)
        metrics = rollouts.metrics(found)
        labels = [metrics[f"rollout/label/{name.value}"] for name in Label]
        self.assertEqual(sum(labels), 6)
        self.assertEqual(metrics["rollout/episodes"], 6)

    def test_every_fault_is_listed(self):
        self.assertEqual([row[0] for row in OUTCOMES], list(Fault))

    @parameterized.parameters(range(3))
    def test_faults_keep_to_themselves(self, seed):
        rng = random.Random(seed)
        plan = rng.choices(OUTCOMES, k=40)
        waiting = [row[0] for row in plan]
        taskset = faults.FaultyTaskset(Fault.NONE)
        taskset.environment = lambda: faults.FaultyTaskset(
            waiting.pop(0)
        ).environment()  # created in the order of the jobs
        settings = dataclasses.replace(
            SETTINGS, num_concurrent=rng.randint(1, 40), call_timeout=0.05
        )
        engine = scripted.ScriptedEngine(answers_ok, num_slots=rng.randint(1, 9))
        found = collect(taskset, 40, engine=engine, settings=settings)
        for episode, (_, label, reward, num_turns, reason) in zip(
            found, plan, strict=True
        ):
            self.assertIs(episode.label, label)
            self.assertEqual(episode.reward and episode.reward.total, reward)
            self.assertEqual(episode.num_turns, num_turns)
            self.assertIn(reason, episode.reason)

    @parameterized.named_parameters(
        ("beyond_the_limit", ends(1e9), Label.REWARD_ERROR, "max_reward"),
        ("below_the_limit", ends(-101), Label.REWARD_ERROR, "max_reward"),
        ("too_large_an_integer", ends(10**400), Label.REWARD_ERROR, "too large"),
        (
            "part_not_finite",
            ends(reward=protocol.Reward(1.0, {"a": float("nan")})),
            Label.REWARD_ERROR,
            "not finite",
        ),
        ("no_step_result", (), Label.ENV_ERROR, "step returned ()"),
        ("no_message", goes_on(), Label.ENV_ERROR, "no message"),
        ("no_role", goes_on("a", role=None), Label.ENV_ERROR, "role must be one of"),
        ("no_message_but_a_text", goes_on_with(["a"]), Label.ENV_ERROR, "be a mapping"),
        ("endless", goes_on_with(itertools.repeat(TOOL)), Label.TRUNCATED, "not fit"),
        (
            "much_thought",
            goes_on_with([{"role": "tool", "reasoning_content": "x" * 10**6}]),
            *(Label.TRUNCATED, "no end"),
        ),
        (
            "many_parts",
            goes_on_with([{**TOOL, "more": ["x" * 10**5] * 99}]),
            *(Label.ENV_ERROR, "more than"),
        ),
        ("no_text", goes_on(5), Label.ENV_ERROR, "must be a string"),
        ("a_text", ends(terminated=False, messages="Hi"), Label.ENV_ERROR, "step"),
        ("cut_off", ends(terminated=False, truncated=True), Label.TRUNCATED, "trunc"),
    )
    def test_values_that_step_returns(self, result, label, reason):
        async def step(env, message):
            return result

        (episode,) = collect(Scripted(step), count=1)
        self.assertIs(episode.label, label)
        self.assertIn(reason, episode.reason)
        self.assertEqual(episode.reward is None, label is not Label.TRUNCATED)
        self.assertLess(len(str(episode.transcript)), 10**5)

    @parameterized.named_parameters(
        ("exit", lambda: sys.exit(3), "SystemExit"),
        ("no_exception", lambda: _raise(_Strange), "_Strange"),
        ("cancels_itself", lambda: asyncio.current_task().cancel(), "cancelled itself"),
        ("generator_exit", lambda: _raise(GeneratorExit), "GeneratorExit"),
        ("cancels_all", lambda: _cancel(asyncio.all_tasks()), "no task but its own"),
        ("stops_the_loop", lambda: asyncio.get_running_loop().stop(), "must not stop"),
        ("cannot_be_shown", lambda: _raise(_Nameless()), "_Nameless"),
        ("its_own_timeout", lambda: _raise(TimeoutError), "TimeoutError"),
    )
    def test_strange_ends(self, act, reason):
        async def step(env, message):
            act()
            await asyncio.sleep(0)

        taskset = Scripted(step)
        for episode in collect(taskset, count=2):
            self.assertIs(episode.label, Label.ENV_ERROR)
            self.assertIn(reason, episode.reason)
        self.assertEqual(taskset.num_closed, 2)

    def test_threads_of_environments_that_hang_are_not_missed_by_others(self):
        over = threading.Event()
        self.addCleanup(over.set)

        async def step(env, message):
            hangs = int(env.task.id) < 16
            await asyncio.to_thread(over.wait if hangs else time.sleep, *[0.0][hangs:])
            return ends()

        settings = dataclasses.replace(SETTINGS, num_concurrent=20, call_timeout=4.0)
        made = functools.partial(threads.Threads, seconds=0.05)
        with mock.patch.object(threads, "Threads", made):
            found = collect(Scripted(step), count=20, settings=settings)
        labels = [episode.label for episode in found]
        self.assertEqual(labels, [Label.TIMEOUT] * 16 + [Label.OK] * 4)

    def test_nobody_waits_for_an_episode_that_ignores_being_cancelled(self):
        async def step(env, message):
            while env.task.id == "0":
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(faults.NEVER)
            return ends()

        start = time.monotonic()
        with self.assertLogs(level="ERROR"):
            found = collect(Scripted(step))
        self.assertLess(time.monotonic() - start, 10)
        labels = [episode.label for episode in found]
        self.assertEqual(labels, [Label.TIMEOUT] + [Label.OK] * 3)

    def test_the_first_message_must_exist(self):
        async def reset(task):
            return ()

        (episode,) = collect(Scripted(None, reset), count=1)
        self.assertIs(episode.label, Label.ENV_ERROR)
        self.assertEqual(episode.reason, "reset returned no message")

    def test_the_largest_reward_counts(self):
        async def step(env, message):
            return ends(SETTINGS.max_reward)

        (episode,) = collect(Scripted(step), count=1)
        self.assertIs(episode.label, Label.OK)
        self.assertEqual(episode.reward.total, SETTINGS.max_reward)

    def test_a_long_reason_is_cut(self):
        async def step(env, message):
            raise ValueError("x" * 1000)

        (episode,) = collect(Scripted(step), count=1)
        self.assertEqual(episode.reason, f"step: ValueError('{'x' * 288}")

    @parameterized.parameters(-1, 0, 1)
    def test_a_text_is_kept_until_no_cache_could_hold_it(self, more):
        """Each token has at most as many characters as the longest piece."""
        longest = max(map(len, TEMPLATE.tokenizer.pieces))
        size = 9 * longest + 1
        engine = scripted.ScriptedEngine(answers_ok, capacity=9)
        taskset = Scripted(None)

        async def reset(task):
            return ({"role": "user", "content": "x" * (size + more)},)

        taskset.reset = reset
        (episode,) = collect(taskset, 1, engine=engine)
        self.assertIn("does not fit the cache", episode.reason)
        (message,) = episode.transcript
        self.assertLen(message["content"], min(size + more, size))

    def test_an_environment_that_cannot_be_made(self):
        taskset = Scripted(None)
        taskset.environment = lambda: _raise(OSError)
        (episode,) = collect(taskset, count=1)
        self.assertIs(episode.label, Label.ENV_ERROR)
        self.assertEmpty(episode.samples)

    def test_the_limit_of_an_episode_is_over_all_calls(self):
        async def step(env, message):
            await asyncio.sleep(0.3)
            return goes_on("more")

        limits = {"call_timeout": 0.5, "episode_timeout": 0.75}
        settings = dataclasses.replace(SETTINGS, max_turns=9, **limits)
        taskset, engine = Scripted(step), orchestrator_test.Engine()
        context = episodes_lib.Context(engine, taskset, TEMPLATE, settings)
        todo = jobs(taskset, 1, settings.max_turns)
        (episode,), seconds = virtual_time.run(at_once.run_all(context, todo))
        self.assertIs(episode.label, Label.TIMEOUT)
        self.assertEqual(episode.num_turns, 3)
        self.assertAlmostEqual(seconds, 0.75)

    def test_environments_work_while_the_engine_does(self):
        """A step that compiles takes longer than a call of an environment may."""
        engine = scripted.ScriptedEngine(lambda request: [65] * 40 + OK)
        plain_step = engine.step

        def slow_step():
            time.sleep(1.5 * SETTINGS.call_timeout)
            return plain_step()

        stepped = []

        async def step(env, message):
            stepped.append(message)
            for _ in range(4):
                await asyncio.sleep(0.001)
            return ends()

        # The second still decodes while the first's environment works.
        environment = Scripted(step)
        environment.pays_when_cut = True  # else it is not asked
        engine.step = slow_step
        settings = dataclasses.replace(SETTINGS, max_new_tokens=2)
        found = collect(environment, 6, engine=engine, settings=settings)
        self.assertEqual({episode.label for episode in found}, {Label.TRUNCATED})
        self.assertLen(stepped, len(found))


class _Strange(BaseException):
    pass


class _Nameless(Exception):
    def __repr__(self):
        raise ValueError


def _cancel(tasks):
    for task in sorted(tasks, key=lambda task: task is asyncio.current_task()):
        task.cancel()


def _raise(error):
    raise error


class TurnsTest(parameterized.TestCase):
    def test_the_engine_is_asked_for_as_many_tokens_as_fit(self):
        asked = []

        def answer(request):
            asked.append(request)
            return [65] * 100

        async def step(env, message):
            return goes_on("more", role="user")

        settings = dataclasses.replace(SETTINGS, max_turns=9, continue_truncated=True)
        engine = scripted.ScriptedEngine(answer, capacity=60)
        (episode,) = collect(Scripted(step), 1, engine=engine, settings=settings)
        self.assertIs(episode.label, Label.TRUNCATED)
        self.assertIn("does not fit", episode.reason)
        self.assertEqual(episode.num_truncated, episode.num_turns)
        (sample,) = episode.samples
        self.assertLessEqual(len(sample.tokens), 60)
        self.assertEqual(sample.tokens.count(TEMPLATE.tokenizer.eos_id), 2)
        self.assertEqual({request.stop_ids for request in asked}, {TEMPLATE.stop_ids})

    def test_a_prompt_that_leaves_room_for_one_token_is_sampled(self):
        asked = []

        def answer(request):
            asked.append(request)
            return OK

        async def step(env, message):
            return ends()

        collect(Scripted(step), 1, answer=answer)
        (room,) = {len(request.prompt) for request in asked}
        for capacity, label, reason in (
            (room, Label.ENV_ERROR, "does not fit the cache"),
            (room + 1, Label.TRUNCATED, "cut off by its length"),
        ):
            engine = scripted.ScriptedEngine(answer, capacity=capacity)
            (episode,) = collect(Scripted(step), 1, engine=engine)
            self.assertIs(episode.label, label)
            self.assertIn(reason, episode.reason)

    def test_the_engine_keeps_a_prefix_for_every_turn_but_the_last(self):
        asked = {}

        def answer(request):
            asked[request.id] = request
            return OK

        async def step(env, message):
            return goes_on("more", role="user")

        collect(Scripted(step), 1, answer=answer)
        kept = [request.keep > 0 for _, request in sorted(asked.items())]
        self.assertEqual(kept, [True, True, False])
        self.assertEqual({request.temperature for request in asked.values()}, {1.0})

    @parameterized.named_parameters(
        ("ends", False, Label.TRUNCATED, 1), ("goes_on", True, Label.OK, 2)
    )
    def test_a_turn_that_is_cut_off(self, continue_truncated, label, num_turns):
        async def step(env, message):
            return ends() if env.num_turns == 2 else goes_on("go on", role="user")

        settings = dataclasses.replace(SETTINGS, continue_truncated=continue_truncated)
        answers = {"answer": lambda request: OK if request.id else [65] * 99}
        (episode,) = collect(Scripted(step), 1, **answers, settings=settings)
        self.assertIs(episode.label, label)
        self.assertEqual(episode.num_turns, num_turns)
        self.assertEqual(episode.reward.total, num_turns - 1.0)

    @parameterized.named_parameters(
        ("earns_nothing", False, False, 0.0),
        ("nor_where_others_go_on", False, True, 0.0),
        ("earns_what_the_task_says", True, False, 0.7),
    )
    def test_the_last_turn_cut_off(self, pays, continue_truncated, reward):
        async def step(env, message):
            return ends(0.7)

        taskset, settings = Scripted(step), SETTINGS
        taskset.pays_when_cut = pays
        settings = dataclasses.replace(settings, continue_truncated=continue_truncated)
        answers = {"answer": lambda request: [65] * 99}
        (episode,) = collect(taskset, 1, **answers, settings=settings)
        self.assertIs(episode.label, Label.TRUNCATED)
        self.assertIn("cut off by its length", episode.reason)
        self.assertEqual(episode.reward.total, reward)
        self.assertEqual(taskset.num_closed, 1)

    def test_an_empty_response_is_an_answer(self):
        seen = []

        async def step(env, message):
            seen.append(message["content"])
            return ends(0.5)

        answer = templates_test.ids_of("<|user|>")
        (episode,) = collect(Scripted(step), 1, answer=lambda request: answer)
        self.assertEqual(seen, [""])
        self.assertIs(episode.label, Label.OK)
        self.assertEqual(episode.reward.total, 0.5)

    def test_changes_of_environments_to_messages_are_not_seen(self):
        async def step(env, message):
            message["content"] = "other"
            env.last = getattr(env, "last", {"role": "tool", "content": "result"})
            result = protocol.StepResult((env.last,), None, env.num_turns == 3, False)
            env.last["content"] += "!"
            return dataclasses.replace(result, reward=faults.reward_of(1))

        (episode,) = collect(Scripted(step), 1)
        self.assertEqual(episode.num_forks, 0)
        texts = [messages_lib.text_of(m, "content") for m in episode.transcript]
        self.assertEqual(
            texts, ["task 0", "OK", "result!", "OK", "result!!", "OK", "result!!!"]
        )
        self.assertIsInstance(episode.reward.total, float)


class ManyTest(parameterized.TestCase):
    def test_results_do_not_depend_on_other_episodes(self):
        def answer(request):
            rng = random.Random(f"{request.id} {request.prompt}")
            return rng.choices(range(256), k=rng.randint(0, 16)) + OK

        def run(num_concurrent, num_slots):
            rng = random.Random(num_concurrent)

            async def step(env, message):
                await asyncio.sleep(rng.choice((0, 0, 0.001, 0.01)))
                return (
                    goes_on("a") if env.num_turns < 3 else ends(len(str(message)) % 50)
                )

            taskset = Scripted(step)
            settings = dataclasses.replace(SETTINGS, num_concurrent=num_concurrent)
            engine = scripted.ScriptedEngine(answer, num_slots)
            found = collect(taskset, 20, engine=engine, settings=settings)
            self.assertLessEqual(taskset.max_open, num_concurrent)
            self.assertLessEqual(engine.max_running, min(num_concurrent, num_slots))
            return found

        alone = run(1, 1)
        self.assertEqual([e.task.id for e in alone], [str(i) for i in range(20)])
        self.assertEqual({e.label for e in alone}, {Label.OK, Label.TRUNCATED})
        for num_concurrent, num_slots in ((7, 4), (20, 20), (4, 7)):
            self.assertEqual(run(num_concurrent, num_slots), alone)

    def test_no_slot_is_idle_while_episodes_wait(self):
        engine, num_steps = scripted.ScriptedEngine(answers_ok, num_slots=4), [0]
        plain = engine.step

        def step():
            num_steps[0] += 1
            return plain()

        engine.step = step
        collect(faults.FaultyTaskset(Fault.NONE), 40, engine=engine)
        self.assertEqual(num_steps[0], 40 * len(OK) // 4)

    def test_progress_is_told(self):
        told = {}
        taskset = faults.FaultyTaskset(Fault.CRASH_IN_STEP, every=3)
        found = collect(taskset, 7, on_episode=told.__setitem__)
        self.assertEqual([told[i] for i in range(7)], found)

    def test_the_three_most_frequent_failures_are_logged(self):
        reasons = "aaaabbbccd"

        async def step(env, message):
            index = int(env.task.id)
            return ends() if index >= len(reasons) else _raise(OSError(reasons[index]))

        with self.assertLogs(level="WARNING") as logs:
            collect(Scripted(step), 13)
        told = [record.getMessage() for record in logs.records]
        wanted = [(4, "a"), (3, "b"), (2, "c")]
        self.assertEqual(
            told, [f"{n} episodes of scripted: step: OSError('{x}')" for n, x in wanted]
        )

    def test_nothing_to_do(self):
        self.assertEqual(collect(faults.FaultyTaskset(Fault.NONE), 0), [])
        self.assertEqual(rollouts.metrics([])["rollout/reward"], 0)

    def test_in_a_notebook(self):
        async def cell():
            return collect(faults.FaultyTaskset(Fault.NONE))

        self.assertLen(asyncio.run(cell()), 4)

    def test_rewards_of_several_tags(self):
        found = collect(faults.FaultyTaskset(Fault.NONE), 4)
        for i, (tag, total) in enumerate(
            [("a", 0.5), ("", 0.0), ("a", 0.75), ("b", 1.0)]
        ):
            task = dataclasses.replace(found[i].task, tag=tag)
            found[i] = dataclasses.replace(
                found[i], task=task, reward=protocol.Reward(total)
            )
        found[3] = dataclasses.replace(found[3], reward=None)
        metrics = rollouts.metrics(found)
        by_tag = {k: v for k, v in metrics.items() if "reward/" in k}
        wanted = {"rollout/reward/a": 0.625, "rollout/reward/untagged": 0.0}
        self.assertEqual(by_tag, wanted)
        self.assertLen(rollouts.metrics(found[:1]), len(metrics) - 2)

    def test_shares_of_the_tags_of_a_step(self):
        (one,) = collect(faults.FaultyTaskset(Fault.NONE), 1)
        groups = [
            [dataclasses.replace(one, task=dataclasses.replace(one.task, tag=tag))] * 2
            for tag in ("a", "b", "a", "")
        ]
        wanted = {"a": 0.5, "b": 0.25, "untagged": 0.25}
        wanted = {f"rollout/share/{tag}": share for tag, share in wanted.items()}
        self.assertEqual(rollouts.shares(groups), wanted)
        self.assertEqual(rollouts.shares(groups[::2]), {})  # of one tag
        self.assertEqual(rollouts.shares([]), {})

    def test_metrics(self):
        taskset = faults.FaultyTaskset(Fault.ENDLESS, every=2)
        metrics = rollouts.metrics(collect(taskset, 4))
        self.assertEqual(metrics["rollout/label/ok"], 2)
        self.assertEqual(metrics["rollout/label/truncated"], 2)
        self.assertEqual(metrics["rollout/reward"], 0.5)
        self.assertEqual(metrics["rollout/turns"], 2)
        self.assertEqual(metrics["rollout/sampled_tokens"], 8 * len(OK))
        self.assertEqual(metrics["rollout/response_length"], len(OK))
        self.assertEqual(metrics["rollout/truncated_fraction"], 0)

    @absltest.skipUnless(os.path.exists("/proc/self/fd"), "reads Linux' /proc")
    def test_300_episodes_leave_nothing_behind(self):
        others = {*threading.enumerate()}  # fsspec's loop keeps its threads for ever

        def run(count):
            for fault in (Fault.NONE, Fault.CRASH_IN_STEP, Fault.ENDLESS):
                found = collect(faults.FaultyTaskset(fault, every=2), count)
                self.assertLen(found, count)

            async def step(env, message):
                await asyncio.to_thread(time.sleep, 0)
                return ends()

            patient = dataclasses.replace(SETTINGS, call_timeout=60.0)
            collect(Scripted(step), count, settings=patient)

            self.wait_for_threads(others)

        run(25)
        before = left_behind()
        self.addCleanup(tracemalloc.stop)
        tracemalloc.start()
        run(50)
        self.assertEqual(left_behind(), before)
        self.assertLess(tracemalloc.get_traced_memory()[0], 200 * MAX_EPISODE_BYTES)

    def wait_for_threads(self, others):
        """Those of calls end soon after them; nobody else waits for it."""
        deadline = time.monotonic() + 60
        while names := [
            thread.name
            for thread in {*threading.enumerate()} - others
            if thread.name.startswith("asyncio_")
        ]:
            self.assertLess(time.monotonic(), deadline, names)
            time.sleep(0.01)


_LEFT_BEHIND = (asyncio.Task, pump_lib.Pump, episodes_lib.Episode, _Environment)
MAX_EPISODE_BYTES = 64  # no object; caches may grow by a few entries


def left_behind():
    """Counts live objects of episodes, and open files."""
    gc.collect()
    live = sum(isinstance(x, _LEFT_BEHIND) for x in gc.get_objects())
    return live, len(os.listdir("/proc/self/fd"))


class RunTest(absltest.TestCase):
    def test_runs_here_unless_a_loop_runs_here(self):
        """Ctrl-C reaches the main thread only."""

        async def thread():
            return threading.current_thread()

        async def within_a_loop():
            return calls_lib.run(thread())

        self.assertIs(calls_lib.run(thread()), threading.current_thread())
        inner = asyncio.run(within_a_loop())
        self.assertIsNot(inner, threading.current_thread())


class LoudTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("engine_raises", "step", lambda: _raise(OSError("device lost")), "OSError"),
        ("requests_are_lost", "step", lambda: [], "lost the request"),
        ("its_thread_ends", "step", lambda: _raise(SystemExit), "thread has failed"),
        ("submit_raises", "submit", lambda r: _raise(ValueError("no")), "no"),
        ("check_refuses", "check", lambda r: _raise(config.InputError("no")), None),
    )
    def test_mistakes_of_the_engine_stop_everything(self, name, act, message):
        async def step(env, message):
            return goes_on("again")

        engine, taskset = scripted.ScriptedEngine(answers_ok), Scripted(step)
        plain, calls = getattr(engine, name), []

        def breaks(*arguments):
            calls.append(arguments)
            if len(calls) < 8:
                return plain(*arguments)
            if message == "lost the request":
                engine._running.clear()
            return act(*arguments)

        setattr(engine, name, breaks)
        error = config.InputError if message is None else completer.EngineError
        with self.assertRaisesRegex(error, message or "no"):
            scripted.collect(engine, taskset, TEMPLATE, jobs(taskset, 9), SETTINGS)
        self.assertEqual(taskset.num_open, 0)
        self.assertEqual(engine.num_pending, 0)

    def test_misaligned_completions_stop_everything(self):
        engine, taskset = scripted.ScriptedEngine(answers_ok), Scripted(None)
        plain = engine.step

        def step():
            finished = plain()
            for _, completion in finished:
                completion.logprobs.pop()
            return finished

        engine.step = step
        with self.assertRaisesRegex(Exception, "3 log-probs"):
            scripted.collect(engine, taskset, TEMPLATE, jobs(taskset, 9), SETTINGS)
        self.assertEqual(taskset.num_open, 0)

    def test_so_does_the_callback(self):
        def on_episode(i, episode):
            raise KeyError(i)

        with self.assertRaises(KeyError):
            collect(faults.FaultyTaskset(Fault.NONE), on_episode=on_episode)


class BadInputTest(parameterized.TestCase):
    def test_request_ids_must_not_overlap(self):
        taskset = faults.FaultyTaskset(Fault.NONE)
        engine = scripted.ScriptedEngine(answers_ok)
        todo = [
            dataclasses.replace(job, request_id=60 + job.request_id)
            for job in jobs(taskset, 3, spacing=2)
        ]
        with self.assertRaisesRegex(config.InputError, "max_turns=3 apart"):
            scripted.collect(engine, taskset, TEMPLATE, todo, SETTINGS)

    @parameterized.named_parameters(
        ("turns", {"max_turns": 0}, "max_turns must be at least 1, got 0"),
        ("timeout", {"call_timeout": 0.0}, "call_timeout must be positive"),
        ("nan", {"max_reward": float("nan")}, "max_reward must be positive, got nan"),
    )
    def test_settings(self, changes, message):
        with self.assertRaisesRegex(config.InputError, message):
            dataclasses.replace(SETTINGS, **changes)


if __name__ == "__main__":
    environment.main()
