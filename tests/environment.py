"""The environment of every test: the CPU as 8 devices, and no rank promotion.

conftest.py calls `configure` for pytest; a test file run alone calls `main`.
"""

import contextlib
import functools
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl.testing import absltest
from jax import lax
from jax._src import core
from jax._src.interpreters import mlir

# The garbage collector's; Python's own are 700, 10 and 10. Tracing makes so many
# objects that collecting them took a tenth of the tests' CPU time.
GARBAGE_THRESHOLDS = 50_000, 20, 50
CACHE_DIR = pathlib.Path(__file__).parent.parent / ".cache" / "jax"
VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    # For the processes that tests start: `configure` says why not for those of tests.
    "JAX_COMPILATION_CACHE_DIR": str(CACHE_DIR),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    # Compiling takes most of the time of most tests: a third less so. Set it to 0 for
    # the programs that users run.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    # Loops without MLIR take half as long to compile (newer XLAs ignore the option); a
    # module that is not split for many threads, a tenth less of two cores.
    "XLA_FLAGS": "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    " --xla_cpu_parallel_codegen_split_count=1",
    # Under pytest the stack is deep, and jax would write it beside each operation.
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    # libtpu compiles ahead of time: it must not look for chips nor lock out the other
    # test process.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
SHUFFLES = "grain._src.python.experimental.index_shuffle.python.index_shuffle_module"
# A context keeps the constants of its modules.
MODULES_OF_A_CONTEXT = 100


def configure(*, has_cache: bool = True) -> None:
    """Sets up jax; call it before the first array. What the user has set stays.

    Args:
      has_cache: keep compiled programs for other processes. Not those of tests: hashing
        programs and writing the long ones took a tenth of their CPU time, XLA takes a
        twentieth, so a second run would win less. And what comes from the cache cannot
        be serialised.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)  # child processes inherit these
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    environ = os.environ
    jax.config.update("jax_platforms", environ["JAX_PLATFORMS"])
    jax.config.update("jax_compilation_cache_dir", environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update(
        "jax_persistent_cache_min_compile_time_secs",
        float(environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]),
    )
    jax.config.update("jax_enable_compilation_cache", has_cache)
    mlir.make_ir_context = _shared(mlir.make_ir_context)
    _put_numpy(core.stage_p, _staged)  # jnp.asarray(x)
    _put_numpy(lax.convert_element_type_p, _converted)  # jnp.asarray(x, dtype)
    _put_numpy(lax.broadcast_in_dim_p, _filled)  # jnp.zeros(shape)
    limit = int(environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"])
    jax.config.update("jax_traceback_in_locations_limit", limit)
    jax.config.update("jax_disable_most_optimizations", _is_quick())
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if "xla_force_host_platform_device_count" not in environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)


@contextlib.contextmanager
def optimized() -> Iterator[None]:
    """Compiles as for users while this lasts."""
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", _is_quick())


def main() -> None:
    """Runs the tests of the file that is being executed."""
    configure(has_cache=False)
    absltest.main()


def remember_shuffles() -> None:
    """Lets Grain, where it is imported, shuffle a place of a small source only once.

    It walks through 2**16 places until one is below the size: 3 ms for ten rows.
    """
    module = sys.modules.get(SHUFFLES)
    if module is not None and not hasattr(module.index_shuffle, "cache_info"):
        module.index_shuffle = functools.lru_cache(10**5)(module.index_shuffle)


def _shared(make: Callable[[], mlir.ir.Context]) -> Callable[[], mlir.ir.Context]:
    """Returns a maker of MLIR's contexts that gives a thread one for many modules.

    Making one takes 4 ms, and jax does for each program, also for one operation.
    """
    if hasattr(make, "__wrapped__"):
        return make
    kept = threading.local()

    @functools.wraps(make)
    def shared() -> mlir.ir.Context:
        kept.uses = getattr(kept, "uses", 0) + 1
        if kept.uses % MODULES_OF_A_CONTEXT == 1:
            kept.context = make()
        return kept.context

    return shared


def _put_numpy(primitive: core.Primitive, compute: Callable) -> None:
    """Lets numpy compute what a new array holds, outside any program.

    jax compiles a program for each shape, which takes 10 ms. It still does in a mesh,
    whose devices all get the array.
    """
    compiled = primitive.impl
    if hasattr(compiled, "__wrapped__"):
        return

    @functools.wraps(compiled)
    def run(x: Any, **options: Any) -> jax.Array:
        found = None
        if jax.sharding.get_abstract_mesh().empty:
            found = compute(x, **options)
        if found is None:
            return compiled(x, **options)
        return jax.device_put(np.array(found))  # a device may share numpy's memory

    primitive.def_impl(run)


def _staged(x: Any) -> np.ndarray | None:
    """Returns an array of numpy; no scalar, which may be of a weak type."""
    return x if isinstance(x, np.ndarray) and x.ndim else None


def _converted(x: Any, new_dtype: np.dtype, **_: Any) -> np.ndarray | None:
    """Returns a converted array; None where numpy and XLA round differently."""
    if _staged(x) is None or (new_dtype.kind in "iu" and x.dtype.kind not in "iub"):
        return None
    with np.errstate(all="ignore"):
        return x.astype(new_dtype)


def _filled(x: Any, shape: tuple, sharding: Any, **_: Any) -> np.ndarray | None:
    """Returns an array of one number, which jax has put on the default device."""
    is_number = isinstance(x, jax.Array) and not x.ndim and not x.weak_type
    if not is_number or x.committed or sharding is not None:
        return None
    return np.broadcast_to(x, shape) if isinstance(x.dtype, np.dtype) else None


def _is_quick() -> bool:
    return os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
