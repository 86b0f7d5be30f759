"""Continues prompts with continuous batching: freed slots are refilled at once.

    engine = Engine(params, config, num_slots=8, capacity=256)
    engine.submit(Request(id=0, prompt=ids, max_new_tokens=64))
    while engine.num_pending:
        for id, completion in engine.step():
            ...

Parameters are arguments of the compiled programs, so `publish` can replace them between
two steps; each token records the version that drew it. A completion depends on the
request's id, its prompt and the engine's seed, not on other requests or on the number
of devices. An engine made under `jax.set_mesh` uses all devices of the mesh
(inference/placement.py).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import jax
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.inference import parts as parts_lib
from glm5_jax.inference import placement, programs, requests, steps
from glm5_jax.inference import scheduler as scheduler_lib
from glm5_jax.inference import weights as weights_lib
from glm5_jax.inference.requests import Completion, Request, errors

NUM_STEPS = 16  # tokens of a dispatch
CHUNK = 2048  # tokens of a prompt that one dispatch reads
PREFILL_TOKENS = 8 * CHUNK  # that a device reads in a dispatch, padding included
MAX_STOP_IDS = 8  # of a request, by default


@dataclasses.dataclass(frozen=True)
class _Result:
    """The result of a dispatch, until the engine's state takes it in."""

    dispatch: scheduler_lib.Dispatch
    rows: list[int]  # of its parts, in the arrays of `drawn`
    state: steps.State
    drawn: steps.Drawn  # host arrays
    version: int  # of the weights that drew


