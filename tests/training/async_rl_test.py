"""Stage async_rl: alone equal to stage rl, else never staler than it may be."""

import asyncio
import collections
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import shutil
import socket
import sys
import tempfile
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pydantic_ai
import pytest
from absl.testing import parameterized
from pydantic_ai.models import openai as openai_models
from pydantic_ai.providers import openai as openai_providers

from glm5_jax import config as config_lib
from glm5_jax import environments
from glm5_jax.rl import episode_files
from glm5_jax.rl.actors import journal
from glm5_jax.rl.actors import orchestrator as orchestrator_lib
from glm5_jax.training import loop, policy, replay
from glm5_jax.training.feeds import engine_processes, own_engine, player, rollouts
from glm5_jax.training.reporting import metrics
from glm5_jax.training.run import health
from glm5_jax.training.run import state as run_lib
from tests import environment, runs
from tests.training import rl_runs

SLOW = rl_runs.SLOW
STALE = rl_runs.STALE


class AsyncTest(runs.OneDeviceTest):
    def train(self, config, folder, seconds=0.0):
        """Trains; returns the indices of the groups of each step."""
        taskset = rl_runs.Lottery(seconds=seconds)
        steps, take = [], orchestrator_lib.Orchestrator.take

        async def taken(orchestrator, stall_seconds):
            groups = await take(orchestrator, stall_seconds)
            steps.append([index for index, _ in groups])
            return groups

        with (
            runs.compile_once(config),
            mock.patch.object(environments, "make", return_value=taskset),
            mock.patch.object(orchestrator_lib.Orchestrator, "take", taken),
        ):
            loop.train(config, folder)
        return steps

    def test_without_staleness_it_is_the_synchronous_stage_bit_for_bit(self):
        config = rl_runs.make_async(0, eval_every=2)
        synchronous = dataclasses.replace(config, stage="rl")
        folders = self.root / "async", self.root / "sync"
        steps = self.train(config, folders[0])
        self.train(synchronous, folders[1])
        self.assertEqual(steps, [[0, 1], [2, 3], [4, 5], [6, 7]])
        rl_runs.assert_same_state(*folders, config)
        ours, theirs = map(rl_runs.computed, folders)
        for line, other in zip(ours, theirs, strict=True):
            self.assertEqual(other.keys() - line.keys(), {"rollout/prompt_tokens_read"})
            shared = {name: value for name, value in other.items() if name in line}
            self.assertContainsSubset(shared.items(), line.items())
        records = (metrics.read(folder / "metrics.jsonl") for folder in folders)
        found = [[r.get("eval/success") for r in lines] for lines in records]
        self.assertEqual(*found)

    def test_stale_tokens_are_learnt_from_within_the_bound(self):
        folder = self.root / "stale"
        steps = self.train(STALE, folder, SLOW)
        learnt = [index for step in steps for index in step]
        self.assertLen(set(learnt), 12)
        records = metrics.read(folder / "metrics.jsonl")
        staleness = [r["rollout/staleness_max"] for r in records]
        self.assertBetween(max(staleness), 1, 2)
        for record in records:
            ledger = collections.Counter(
                {k: v for k, v in record.items() if k.startswith("groups/")}
            )
            begun = ledger.pop("groups/begun")
            self.assertEqual(begun, sum(ledger.values()))
            stale = sum(record[f"rl/tokens/stale_{s}"] for s in (1, 2))
            self.assertBetween(stale, 0, record["rl/trained_tokens"])
            self.assertLess(record["rl/logprob_gap"], 1e-5)
            self.assertEqual(record["optim/skipped_total"], 0)
            self.assertBetween(record["actors/loop_lag_seconds"], 0, 60)
        self.assertGreater(sum(r["rl/tokens/stale_1"] for r in records), 0)

    def test_a_killed_run_goes_on_with_what_was_under_way(self):
        """It has learnt four steps, two of them since its checkpoint."""
        folder, killed = self.root / "alive", self.root / "killed"
        resets, take = collections.Counter(), own_engine.OwnEngine.take

        def copied(actors, version):
            if version == 4:  # before the fifth step has its groups
                while not actors._local.call(lambda made: made.groups.num_ready):
                    time.sleep(0.002)
                rl_runs.copy_as_killed(actors, folder, killed)
            return take(actors, version)

        with mock.patch.object(own_engine.OwnEngine, "take", copied):
            first = self.train(STALE, folder, SLOW)
        self.assertEqual(episode_files.numbers(killed), [1, 2, 3, 4])
        under_way = journal.Journal(killed / "episodes" / journal.FOLDER).read(4)
        ended = {known.index: len(known.ended) for known in under_way}
        ready = {index for index, num_ended in ended.items() if num_ended == 4}
        self.assertTrue(ready - {*itertools.chain(*first[:4])})

        reset = rl_runs.Lottery.reset

        async def counted(taskset, task):
            resets[task.id] += 1
            return await reset(taskset, task)

        with mock.patch.object(rl_runs.Lottery, "reset", counted):
            second = self.train(STALE, killed, SLOW)
        self.assertLen(second, 2)  # the others were learnt from their files
        learnt = [index for step in first[:4] + second for index in step]
        self.assertLen(set(learnt), 12)
        self.assertContainsSubset(ready - {*learnt[:8]}, learnt[8:])
        tasks = rl_runs.Lottery()
        played = {i: resets[tasks.task("train", STALE.seed, i).id] for i in ended}
        self.assertEqual(
            played, {i: 0 if i in learnt[:8] else 4 - n for i, n in ended.items()}
        )
        states = [rl_runs.read_state(f, STALE, 4) for f in (folder, killed)]
        jax.tree.map(np.testing.assert_array_equal, *states)
        records = metrics.read(killed / "metrics.jsonl")
        self.assertEqual([r["step"] for r in records], [1, 2, 3, 4, 5, 6])
        self.assertLessEqual(max(r["rollout/staleness_max"] for r in records), 2)
        self.assertLess(max(r["rl/logprob_gap"] for r in records), 1e-5)
        has_speed = ["perf/sampled_tokens_per_second" in r for r in records]
        self.assertEqual(has_speed, [True, True, False, False, True, True])
        ledger = {k: v for k, v in records[-1].items() if k.startswith("groups/")}
        self.assertEqual(ledger.pop("groups/begun"), sum(ledger.values()))
        self.assertNotIn("groups/dropped_stale", ledger)
        told = [
            [{k: v for k, v in r.items() if k.startswith("groups/")} for r in run[2:4]]
            for run in (metrics.read(folder / "metrics.jsonl"), records)
        ]
        self.assertEqual(*told)  # of the steps that were learnt again
        with runs.compile_once(STALE):
            self.assertTrue(replay.replay(killed).is_same)

    def test_a_run_that_kept_no_episodes_plays_them_again(self):
        folder = self.root / "forgetful"
        rl = dataclasses.replace(STALE.rl, episodes_gib=0.0)
        config = dataclasses.replace(STALE, rl=rl)
        self.enterContext(runs.compile_once(STALE))  # whose step is the same
        first = self.train(config, folder, SLOW)
        for step in ("4", "6"):  # as if it was killed before they were written
            shutil.rmtree(folder / "checkpoints" / step)
        (folder / "summary.json").unlink()
        second = self.train(config, folder, SLOW)
        self.assertFalse((folder / "episodes").exists())
        self.assertLen(second, 4)
        learnt = [index for step in first[:2] + second for index in step]
        self.assertLen(set(learnt), 12)
        oldest = sorted(learnt)[:8]
        self.assertEqual(oldest, [*range(8)])
        records = metrics.read(folder / "metrics.jsonl")
        self.assertEqual([r["step"] for r in records], [1, 2, 3, 4, 5, 6])
        self.assertLessEqual(max(r["rollout/staleness_max"] for r in records), 2)

    def test_a_run_of_fewer_steps_than_groups_may_wait_ends(self):
        """Groups that no step is left for are under way as it does."""
        config = rl_runs.make_async(4, num_steps=2)
        with runs.compile_once(STALE):  # whose step differs in its schedule alone
            steps = self.train(config, self.root / "short", SLOW)
        self.assertEqual([len(step) for step in steps], [2, 2])
        records = metrics.read(self.root / "short" / "metrics.jsonl")
        self.assertEqual([r["step"] for r in records], [1, 2])
        last = records[-1]
        self.assertGreater(last["groups/running"] + last["groups/ready"], 0)

    def test_an_evaluation_s_figures_come_with_a_later_step(self):
        """Here with the next one, which waits for them so that it is the same one."""
        beside = {"evaluates_beside": True}
        config = rl_runs.make_async(2, beside, num_steps=3, eval_every=1)
        take = own_engine.OwnEngine.take

        def after_the_evaluation(actors, version):
            def is_under_way(made):
                return made.evaluation._under_way is not None

            while actors._local.call(is_under_way):
                time.sleep(0.002)
            return take(actors, version)

        folder = self.root / "beside"
        with (
            runs.compile_once(STALE),
            mock.patch.object(own_engine.OwnEngine, "take", after_the_evaluation),
        ):
            self.train(config, folder, SLOW)
        records = metrics.read(folder / "metrics.jsonl")
        found = [
            (r["step"], r.get("eval/version")) for r in records if "eval/tasks" in r
        ]
        self.assertEqual(found, [(2, 1), (3, None)])  # the last one is waited for
        self.assertEqual(records[1]["eval/version_share"], 1.0)

    def test_a_rollback_learns_from_newer_groups(self):
        """Step 4 is NaN, and the checkpoint of step 2 is followed by other groups."""
        limits = {"max_skipped_in_a_row": 1, "on_not_finite": "roll_back"}
        config = dataclasses.replace(STALE, health=config_lib.HealthConfig(**limits))
        plain, folder = rollouts.Rollouts.next, self.root / "rolled_back"

        def spoilt(feed, params, position):
            batch, seen = plain(feed, params, position)
            if position == 3:
                batch["advantages"] = np.full_like(batch["advantages"], np.nan)
            return batch, seen

        with mock.patch.object(rollouts.Rollouts, "next", spoilt):
            steps = self.train(config, folder, SLOW)
        self.assertLen(steps, 8)  # two of them were undone
        taken = [index for step in steps for index in step]
        self.assertLen(set(taken), 16)
        records = metrics.read(folder / "metrics.jsonl")
        self.assertEqual([r["step"] for r in records], [1, 2, 3, 4, 5, 6])
        last = records[-1]
        self.assertEqual((last[health.ROLLBACKS], last["optim/skipped_total"]), (1, 0))
        for record in records:
            self.assertLessEqual(record["rollout/staleness_max"], 2)
            self.assertLess(record["rl/logprob_gap"], 1e-5)
        ledger = {k: v for k, v in last.items() if k.startswith("groups/")}
        begun = ledger.pop("groups/begun")
        self.assertEqual(begun, sum(ledger.values()))

    def test_an_environment_that_hangs_is_a_timeout_not_a_hang(self):
        quick = {"step_timeout_seconds": 0.1, "answer_timeout_seconds": 0.3}
        config = rl_runs.make_async(1, quick, num_steps=1)
        with (
            self.assertRaisesRegex(
                orchestrator_lib.StalledError, "no episode has advanced"
            ),
            mock.patch.object(player.Player, "serve", _silent),
            mock.patch.object(run_lib.Run, "compile"),
        ):
            self.train(config, self.root / "silent")


