"""Trains on a Ray cluster: one process a node, each with all of the node's devices.

    ray job submit --address=http://HEAD:8265 --working-dir=. -- \
        python launch/ray_job.py --nodes=4 --each=TPU=4 \
        -- --config=configs/NAME.py --workdir=/shared/run

Ray finds the nodes and carries the output, process 0's and the others', to the job's
log; jax.distributed does the rest. Where SIGTERM made the run save and end (143), or a
node went away, all start again, at most --max_restarts times; any other end is the
job's. A training process outlives neither its actor nor the job: it gets SIGTERM.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

SAVED = 143  # glm5_jax.training.loop.EXIT_TERMINATED
_PR_SET_PDEATHSIG = 1  # of Linux: a signal at the death of the parent


@ray.remote(max_restarts=0)
class Host:
    """The run's processes on one node."""

    def address(self) -> str:
        """Returns this node's, with a port that is free now."""
        with socket.create_server(("", 0)) as server:
            return f"{ray.util.get_node_ip_address()}:{server.getsockname()[1]}"

    def train(self, arguments: list[str], variables: dict[str, str]) -> int:
        """Runs the training command; returns its exit code."""
        flags = '. launch/flags.sh && exec "$@"'
        command = ["sh", "-c", flags, "sh", sys.executable]
        command += ["-m", "glm5_jax.train", *arguments]
        return subprocess.call(
            command, env=os.environ | variables, preexec_fn=_end_with_parent
        )


def main() -> int:
    """Runs all processes, again where they saved and ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--each", default="CPU=1", help="of a node, e.g. TPU=4 GPU=8")
    parser.add_argument("--chip", default="none", help="see launch/flags.sh")
    parser.add_argument("--cache", default="", help="a folder that all nodes see")
    parser.add_argument("--max_restarts", type=int, default=100)
    parser.add_argument("arguments", nargs="+", help="of glm5_jax.train, after --")
    options = parser.parse_args()
    pairs = (word.split("=") for word in options.each.split())
    resources = {name: float(number) for name, number in pairs}
    ray.init(address="auto")
    code = SAVED
    for _ in range(options.max_restarts + 1):
        code = _once(options, resources)
        if code not in (SAVED, None):
            return code
    return SAVED if code is None else code


def _once(options: argparse.Namespace, resources: dict[str, float]) -> int | None:
    """The first exit code that is not 0; None where a node went away."""
    num_nodes, arguments = options.nodes, options.arguments
    group = placement_group([resources] * num_nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())  # waits until there are as many nodes
    hosts = [
        Host.options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            resources={k: v for k, v in resources.items() if k not in ("CPU", "GPU")},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        ).remote()
        for index in range(num_nodes)
    ]
    variables = {
        "JAX_COORDINATOR_ADDRESS": ray.get(hosts[0].address.remote()),
        "JAX_NUM_PROCESSES": str(num_nodes),
        "PYTHONUNBUFFERED": "1",
        "CHIP": options.chip,
        "CACHE": options.cache,
    }
    try:
        codes = ray.get(
            [
                host.train.remote(arguments, variables | {"JAX_PROCESS_ID": str(i)})
                for i, host in enumerate(hosts)
            ]
        )
    except ray.exceptions.RayActorError:
        return None
    finally:
        remove_placement_group(group)  # ends the actors, and they their processes
    return next((code for code in codes if code), 0)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