class Engine:
    """A model, a cache, and the requests under way.

    One thread submits, steps and aborts; another may publish meanwhile. A step that
    raises changes nothing, so the next step repeats its work. Programs donate the
    cache: if one fails and loses it, the engine makes an empty cache and reads the
    tokens of the running requests again.
    """

    def __init__(
        self,
        params: dict,
        config: config_lib.ModelConfig,
        *,
        num_slots: int,
        capacity: int,
        seed: int = 0,
        chunk: int = CHUNK,
        num_steps: int = NUM_STEPS,
        max_stop_ids: int = MAX_STOP_IDS,
        with_experts: bool = False,
    ) -> None:
        """Makes an engine without requests.

        Args:
          params: of `transformer.table`.
          config: of the model.
          num_slots: sequences decoded at the same time.
          capacity: most tokens of a sequence, prompt and completion.
          seed: of the random numbers, from 0 on.
          chunk: tokens of a prompt that one dispatch reads.
          num_steps: tokens of a sequence that one dispatch draws.
          max_stop_ids: most stop ids of a request.
          with_experts: whether to record the experts of each token.

        Raises:
          InputError: a number is no integer or too small, `capacity` exceeds the
            model's positions, or the mesh's devices cannot share the slots equally.
        """
        sizes = {"num_slots": num_slots, "capacity": capacity, "chunk": chunk}
        requests.require_ints(1, **sizes, num_steps=num_steps)
        requests.require_ints(0, seed=seed, max_stop_ids=max_stop_ids)
        limit = config.max_position_embeddings
        if capacity > limit:
            raise config_lib.InputError(
                f"capacity must not exceed model.max_position_embeddings={limit}, got "
                f"{capacity}."
            )
        self._chunk = chunk = min(chunk, capacity)
        self._mesh = placement.in_use()
        placement.require_whole("num_slots", num_slots, self._mesh)
        num_devices = placement.num_shares(self._mesh)
        self.config, self.capacity, self._seed = config, capacity, seed
        self._with_experts, self._num_steps = with_experts, num_steps
        self._shapes = parts_lib.Shapes(num_slots, num_devices, chunk)
        self._num_stops, room = max_stop_ids, (num_slots, capacity, max_stop_ids)
        self._empty = functools.partial(steps.empty, config, *room)
        self._scheduler = self._new_scheduler()
        self._experts: dict[int, list] = {i: [] for i in range(num_slots)}
        self._result: _Result | None = None
        self._finished: dict[int, Completion] = {}  # not yet returned
        with self._on_mesh():
            self._state = placement.made(self._empty, self._mesh)
            self._weights = weights_lib.make(params, 0, config, self._mesh)

    @property
    def running(self) -> dict[int, Completion]:
        """Returns the completions under way, by request id."""
        return {id: work.completion for id, work in self._scheduler.works.items()}

    @property
    def num_pending(self) -> int:
        """Returns the number of requests that `step` has not returned yet."""
        return len(self._scheduler.works.keys() | self._finished.keys())

    @property
    def version(self) -> int:
        """Returns the version of the parameters that the next dispatch uses."""
        return self._weights.version

    @property
    def max_programs(self) -> int:
        """Returns an upper bound on the programs that this engine ever compiles."""
        return self._shapes.num_programs

    def publish(self, params: dict, version: int) -> None:
        """Replaces the parameters; running requests keep their caches.

        The parameters must not be donated while the engine uses them. A dispatch under
        way ends with the parameters that it began with. If no request is running, all
        slots are emptied, so that later results do not depend on earlier requests.

        Args:
          params: of `transformer.table`.
          version: of the parameters, above the last one; or equal to it if no request
            is running. Each token records the version that drew it.

        Raises:
          InputError: the version does not increase.
        """
        requests.require_ints(0, version=version)
        is_running, last = bool(self.num_pending), self._weights.version
        if version < last or (version == last and is_running):
            remedy = "; it may stay the same only if nothing runs" if is_running else ""
            raise config_lib.InputError(
                f"version must increase with every publish, got {version} after "
                f"{last}{remedy}."
            )
        with self._on_mesh():
            weights = weights_lib.make(params, version, self.config, self._mesh)
        if not is_running:
            self._scheduler = self._new_scheduler()
        self._weights = weights

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
          InputError: the request is invalid, or too long for the engine.
        """
        self._settle()
        found = errors(request, self.config, self.capacity)
        if not found and len(request.stop_ids) > self._num_stops:
            found.append(
                f"stop_ids must have at most {self._num_stops} ids (the engine's "
                f"max_stop_ids), got {len(request.stop_ids)}."
            )
        if not found and request.id in {*self._scheduler.works, *self._finished}:
            found.append(f"Request {request.id} is already running.")
        if found:
            raise config_lib.InputError("\n".join(found))
        self._scheduler.submit(request)

    def abort(self, id: int) -> Completion:
        """Stops a request and returns its completion so far.

        Raises:
          InputError: there is no such request.
        """
        self._settle()
        completion = self._finished.pop(id, None) or self.running.get(id)
        if completion is None:
            raise config_lib.InputError(f"Request {id} is not running.")
        slot = self._scheduler.release(id)
        if slot is not None and not self._is_lost():
            plan = self._state.plan
            budget = plan.budget.at[slot.index].set(0)
            budget = jax.device_put(budget, plan.budget.sharding)
            plan = dataclasses.replace(plan, budget=budget)
            self._state = dataclasses.replace(self._state, plan=plan)
        return completion

    def step(self) -> list[tuple[int, Completion]]:
        """Runs one dispatch and returns the requests that it finished.

        Raises:
          Exception: any error of the dispatch; the step may be retried.
        """
        self._settle()
        with self._on_mesh():
            if self._is_lost():
                self._scheduler.forget()
                self._state = placement.made(self._empty, self._mesh)
            weights = self._weights
            todo = self._scheduler.plan(weights.version)
            if todo is not None:
                self._result = self._run(todo, weights)
        self._settle()
        finished, self._finished = self._finished, {}
        return list(finished.items())

    def _run(
        self, todo: scheduler_lib.Dispatch, weights: weights_lib.Weights
    ) -> _Result:
        """Runs the scheduler's next dispatch on the devices."""
        if todo.kind == "decode":
            rows, chosen = self._shapes.decode(todo.parts)
            state, drawn = programs.decode(
                weights.decode_params,
                self.config,
                self._state,
                placement.rows(chosen, self._mesh),
                num_steps=self._num_steps,
                with_experts=self._with_experts,
            )
        else:
            todo = self._shapes.within(todo, PREFILL_TOKENS)
            rows, arrays = self._shapes.prefill(todo.parts, self._seed, self._num_stops)
            state, drawn = programs.prefill(
                weights.params,
                self.config,
                self._state,
                placement.rows(arrays, self._mesh),
                is_fresh=todo.kind == "fresh",
                with_experts=self._with_experts,
            )
        return _Result(todo, rows, state, jax.device_get(drawn), weights.version)

    def _settle(self) -> None:
        """Takes the last dispatch's result into the engine's state.

        Each assignment may be repeated: after ctrl-C between two of them, the next call
        does all of them again.
        """
        if self._result is None:
            return
        result, drawn = self._result, self._result.drawn
        self._state = result.state
        parts = result.dispatch.parts
        ids = [[int(i) for i in drawn.ids[row] if i >= 0] for row in result.rows]
        self._scheduler.advance(result.dispatch, ids, result.version)
        for part, row, new in zip(parts, result.rows, ids, strict=True):
            completion, first = part.work.completion, part.num_drawn
            completion.tokens[first:] = new
            completion.logprobs[first:] = drawn.logprobs[row, : len(new)].tolist()
            completion.versions[first:] = [result.version] * len(new)
            pieces = self._experts[part.slot.index]
            if drawn.experts is not None:
                num_read = len(part.tokens) + max(len(new) - 1, 0)
                read = np.asarray(drawn.experts)[:, row, :num_read].swapaxes(0, 1)
                _put(pieces, part.start, read)
            if reason := _finish_reason(part.work):
                completion.finish_reason = reason
                if drawn.experts is not None:
                    completion.experts = np.concatenate([piece for _, piece in pieces])
                self._finished[part.work.request.id] = completion
                self._scheduler.release(part.work.request.id, part.work.request.keep)
        self._result = None

    def _new_scheduler(self) -> scheduler_lib.Scheduler:
        """Returns a scheduler whose slots are all free."""
        shapes = self._shapes
        return scheduler_lib.Scheduler(
            shapes.num_slots * shapes.num_devices,
            self._chunk,
            shapes.num_devices,
            can_set_back=not self.config.is_recurrent,
        )

    def _is_lost(self) -> bool:
        """Returns whether a failed program has consumed the cache."""
        return any(x.is_deleted() for x in jax.tree.leaves(self._state))

    def _on_mesh(self) -> contextlib.AbstractContextManager:
        """Enters the engine's mesh, in whatever thread calls."""
        return (
            contextlib.nullcontext()
            if self._mesh is None
            else placement.using(self._mesh)
        )