class LostTest(runs.FolderTest):
    """An orchestrator that ends, as its socket and its log tell."""

    def setUp(self):
        super().setUp()
        config = rl_runs.make_async(1, {"num_engines": 1})
        self.made = engine_processes.EngineProcesses(config)
        self.made._folder = self.root
        lines = "\n".join(f"line {i}" for i in range(30))
        (self.root / "orchestrator.log").write_text(f"{lines}\nKilled")

    def assert_told(self, how):
        words = rf"^the orchestrator {how}: line 11\nline 12\n(.*\n)*Killed$"
        return self.assertRaisesRegex(engine_processes.ActorError, words)

    @parameterized.parameters(True, False)
    def test_it_ends_with_a_step_s_request_or_before_it(self, has_come):
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.made._port = server.getsockname()[1]

            def end():
                with server.accept()[0] as connection:
                    connection.recv(10)

            ending = threading.Thread(target=end)
            if has_come:
                ending.start()
                self.addCleanup(ending.join)
            else:
                server.close()
            with self.assert_told(r"is lost \(\w+\(.*\)\)"):
                self.made.take(0)

    def test_it_ends_before_it_answers(self):
        self.made._children["orchestrator"] = mock.Mock(poll=lambda: -9)
        with self.assert_told("ended"):
            self.made._wait("orchestrator", 1, "/status")


