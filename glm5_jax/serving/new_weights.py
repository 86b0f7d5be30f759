"""Reads the weights that a server is to take, beside its running engine.

A version of a weight store may come into sight late, as on NFS: it is waited for. Where
the store is also behind a URL, a version that the folder lacks, or has damaged, is read
from there. The one that was read last stays in memory, so that of a difference to it
nothing else is read.
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import leader, placement
from glm5_jax.model import transformer
from glm5_jax.quantization import leaf as quantized
from glm5_jax.rl.weight_store import manifest, reader, sources
from glm5_jax.weights import loading

# For a version that another host wrote to come into sight: NFS remembers for a minute
# which names a folder lacks (acdirmax).
_VISIBLE_SECONDS = 90.0
_POLL_SECONDS = 0.5
_SAME = "A server's --quantize must be the rl.rollout_weights of its trainer."


@dataclasses.dataclass
class Last:
    """The version of a store that a process read last, if any."""

    snapshot: reader.Snapshot | None = None


class Own:
    """Weights that an engine of one process is to take."""

    def __init__(
        self,
        engine: engine_lib.Engine,
        path: pathlib.Path,
        last: Last,
        far: sources.Url | None = None,
    ) -> None:
        """Begins to read in a thread; see `read`."""
        threads = futures.ThreadPoolExecutor(1, "new weights")
        self._params = threads.submit(read, engine, path, last, far)
        threads.shutdown(wait=False)

    def wait(self) -> None:
        """Returns once they are read; in any thread.

        Raises:
          InputError: they cannot be used.
        """
        self._params.result()

    def publish(self, engine: engine_lib.Engine, version: int) -> None:
        """Lets the engine take them; in its thread.

        Raises:
          InputError: see `Engine.publish`.
        """
        engine.publish(self._params.result(), version)


Coming = Own | leader.Coming


def begin(
    engine: engine_lib.Engine,
    path: pathlib.Path,
    last: Last,
    far: sources.Url | None = None,
) -> Coming:
    """Begins to read weights, in every process of the engine; in its thread.

    Args:
      engine: that is to take them.
      path: see `read`.
      last: of an engine of one process; each of several keeps its own.
      far: see `read`.
    """
    if isinstance(engine, leader.Leader):
        return engine.read_everywhere(read_as_member, path, far)
    return Own(engine, path, last, far)


def read_as_member(
    engine: leader.Member, path: pathlib.Path, far: sources.Url | None = None
) -> dict:
    """Calls `read` in one of several processes, whose engine keeps what was read."""
    engine.last_read = engine.last_read or Last()
    return read(engine, path, engine.last_read, far)


def read(
    engine: engine_lib.Engine,
    path: pathlib.Path,
    last: Last,
    far: sources.Url | None = None,
) -> dict:
    """Returns parameters of the engine's shapes, placed as its own are.

    Args:
      engine: one that is running; nothing of it changes.
      path: of a run, a step, a Hugging Face folder, or a version of a weight store. Of
        an engine of several processes it is a version, of which each reads its windows.
      last: what an earlier call read; the version of this one takes its place.
      far: another way to the weight store that the path is in.

    Raises:
      InputError: the path cannot be used; the engine's weights are quantized, and those
        at the path are not, or the other way round.
    """
    config, (params, mesh) = engine.config, engine.placed_params
    is_code = quantized.is_quantized
    is_coded = any(map(is_code, jax.tree.leaves(params, is_leaf=is_code)))
    abstract = transformer.abstract_params(config)
    name = manifest.name_of(path.name)
    if name is not None:  # its arrays have the types of the computation
        cast = functools.partial(transformer.cast, config=config)
        shapes = _coded_as(params, abstract) if is_coded else abstract
        abstract = jax.eval_shape(cast, shapes)
    elif is_coded:
        raise config_lib.InputError(
            f"This server's weights are quantized; {path.name} is no version of a "
            f"weight store, of which alone it takes new ones. Start it without "
            f"--quantize, from weights that are not."
        )
    elif isinstance(engine, leader.Member):  # programs would check the arrays
        raise config_lib.InputError(
            f"{path.name} is no version of a weight store, of which alone a server of "
            f"several processes takes new weights."
        )
    abstract = _placed(abstract, config, mesh)
    if name is None:
        return loading.load_params(path, config, abstract)
    wanted = quantized.to_dicts(abstract)
    try:
        needs, ways = Needs(wanted), [path.parent, *([far] if far else [])]
        stores = [reader.Reader(way, needs) for way in ways]
        found = _seen(stores, name, path.parent, last.snapshot)
        _require_same_kind(found, is_coded)
        placed = reader.place(found, wanted)
    except manifest.StoreError as error:
        hint = f" {_SAME}" if is_coded else ""
        raise config_lib.InputError(
            f"{path.name} cannot be used: {error}{hint}"
        ) from error
    last.snapshot = found
    return quantized.from_dicts(abstract, placed)


def _require_same_kind(found: reader.Snapshot, is_coded: bool) -> None:
    """Checks that a version has codes if the engine's weights are codes.

    Raises:
      InputError: only one of them has.
    """
    if is_coded != any(leaf.endswith("/scales") for leaf in found.leaves):
        are = "are" if is_coded else "are not"
        raise config_lib.InputError(
            f"This server's weights {are} quantized, unlike those of "
            f"{found.name.folder}. {_SAME}"
        )


def _placed(
    abstract: dict, config: config_lib.ModelConfig, mesh: placement.AnyMesh | None
) -> dict:
    """Returns shapes with the shardings of an engine."""
    if mesh is None:
        place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        places = jax.tree.map(lambda leaf: place, abstract)
    else:
        places = placement.params(abstract, config, mesh)
    return jax.tree.map(lambda x, s: x.update(sharding=s), abstract, places)


def _coded_as(params: dict, shapes: dict) -> dict:
    """Returns shapes of the codes where an engine's parameters are quantized."""

    def one(ours: Any, shape: jax.ShapeDtypeStruct) -> Any:
        if not quantized.is_quantized(ours):
            return shape
        return quantized.abstract(shape.shape, ours.layout)

    return jax.tree.map(one, params, shapes, is_leaf=quantized.is_quantized)


