"""Updates of weights that overlap: no reading is published under another's version."""

import asyncio
import pathlib
import threading
from concurrent import futures
from unittest import mock

from absl.testing import absltest

from glm5_jax.http_server import errors
from glm5_jax.inference import service
from glm5_jax.serving import new_weights, served, weight_updates

LIMIT = 30.0  # seconds; everything here takes milliseconds


class Service(service.Service):
    """Calls at once, and is its own engine, which notes what it takes."""

    def __init__(self):
        self.taken = []
        self.later = None  # commands that wait for the end of a dispatch; None: none do

    def call(self, function):
        done = futures.Future()

        def run():
            done.set_result(function(self))

        run() if self.later is None else self.later.append(run)
        return done


class Coming:
    """Weights whose reading takes until `end`."""

    def __init__(self, path):
        self.name, self.end = path.name, threading.Event()

    def wait(self):
        if not self.end.wait(LIMIT):
            raise TimeoutError

    def publish(self, engine, version):
        engine.taken.append((self.name, version))


class OverlapTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.service, self.coming = Service(), {}
        root = pathlib.Path("/weights")
        model = served.Served(name="m", service=self.service, weights_root=root)
        self.updates = weight_updates.Updates(model)
        begin = mock.Mock(side_effect=lambda _, path, *__: self.read(path))
        self.enterContext(mock.patch.object(new_weights, "begin", begin))

    def read(self, path):
        return self.coming.setdefault(path.name, Coming(path))

    def update(self, name):
        body = {"update_info": {"path": name}}
        return self.updates.update(weight_updates.UpdateBody.model_validate(body))

    def finish(self, version, name=None):
        body = {"weight_version": version}
        if name is not None:
            body["update_info"] = {"path": name}
        return self.updates.finish(weight_updates.FinishBody.model_validate(body))

    async def refused(self, call):
        with self.assertRaises(errors.ApiError) as caught:
            await call
        self.assertEqual(caught.exception.status, 409)

    async def start(self):
        return self.updates.start()

    async def reading(self, name):
        """Begins an update, which goes on."""
        self.updates.start()
        task = asyncio.create_task(self.update(name))
        while name not in self.coming:
            if task.done():
                await task  # has failed
            await asyncio.sleep(0.001)
        return task

    def test_a_reading_that_a_later_update_met_is_forgotten(self):
        """Its trainer has given up, or ended, and another one sends version 2."""

        async def run(meets):
            self.coming.clear()
            late = await self.reading("one")
            for call in meets:
                await self.refused(call())
            self.coming["one"].end.set()
            await self.refused(late)
            await self.refused(self.finish(2))

        for meets in (
            (self.start, lambda: self.update("two")),
            (self.start,),
            (lambda: self.update("two"),),
        ):
            asyncio.run(run(meets))
        self.assertEqual(self.service.taken, [])

        async def then():
            task = await self.reading("two")
            self.coming["two"].end.set()
            await task
            return await self.finish(2)

        self.assertEqual(asyncio.run(then())["weight_version"], 2)
        self.assertEqual(self.service.taken, [("two", 2)])

    def test_a_client_that_leaves_ends_no_reading(self):
        """Its thread goes on, and a second reading would take as much memory."""

        async def run():
            task = await self.reading("one")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.refused(self.start())
            await self.refused(self.update("two"))
            self.coming["one"].end.set()
            while True:
                try:
                    await self.start()
                    break
                except errors.ApiError:
                    await asyncio.sleep(0.001)
            self.coming["two"] = Coming(pathlib.Path("/weights/two"))
            self.coming["two"].end.set()
            await self.update("two")
            return await self.finish(2)

        self.assertEqual(asyncio.run(run())["weight_version"], 2)
        self.assertEqual(self.service.taken, [("two", 2)])

    def test_an_update_that_begins_while_another_is_published_goes_on(self):
        """The engine publishes between two dispatches, which may take seconds."""

        async def run(is_read):
            self.coming.clear()
            for name in ("one", "two"):
                task = await self.reading(name)
                self.coming[name].end.set()
                if name == "one":
                    await task
                    self.service.later = []
                    publishing = asyncio.create_task(self.finish(1))
                    while not self.service.later:
                        await asyncio.sleep(0.001)
                    publish, self.service.later = self.service.later, None
                elif is_read:
                    await task
            for act in publish:
                act()
            await publishing
            await task
            return await self.finish(2, "two")

        for is_read in (False, True):
            self.service.taken.clear()
            self.assertEqual(asyncio.run(run(is_read))["weight_version"], 2)
            self.assertEqual(self.service.taken, [("one", 1), ("two", 2)])

    def test_the_end_names_what_was_read(self):
        """Its own beginning may have been lost, while another's had come."""

        async def run():
            task = await self.reading("one")
            self.coming["one"].end.set()
            await task
            await self.refused(self.finish(2, "two"))
            return await self.finish(1, "one")

        self.assertEqual(asyncio.run(run())["weight_version"], 1)
        self.assertEqual(self.service.taken, [("one", 1)])


if __name__ == "__main__":
    absltest.main()
