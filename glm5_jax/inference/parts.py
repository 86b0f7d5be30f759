"""Turns the scheduler's parts of prompts into arrays of a few fixed shapes."""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.inference import draws, steps
from glm5_jax.inference import sampling as sampling_lib
from glm5_jax.inference import scheduler as scheduler_lib
from glm5_jax.inference.requests import Request

MIN_TOKENS = 16  # length of the shortest prefill program
_DECODE_RATIO = 4  # between the slots of two neighbouring decode programs
_FEW_SLOTS = 8  # from here on there is more than one decode program
_IDLE = Request(id=0, prompt=(), max_new_tokens=0), 0


class Shapes:
    """The shapes that programs are compiled for.

    Attributes:
        num_devices: number of devices with slots of their own.
        num_slots: slots of each device.
    """

    def __init__(
        self,
        num_slots: int,
        num_devices: int,
        chunk: int,
        table: tuple[int, int] | None = None,
    ) -> None:
        """Divides all slots among the devices.

        Args:
          num_slots: over all devices.
          num_devices: devices with slots of their own.
          chunk: tokens of the longest part.
          table: most pages of a sequence, and pages of a device; None without pages.
        """
        self.num_devices, self.num_slots = num_devices, num_slots // num_devices
        self._table_sizes = table
        self._rows = row_counts(self.num_slots)
        self._sizes = sizes_to(chunk)
        self._decode_rows = decode_counts(self.num_slots)

    @property
    def decode_rows(self) -> list[int]:
        """Returns the slots of a device that decode programs compute."""
        return self._decode_rows

    def prefill_shapes(self, max_tokens: int) -> list[tuple[int, int]]:
        """Returns rows and tokens of a device's arrays, of dispatches of `within`."""
        fewest = self._rows[0]
        return [
            (rows, size)
            for size in self._sizes
            for rows in self._rows
            if rows == fewest or rows * size <= max_tokens
        ]

    def within(
        self, todo: scheduler_lib.Dispatch, max_tokens: int
    ) -> scheduler_lib.Dispatch:
        """Returns the leading parts that fit into one dispatch, at least one.

        Args:
          todo: parts of prompts to read.
          max_tokens: upper bound for a device, padding included.
        """
        parts: list[scheduler_lib.Part] = []
        counts: collections.Counter[int] = collections.Counter()  # by device
        most_rows = longest = num_tokens = 0
        for part in todo.parts:
            count, length = counts[part.slot.device] + 1, len(part.tokens)
            rows = least(self._rows, max(most_rows, count))
            size = least(self._sizes, max(longest, length))
            if not parts or rows * size <= max_tokens:
                parts.append(part)
                counts[part.slot.device] = count
                most_rows, longest = max(most_rows, count), max(longest, length)
                num_tokens = rows * size
        is_all = len(parts) == len(todo.parts)
        return dataclasses.replace(
            todo, parts=parts, is_all=is_all, num_tokens=num_tokens
        )

    def prefill(
        self, todo: Sequence[scheduler_lib.Part], seed: int, num_stops: int
    ) -> tuple[list[int], steps.Parts]:
        """Returns the row of each part, on its slot's device, and the arrays.

        Args:
          todo: parts of prompts to read.
          seed: of the random numbers.
          num_stops: most stop ids of a request.
        """
        num_rows, size = self._shape(todo)
        rows = [device * num_rows + row for device, row in _arranged(todo)]
        shape = self.num_devices * num_rows, size
        arrays = make(todo, rows, shape, self.num_slots, seed, num_stops)
        table = self._table(todo, rows, shape[0])
        return rows, dataclasses.replace(arrays, table=table)

    def padding(self, shape: tuple[int, int], num_stops: int) -> steps.Parts:
        """Returns arrays without a part, of one of `prefill_shapes`."""
        shape = self.num_devices * shape[0], shape[1]
        arrays = make([], [], shape, self.num_slots, 0, num_stops)
        return dataclasses.replace(arrays, table=self._table([], [], shape[0]))

    def decode(
        self, todo: Sequence[scheduler_lib.Part]
    ) -> tuple[list[int], steps.Chosen | None]:
        """Returns the rows of slots to decode, and the slots, as `chosen` does."""
        places = _arranged(todo)
        num_rows = _least_rows(places, self._decode_rows)
        if num_rows == self.num_slots:
            rows = [part.slot.index for part in todo]
        else:
            rows = [device * num_rows + row for device, row in places]
        return rows, self.chosen(num_rows, rows, todo)

    def chosen(
        self,
        num_rows: int,
        rows: Sequence[int] = (),
        todo: Sequence[scheduler_lib.Part] = (),
    ) -> steps.Chosen | None:
        """Returns `num_rows` slots of each device; None for all slots, without pages.

        Args:
          num_rows: one of `decode_rows`.
          rows: of the slots in the array; the others are padding.
          todo: parts of the slots.
        """
        number = self.num_devices * num_rows
        table = self._table(todo, rows, number)
        if num_rows == self.num_slots:
            return None if table is None else steps.Chosen(None, table)
        slots = np.full(number, self.num_slots, np.int32)
        slots[[*rows]] = [part.slot.index % self.num_slots for part in todo]
        return steps.Chosen(jnp.asarray(slots), table)

    def _table(
        self,
        todo: Sequence[scheduler_lib.Part],
        rows: Sequence[int],
        number: int,
    ) -> jax.Array | None:
        """Returns pages of `number` rows; the number of pages marks a missing one."""
        if self._table_sizes is None:
            return None
        width, missing = self._table_sizes
        table = np.full((number, width), missing, np.int32)
        for row, part in zip(rows, todo, strict=True):
            table[row, : len(part.slot.pages)] = part.slot.pages
        return jnp.asarray(table)

    def _shape(self, todo: Sequence[scheduler_lib.Part]) -> tuple[int, int]:
        """Returns rows and tokens of a device's arrays for parts of prompts."""
        size = least(self._sizes, max(len(part.tokens) for part in todo))
        return _least_rows(_arranged(todo), self._rows), size


