"""Runs an engine in a thread of its own, for any number of clients.

    service = Service(engine)
    service.submit(Request(service.new_id(), ids, 64), on_event)
    service.drain(timeout=60)
    service.close()

The thread alone touches the engine. Every other thread, or a coroutine, queues
commands, which take effect between two dispatches, in their order. Events arrive by a
callback, so that a server needs no thread for a request:

    lambda event: loop.call_soon_threadsafe(queue.put_nowait, event)

Every request that `submit` takes gets its tokens in order, each of them once, and then
exactly one End. A dispatch that raises is repeated; requests whose dispatch fails twice
without a new token between end with an error, and all others continue.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, Literal, TypeVar

from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference.events import ClosedError, End, Event, Reason, Stats, Tokens
from glm5_jax.inference.requests import Completion, Request

MAX_FAILURES = 2  # of dispatches with a request, without a new token between them
_NUM_IDS = 2**31  # of Request
Pause = Literal["keep", "wait", "abort"]
_Command = tuple[Callable, futures.Future]

T = TypeVar("T")


@dataclasses.dataclass
class _Stream:
    """A request that has not ended, in the engine's thread."""

    request: Request
    on_event: Callable[[Event], None]
    completion: Completion | None = None  # None: held back while the service pauses
    num_sent: int = 0
    num_failures: int = 0  # of its dispatches since its last token


