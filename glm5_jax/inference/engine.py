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

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from glm5_jax import config as config_lib
from glm5_jax.inference import handover, host_pages, placement, requests, results
from glm5_jax.inference import parts as parts_lib
from glm5_jax.inference import runner as runner_lib
from glm5_jax.inference import scheduler as scheduler_lib
from glm5_jax.inference import weights as weights_lib
from glm5_jax.inference.limits import Limits
from glm5_jax.inference.requests import Completion, Request, errors

NUM_STEPS = 16  # tokens of a dispatch
CHUNK = 2048  # tokens of a prompt that one dispatch reads


class Engine:
    """A model, a cache, and the requests under way.

    One thread submits, steps and aborts; another may publish meanwhile. A step that
    raises changes nothing, and the next repeats its work: if a program fails and loses
    the cache, the tokens of running requests are read again, into an empty one.
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
        with_experts: bool = False,
        limits: Limits = Limits(),  # noqa: B008, frozen
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
          with_experts: whether to record the experts of each token.
          limits: bounds of a dispatch.

        Raises:
          InputError: a size does not fit the model or the devices, or see `Limits`.
        """
        sizes = {"num_slots": num_slots, "capacity": capacity, "chunk": chunk}
        requests.require_ints(1, **sizes, num_steps=num_steps)
        requests.require_ints(0, seed=seed)
        requests.require_positions(config, capacity)
        self._chunk = chunk = min(chunk, capacity, limits.prefill_tokens)
        mesh = placement.in_use()
        placement.require_whole("num_slots", num_slots, mesh)
        num_devices = placement.num_shares(mesh)
        table = limits.table(config, capacity, num_devices)
        self.config, self.capacity, self._limits = config, capacity, limits
        self.drafter = limits.drafter(config)
        self._runner = runner_lib.Runner(
            config,
            mesh,
            parts_lib.Shapes(num_slots, num_devices, chunk, table),
            limits,
            capacity,
            seed,
            num_steps,
            with_experts,
            self.drafter,
        )
        self._scheduler, self._num_preempted = self._runner.new_scheduler(chunk), 0
        self._host = host_pages.HostPages(limits)
        # Of the last step, also of one that raised; None if there was nothing to do.
        self.dispatch: scheduler_lib.Dispatch | None = None
        self._result: results.Result | None = None
        self._finished: dict[int, Completion] = {}  # not yet returned
        with self._runner.on_mesh():
            self._state = self._runner.empty()
            self._weights = weights_lib.make(params, 0, config, mesh)

    @property
    def running(self) -> dict[int, Completion]:
        """Returns the completions under way, by request id."""
        return {id: work.completion for id, work in self._scheduler.works.items()}

    @property
    def num_pending(self) -> int:
        """Returns the number of requests that `step` has not returned yet."""
        works = self._scheduler.works
        return len(works) + sum(id not in works for id in self._finished)

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests that have no slot yet."""
        return self._scheduler.num_waiting

    @property
    def num_free_slots(self) -> int:
        """Returns the number of slots without a request."""
        return sum(slot.work is None for slot in self._scheduler.slots)

    @property
    def num_free_pages(self) -> int:
        """Returns the pages that no request uses; 0 without pages."""
        return self._scheduler.num_free_pages

    @property
    def num_preempted(self) -> int:
        """Returns how often a request lost its pages to an older one."""
        return self._num_preempted + self._scheduler.num_preempted

    @property
    def num_restored(self) -> int:
        """Returns how many pages came back from host memory."""
        return self._host.num_restored

    @property
    def version(self) -> int:
        """Returns the version of the parameters that the next dispatch uses."""
        return self._weights.version

    @property
    def placed_params(self) -> tuple[dict, placement.AnyMesh | None]:
        """Returns the parameters of the next dispatch, and the mesh they lie on."""
        return self._weights.params, self._runner.mesh

    @property
    def max_programs(self) -> int:
        """Returns an upper bound on the programs that this engine ever compiles."""
        return len(self._runner.paddings())

    def warm_up(self, on_program: Callable[[int, int], None] | None = None) -> None:
        """Compiles all programs that requests may need, by running them on padding.

        Args:
          on_program: called after each program with the number done, and of all.

        Raises:
          InputError: requests are running.
        """
        if self.num_pending:
            raise config_lib.InputError("warm_up must be called before any request.")
        paddings = self._runner.paddings()
        for done, program in enumerate(paddings, 1):
            with self._runner.on_mesh():
                self._restore()
                self._state, drawn = program(self._state, self._weights)
                jax.block_until_ready(drawn)
            if on_program is not None:
                on_program(done, len(paddings))

    def publish(self, params: dict, version: int) -> None:
        """Replaces the parameters; running requests keep their caches.

        The parameters must not be donated while the engine uses them. A dispatch under
        way ends with those that it began with. If no request runs, all slots are
        emptied, so that later results do not depend on earlier requests.

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
        with self._runner.on_mesh():
            weights = weights_lib.make(params, version, self.config, self._runner.mesh)
        if not is_running:
            self._num_preempted = self.num_preempted
            self._scheduler = self._runner.new_scheduler(self._chunk)
        self._weights = weights
        self.drafter.renew()

    def check(self, request: Request) -> None:
        """Checks a request by itself, in any thread.

        Raises:
          InputError: the request is invalid, or too long for the engine.
        """
        found = errors(request, self.config, self.capacity)
        if found := found or self._limits.errors(request):
            raise config_lib.InputError("\n".join(found))

    def submit(self, request: Request) -> Completion:
        """Queues a request and returns its completion, which grows with every step.

        Raises:
          InputError: see `check`; or a request with this id is running.
        """
        self._settle()
        self.check(request)
        if request.id in self._scheduler.works or request.id in self._finished:
            raise config_lib.InputError(f"Request {request.id} is already running.")
        return self._scheduler.submit(request).completion

    def abort(self, id: int) -> Completion:
        """Stops a request and returns its completion so far.

        Raises:
          InputError: there is no such request.
        """
        self._settle()
        completion = self._finished.pop(id, None)
        if completion is None and id in self._scheduler.works:
            completion = self._scheduler.works[id].completion
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

    def clear_cache(self) -> None:
        """Empties the cache; running requests read their tokens again."""
        self._settle()
        for array in jax.tree.leaves(self._state):  # as if a program had lost it
            array.delete()

    def num_known(self, prompt: Sequence[int]) -> int:
        """Returns a prompt's tokens that are in pages; a guess in other threads."""
        return self._scheduler.num_known(prompt)

    def view(self) -> handover.View:
        """Returns the pages of the cache as they are until the next call.

        Raises:
          InputError: they cannot be handed over.
        """
        self._settle()
        with self._runner.on_mesh():
            self._restore()
            self._state = self._host.move(self._scheduler.moves, self._state)
        return handover.view(
            self._scheduler, self._host, self._state, self._weights, self._runner
        )

    def everywhere(self, function: Callable, *args: Any) -> Any:
        """Returns function(engine, *args), called in all processes (leader.py)."""
        return function(self, *args)

    def step(self) -> list[tuple[int, Completion]]:
        """Runs one dispatch and returns the requests that it finished.

        Raises:
          Exception: any error of the dispatch; the step may be retried.
        """
        self._settle()
        self.dispatch = None
        with self._runner.on_mesh():
            self._restore()
            weights = self._weights
            todo = self._scheduler.plan(weights.version)
            if todo is not None and todo.kind != "decode":
                todo = self._runner.shapes.within(todo, self._scheduler.num_readable)
            self.dispatch = todo
            if todo is not None:
                self._state = self._host.move(self._scheduler.moves, self._state)
                self._result = self._runner.run(todo, self._state, weights)
        self._settle()
        try:
            return [*self._finished.items()]
        finally:  # not before the list is made, in case of ctrl-C
            self._finished = {}

    def _settle(self) -> None:
        """Takes the last dispatch's result into the engine's state.

        Each assignment may be repeated: after ctrl-C between two of them, the next call
        does all of them again.
        """
        if self._result is None:
            return
        result = self._result
        parts, ids = result.dispatch.parts, result.ids
        self._state = result.state
        self._scheduler.advance(result.dispatch, ids, result.version)
        for part, row, new in zip(parts, result.rows, ids, strict=True):
            if part.slot.work is not part.work:
                continue  # it has ended: this is a repetition
            pieces = part.slot.pieces
            is_over = results.write(result, part, row, new, pieces)
            if pieces:
                results.share(part.slot.nodes, pieces)
            if is_over:
                request = part.work.request
                self._finished[request.id] = part.work.completion
                self._scheduler.release(request.id, request.keep)
        self._result = None

    def _restore(self) -> None:
        """Makes an empty cache if a failed program has consumed it."""
        if self._is_lost():
            self._scheduler.forget()
            self._state = self._runner.empty()

    def _is_lost(self) -> bool:
        """Returns whether a failed program has consumed the cache."""
        return any(x.is_deleted() for x in jax.tree.leaves(self._state))


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
    num_drafts: int = 0,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> list[Completion]:
    """Continues all prompts together.

    Args:
      params: of `transformer.table`.
      config: of the model.
      prompts: token ids.
      max_new_tokens: most tokens of each.
      temperature: 0 takes the most likely token.
      top_p: samples among the most likely tokens that together have this probability.
      stop_ids: tokens that end a completion.
      seed: of the random numbers.
      num_drafts: tokens that multi-token prediction drafts in a round.
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
    if found := [line for r in requests for line in errors(r, config, limit)]:
        raise config_lib.InputError("\n".join(dict.fromkeys(found)))
    if not requests:
        return []
    longest = max(len(prompt) for prompt in prompts)
    engine = Engine(
        params,
        config,
        num_slots=placement.least_slots(len(prompts)),
        capacity=min(bucket(longest + max_new_tokens), limit),
        seed=seed,
        limits=Limits.of_prompts(len(stop_ids), num_drafts),
    )
    completions = {request.id: engine.submit(request) for request in requests}
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
    """Returns the smallest 2^n or 1.5 * 2^n that is at least `num_tokens`."""
    return parts_lib.least(parts_lib.sizes(), num_tokens)
