"""Which implementation of an op runs, and for which chip a program is meant.

A program is traced for the device of the mesh in use, present or not; without a mesh
for jax's default device. Ahead-of-time compiles for other chips rest on this.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax import ad_checkpoint

from pallas_kernels import chips

SAVED = "pallas_kernels"  # name of what a rematerialisation policy should keep
KERNELS = ("tpu", "gpu")  # modules of kernels; all others are plain XLA
INTERPRETED = "_interpret"  # suffix: the kernel runs on a CPU, slowly, for its values


def platform() -> str:
    """Platform that a program traced now is meant for: "cpu", "gpu" or "tpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def chip() -> chips.Chip | None:
    """Chip that a program traced now is meant for; None if it is not a known one."""
    return chips.find(_device_kind())


def _device_kind() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def saved(tree: Any) -> Any:
    """Marks arrays that cost much more to compute again than to keep."""
    return jax.tree.map(lambda x: ad_checkpoint.checkpoint_name(x, SAVED), tree)


def choose(
    op: str,
    implementation: str | None,
    known: tuple[str, ...],
    *args: Any,
    function: str | None = None,
) -> Callable:
    """Finds the function `op` of one of the modules of the folder `op`.

    None picks the module named after the platform if it is known and supports the
    arguments, else the first of `known`. A named one never falls back to another. Where
    there is nothing to compute (no queries, no rows) any of them is the definition.

    Args:
      op: folder, and function in each of its modules.
      implementation: one of `known`, "tpu_interpret", "gpu_interpret" or None.
      known: modules of the folder; the first is plain XLA and takes everything.
      *args: of the op. A module may define `unsupported_OP(*args)`: why it cannot
        take them, or None.
      function: the op's name where the folder holds several.

    Raises:
      NotImplementedError: if a named implementation is unknown, is meant for another
        platform or does not support the arguments.
    """
    wanted = function or op
    if implementation is None:
        return _best(op, known, args, wanted)
    name = implementation.removesuffix(INTERPRETED)
    is_interpreted = name != implementation
    is_kernel = name in KERNELS
    if name not in known or (is_interpreted and not is_kernel):
        raise NotImplementedError(
            f"implementation of {wanted} must be one of {', '.join(known)} or None, "
            f"got {implementation!r}."
        )
    if is_kernel and not is_interpreted and platform() != name:
        raise NotImplementedError(
            f"implementation {name!r} of {wanted} needs a {name}, this program is for "
            f"{platform()}; use '{name}{INTERPRETED}' to interpret it, slowly."
        )
    if _is_empty(args):
        return getattr(_module(op, "reference"), wanted)
    why = _missing(name, is_interpreted) or _unsupported(op, name, wanted, args)
    if why is not None:
        raise NotImplementedError(f"implementation {name!r} of {wanted}: {why}")
    chosen = getattr(_module(op, name), wanted)
    return functools.partial(chosen, interpret=True) if is_interpreted else chosen


def _best(op: str, known: tuple[str, ...], args: tuple, function: str) -> Callable:
    """The platform's kernel where there is one that runs, else plain XLA."""
    name = platform()
    if _is_empty(args):
        return getattr(_module(op, "reference"), function)
    if name in known:
        why = _missing(name)
        if why is not None:  # whatever the op: one warning for all of them
            _warn_once(f"plain XLA runs instead of the kernels for {name}: {why}")
        else:
            why = _unsupported(op, name, function, args)
            if why is None:
                return getattr(_module(op, name), function)
            _warn_once(f"{function} runs as {known[0]} instead of {name}: {why}")
    return getattr(_module(op, known[0]), function)


def _is_empty(args: tuple) -> bool:
    """Returns whether there is nothing to compute, and to cut into tiles."""
    return any(x.size == 0 for x in jax.tree.leaves(args) if hasattr(x, "size"))


def _module(op: str, name: str) -> Any:
    """Imported when it is wanted: the GPU's needs Triton."""
    return importlib.import_module(f"pallas_kernels.{op}.{name}")


def _missing(name: str, is_interpreted: bool = False) -> str | None:
    """Returns what all kernels of a platform want and this machine lacks, or None."""
    if name != "gpu":
        return None
    kind = _device_kind()
    if platform() == "gpu" and not chips.is_hopper(kind):
        return f"they are compiled for Hopper GPUs, this is {kind}"
    for package in ("triton",) if is_interpreted else ("triton", "jax_triton"):
        error = _import_error(package)
        if error is not None:
            return f"{error}; the extra 'gpu' brings {package}"
    return None


@functools.cache
def _import_error(package: str) -> str | None:
    try:
        importlib.import_module(package)
    except Exception as error:  # also where its version does not fit jax's
        return f"{type(error).__name__}: {error}"
    return None


def _unsupported(op: str, name: str, function: str, args: tuple) -> str | None:
    """Returns why a module cannot take the arguments here, or None."""
    axes = _automatic_axes()
    if name in KERNELS and axes:
        return (
            f"jit cannot split a kernel over the mesh's axes {axes}; call it inside "
            "jax.shard_map over them"
        )
    module = _module(op, name)
    if not hasattr(module, function):
        return "there is no such kernel yet"
    reason = getattr(module, f"unsupported_{function}", None)
    return None if reason is None else reason(*args)


def _automatic_axes() -> tuple[str, ...]:
    """Axes of the mesh that jit, not a shard_map around us, splits arrays over."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    manual = jax.sharding.AxisType.Manual
    return tuple(name for name, size, kind in axes if size > 1 and kind != manual)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