def make(
    todo: Sequence[scheduler_lib.Part],
    rows: Sequence[int],
    shape: tuple[int, int],
    num_slots: int,
    seed: int,
    num_stops: int,
) -> steps.Parts:
    """Returns the arrays of parts of prompts, padded.

    Args:
      todo: parts of prompts to read.
      rows: row of each part in the arrays.
      shape: rows and tokens of the arrays.
      num_slots: slots of a device.
      seed: of the random numbers.
      num_stops: most stop ids of a request.
    """
    num_rows, size = shape
    padding = [0] * size, 0, num_slots, 0, False
    lines, plans = [padding] * num_rows, [_IDLE] * num_rows
    for row, part in zip(rows, todo, strict=True):
        tokens = [*part.tokens, *[0] * (size - len(part.tokens))]
        where = part.slot.index % num_slots, part.start, part.is_last
        lines[row] = (tokens, len(part.tokens), *where)
        plans[row] = part.work.request, part.num_drawn
    columns = map(np.asarray, zip(*lines, strict=True))
    arrays, plan = jax.device_put(([*columns], _columns(plans, num_stops)))
    keys = sampling_lib.request_keys(seed, plan.pop("numbers"))
    sampling = sampling_lib.Sampling(**plan.pop("sampling"))
    return steps.Parts(*arrays, plan=draws.Plan(keys=keys, sampling=sampling, **plan))


def sizes() -> Iterator[int]:
    """Yields the sizes 16, 24, 32, 48, 64, ..."""
    size = MIN_TOKENS
    while True:
        yield from (size, size * 3 // 2)
        size *= 2


def sizes_to(chunk: int) -> list[int]:
    """Returns the sizes below a chunk, and the chunk."""
    return [*itertools.takewhile(lambda size: size < chunk, sizes()), chunk]


def row_counts(num_slots: int) -> list[int]:
    """Returns row counts of prefill programs: 1 to num_slots, in steps of about 4."""
    counts = [num_slots]
    while counts[0] > 1:
        counts.insert(0, -(-counts[0] // 4))
    return counts


def decode_counts(num_slots: int) -> list[int]:
    """Returns slot counts of decode programs: num_slots, smaller ones, and 1.

    Each count is a program of its own, so there are few: one below 8 slots. A lone
    request needs a program of one row, as two rows take a CPU nearly twice as long.
    """
    if num_slots < _FEW_SLOTS:
        return [num_slots]
    counts = [num_slots]
    while counts[0] > _FEW_SLOTS:
        counts.insert(0, counts[0] // _DECODE_RATIO)
    return [1, *counts]


def least(sizes: Iterable[int], size: int) -> int:
    """Returns the first of ascending sizes that is at least `size`."""
    return next(s for s in sizes if s >= size)


def _arranged(todo: Sequence[scheduler_lib.Part]) -> list[tuple[int, int]]:
    """Returns for each part the device of its slot, and its row on that device."""
    num_rows: dict[int, int] = {}
    places = []
    for part in todo:
        device = part.slot.device
        places.append((device, num_rows.get(device, 0)))
        num_rows[device] = num_rows.get(device, 0) + 1
    return places


def _least_rows(places: Sequence[tuple[int, int]], counts: Sequence[int]) -> int:
    """Returns the rows that every device needs for the places of `_arranged`."""
    return least(counts, 1 + max(row for _, row in places))


def _columns(works: Sequence[tuple[Request, int]], num_stops: int) -> dict[str, Any]:
    """Returns how to continue requests that already have some tokens, by field."""
    requests = [request for request, _ in works]

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(r, name) for r in requests], dtype)

    stop_ids = [sorted(set(r.stop_ids)) for r in requests]
    return {
        "numbers": np.array([*map(_number, requests)], np.int32),
        "sampling": {
            "temperature": column("temperature", np.float32),
            "top_p": column("top_p", np.float32),
            "top_k": column("top_k", np.int32),
            "min_p": column("min_p", np.float32),
        },
        "budget": np.array([r.max_new_tokens - n for r, n in works], np.int32),
        "stop_ids": np.array(
            [ids + [-1] * (num_stops - len(ids)) for ids in stop_ids], np.int32
        ),
    }


def _number(request: Request) -> int:
    """Returns the number that the request's random numbers come from."""
    return request.id if request.seed is None else request.seed
