"""Serves a model on a Ray cluster: servers on its nodes, and a router at the head.

    ray job submit --address=http://HEAD:8265 --working-dir=. -- \
        python launch/ray_serve.py --replicas=4 --each=GPU=1 --host=0.0.0.0 \
        -- --checkpoint=/shared/run

Ray finds nodes with room. Where a server ends or its node goes away, it starts again on
a node that has room, and the router is told (docs/routing.md). Clients send
$GLM5_JAX_API_KEY; the servers have a key of their own, which is drawn. SIGTERM finishes
the answers under way. A server outlives neither its actor nor the job.
"""

import argparse
import ctypes
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import ray

WRONG_INPUT = 2  # exit code of a server that starting again does not help
MIN_DELAY, MAX_DELAY = 1.0, 60.0  # seconds before a server starts again
_PR_SET_PDEATHSIG = 1  # of Linux: a signal at the death of the parent


@ray.remote(max_restarts=0)
class Host:
    """One server, on the node where Ray has placed it."""

    def address(self) -> tuple[str, int]:
        """Returns this node's, with a port that is free now."""
        with socket.create_server(("", 0)) as server:
            return ray.util.get_node_ip_address(), server.getsockname()[1]

    def serve(self, arguments: list[str], variables: dict[str, str]) -> int:
        """Runs the server; returns its exit code."""
        return subprocess.call(
            [sys.executable, "-m", "glm5_jax.serve", *arguments],
            env=os.environ | variables,
            preexec_fn=_end_with_parent,
        )


class Servers:
    """Keeps servers running, and tells the router where they are."""

    def __init__(self, options: argparse.Namespace, router: subprocess.Popen) -> None:
        """Starts nothing yet."""
        pairs = (word.split("=") for word in options.each.split())
        self._resources = {name: float(number) for name, number in pairs}
        self._arguments, self._router = options.arguments, router
        host = "127.0.0.1" if options.host == "0.0.0.0" else options.host
        self._url = f"http://{host}:{options.port}/replicas"
        self._key = os.environ["GLM5_JAX_REPLICA_KEY"]
        self._has_served = False  # hence its input is right
        self.code = 0  # of the job

    def keep(self) -> None:
        """Keeps one server running until the router ends."""
        delay = MIN_DELAY
        while self._router.poll() is None:
            began = time.monotonic()
            code = self._serve_once()
            if code == WRONG_INPUT and not self._has_served:
                self.code = code
                self._router.terminate()
                return
            if time.monotonic() - began > MAX_DELAY:
                delay, self._has_served = MIN_DELAY, True
            logging.warning("A server ended (%s); again in %g s.", code, delay)
            time.sleep(delay)
            delay = min(2 * delay, MAX_DELAY)

    def _serve_once(self) -> int | None:
        """Returns the exit code of a server; None where its node or actor was lost."""
        others = {k: v for k, v in self._resources.items() if k not in ("CPU", "GPU")}
        actor = Host.options(
            num_cpus=self._resources.get("CPU", 0),
            num_gpus=self._resources.get("GPU", 0),
            resources=others,
            scheduling_strategy="SPREAD",
        ).remote()
        url = None
        try:
            host, port = ray.get(actor.address.remote())  # waits for a node with room
            url = f"http://{host}:{port}"
            self._tell("POST", {"url": url})
            flags = [*self._arguments, f"--host={host}", f"--port={port}"]
            return ray.get(actor.serve.remote(flags, {"GLM5_JAX_API_KEY": self._key}))
        except ray.exceptions.RayError as error:
            logging.warning("A server was lost: %s", type(error).__name__)
            return None
        finally:
            ray.kill(actor)
            if url is not None:
                self._tell("DELETE", {"url": url, "drain_seconds": 0})

    def _tell(self, method: str, fields: dict[str, object]) -> None:
        """Tells the router about a server, once it listens."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("GLM5_JAX_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        body = json.dumps(fields).encode()
        while self._router.poll() is None:
            request = urllib.request.Request(self._url, body, headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=90):
                    return
            except urllib.error.HTTPError as error:
                logging.warning("%s: %s", self._url, error.read().decode())
                return
            except OSError:
                time.sleep(0.2)


def main() -> int:
    """Runs the router, and servers on the nodes, until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--each", default="CPU=1", help="of a server, e.g. GPU=1 TPU=4")
    parser.add_argument("--host", default="127.0.0.1", help="address of the router")
    parser.add_argument("--port", type=int, default=8000, help="of the router")
    parser.add_argument("arguments", nargs="+", help="of glm5_jax.serve, after --")
    options = parser.parse_args()
    os.environ.setdefault("GLM5_JAX_REPLICA_KEY", secrets.token_hex())
    router = subprocess.Popen(
        [
            *(sys.executable, "-m", "glm5_jax.route"),
            *(f"--host={options.host}", f"--port={options.port}"),
        ],
        preexec_fn=_end_with_parent,
    )
    ray.init(address="auto")  # sets a handler of its own
    signal.signal(signal.SIGTERM, lambda *_: router.terminate())
    servers = Servers(options, router)
    for _ in range(options.replicas):
        threading.Thread(target=servers.keep, daemon=True).start()
    code = router.wait()
    ray.shutdown()  # ends the actors, and they their servers
    return servers.code or code


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