class Chatting(rl_runs.Lottery):
    """The same tasks for a program from PyPI, which knows a base URL alone."""

    has_agents = True

    async def play(self, task, base_url):
        plain = openai.DefaultAsyncHttpxClient(verify=False)  # reads no certificates
        async with openai.AsyncOpenAI(
            base_url=base_url, api_key="-", http_client=plain
        ) as client:
            provider = openai_providers.OpenAIProvider(openai_client=client)
            model = openai_models.OpenAIChatModel("any", provider=provider)
            agent = pydantic_ai.Agent(model, retries=0)
            with contextlib.suppress(pydantic_ai.exceptions.AgentRunError):
                found = await agent.run(task.messages[-1]["content"])
                return await self.step({"content": found.output})
        return await self.step({"content": ""})


class Commanding(rl_runs.Lottery):
    """The same tasks for PyPI's program llm, a process for each episode."""

    has_agents = True

    async def play(self, task, base_url):
        with tempfile.TemporaryDirectory() as home:
            server = {"model_id": "ours", "model_name": "any", "api_base": base_url}
            models = pathlib.Path(home) / "extra-openai-models.yaml"
            models.write_text(json.dumps([server]))
            said = task.messages[-1]["content"]
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "llm",
                "--model=ours",
                said,
                env={**os.environ, "LLM_USER_PATH": home, "PYTHONUTF8": "1"},
                stdout=asyncio.subprocess.PIPE,
            )
            text, _ = await child.communicate()
        assert child.returncode == 0
        return await self.step({"content": text.decode().removesuffix("\n")})


