"""Episodes that a thread plays beside the trainer: they begin, and end, in time."""

import asyncio
import contextlib
import gc
import threading
import time
from concurrent import futures
from unittest import mock

from absl import logging
from absl.testing import absltest

from glm5_jax.inference import service
from glm5_jax.rl import entrance
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import journal as journal_lib
from glm5_jax.rl.actors import lag, local, monitor
from tests.data import templates_test
from tests.rl import faults, monitor_test, scripted

OK = templates_test.ids_of("</think>OK<|user|>")
STALL = 20.0  # seconds; everything here takes milliseconds
HOLD = 5.0  # seconds; an engine that waits for a loop in vain takes 10
SETTINGS = episodes_lib.Settings(max_new_tokens=16, max_turns=1, num_concurrent=4)


class Taskset(faults.FaultyTaskset):
    """A taskset whose environments close by a coroutine function."""

    num_closed = 0

    def __init__(self, close=lambda: asyncio.sleep(0.02)):
        super().__init__(faults.Fault.NONE)
        self.close = close

    def environment(self):
        made = super().environment()

        async def close():
            await self.close()
            self.num_closed += 1

        made.close = close
        return made


def game(taskset, watch=None):
    def jobs(index):
        task = taskset.task("train", 0, index)
        return [episodes_lib.Job(task, index, 2 * index + i) for i in range(2)]

    template = templates_test.template(clear=False)
    return local.Game(taskset, template, SETTINGS, jobs, False, watch)


class LocalTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(self.assertNoLogs("asyncio"))

    @contextlib.contextmanager
    def playing(self, taskset, engine=None, watch=None):
        """Yields what plays episodes with an engine of a service of its own."""
        engine = engine or scripted.ScriptedEngine(lambda _: OK)
        with contextlib.closing(service.Service(engine)) as served:
            groups, journal = groups_lib.Groups(2, 1), journal_lib.Journal(None)
            yield local.Local(served, game(taskset, watch), groups, journal)

    def actors(self):
        return [t for t in threading.enumerate() if t.name == "actors"]

    def test_a_step_and_its_end(self):
        taskset = Taskset()
        with self.playing(taskset) as played:
            taken = played.take(STALL)
            self.assertEqual([index for index, _ in taken], [0, 1])
            self.assertEqual([len(group) for _, group in taken], [2, 2])
            self.assertEqual(played.call(lambda made: made.groups.version), 0)
            (thread,) = self.actors()
            self.assertTrue(thread.daemon)  # a trainer that fails can end
            played.close()
            self.assertEmpty(self.actors())
            self.assertGreaterEqual(taskset.num_closed, taskset.counts.resets)

    def test_an_environment_that_blocks_the_thread_is_named(self):
        blocked, shown = [], threading.Event()

        def show(*words):
            logging.error(*words)
            if "close_by_computing" in words[-1]:
                shown.set()

        async def close_by_computing():
            await asyncio.sleep(0.3)  # the loop turns: it is looked at anew
            if not blocked:
                blocked.append(True)
                shown.wait(STALL / 2)
                time.sleep(0.5)

        with (
            mock.patch.object(lag, "_LOOK_SECONDS", 0.25),
            mock.patch.object(lag, "_LATE_SECONDS", 0.5),
            mock.patch.object(lag, "logging", mock.Mock(wraps=logging, error=show)),
            self.assertLogs("absl", "WARNING") as logs,
            self.playing(Taskset(close_by_computing)) as played,
        ):
            played.take(STALL)
            self.assertBetween(played.lag.taken(), 0.5, STALL)
            played.close()
        said = "\n".join(logs.output)
        self.assertRegex(said, r"not turned for 0\.25 s(.*\n)+.*close_by_computing\n")
        self.assertIn("The event loop was late by", said)
        self.assertNotIn("lag", [thread.name for thread in threading.enumerate()])

    def test_the_engine_waits_for_no_thread_that_has_ended(self):
        async def close():  # meanwhile the engine begins to wait for the coroutines
            time.sleep(0.05)

        engine = scripted.ScriptedEngine(lambda _: [7] * 16)
        stepping, step = threading.Event(), engine.step

        def slowly():
            stepping.set()
            time.sleep(0.01)
            return step()

        engine.step = slowly
        with self.playing(Taskset(close), engine) as played:
            self.assertTrue(stepping.wait(STALL))
            played.close()
            began = time.monotonic()
        self.assertLess(time.monotonic() - began, HOLD)

    def test_a_thread_that_cannot_begin(self):
        """As where agents are to have addresses, and no port is free."""
        full = mock.patch.object(entrance, "of", side_effect=OSError("no port"))
        tried: futures.Future[None] = futures.Future()

        def begin():
            try:
                with self.playing(Taskset()):
                    tried.set_result(None)
            except OSError as error:
                tried.set_exception(error)

        with full, self.assertRaisesRegex(OSError, "no port"):
            threading.Thread(target=begin, daemon=True).start()
            tried.result(timeout=STALL)
        for thread in self.actors():
            thread.join(STALL)
        self.assertEmpty(self.actors())

    def test_an_environment_that_pays_for_junk_ends_the_run_if_settings_say_so(self):
        shop = monitor_test.Shop(monitor_test.square, lambda said: True, knows=True)
        watch = monitor.Settings(quarantine="end", canary_every=1)
        with self.playing(shop, watch=watch) as played:
            with self.assertRaisesRegex(monitor.PoisonedError, "'odd' pays for junk"):
                for version in range(50):
                    played.call(lambda made, new=version: made.published(new))
                    played.take(STALL)
            played.close()

    def test_a_taskset_without_a_task(self):
        taskset = Taskset()
        taskset.task = lambda *_: 1 / 0
        with self.playing(taskset) as played:
            with self.assertRaises(ZeroDivisionError):
                played.take(STALL)
            played.close()
            self.assertEmpty(self.actors())
        gc.collect()  # asyncio would log an exception that nobody retrieves


if __name__ == "__main__":
    absltest.main()