class Needs:
    """Says whether a window of a leaf lies on this process's devices, in part."""

    def __init__(self, abstract_params: dict) -> None:
        """Notes the blocks of this process."""
        flat = leaves_lib.flatten(abstract_params)[0]
        self._blocks = {"/".join(path): _blocks(leaf) for path, leaf in flat.items()}

    def __call__(self, leaf: str, window: manifest.Window) -> bool:
        """Returns True for a leaf that the model lacks too: `reader.place` says so."""
        end = np.add(window.start, window.shape)
        return leaf not in self._blocks or any(
            np.all((low < end) & (np.asarray(window.start) < high))
            for low, high in self._blocks[leaf]
        )


def _blocks(leaf: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the starts and ends of the blocks that this process's devices hold."""
    found = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    bounds = (
        [cut.indices(n)[:2] for cut, n in zip(index or (), leaf.shape, strict=True)]
        for index in found
    )
    return [
        (np.array([low for low, _ in cuts]), np.array([high for _, high in cuts]))
        for cuts in bounds
    ]


def _seen(
    stores: Sequence[reader.Reader],
    name: manifest.Name,
    root: pathlib.Path,
    held: reader.Snapshot | None,
) -> reader.Snapshot:
    """Reads a version, once it is in sight, by the first way that has it whole.

    Args:
      stores: ways to one store; the first is that of a folder.
      name: of the version.
      root: the folder.
      held: see `Reader.read`.

    Raises:
      InputError: it is not in sight, for _VISIBLE_SECONDS.
      StoreError: it is damaged.
    """
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while True:
        failures: list[FileNotFoundError | manifest.StoreError] = []
        for store in stores:
            try:
                return store.read(name, held)
            except (FileNotFoundError, manifest.StoreError) as error:
                failures.append(error)
                logging.log_first_n(logging.WARNING, "%s: %s", 3, name.folder, error)
        shown = "; ".join(map(str, failures))
        if isinstance(failures[0], manifest.StoreError):
            raise manifest.StoreError(shown) from failures[0]
        if time.monotonic() > deadline:
            raise config_lib.InputError(
                f"{name.folder} has not been in sight for {_VISIBLE_SECONDS:g} s "
                f"({shown}): --weights_root must be the folder that the trainer writes "
                f"to, which all hosts share, or --weights_url must say where "
                f"python -m glm5_jax.serve_weights sends it."
            ) from failures[0]
        time.sleep(_POLL_SECONDS)
        manifest.names(root)  # listing a folder renews what NFS remembers of it
