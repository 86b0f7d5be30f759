"""Runs one engine in several processes: the others repeat what process 0 does.

A program over the devices of several processes runs once all of them start it, one
after another in the same order and with the same inputs. An engine's programs follow
from the calls that are made to it. So process 0, which alone knows the clients, tells
every call to the others before it makes it. They make it with engines of their own,
which hold the other parts of weights and cache, and drop the result.

    engine = Leader(params, config, num_slots=8, capacity=256)  # on process 0
    follow(Engine(params, config, num_slots=8, capacity=256))  # on the others

A dispatch that fails here may have run elsewhere, and nobody could tell what the others
hold. So a failure ends all processes, where an engine of one process tries again.
"""

import pickle
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference.requests import Completion, Request
from glm5_jax.processes import calls, together

_NAME = "engine"


class Leader(engine_lib.Engine):
    """The engine of process 0, whose calls the others repeat until `dismiss`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Makes an engine, as all processes do at the same time."""
        super().__init__(*args, **kwargs)
        self._speaker = calls.Speaker(_NAME)

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

    def publish(self, params: dict, version: int) -> NoReturn:
        """Refuses new weights, which the others have not read.

        Raises:
          InputError: always.
        """
        raise config_lib.InputError("New weights need a server of one process.")

    def view(self) -> NoReturn:
        """Refuses to hand pages over, of which this process has a part alone.

        Raises:
          InputError: always.
        """
        raise config_lib.InputError("Handing pages over needs a server of one process.")

    def dismiss(self) -> None:
        """Lets the other processes return from `follow`."""
        self._speaker.say(pickle.dumps(None))


def follow(engine: engine_lib.Engine) -> None:
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
