"""Hands pages of the cache from one engine to another, which need not read them again.

One engine reads a prompt; `copy` returns its whole pages. Another engine with the same
weights takes them into its host memory by `take`, from where they come back when a
prompt begins with them, as if they had been its own (host_pages.py). Decoding knows
nothing of it.

Pages of other weights would give wrong answers without a sign. Therefore both engines
must have the same mark, which depends on the model's config, on the shapes, types and
first numbers of all parameters and on the arrays of a page, and the same version.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array

from glm5_jax import config as config_lib
from glm5_jax.config import checks
from glm5_jax.inference import (
    host_pages,
    paged_scheduler,
    runner,
    scheduler,
    steps,
    weights,
)
from glm5_jax.model import cached

EXPERTS = "experts"  # name of the array beside the cache's entries


class MismatchError(ValueError):
    """Raised if pages are of no use to an engine."""


@dataclasses.dataclass(frozen=True)
class Form:
    """The arrays of a page, which are the same during an engine's life."""

    page_size: int  # tokens
    # [layers, 1, rows, ...] by name: of one page.
    arrays: Mapping[str, jax.ShapeDtypeStruct]

    @property
    def described(self) -> list:
        """Returns the form in words that do not depend on the process."""
        arrays = [[n, [*x.shape], str(x.dtype)] for n, x in self.arrays.items()]
        return [self.page_size, *sorted(arrays)]

    @property
    def page_bytes(self) -> int:
        """Returns the bytes of a page."""
        return sum(x.size * x.dtype.itemsize for x in self.arrays.values())


@dataclasses.dataclass(frozen=True)
class Pages:
    """Pages of a text, one behind the other, in the host's memory."""

    mark: str  # of the model that read them
    version: int  # of its weights
    first: int  # number of the first page in the text
    arrays: Mapping[str, np.ndarray]  # [layers, pages, rows, ...] by name

    @property
    def number(self) -> int:
        """Returns the number of pages."""
        return next(iter(self.arrays.values())).shape[1]


@dataclasses.dataclass(frozen=True)
class View:
    """An engine's cache between two dispatches."""

    config: config_lib.ModelConfig
    scheduler: paged_scheduler.PagedScheduler
    host: host_pages.HostPages
    entries: dict[str, Array]  # of the cache
    weights: weights.Weights
    with_experts: bool

    @property
    def form(self) -> Form:
        """Returns the arrays of a page."""
        size = self.scheduler.page_size
        shapes = {
            name: jax.ShapeDtypeStruct((len(x), 1, *x.shape[2:]), x.dtype)
            for name, x in self.entries.items()
        }
        if self.with_experts:
            make = functools.partial(cached.no_experts, self.config, (1, size))
            shapes[EXPERTS] = jax.eval_shape(make)
        return Form(size, shapes)

    @property
    def mark(self) -> str:
        """Returns what tells this model, its weights and its pages from others."""
        leaves = jax.tree_util.tree_leaves_with_path(self.weights.params)
        params = [
            (jax.tree_util.keystr(path), x.shape, str(x.dtype)) for path, x in leaves
        ]
        shown = repr((self.config, params, self.form.described))
        return hashlib.sha256(shown.encode() + self.weights.sample).hexdigest()


def view(
    plan: scheduler.Scheduler,
    host: host_pages.HostPages,
    state: steps.State,
    current: weights.Weights,
    devices: runner.Runner,
) -> View:
    """Returns the view of an engine with these parts.

    Raises:
      InputError: it has no pages, or devices with pages of their own.
    """
    number = devices.shapes.num_devices
    checks.require(
        (
            isinstance(plan, paged_scheduler.PagedScheduler),
            "num_pages must be above 0 to hand a cache over, which goes in pages; "
            "start the server with --num_pages=N.",
        ),
        (
            number == 1,
            f"Pages cannot be handed over on several devices with slots, got {number}; "
            f"give the devices to mesh.tensor.",
        ),
    )
    assert isinstance(plan, paged_scheduler.PagedScheduler)
    entries = state.cache.entries
    return View(devices.config, plan, host, entries, current, devices.with_experts)


def copy(source: View, tokens: Sequence[int], first: int) -> Pages:
    """Copies the pages with which a text begins, as far as they are in the cache.

    Args:
      source: the engine that read them.
      tokens: of whole pages.
      first: number of the first page to copy.
    """
    version = source.weights.version
    nodes = source.scheduler.known(tokens, version)[first:]
    arrays = source.host.copied(nodes, source.entries)
    if source.with_experts:
        one = source.form.arrays[EXPERTS]
        found = np.repeat(np.zeros(one.shape, one.dtype), len(nodes), axis=1)
        for i, node in enumerate(nodes):
            found[:, i] = node.experts.swapaxes(0, 1)
        arrays[EXPERTS] = found
    return Pages(source.mark, version, first, arrays)


def take(target: View, tokens: Sequence[int], pages: Pages) -> int:
    """Takes pages of another engine into host memory, as far as there is room.

    Args:
      target: the engine that will need them.
      tokens: of whole pages, from the first of the text.
      pages: as `copy` returned them for this text. Equal marks mean equal forms.

    Returns:
      The number of pages that are new here.

    Raises:
      MismatchError: another model, or another version of the weights, has read them.
    """
    version = target.weights.version
    if pages.version != version:
        raise MismatchError(
            f"The pages are of version {pages.version} of the weights, and this "
            f"engine's are of version {version}."
        )
    if pages.mark != target.mark:
        raise MismatchError(
            "The pages are of another model, or of one that was started otherwise."
        )
    rows = {name: pages.arrays[name] for name in target.entries}
    target.host.reserve(rows)  # if there is no memory, nothing has changed yet
    last = (pages.first + pages.number) * target.scheduler.page_size
    known, nodes = target.scheduler.adopt(tokens[:last], pages.first, version)
    columns = slice(known - pages.first, known - pages.first + len(nodes))
    rows = {name: values[:, columns] for name, values in rows.items()}
    target.host.put([node.host for node in nodes], rows)
    if target.with_experts:
        read = pages.arrays[EXPERTS][:, columns]
        for i, node in enumerate(nodes):
            node.experts = read[:, i].swapaxes(0, 1)
    return len(nodes)
