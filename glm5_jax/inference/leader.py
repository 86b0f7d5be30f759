"""Runs one engine in several processes: the others repeat what process 0 does.

A program over the devices of several processes runs once all of them start it, one
after another in the same order and with the same inputs. An engine's programs follow
from the calls that are made to it. So process 0, which alone knows the clients, tells
every call to the others before it makes it. They make it with engines of their own,
which hold the other parts of weights and cache, and drop the result.

    engine = Leader(params, config, num_slots=8, capacity=256)  # on process 0
    follow(Member(params, config, num_slots=8, capacity=256))  # on the others

A dispatch that fails here may have run elsewhere, and nobody could tell what the others
hold. So a failure ends all processes, where an engine of one process tries again.

New weights are read in every process by a thread, while the engine runs; no program
runs over devices meanwhile. All take them at the same place in the row of calls.
"""

import json
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any, NoReturn

import jax
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference.requests import Completion, Request
from glm5_jax.processes import calls, together

_NAME = "engine"
_READ = "engine/read/{}"  # what a process says of the weights of this number

Read = Callable[..., dict]  # (engine, *args) -> parameters, placed


class Member(engine_lib.Engine):
    """The engine of one of several processes."""

    last_read: Any = None  # what the reader of weights keeps for the next ones
    _reading: tuple[int, futures.Future[dict]] | None = None

    def begin_to_read(self, number: int, read: Read, *args: Any) -> None:
        """Calls read(self, *args) in a thread, and tells process 0 what came of it.

        Args:
          number: of these weights; those of a number before are forgotten.
          read: runs no program over the devices of several processes.
          *args: of `read`.
        """
        done: futures.Future[dict] = futures.Future()
        self._reading = number, done

        def run() -> None:
            said = {}
            try:
                done.set_result(read(self, *args))
            except Exception as raised:
                done.set_exception(raised)
                is_input = isinstance(raised, config_lib.InputError)
                said = {"error": str(raised) or repr(raised), "is_input": is_input}
                logging.warning("New weights were not read: %s", said["error"])
            calls.answer(_READ.format(number), json.dumps(said).encode())

        threading.Thread(target=run, daemon=True, name="new weights").start()

    def take(self, number: int, version: int) -> None:
        """Publishes the weights of this number, which every process has read.

        Raises:
          InputError: see `Engine.publish`; or other weights are being read.
        """
        found, done = self._reading or (None, None)
        if found != number or done is None:
            raise config_lib.InputError("Other weights are being read meanwhile.")
        engine_lib.Engine.publish(self, done.result(), version)
        self._reading = None


class Leader(Member):
    """The engine of process 0, whose calls the others repeat until `dismiss`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Makes an engine, as all processes do at the same time."""
        super().__init__(*args, **kwargs)
        self._speaker = calls.Speaker(_NAME)
        self._num_read = 0

    def everywhere(self, function: Callable, *args: Any) -> Any:
        """Returns function(engine, *args), which all processes call.

        Args:
          function: of a module or a class, so that its name is enough to find it.
          *args: what pickle can send.
        """
        self._speaker.say(pickle.dumps((function, args)))
        try:
            return function(self, *args)
        except config_lib.InputError:  # all processes refuse it alike
            raise
        except Exception as error:
            together.end_all(error)
            raise

    def warm_up(self, on_program: Callable[[int, int], None] | None = None) -> None:
        """Compiles all programs; see `Engine.warm_up`."""
        self._speaker.say(pickle.dumps((engine_lib.Engine.warm_up, ())))
        super().warm_up(on_program)

    def check(self, request: Request) -> None:
        """Checks a request by itself, in any thread.

        Raises:
          InputError: see `Engine.check`; or a grammar constrains it, which cannot be
            sent to the others.
        """
        super().check(request)
        if request.constraint is not None:
            raise config_lib.InputError(
                "Answers in a given form (response_format, grammars, strict tools) "
                "need a server of one process; this one has several."
            )

    def submit(self, request: Request) -> Completion:
        """Queues a request; see `Engine.submit`."""
        self.check(request)
        return self.everywhere(engine_lib.Engine.submit, request)

    def abort(self, id: int) -> Completion:
        """Stops a request; see `Engine.abort`."""
        return self.everywhere(engine_lib.Engine.abort, id)

    def clear_cache(self) -> None:
        """Empties the cache; see `Engine.clear_cache`."""
        self.everywhere(engine_lib.Engine.clear_cache)

    def step(self) -> list[tuple[int, Completion]]:
        """Runs one dispatch; see `Engine.step`."""
        finished = self.everywhere(engine_lib.Engine.step)
        if self.dispatch is not None:  # its results came from all processes
            self._speaker.forget()
        return finished

    def read_everywhere(self, read: Read, *args: Any) -> "Coming":
        """Lets every process read new weights; see `Member.begin_to_read`.

        Args:
          read: of a module, so that its name is enough to find it.
          *args: what pickle can send.
        """
        self._num_read += 1
        self.everywhere(Member.begin_to_read, self._num_read, read, *args)
        return Coming(self._num_read)

    def publish(self, params: dict, version: int) -> NoReturn:
        """Refuses weights that the others have not read; see `read_everywhere`.

        Raises:
          InputError: always.
        """
        raise config_lib.InputError("New weights must be read by every process.")

    def view(self) -> NoReturn:
        """Refuses to hand pages over, of which this process has a part alone.

        Raises:
          InputError: always.
        """
        raise config_lib.InputError("Handing pages over needs a server of one process.")

    def dismiss(self) -> None:
        """Lets the other processes return from `follow`."""
        self._speaker.say(pickle.dumps(None))


class Coming:
    """Weights that every process of an engine reads."""

    def __init__(self, number: int) -> None:
        """Names the weights by their number."""
        self._number = number

    def wait(self) -> None:
        """Returns once every process has read its parts; in any thread.

        Raises:
          InputError: they cannot be used.
          RuntimeError: one could not read them, and might another time.
        """
        answers = calls.answers(_READ.format(self._number), jax.process_count())
        failed = [said for answer in answers if (said := json.loads(answer))]
        for said in failed:
            if not said["is_input"]:
                raise RuntimeError(said["error"])
        for said in failed:
            raise config_lib.InputError(said["error"])

    def publish(self, engine: engine_lib.Engine, version: int) -> None:
        """Lets all processes take the weights; in the engine's thread.

        Raises:
          InputError: see `Member.take`.
        """
        assert isinstance(engine, Leader), "it gave these weights"
        engine.everywhere(Member.take, self._number, version)


def follow(engine: Member) -> None:
    """Makes the calls that process 0 makes to its engine, until it dismisses this one.

    SIGTERM and ctrl-C, which a cluster sends to all processes, are left to process 0,
    which answers its clients first.

    Args:
      engine: made as process 0 has made its own.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave_it)
    for message in calls.heard(_NAME):
        call = pickle.loads(message)
        if call is None:
            return
        function, args = call
        try:
            function(engine, *args)
        except config_lib.InputError as error:  # process 0 says so to its client
            logging.info("Process 0 refuses a request: %s", error)


def _leave_it(number: int, _: object) -> None:
    logging.info("%s: process 0 ends the server.", signal.Signals(number).name)