class AgentTest(runs.OneDeviceTest):
    def test_an_agent_from_pypi_is_trained_unchanged(self):
        self.require_training(Chatting())

    @pytest.mark.slow
    def test_a_program_from_pypi_is_trained_unchanged(self):
        """Two minutes: it takes seconds to start."""
        self.require_training(Commanding())

    def require_training(self, taskset):
        folder = self.root / "agent"
        with (
            runs.compile_once(STALE),
            mock.patch.object(environments, "make", return_value=taskset),
        ):
            loop.train(STALE, folder)
        records = metrics.read(folder / "metrics.jsonl")
        self.assertEqual([r["step"] for r in records], [1, 2, 3, 4, 5, 6])
        for record in records:
            self.assertEqual(record["rollout/label/env_error"], 0)
            self.assertGreater(record["rl/trained_tokens"], 0)
            self.assertLess(record["rl/logprob_gap"], 1e-5)
        before = rl_runs.initial_params(STALE)
        after = rl_runs.read_state(folder, STALE)["params"]
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, after)
        self.assertGreater(max(jax.tree.leaves(moved)), 1e-3)


def _silent(self, serve=player.Player.serve):
    """Returns a service that never answers."""
    service = serve(self)
    service.pause("keep").result()
    return service


class GateTest(parameterized.TestCase):
    def test_only_tokens_of_the_trained_weights_are_judged(self):
        config = rl_runs.make_async(3)
        staleness = np.array([[0, 1, 3, 7, 0]])
        mask = np.array([[1.0, 1, 1, 1, 0]])
        batch = jax.tree.map(jnp.asarray, {"loss_mask": mask, "staleness": staleness})
        masks = policy._by_staleness(config, batch)
        found = [np.flatnonzero(mask[0]).tolist() for mask in jax.device_get(masks)]
        self.assertEqual(found, [[0], [1], [], [2, 3]])
        del batch["staleness"]
        (mask,) = policy._by_staleness(config, batch)
        self.assertEqual(np.flatnonzero(mask[0]).tolist(), [0, 1, 2, 3])

    @parameterized.named_parameters(
        (
            "synchronous",
            "rl",
            {"num_engines": 1},
            "num_engines must not be set in stage",
        ),
        (
            "beside",
            "rl",
            {"evaluates_beside": True},
            "evaluates_beside must be false in stage",
        ),
        (
            "guarded",
            "rl",
            {"quarantine": "end"},
            "quarantine='end' would end nothing in stage",
        ),
    )
    def test_settings_that_nothing_would_read_are_refused(self, stage, rl, words):
        with self.assertRaisesRegex(config_lib.InputError, words):
            rl_runs.make_config(rl, stage=stage)

    @parameterized.parameters(
        ({"servers": "http://a:1"}, "servers and weights_store must be set together"),
        ({"weights_store": "/tmp"}, "servers and weights_store must be set together"),
        ({"servers": "a:1", "weights_store": "/tmp"}, "servers must be a URL"),
        ({"eval_servers": "http://a:1"}, "eval_servers must not be set without"),
        (
            {"servers": "http://a:1", "weights_store": "/tmp", "num_engines": 2},
            "num_engines must be 0",
        ),
    )
    def test_servers_of_others_need_their_settings(self, rl, words):
        with self.assertRaisesRegex(config_lib.InputError, words):
            rl_runs.make_async(1, rl)

    def test_servers_of_others_are_asked_before_a_device_is(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        config = rl_runs.make_async(1, {"servers": url, "weights_store": "/tmp"})
        with self.assertRaisesRegex(config_lib.InputError, f"{url}' is no router"):
            run_lib.make_feed(config)

    def test_a_missing_extra_is_named_before_anything_starts(self):
        config = rl_runs.make_async(1, {"num_engines": 1})
        with (
            mock.patch.object(importlib.util, "find_spec", return_value=None),
            self.assertRaisesRegex(config_lib.InputError, r'"glm5_jax\[serve\]"'),
        ):
            engine_processes.EngineProcesses(config)

    def test_figures_of_a_step_before_the_next_one_need_an_evaluation_that_waits(self):
        with self.assertRaisesRegex(config_lib.InputError, "evaluates_beside must be"):
            rl_runs.make_async(
                1, {"evaluates_beside": True}, eval_every=1, stop_metric="eval/success"
            )

    def test_staleness_is_not_negative(self):
        with self.assertRaisesRegex(config_lib.InputError, "max_staleness must be"):
            rl_runs.make_async(-1)


if __name__ == "__main__":
    environment.main()
