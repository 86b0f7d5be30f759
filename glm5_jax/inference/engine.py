"""Continues prompts: slots that are refilled while others decode.

    engine = Engine(params, config, num_slots=8, capacity=256)
    engine.submit(Request(id=0, prompt=ids, max_new_tokens=64))
    while engine.num_pending:
        for id, completion in engine.step():
            ...

Parameters are arguments of the compiled programs, so new ones are taken between two
steps (`publish`); every token says which version drew it. What a request gets depends
on its id, its prompt and the engine's seed, not on what runs beside it, nor on how many
devices: an engine made under `jax.set_mesh` uses all of them (inference/placement.py).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.inference import parts as parts_lib
from glm5_jax.inference import placement, steps
from glm5_jax.inference import scheduler as scheduler_lib
from glm5_jax.inference.requests import Completion, Request, errors
from glm5_jax.model import cached, transformer
from pallas_kernels import dispatch

NUM_STEPS = 16  # tokens of a dispatch
CHUNK = 2048  # tokens of a prompt that are read at once
MAX_STOP_IDS = 8  # of a request, unless the engine is made for more
MAX_UNSTACKED_LAYERS = 32  # compile time grows with them


class Engine:
    """A model, a cache, and the requests that it works on.

    Attributes:
        running: completions under way, by request.
        version: of the parameters.
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
        """An engine without requests.

        Args:
          params: of `transformer.table`.
          config: of the model.
          num_slots: sequences that are decoded at once.
          capacity: tokens of a sequence, prompt and completion.
          seed: of the random numbers.
          chunk: tokens of a prompt that are read at once.
          num_steps: tokens of a sequence that are drawn in one dispatch.
          max_stop_ids: of a request.
          with_experts: records which experts each token went to.

        Raises:
          InputError: the model cannot see as many tokens, or the devices of the mesh in
            use cannot have equally many slots.
        """
        limit = config.max_position_embeddings
        if capacity > limit:
            raise config_lib.InputError(
                f"capacity must not exceed model.max_position_embeddings={limit}, got "
                f"{capacity}."
            )
        chunk = min(chunk, capacity)
        self._mesh = placement.in_use()
        placement.require_whole("num_slots", num_slots, self._mesh)
        self._num_devices = placement.num_shares(self._mesh)
        self.config, self.capacity, self._seed = config, capacity, seed
        self._with_experts, self._num_steps = with_experts, num_steps
        self._num_stops = max_stop_ids
        self._rows = parts_lib.row_counts(num_slots // self._num_devices)
        self._sizes = parts_lib.sizes_to(chunk)
        self._scheduler = scheduler_lib.Scheduler(num_slots, chunk, self._num_devices)
        empty = functools.partial(
            steps.empty, config, num_slots, capacity, max_stop_ids
        )
        with self._on_mesh():
            self._state = placement.made(empty, self._mesh)
        self._experts: dict[int, list[np.ndarray]] = {i: [] for i in range(num_slots)}
        self.running: dict[int, Completion] = {}
        self.publish(params, 0)

    @property
    def num_pending(self) -> int:
        """Requests that have not finished."""
        return len(self.running)

    @property
    def max_programs(self) -> int:
        """Most programs that will ever be compiled for this engine."""
        return 2 * len(self._rows) * len(self._sizes) + 1

    def publish(self, params: dict, version: int) -> None:
        """Goes on with other parameters; what running requests have read stays.

        They must not be donated to anyone while they are in use here. Between requests
        all slots are emptied, so that what follows does not depend on what came before.
        """
        if not self.running:
            slots, chunk = len(self._scheduler.slots), self._scheduler.chunk
            self._scheduler = scheduler_lib.Scheduler(slots, chunk, self._num_devices)
        with self._on_mesh():
            self._params = self._placed(cast_params(self._placed(params), self.config))
            self._decode_params = _decode_params(self._params, self.config)
        self.version = self._scheduler.version = version

    def submit(self, request: Request) -> None:
        """Lets a request wait for a slot.

        Raises:
          InputError: it cannot be continued.
        """
        found, num_stops = errors(request, self.config, self.capacity), self._num_stops
        if len(request.stop_ids) > num_stops:
            found.append(
                f"stop_ids must be at most {num_stops} (the engine's max_stop_ids), "
                f"got {len(request.stop_ids)}."
            )
        if request.id in self.running:
            found.append(f"Request {request.id} is already running.")
        if found:
            raise config_lib.InputError("\n".join(found))
        self.running[request.id] = Completion([], [], None)
        self._scheduler.submit(request)

    def abort(self, id: int) -> Completion:
        """Stops a request; returns what it has so far."""
        slot = self._scheduler.abort(id)
        if slot is not None:
            plan = self._state.plan
            budget = plan.budget.at[slot.index].set(0)
            budget = jax.device_put(budget, plan.budget.sharding)
            plan = dataclasses.replace(plan, budget=budget)
            self._state = dataclasses.replace(self._state, plan=plan)
        return self.running.pop(id)

    def step(self) -> list[tuple[int, Completion]]:
        """Runs one dispatch; returns the requests that it finished."""
        todo = self._scheduler.next()
        if todo is None:
            return []
        with self._on_mesh():
            if todo == "decode":
                return self._decode()
            return self._prefill(todo)

    def _decode(self) -> list[tuple[int, Completion]]:
        """Draws tokens for all slots."""
        self._state, drawn = steps.decode(
            self._decode_params,
            self.config,
            self._state,
            num_steps=self._num_steps,
            with_experts=self._with_experts,
        )
        drawn = jax.device_get(drawn)
        slots = [s for s in self._scheduler.slots if s.is_decoding]
        done = [self._advance(slot, drawn, slot.index, None) for slot in slots]
        return [request for request in done if request is not None]

    def _prefill(
        self, todo: Sequence[scheduler_lib.Part]
    ) -> list[tuple[int, Completion]]:
        """Reads parts of prompts, each on the device of its slot."""
        places = parts_lib.arrange(todo)
        num_rows = parts_lib.least(self._rows, 1 + max(row for _, row in places))
        rows = [device * num_rows + row for device, row in places]
        size = max(len(part.tokens) for part in todo)
        shape = self._num_devices * num_rows, parts_lib.least(self._sizes, size)
        own = len(self._scheduler.slots) // self._num_devices
        arrays = parts_lib.make(todo, rows, shape, own, self._seed, self._num_stops)
        self._state, drawn = steps.prefill(
            self._params,
            self.config,
            self._state,
            placement.rows(arrays, self._mesh),
            is_fresh=todo[0].start == 0,
            with_experts=self._with_experts,
        )
        drawn = jax.device_get(drawn)
        pairs = zip(rows, todo, strict=True)
        done = [self._advance(part.slot, drawn, row, part) for row, part in pairs]
        return [request for request in done if request is not None]

    def _on_mesh(self) -> contextlib.AbstractContextManager:
        """The mesh that the engine was made on, whatever thread asks it."""
        return (
            contextlib.nullcontext()
            if self._mesh is None
            else placement.using(self._mesh)
        )

    def _placed(self, params: dict) -> dict:
        """Parameters where they are on the mesh: no copy, where they are there."""
        if self._mesh is None:
            return params
        return jax.device_put(params, placement.params(self.config, self._mesh))

    def _advance(
        self,
        slot: scheduler_lib.Slot,
        drawn: steps.Drawn,
        row: int,
        part: scheduler_lib.Part | None,
    ) -> tuple[int, Completion] | None:
        """Puts down what a slot drew; returns its request if that has finished."""
        request = slot.request
        assert request is not None
        completion = self.running[request.id]
        ids = [int(i) for i in drawn.ids[row] if i >= 0]
        num_read = len(ids) if part is None else len(part.tokens)
        if drawn.experts is not None:
            if part is not None:
                self._experts[slot.index] = _leading(
                    self._experts[slot.index], part.start
                )
            read = np.asarray(drawn.experts)[:, row, :num_read]
            self._experts[slot.index].append(read.swapaxes(0, 1))
        for id, logprob in zip(ids, drawn.logprobs[row].tolist(), strict=False):
            if slot.last is not None:
                slot.tokens.append(slot.last)
            slot.last = id
            completion.tokens.append(id)
            completion.logprobs.append(logprob)
            completion.versions.append(self.version)
        if not ids:
            return None
        if ids[-1] in request.stop_ids:
            completion.finish_reason = "stop"
        elif len(completion.tokens) == request.max_new_tokens:
            completion.finish_reason = "length"
        else:
            return None
        if drawn.experts is not None:
            completion.experts = np.concatenate(self._experts[slot.index])
        self._scheduler.release(slot)
        return request.id, self.running.pop(request.id)


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
    """Continues every prompt, all at once.

    Args:
      params: of `transformer.table`.
      config: of the model.
      prompts: token ids.
      max_new_tokens: of each completion.
      temperature: 0 takes the most likely token.
      top_p: samples among the most likely tokens that together have this probability.
      stop_ids: tokens that end a completion.
      seed: of the random numbers.
      on_tokens: called with the index of a prompt and its new tokens, as they come.

    Raises:
      InputError: an empty prompt, an unknown id, too many tokens, no distribution.
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


@functools.partial(jax.jit, static_argnames="config")
def cast_params(params: dict, config: config_lib.ModelConfig) -> dict:
    """Parameters in the dtypes that they are computed in, once instead of every token.

    Matrices become config.dtype; norms, router and head weights float32.
    """
    return transformer.cast(params, config)


def bucket(num_tokens: int) -> int:
    """The least 2^n or 1.5 * 2^n that is enough."""
    return parts_lib.least(parts_lib.sizes(), num_tokens)


def _slots_for(num_prompts: int) -> int:
    """Enough for all at once, 2^n on a device."""
    num_devices = placement.num_shares(placement.in_use())
    return num_devices << (-(-num_prompts // num_devices) - 1).bit_length()


def _decode_params(params: dict, config: config_lib.ModelConfig) -> dict:
    """On a CPU, where a layer of a stack is copied before use, no stacks."""
    is_small = config.num_hidden_layers <= MAX_UNSTACKED_LAYERS
    is_alone = placement.in_use() is None
    if dispatch.platform() == "cpu" and is_small and is_alone:
        return _unstacked(params, config)
    return params


_unstacked = jax.jit(cached.unstacked, static_argnames="config")


def _leading(pieces: list[np.ndarray], size: int) -> list[np.ndarray]:
    """The first `size` rows of the pieces together."""
    return [np.concatenate(pieces)[:size]] if pieces and size else []