def generate(
    params: dict,
    config: config_lib.ModelConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_ids: Iterable[int] = (),
    seed: int = 0,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> list[Completion]:
    """Continues all prompts together.

    Args:
      params: of `transformer.table`.
      config: of the model.
      prompts: token ids.
      max_new_tokens: upper bound for each completion.
      temperature: 0 takes the most likely token.
      top_p: samples among the most likely tokens that together have this probability.
      stop_ids: tokens that end a completion.
      seed: of the random numbers.
      on_tokens: called with the index of a prompt and its new tokens, as they come.

    Raises:
      InputError: a prompt or a sampling setting cannot be used; see `requests`.
    """
    stop_ids = frozenset(stop_ids)
    requests = [
        Request(i, prompt, max_new_tokens, stop_ids, temperature, top_p)
        for i, prompt in enumerate(prompts)
    ]
    limit = config.max_position_embeddings
    found = [line for r in requests for line in errors(r, config, limit)]
    if found:
        raise config_lib.InputError("\n".join(dict.fromkeys(found)))
    if not requests:
        return []
    longest = max(len(prompt) for prompt in prompts)
    engine = Engine(
        params,
        config,
        num_slots=_slots_for(len(prompts)),
        capacity=min(bucket(longest + max_new_tokens), limit),
        seed=seed,
        max_stop_ids=max(len(stop_ids), MAX_STOP_IDS),
    )
    for request in requests:
        engine.submit(request)
    completions = dict(engine.running)
    reported = dict.fromkeys(completions, 0)
    while engine.num_pending:
        engine.step()
        for i, completion in completions.items():
            new = completion.tokens[reported[i] :]
            reported[i] += len(new)
            if new and on_tokens:
                on_tokens(i, new)
    return list(completions.values())


def bucket(num_tokens: int) -> int:
    """Returns the smallest 2^n or 1.5 * 2^n that is at least `size`."""
    return parts_lib.least(parts_lib.sizes(), num_tokens)


def _slots_for(num_prompts: int) -> int:
    """Returns slots for all requests at once, 2^n on each device."""
    num_devices = placement.num_shares(placement.in_use())
    return num_devices << (-(-num_prompts // num_devices) - 1).bit_length()


def _finish_reason(work: scheduler_lib.Work) -> Literal["stop", "length"] | None:
    """Returns why a completion has ended, or None."""
    tokens, request = work.completion.tokens, work.request
    if tokens and tokens[-1] in request.stop_ids:
        return "stop"
    return "length" if len(tokens) == request.max_new_tokens else None


def _put(pieces: list[tuple[int, np.ndarray]], start: int, new: np.ndarray) -> None:
    """Replaces rows from `start` on by these pieces, each at its own place."""
    while pieces and pieces[-1][0] >= start:
        pieces.pop()
    if pieces:
        first, piece = pieces[-1]
        pieces[-1] = first, piece[: start - first]
    pieces.append((start, new))
