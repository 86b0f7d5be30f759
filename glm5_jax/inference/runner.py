"""Runs the engine's programs on its devices."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence

from glm5_jax import config as config_lib
from glm5_jax.inference import (
    adjustments,
    guides,
    paged_scheduler,
    placement,
    programs,
    results,
    rounds,
    scheduler,
    steps,
    weights,
)
from glm5_jax.inference import drafter as drafter_lib
from glm5_jax.inference import parts as parts_lib
from glm5_jax.inference.limits import Limits


@dataclasses.dataclass(frozen=True)
class Runner:
    """The devices of an engine, and the static arguments of its programs."""

    config: config_lib.ModelConfig
    mesh: placement.AnyMesh | None  # None: one device
    shapes: parts_lib.Shapes
    limits: Limits
    capacity: int  # tokens of a sequence
    seed: int
    num_steps: int  # tokens of a sequence that a dispatch draws
    with_experts: bool
    drafter: drafter_lib.Drafter
    # Guides of rows without a constraint, on the devices; by the number of rows.
    _idle: dict[int, guides.Guides] = dataclasses.field(default_factory=dict)

    @property
    def most_drawn(self) -> int:
        """Returns the most tokens of a sequence that a dispatch draws."""
        return max(self._rounds(n).most_drawn for n in self.drafter.numbers)

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """Enters the engine's mesh, in whatever thread calls."""
        return placement.using(self.mesh)

    def new_scheduler(self, chunk: int) -> scheduler.Scheduler:
        """Returns a scheduler whose slots are all free.

        Args:
          chunk: tokens of a prompt that a dispatch reads.
        """
        shapes, limits = self.shapes, self.limits
        sizes = shapes.num_slots * shapes.num_devices, chunk, shapes.num_devices
        if limits.num_pages:
            return paged_scheduler.PagedScheduler(*sizes, limits, self.most_drawn)
        return scheduler.Scheduler(
            *sizes,
            prefill_tokens=limits.prefill_tokens,
            can_set_back=not self.config.is_recurrent,
        )

    def empty(self) -> steps.State:
        """Returns a state without sequences; on the mesh."""
        slots = self.shapes.num_slots * self.shapes.num_devices
        sizes = slots, self.capacity, self.limits.max_stop_ids
        limits = self.limits
        pages = (limits.num_pages, limits.page_size) if limits.num_pages else None
        make = functools.partial(
            steps.empty,
            self.config,
            *sizes,
            pages,
            limits.with_adjustments,
            with_drafts=self.drafter.is_on,
        )
        return placement.made(make, self.mesh)

    def run(
        self, todo: scheduler.Dispatch, state: steps.State, weights: weights.Weights
    ) -> results.Result:
        """Runs a dispatch, which consumes the state; on the mesh."""
        if todo.kind == "decode":
            rows, chosen = self.shapes.decode(todo.parts)
            found, is_cut = self._guides(rows, todo.parts, self._num_rows(chosen))
            state, drawn = self._decode_measured(state, weights, chosen, found, is_cut)
        else:
            num_stops, is_fresh = self.limits.max_stop_ids, todo.kind == "fresh"
            rows, arrays = self.shapes.prefill(todo.parts, self.seed, num_stops)
            arrays = self._adjusted(arrays, zip(rows, todo.parts, strict=True))
            found, _ = self._guides(rows, todo.parts, len(arrays.num_tokens))
            state, drawn = self._prefill(state, weights, arrays, found, is_fresh)
        host = placement.fetched(drawn)
        return results.Result(todo, rows, state, host, weights.version)

    def paddings(self) -> list[functools.partial]:
        """Returns a function for every program, which runs it on padding.

        Each takes a state and weights, and returns the state and what was drawn.
        """
        shapes = self.shapes.prefill_shapes(self.limits.prefill_tokens)
        prefills = [
            functools.partial(self._read_padding, shape=shape, is_fresh=is_fresh)
            for shape in shapes
            for is_fresh in (True, False)
        ]
        return prefills + [
            functools.partial(self._draw_padding, rows=rows, num_drafts=number)
            for rows in self.shapes.decode_rows
            for number in self.drafter.numbers
        ]

    def _read_padding(
        self,
        state: steps.State,
        weights: weights.Weights,
        shape: tuple[int, int],
        is_fresh: bool,
    ) -> tuple[steps.State, steps.Drawn]:
        """Reads no prompt, in arrays of this shape."""
        arrays = self.shapes.padding(shape, self.limits.max_stop_ids)
        arrays = self._adjusted(arrays, ())
        found, _ = self._guides((), (), len(arrays.num_tokens))
        return self._prefill(state, weights, arrays, found, is_fresh)

    def _draw_padding(
        self,
        state: steps.State,
        weights: weights.Weights,
        rows: int,
        num_drafts: int,
    ) -> tuple[steps.State, steps.Drawn]:
        """Draws no token, in these rows of a device."""
        chosen = self.shapes.chosen(rows)
        found, _ = self._guides((), (), self._num_rows(chosen))
        return self._decode(state, weights, chosen, found, num_drafts)

    def _num_rows(self, chosen: steps.Chosen | None) -> int:
        """Returns the rows of a dispatch that decodes, over all devices."""
        if chosen is None or chosen.slots is None:
            return self.shapes.num_slots * self.shapes.num_devices
        return len(chosen.slots)

    def _guides(
        self, rows: Sequence[int], parts: Sequence[scheduler.Part], num_rows: int
    ) -> tuple[guides.Guides | None, bool]:
        """Returns the guides of a dispatch, on its devices; None without adjustments.

        Args:
          rows: of the parts in the arrays.
          parts: of the dispatch.
          num_rows: of the arrays.

        Returns:
          The guides, and whether they end the dispatch early.
        """
        if not self.limits.with_adjustments:
            return None, False
        found: list = [None] * num_rows
        for row, part in zip(rows, parts, strict=True):
            if part.work.tracker is not None and part.is_last:
                drawn = part.work.completion.tokens[: part.num_drawn]
                found[row] = part.work.tracker.guide(drawn, self.num_steps)
        if not any(found):
            if num_rows not in self._idle:
                self._idle[num_rows] = self._placed(found)
            return self._idle[num_rows], False
        is_cut = any(guide.pause is None for guide in filter(None, found))
        return self._placed(found), is_cut

    def _placed(self, found: Sequence) -> guides.Guides:
        """Returns the arrays of guides on the devices of their rows."""
        made = guides.make(found, self.config.vocab_size, self.num_steps)
        return placement.rows(made, self.mesh)

    def _adjusted(
        self, arrays: steps.Parts, parts: Iterable[tuple[int, scheduler.Part]]
    ) -> steps.Parts:
        """Returns the arrays of prompts with the adjustments of their requests.

        Args:
          arrays: of the prompts.
          parts: of the prompts, each with its row.
        """
        if not self.limits.with_adjustments:
            return arrays
        asked: list = [None] * len(arrays.num_tokens)
        for row, part in parts:
            drawn = part.work.completion.tokens[: part.num_drawn]
            asked[row] = part.work.request, drawn
        wishes = adjustments.make(asked, self.capacity)
        plan = dataclasses.replace(arrays.plan, adjustments=wishes)
        return dataclasses.replace(arrays, plan=plan)

    def _prefill(
        self,
        state: steps.State,
        weights: weights.Weights,
        arrays: steps.Parts,
        found: guides.Guides | None,
        is_fresh: bool,
    ) -> tuple[steps.State, steps.Drawn]:
        """Reads parts of prompts."""
        arrays = placement.rows(arrays, self.mesh)
        plan = dataclasses.replace(arrays.plan, guides=found)
        arrays = dataclasses.replace(arrays, plan=plan)
        return programs.prefill(
            weights.params,
            self.config,
            state,
            arrays,
            is_fresh=is_fresh,
            with_experts=self.with_experts,
        )

    def _decode_measured(
        self,
        state: steps.State,
        weights: weights.Weights,
        chosen: steps.Chosen | None,
        found: guides.Guides | None,
        is_cut: bool,
    ) -> tuple[steps.State, steps.Drawn]:
        """Draws tokens for the chosen slots; measures drafts."""
        if is_cut or not self.drafter.is_on:
            # Rounds of drafts are cut off too, and their times say nothing.
            fewest = min(self.drafter.numbers)
            return self._decode(state, weights, chosen, found, fewest)
        rows = self._num_rows(chosen)
        number, began = self.drafter.choose(rows), time.perf_counter()
        state, drawn = self._decode(state, weights, chosen, found, number)
        drawn = placement.fetched(drawn)
        seconds = time.perf_counter() - began
        self.drafter.record(rows, number, drawn.tally, seconds)
        return state, drawn

    def _decode(
        self,
        state: steps.State,
        weights: weights.Weights,
        chosen: steps.Chosen | None,
        found: guides.Guides | None,
        num_drafts: int,
    ) -> tuple[steps.State, steps.Drawn]:
        """Draws tokens for the chosen slots."""
        chosen = placement.rows(chosen, self.mesh)
        if found is not None:
            chosen = dataclasses.replace(chosen or steps.Chosen(None), guides=found)
        args = weights.decode_params, self.config, state, chosen
        if self.drafter.is_on:
            return programs.speculate(
                *args,
                settings=self._rounds(num_drafts),
                with_experts=self.with_experts,
            )
        return programs.decode(
            *args, num_steps=self.num_steps, with_experts=self.with_experts
        )

    def _rounds(self, num_drafts: int) -> rounds.Settings:
        """Returns rounds that draw num_steps tokens if half of the drafts are kept."""
        return rounds.Settings(
            num_rounds=-(-2 * self.num_steps // (num_drafts + 2)),
            num_drafts=num_drafts,
            by_rejection=self.limits.acceptance == "rejection",
        )
