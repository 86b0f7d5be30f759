"""Runs the engine's programs on its devices."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable

import jax

from glm5_jax import config as config_lib
from glm5_jax.inference import (
    adjustments,
    placement,
    programs,
    results,
    scheduler,
    steps,
    weights,
)
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

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """Enters the engine's mesh, in whatever thread calls."""
        return (
            contextlib.nullcontext()
            if self.mesh is None
            else placement.using(self.mesh)
        )

    def empty(self) -> steps.State:
        """Returns a state without sequences; on the mesh."""
        slots = self.shapes.num_slots * self.shapes.num_devices
        sizes = slots, self.capacity, self.limits.max_stop_ids
        limits = self.limits
        pages = (limits.num_pages, limits.page_size) if limits.num_pages else None
        make = functools.partial(
            steps.empty, self.config, *sizes, pages, limits.with_adjustments
        )
        return placement.made(make, self.mesh)

    def run(
        self, todo: scheduler.Dispatch, state: steps.State, weights: weights.Weights
    ) -> results.Result:
        """Runs a dispatch, which consumes the state; on the mesh."""
        if todo.kind == "decode":
            rows, chosen = self.shapes.decode(todo.parts)
            state, drawn = self._decode(state, weights, chosen)
        else:
            num_stops, is_fresh = self.limits.max_stop_ids, todo.kind == "fresh"
            rows, arrays = self.shapes.prefill(todo.parts, self.seed, num_stops)
            arrays = self._adjusted(arrays, zip(rows, todo.parts, strict=True))
            state, drawn = self._prefill(state, weights, arrays, is_fresh)
        return results.Result(todo, rows, state, jax.device_get(drawn), weights.version)

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
        rows = self.shapes.decode_rows
        return prefills + [functools.partial(self._draw_padding, rows=n) for n in rows]

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
        return self._prefill(state, weights, arrays, is_fresh)

    def _draw_padding(
        self, state: steps.State, weights: weights.Weights, rows: int
    ) -> tuple[steps.State, steps.Drawn]:
        """Draws no token, in these rows of a device."""
        return self._decode(state, weights, self.shapes.chosen(rows))

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
        is_fresh: bool,
    ) -> tuple[steps.State, steps.Drawn]:
        """Reads parts of prompts."""
        return programs.prefill(
            weights.params,
            self.config,
            state,
            placement.rows(arrays, self.mesh),
            is_fresh=is_fresh,
            with_experts=self.with_experts,
        )

    def _decode(
        self,
        state: steps.State,
        weights: weights.Weights,
        chosen: steps.Chosen | None,
    ) -> tuple[steps.State, steps.Drawn]:
        """Draws tokens for the chosen slots."""
        return programs.decode(
            weights.decode_params,
            self.config,
            state,
            placement.rows(chosen, self.mesh),
            num_steps=self.num_steps,
            with_experts=self.with_experts,
        )
