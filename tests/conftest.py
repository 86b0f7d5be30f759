"""Prepares jax and absl before pytest runs a test, and shares files among workers."""

import contextlib
import ctypes.util
import gc
import os
import pathlib
import shutil
import tempfile
from multiprocessing import util
from unittest import mock

import jax
import pytest
from absl import flags
from absl.testing import (
    absltest,  # noqa: F401  defines --test_tmpdir
    flagsaver,
)

from tests import environment, typecheck

HERE = pathlib.Path(__file__).parent
# They start first, so that no worker is left alone with one at the end; a file with
# those of TOGETHER that share its programs.
LONGEST = (
    "training/loop_test.py",
    "training/mesh_test.py",
    "model/properties_test.py",
    "inference/engine_test.py",
    "colab_test.py",
    "training/policy_test.py",
    "processes/commands_test.py",
    "environments/worlds/frontend/world_test.py",
    "environments/worlds/slides/checks_test.py",
    "training/rl_test.py",
    "training/async_rl_test.py",
    "data/preparation_test.py",
    "training/async_processes_test.py",
    "environments/harbor/world_test.py",
    "launch_rl_test.py",
    "environments/worlds/terminal_test.py",
    "serving/router/router_test.py",
    "inference/parity_test.py",
    "pallas_kernels/attention_ops_test.py",
    "model/invariance_test.py",
    "inference/speculation_test.py",
    "training/growth_test.py",
    "weights/huggingface_test.py",
    "training/teachers_test.py",
    "inference/constraints_test.py",
    "serving/hostile_test.py",
    "checkpoint/faults_test.py",
    "serving/clients_test.py",
    "evals/probes/probes_test.py",
    "environments/worlds/code/world_test.py",
    "model/experts_test.py",
    "scale/programs_test.py",
    "inference/engine_machine_test.py",
    "scale/rl/planner_test.py",
    "serving/mesh_test.py",
    "serving/prefill_test.py",
    "recipes/runner_test.py",
    "rl/rollouts_test.py",
    "training/packed_rows_test.py",
    "training/sft_test.py",
    "training/companions_test.py",
    "inference/mesh_test.py",
    "model/index_share_test.py",
    "optim/muon_mesh_test.py",
    "optim/optimizer_test.py",
    "ablations/runner_test.py",
    "scale/compiled/report_test.py",
    "pallas_kernels/decode_tpu_test.py",
    "pallas_kernels/dense_attention_tpu_test.py",
    "pallas_kernels/packaging_test.py",
    "docs_blocks_test.py",
    "scale/plan/planner_test.py",
)
# One worker runs both files of a pair, which share compiled programs or a fork server.
TOGETHER = {
    "training/critic_test.py": "training/async_rl_test.py",
    "training/reference_test.py": "training/async_rl_test.py",
    "training/replay_test.py": "training/async_rl_test.py",
    "training/resumed_async_test.py": "training/async_rl_test.py",
    "training/health_test.py": "training/loop_test.py",
    "training/prepared_run_test.py": "training/loop_test.py",
    "training/step_test.py": "training/mesh_test.py",
    "aot_test.py": "processes/commands_test.py",
    "checkpoint/kill_test.py": "processes/commands_test.py",
    "environments/proofs_test.py": "processes/commands_test.py",
    "environments/worlds/author_test.py": "processes/commands_test.py",
    "plan_test.py": "processes/commands_test.py",
    "processes/together_test.py": "processes/commands_test.py",
    "serving/flags_test.py": "processes/commands_test.py",
    "serving/new_weights_test.py": "processes/commands_test.py",
    "storage/commands_test.py": "processes/commands_test.py",
    "storage/lives_test.py": "processes/commands_test.py",
    "training/kill_test.py": "processes/commands_test.py",
    "training/profiling_test.py": "processes/commands_test.py",
    "weights/conversion_test.py": "processes/commands_test.py",
    "weights/loading_test.py": "processes/commands_test.py",
    "weights/sharded_test.py": "processes/commands_test.py",
    "inference/failure_test.py": "inference/engine_test.py",
    "inference/handover_test.py": "inference/engine_test.py",
    "inference/pages_test.py": "inference/engine_test.py",
    "inference/shapes_test.py": "inference/engine_test.py",
}
# They compile as for users, with LLVM's optimizations; XLA's fusions are equal without.
OPTIMIZED = (
    "model/invariance_test.py",
    "pallas_kernels/decode_test.py",
    "training/kill_test.py",
)
# They write to a disk and wait for it as users do.
SYNCED = ("checkpoint/kill_test.py",)
DISK = pathlib.Path("/var/tmp")
# Temporary files of the others lie in memory, where Linux has room for them. A disk
# with ext4 takes seconds to remove the folders of a few checkpoints.
MEMORY = pathlib.Path("/dev/shm")
ROOM = 4 * 2**30  # bytes
# Of the machine's memory, for a process, of which most are then compiled programs.
FULL_SHARE = 0.25
# Of the mappings of memory that Linux gives a process. A program takes about thirty,
# and the compiler crashes where it gets none; a file has 200 programs at most.
FULL_SHARE_OF_MAPPINGS = 0.85
FSYNC = os.fsync
# With it XLA takes a fifth less CPU time to compile than with glibc's malloc.
ALLOCATOR = "libjemalloc.so.2"
PRELOAD = "LD_PRELOAD"