class Service:
    """An engine for many clients; every method can be called in any thread."""

    def __init__(self, engine: engine_lib.Engine) -> None:
        """Starts the thread that runs the engine, which nobody else may use again."""
        self.capacity = engine.capacity  # tokens of a sequence
        self.config = engine.config
        self._engine = engine
        self._lock = threading.Condition()
        # Under the lock:
        self._commands: collections.deque[_Command] = collections.deque()
        self._ids: set[int] = set()  # of requests that have not ended
        self._num_open = 0  # requests whose End has not been delivered
        self._last_id = -1
        self._takes_requests = self._takes_commands = True
        # In the engine's thread alone:
        self._streams: dict[int, _Stream] = {}
        self._pause: Pause | None = None
        self._pauses: list[futures.Future] = []  # waiting for requests to finish
        self._counts: collections.Counter[str] = collections.Counter()
        self._ended: collections.Counter[Reason] = collections.Counter()
        self._seconds = 0.0
        self._stats = self._snapshot()
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()

    def new_id(self) -> int:
        """Returns an id for a request that no running request has."""
        with self._lock:
            while True:
                self._last_id = (self._last_id + 1) % _NUM_IDS
                if self._last_id not in self._ids:
                    return self._last_id

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Queues a request.

        Args:
          request: to continue.
          on_event: called with every event of the request, in the engine's thread,
            which it must not block. If it raises, the request is aborted.

        Raises:
          InputError: see `Engine.check`; or a request with this id is running.
          ClosedError: the service takes no more requests.
        """
        self._engine.check(request)
        with self._lock:
            if not self._takes_requests:
                raise ClosedError("The service is ending and takes no more requests.")
            if request.id in self._ids:
                raise config_lib.InputError(f"Request {request.id} is already running.")
            self._ids.add(request.id)
            self._num_open += 1
            self._queue(lambda: self._begin(_Stream(request, on_event)))

    def abort(self, id: int) -> None:
        """Ends a request soon, unless it has ended already."""
        with self._lock:
            if self._takes_commands:
                self._queue(lambda: self._abort(id))

    def publish(self, params: dict, version: int) -> futures.Future[None]:
        """Replaces the weights before the next dispatch; see `Engine.publish`."""
        return self.call(lambda engine: engine.publish(params, version))

    def clear_cache(self) -> futures.Future[None]:
        """Empties the cache; running requests read their tokens again."""
        return self.call(lambda engine: engine.clear_cache())

    def pause(self, mode: Pause = "keep") -> futures.Future[None]:
        """Stops dispatches until `resume`; requests submitted meanwhile wait.

        Args:
          mode: whether running requests stay where they are ("keep"), finish first
            ("wait"), or are aborted ("abort").

        Returns:
          A future that is done once no dispatch runs any more.
        """
        paused: futures.Future[None] = futures.Future()
        self._post(lambda: self._begin_pause(mode, paused))
        return paused

    def resume(self) -> futures.Future[None]:
        """Ends a pause."""
        return self._post(self._end_pause)

    def call(self, function: Callable[[engine_lib.Engine], T]) -> futures.Future[T]:
        """Calls a function with the engine, between two dispatches, in its thread.

        Raises:
          ClosedError: the service has ended.
        """
        return self._post(lambda: function(self._engine))

    def drain(self, timeout: float | None = None) -> bool:
        """Refuses new requests and waits for the others to end; ends a pause.

        Args:
          timeout: most seconds to wait; None waits for as long as it takes.

        Returns:
          Whether all requests have ended.
        """
        with self._lock:
            self._takes_requests = False
            if self._takes_commands:
                self._queue(self._end_pause)
            return self._lock.wait_for(lambda: self._num_open == 0, timeout)

    def close(self) -> None:
        """Aborts all requests and ends the thread; not to be called by `on_event`."""
        with self._lock:
            self._takes_requests = self._takes_commands = False
            self._lock.notify_all()
        self._thread.join()

    def num_known(self, prompt: Sequence[int]) -> int:
        """Returns about how many tokens of a prompt are in pages of the cache."""
        return self._engine.num_known(prompt)

    def stats(self) -> Stats:
        """Returns the state after the last dispatch, without waiting for the engine."""
        return self._stats

    def _post(self, function: Callable[[], T]) -> futures.Future[T]:
        """Queues a command and returns its result to come."""
        with self._lock:
            if not self._takes_commands:
                raise ClosedError("The service has ended.")
            return self._queue(function)

    def _queue(self, function: Callable[[], T]) -> futures.Future[T]:
        """Queues a command, under the lock."""
        future: futures.Future[T] = futures.Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it
        self._commands.append((function, future))
        self._lock.notify_all()
        return future

    def _drive(self) -> None:
        """Runs the thread: commands, then a dispatch, until the service is closed."""
        reason, message = "error", "The engine's thread has failed."
        try:
            while self._obey():
                if self._is_busy():
                    self._step()
                self._stats = self._snapshot()
                if not self._is_busy():
                    self._settle_pauses()
            reason, message = "abort", ""
        except BaseException:  # clients must not wait for ever
            logging.exception(message)
        with self._lock:
            self._takes_requests = self._takes_commands = False
        self._run_commands()
        for id in [*self._streams]:
            self._leave_engine(id)
            self._end(id, reason, message)
        for paused in self._pauses:
            paused.set_exception(ClosedError("The service has ended."))
        self._stats = self._snapshot()

    def _obey(self) -> bool:
        """Waits for work and runs all commands; returns whether to continue."""
        with self._lock:
            self._lock.wait_for(
                lambda: self._commands or self._is_busy() or not self._takes_commands
            )
        self._run_commands()
        return self._takes_commands

    def _run_commands(self) -> None:
        """Runs the queued commands, and tells who asked; `stats` has it by then."""
        outcomes: list[tuple[Callable, Any]] = []
        try:
            while self._commands:
                function, future = self._commands.popleft()
                try:
                    outcomes.append((future.set_result, function()))
                except Exception as error:
                    outcomes.append((future.set_exception, error))
            self._stats = self._snapshot()
        finally:
            for tell, outcome in outcomes:
                tell(outcome)

    def _is_busy(self) -> bool:
        """Returns whether there is a dispatch to run."""
        is_running = self._pause in (None, "wait") and bool(self._streams)
        return is_running and self._engine.num_pending > 0

    def _begin(self, stream: _Stream) -> None:
        """Hands a new request to the engine, or holds it back during a pause."""
        id = stream.request.id
        self._streams[id] = stream
        if self._pause is None:
            try:
                stream.completion = self._engine.submit(stream.request)
            except Exception as error:
                logging.exception("The engine refuses request %d.", id)
                self._end(id, "error", str(error))

    def _abort(self, id: int) -> None:
        """Ends a request that has not ended."""
        if id in self._streams:
            self._leave_engine(id)
            self._end(id, "abort")

    def _leave_engine(self, id: int) -> None:
        """Removes a request from the engine, also after its cache was lost."""
        if self._streams[id].completion is not None:
            try:
                self._engine.abort(id)
            except Exception:
                logging.exception("Request %d could not be aborted cleanly.", id)

    def _begin_pause(self, mode: Pause, paused: futures.Future[None]) -> None:
        """Stops dispatches as `pause` says."""
        self._pause = mode
        self._pauses.append(paused)
        if mode == "abort":
            for id in [*self._streams]:
                self._abort(id)

    def _settle_pauses(self) -> None:
        """Tells those who asked for a pause; no dispatch follows, or it is over."""
        for paused in self._pauses:
            paused.set_result(None)
        self._pauses = []

    def _end_pause(self) -> None:
        """Hands all requests that were held back to the engine."""
        self._pause = None
        self._settle_pauses()
        for stream in [*self._streams.values()]:
            if stream.completion is None:
                self._begin(stream)

    def _step(self) -> None:
        """Runs a dispatch and reports what it drew."""
        began = time.perf_counter()
        finished, failure = [], None
        try:
            finished = self._engine.step()
        except Exception as error:
            failure = error
        self._seconds += time.perf_counter() - began
        self._counts["dispatches"] += 1
        dispatch = self._engine.dispatch
        parts = [] if dispatch is None else dispatch.parts
        ids = [part.work.request.id for part in parts]
        if failure is not None:
            self._fail(ids or [*self._streams], failure)
            return
        if dispatch is not None and dispatch.kind != "decode":
            self._counts["prompt_tokens"] += sum(len(part.tokens) for part in parts)
        for id in ids:
            if id in self._streams and not self._send(self._streams[id]):
                self._abort(id)
        for id, completion in finished:
            reason = None if completion.error else completion.finish_reason
            self._end(id, reason or "error", completion.error)
        if not self._engine.num_pending:
            self._end_lost()

    def _end_lost(self) -> None:
        """Ends requests that an idle engine no longer knows; their clients wait."""
        for id, stream in [*self._streams.items()]:
            if stream.completion is not None:
                self._end(id, "error", "The engine lost the request.")

    def _fail(self, ids: list[int], error: Exception) -> None:
        """Counts a failed dispatch of these requests; ends those that had several."""
        self._counts["failures"] += 1
        logging.error("A dispatch of %d requests failed.", len(ids), exc_info=error)
        for id in ids:
            stream = self._streams.get(id)
            if stream is None or stream.completion is None:
                continue
            stream.num_failures += 1
            if stream.num_failures >= MAX_FAILURES:
                self._leave_engine(id)
                self._end(id, "error", f"{type(error).__name__}: {error}")

    def _send(self, stream: _Stream) -> bool:
        """Reports new tokens; returns whether the client took them."""
        completion, first = stream.completion, stream.num_sent
        if completion is None or len(completion.tokens) == first:
            return True
        stream.num_sent, stream.num_failures = len(completion.tokens), 0
        self._counts["drawn_tokens"] += stream.num_sent - first
        tokens = Tokens(
            ids=tuple(completion.tokens[first:]),
            logprobs=tuple(completion.logprobs[first:]),
            versions=tuple(completion.versions[first:]),
            raw_logprobs=tuple(completion.raw_logprobs[first:]),
            alternatives=tuple(completion.alternatives[first:]),
        )
        return _deliver(stream, tokens)

    def _end(self, id: int, reason: Reason, message: str = "") -> None:
        """Reports the end of a request, once."""
        stream = self._streams.pop(id, None)
        if stream is None:
            return
        self._send(stream)
        completion = stream.completion or Completion([], [], None)
        self._counts["cached_tokens"] += completion.num_cached
        self._ended[reason] += 1
        with self._lock:
            self._ids.discard(id)
        _deliver(stream, End(reason, completion, message))
        if not self._streams:  # who drained the service sees all that ended
            self._stats = self._snapshot()
        with self._lock:
            self._num_open -= 1
            self._lock.notify_all()

    def _snapshot(self) -> Stats:
        """Returns the present state."""
        engine, streams = self._engine, self._streams.values()
        held = sum(stream.completion is None for stream in streams)
        return Stats(
            version=engine.version,
            running=engine.num_pending - engine.num_waiting,
            waiting=engine.num_waiting + held,
            free_slots=engine.num_free_slots,
            free_pages=engine.num_free_pages,
            restored=engine.num_restored,
            preemptions=engine.num_preempted,
            is_paused=self._pause is not None,
            dispatch_seconds=self._seconds,
            acceptance=engine.drafter.acceptance,
            ended=dict(self._ended),
            **self._counts,
        )


def _deliver(stream: _Stream, event: Event) -> bool:
    """Calls a client's function; returns whether it succeeded."""
    try:
        stream.on_event(event)
    except Exception:
        logging.exception("The client of request %d failed.", stream.request.id)
        return False
    return True
