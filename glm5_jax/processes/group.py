"""Finds out whether this process is one of several, by flags, environment or cluster.

Flags or the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID
give HOST:PORT of process 0, the number of processes and this one's number. Slurm, Open
MPI and TPU pods need none of them: jax.distributed asks the cluster. Imports no jax.
"""

import dataclasses
import importlib.util
import os
import pathlib
import urllib.request
from collections.abc import Mapping

from glm5_jax import config as config_lib

VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
# All variables that jax needs to detect Slurm (jax/_src/clusters/slurm_cluster.py).
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
_METADATA_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The processes of a run; jax.distributed finds fields that are None."""

    coordinator: str | None = None  # HOST:PORT of process 0
    num_processes: int | None = None
    process_id: int | None = None


def find(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Group | None:
    """Returns the group that this process belongs to, or None if it is alone.

    Args:
      coordinator: HOST:PORT of process 0; None: the environment's.
      num_processes: number of all processes; None: the environment's.
      process_id: number of this process, from 0; None: the environment's.
      environ: environment variables.

    Raises:
      InputError: some of the three are missing, or they contradict each other.
    """
    given = {
        "coordinator": coordinator or environ.get(VARIABLES["coordinator"]),
        "num_processes": _number("num_processes", num_processes, environ),
        "process_id": _number("process_id", process_id, environ),
    }
    group = Group(**given)
    if group.num_processes == 1 and not group.process_id:
        return None
    missing = [name for name, value in given.items() if value is None]
    if missing and _is_cluster(environ):
        return group
    if len(missing) == len(given):
        return None
    if missing:
        names = ", ".join(f"--{n} (or {VARIABLES[n]})" for n in missing)
        raise config_lib.InputError(
            f"several processes need --coordinator=HOST:PORT, --num_processes and "
            f"--process_id, and no cluster was found that has them; missing: {names}."
        )
    _check(str(group.coordinator), group.num_processes or 0, group.process_id or 0)
    return group


def require_supported(config: config_lib.TrainConfig, group: Group | None) -> None:
    """Checks that several processes can do what the config asks for.

    Raises:
      InputError: rollouts or samples, whose engine runs in one process.
    """
    if group is None:
        return
    if config.stage_record.has_engine(config):
        raise config_lib.InputError(
            f"stage {config.stage!r} runs in one process: its rollouts do. Start it on "
            f"one host, with as many devices as that has; or take stage 'async_rl' "
            f"with rl.servers, which play for a trainer of any size."
        )
    if config.eval_success:
        raise config_lib.InputError(
            "eval_success must be false with several processes: episodes are played in "
            "one process."
        )
    if config.sample_tokens:
        raise config_lib.InputError(
            f"sample_tokens must be 0 with several processes, got "
            f"{config.sample_tokens}: texts are sampled in one process. Set "
            f"--config.sample_tokens=0 and read samples with python -m "
            f"glm5_jax.generate."
        )


def require_alone(environ: Mapping[str, str] = os.environ) -> None:
    """Checks that a command of one process was not started as several.

    Raises:
      InputError: the environment or the cluster says that there are others.
    """
    if find(environ=environ) is not None:
        raise not_alone()


def not_alone() -> config_lib.InputError:
    """Returns the error of a command that is one of several processes."""
    return config_lib.InputError(
        "several processes were started together (by flags, JAX_NUM_PROCESSES, Slurm, "
        "Open MPI or a TPU pod), but only glm5_jax.train, glm5_jax.serve without "
        "replicas, glm5_jax.generate with a prompt, and glm5_jax.evaluate with "
        "--tokens or --text run as several. Other commands run in one, on all devices "
        "of its host: start the command on one host, without these variables."
    )


def _number(name: str, flag: int | None, environ: Mapping[str, str]) -> int | None:
    text = environ.get(VARIABLES[name])
    if flag is not None or not text:
        return flag
    if not text.isdecimal():
        raise config_lib.InputError(
            f"{VARIABLES[name]} must be a number, got {text!r}."
        )
    return int(text)


def _check(coordinator: str, num_processes: int, process_id: int) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise config_lib.InputError(
            f"--coordinator must be HOST:PORT of process 0, with a port in 1..65535 "
            f"that is free there, got {coordinator!r}; e.g. 10.0.0.1:8476."
        )
    if not 0 <= process_id < num_processes:
        raise config_lib.InputError(
            f"--process_id must lie in 0..num_processes - 1, got {process_id} of "
            f"{num_processes}; number the processes from 0."
        )


def _is_cluster(environ: Mapping[str, str]) -> bool:
    """Returns whether jax.distributed.initialize() would find other processes itself.

    A cluster of one process does not count: a laptop, a login node and a single TPU
    host must not wait for others.
    """
    is_slurm = all(name in environ for name in _SLURM)
    if is_slurm and int(environ.get("SLURM_NTASKS", "1")) > 1:
        return True
    if "OMPI_MCA_orte_hnp_uri" in environ:
        return int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1
    return _is_tpu_pod(environ)


def _is_tpu_pod(environ: Mapping[str, str]) -> bool:
    """Returns whether this is one of several hosts, of one slice or of several."""
    if environ.get("JAX_PLATFORMS", "tpu") == "cpu" or not _has_tpu():
        return False
    workers = environ.get("TPU_PROCESS_ADDRESSES", environ.get("TPU_WORKER_HOSTNAMES"))
    if workers is not None:  # GKE
        num_slices = int(environ.get("MEGASCALE_NUM_SLICES") or 1)
        return "," in workers or num_slices > 1
    if "TPU_SKIP_MDS_QUERY" in environ:
        return False
    # A TPU VM: Compute Engine's metadata server knows the hosts of the slice.
    if "," in _metadata("worker-network-endpoints", environ):
        return True
    for line in _metadata("tpu-env", environ).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "MEGASCALE_NUM_SLICES":
            return int(value.strip().strip("'") or 1) > 1
    return False


def _has_tpu() -> bool:
    """Returns whether this machine has libtpu and the device files of a TPU."""
    if importlib.util.find_spec("libtpu") is None:
        return False
    devices = ("/dev/accel0", "/dev/vfio/0", "/dev/vfio/1")
    return any(pathlib.Path(path).exists() for path in devices)


def _metadata(key: str, environ: Mapping[str, str]) -> str:
    """Returns an attribute of this virtual machine, or an empty text."""
    host = environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/attributes/{key}",
        headers={"Metadata-Flavor": "Google"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as answer:
            return answer.read().decode()
    except OSError:
        return ""