environment.configure(has_cache=False)
typecheck.install()
gc.set_threshold(*environment.GARBAGE_THRESHOLDS)  # before the tests are imported


@pytest.fixture(scope="session", autouse=True)
def absl_flags(tmp_path_factory):
    """Nobody parses absl's flags under pytest; absltest and Grain read some."""
    flags.FLAGS.mark_as_parsed()
    flags.FLAGS.test_tmpdir = str(tmp_path_factory.mktemp("absl"))


@pytest.fixture(scope="module", autouse=True)
def circumstances_of_the_file(request):
    """Runs a file's tests as its name in the tuples above asks for."""
    with circumstances(request.path.relative_to(HERE).as_posix()):
        yield


@contextlib.contextmanager
def circumstances(name):
    """Compiles as the file needs; skips os.fsync, which a save calls 60 times."""
    with contextlib.ExitStack() as stack:
        if name in OPTIMIZED:
            stack.enter_context(environment.optimized())
        fsync = FSYNC if name in SYNCED else mock.Mock()
        stack.enter_context(mock.patch.object(os, "fsync", fsync))
        if name in SYNCED and DISK.is_dir():
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=DISK))
            stack.enter_context(flagsaver.flagsaver(test_tmpdir=folder))
        yield


@pytest.fixture(scope="module", autouse=True)
def room():
    """Lets compiled programs go where they have filled the memory.

    The garbage collector skips those that stay: tests that collect would take seconds.
    """
    yield
    if is_full():
        jax.clear_caches()  # a collection would find little more, in seconds
    gc.freeze()


def is_full():
    """Returns whether the process has its share of memory or of mappings, on Linux."""
    process = pathlib.Path("/proc/self")
    if not process.exists():
        return False
    pages = int((process / "statm").read_text().split()[1])
    mappings = (process / "maps").read_bytes().count(b"\n")
    most = int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
    return (
        pages > FULL_SHARE * os.sysconf("SC_PHYS_PAGES")
        or mappings > FULL_SHARE_OF_MAPPINGS * most
    )


def pytest_configure(config):
    """Gives the processes of -n jemalloc, if Linux has it; not those they start.

    They inherit the variables of the first process, which sets them here before it
    starts them. They delete that of the allocator in their turn: the processes that
    they start have none.
    """
    if hasattr(config, "workerinput"):
        if os.environ.get(PRELOAD) == ALLOCATOR:
            del os.environ[PRELOAD]
        return
    keep_files_in_memory()
    if config.getoption("numprocesses", None) and is_installed(ALLOCATOR):
        os.environ.setdefault(PRELOAD, ALLOCATOR)


def keep_files_in_memory():
    """Makes a folder for all temporary files, which ends with this process.

    TMPDIR asks for another folder, whose files stay where they are.
    """
    if "TMPDIR" in os.environ or not MEMORY.is_dir():
        return
    if shutil.disk_usage(MEMORY).free < ROOM or not os.access(MEMORY, os.W_OK):
        return
    folder = tempfile.mkdtemp(prefix="glm5_jax_tests_", dir=MEMORY)
    os.chmod(folder, 0o1777)  # as /tmp: boxes have users of their own
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    # After the folder of a fork server, which is in it and whose removal has -100.
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)


def is_installed(library):
    """Returns whether the dynamic linker finds it under this name."""
    return ctypes.util.find_library(library[3:].split(".")[0]) == library


def pytest_collection_modifyitems(items):
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    ranks |= {name: ranks[first] for name, first in TOGETHER.items()}
    ranks = {HERE / name: rank for name, rank in ranks.items()}
    items.sort(key=lambda item: ranks.get(item.path, len(LONGEST)))


def pytest_collection_finish():
    """Lets the garbage collector skip what the imports have made."""
    environment.remember_shuffles()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives a file to one worker with -n, which compiles its programs once."""
    from xdist import scheduler

    class Scheduling(scheduler.LoadFileScheduling):
        def _split_scope(self, nodeid):
            name = super()._split_scope(nodeid).removeprefix("tests/")
            return TOGETHER.get(name, name)

    if config.getvalue("dist") != "load":  # another one was asked for
        return None
    config.option.loadscopereorder = False
    return Scheduling(config, log)
