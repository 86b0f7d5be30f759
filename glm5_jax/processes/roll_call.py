"""Lets all processes meet at the coordinator's port, before jax does. Imports no jax.

If the coordinator is absent, or processes disagree on their numbers, jaxlib aborts with
a C++ stack trace; the roll call finds this first and says so in a message.
"""

import errno
import json
import socket
import time
from typing import Any

from glm5_jax import config as config_lib

_RETRY_SECONDS = 0.2
_NOT_HERE = errno.EADDRNOTAVAIL
_MAX_BYTES = 4096  # of a line; no process of a run sends more


def hold(coordinator: str, num_processes: int, process_id: int, timeout: float) -> None:
    """Returns when all processes have called it; process 0 listens for the others.

    Args:
      coordinator: HOST:PORT of process 0.
      num_processes: number of all processes.
      process_id: number of this process.
      timeout: seconds to wait for missing processes.

    Raises:
      InputError: the coordinator is not reachable, a process is missing, or two
        disagree on the numbers.
    """
    deadline = time.monotonic() + timeout
    if process_id == 0:
        _listen(coordinator, num_processes, deadline, timeout)
    else:
        _report(coordinator, num_processes, process_id, deadline, timeout)


def _listen(
    coordinator: str, num_processes: int, deadline: float, timeout: float
) -> None:
    """Collects the reports of all others, then sends them the result: process 0."""
    here: set[int] = set()
    connections: list[socket.socket] = []
    problem = ""
    try:
        server = _server(coordinator)
    except OSError as error:
        raise config_lib.InputError(
            f"process 0 cannot listen on port {coordinator.rpartition(':')[2]} of "
            f"--coordinator={coordinator} ({error.strerror}); take another port, or "
            f"end what holds it."
        ) from error
    with server:
        while len(here) < num_processes - 1 and not problem:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, (host, *_) = server.accept()
            except TimeoutError:
                missing = sorted({*range(1, num_processes)} - here)
                problem = (
                    f"of {num_processes} processes only {len(here) + 1} came within "
                    f"{timeout:g} s; missing: {_some(missing)}. Start them, or correct "
                    f"--num_processes."
                )
                break
            said = _receive(connection, _RETRY_SECONDS * 10)
            if not _is_member(said):  # a port scan, say
                connection.close()
                continue
            problem = _disagreement(said, num_processes, here, host)
            here.add(said["process_id"])
            connections.append(connection)
        for connection in connections:
            _send(connection, {"problem": problem})
            connection.close()
    if problem:
        raise config_lib.InputError(problem)


def _server(coordinator: str) -> socket.socket:
    """Listens at the coordinator's address only: loopback in a simulation.

    If this machine does not have that address, e.g. as it is a load balancer's, it
    listens on every interface.
    """
    host, _, port = coordinator.rpartition(":")
    try:
        kind, *_, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        return socket.create_server(address[:2], family=kind)
    except OSError as error:
        if not isinstance(error, socket.gaierror) and error.errno != _NOT_HERE:
            raise
        return socket.create_server(("", int(port)))


def _is_member(said: dict) -> bool:
    """Returns whether a message is a report of a process of this project."""
    theirs, number = said.get("num_processes"), said.get("process_id")
    return (
        said.get("glm5_jax") == "here"
        and type(theirs) is int
        and type(number) is int
        and 0 < number < theirs
    )


def _disagreement(said: dict, num_processes: int, here: set[int], host: str) -> str:
    """Returns how a report contradicts the others, or an empty text."""
    theirs, number = said["num_processes"], said["process_id"]
    if theirs != num_processes:
        return (
            f"process {number} on {host} has --num_processes={theirs}, process 0 has "
            f"{num_processes}; give all of them the same."
        )
    if number in here:
        return (
            f"two processes have --process_id={number}, the second is on {host}; give "
            f"each its own number in 0..{num_processes - 1}."
        )
    return ""


def _report(
    coordinator: str,
    num_processes: int,
    process_id: int,
    deadline: float,
    timeout: float,
) -> None:
    """Reports to process 0, and waits for its answer: all other processes."""
    host, _, port = coordinator.rpartition(":")
    reason = "it never answered"
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), 2.0)
        except OSError as error:  # not started yet, perhaps
            reason = str(error)
            time.sleep(_RETRY_SECONDS)
            continue
        with connection:
            numbers = {"num_processes": num_processes, "process_id": process_id}
            _send(connection, {"glm5_jax": "here", **numbers})
            # Process 0 gives up first: its message says who is missing.
            answer = _receive(connection, deadline - time.monotonic() + 5)
        if answer.get("problem"):
            raise config_lib.InputError(answer["problem"])
        if "problem" in answer:
            return
        reason = "it hung up"
        time.sleep(_RETRY_SECONDS)
    raise config_lib.InputError(
        f"process {process_id} cannot reach the coordinator {coordinator} within "
        f"{timeout:g} s ({reason}); check that process 0 runs there with the same "
        f"--coordinator, and that no firewall closes the port."
    )


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:  # it went away, and will say so itself
        return


def _receive(connection: socket.socket, timeout: float) -> dict[str, Any]:
    """Returns a line of JSON, or an empty dict if none arrived."""
    connection.settimeout(max(timeout, 0.001))
    try:
        with connection.makefile("rb") as file:
            message = json.loads(file.readline(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown
