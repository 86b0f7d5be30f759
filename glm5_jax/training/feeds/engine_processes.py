"""Actors in processes of their own: servers, and an orchestrator without jax.

    trainer ── weights ──▶ store ──▶ servers ◀── prompts, tokens ── orchestrator
       ▲                                                                 │
       └──────────────────────── groups of episodes ────────────────────┘

A server that ends starts again, gets the present weights, and its episodes begin again;
the trainer goes on meanwhile. All of them end with the trainer, but for servers that
somebody else keeps (rl.servers), perhaps on other machines.
"""

import dataclasses
import http.client
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import logging

from glm5_jax import api_key, command_line
from glm5_jax import config as config_lib
from glm5_jax.http_server import extra
from glm5_jax.processes import own_folder, simulate, together
from glm5_jax.quantization import leaf as quantized
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import held_out, publisher, trajectories
from glm5_jax.rl.weight_store import manifest
from glm5_jax.rl.weight_store import writer as writer_lib
from glm5_jax.training.feeds import actors
from glm5_jax.weights import huggingface_export, loading

_SHARED_MEMORY = pathlib.Path("/dev/shm")
_START_SECONDS = 900.0  # for the servers to load and compile
_ANSWER_SECONDS = 10.0  # of servers that somebody else keeps
_TURN_SECONDS = 60.0  # in which the orchestrator says at least that it goes on
_LATE_SECONDS = 300.0  # after them, when its event loop is blocked
_END_SECONDS = 15.0
_POLL_SECONDS = 0.1
_LAST_LINES = 20  # that are shown of a process that ended


class ActorError(RuntimeError):
    """Raised if the orchestrator or the servers cannot continue."""


class EngineProcesses:
    """Servers and an orchestrator as children of this process, as `actors.Actors`."""

    def __init__(self, config: config_lib.TrainConfig) -> None:
        """Starts nothing yet; the first weights do.

        Raises:
          InputError: the extra serve is missing, or nobody answers at rl.servers.
        """
        extra.require("rl.servers" if config.rl.servers else "rl.num_engines")
        if together.is_first():
            for name in ("servers", "eval_servers"):
                _require_servers(name, getattr(config.rl, name))
        self._config = config
        self._children: dict[str, subprocess.Popen] = {}
        self._own: own_folder.OwnFolder | None = None
        self._folder: pathlib.Path | None = None  # its path
        self._store: writer_lib.Writer | None = None
        self._port = 0  # of the orchestrator
        self._version = -1  # that the servers have

    def publish(self, params: dict, version: int) -> None:
        """Adds a version to the store, and waits until the servers have it.

        All processes of a trainer write; process 0 tells the servers.

        Raises:
          ActorError: no server took it.
        """
        if version == self._version:
            return
        if self._store is None:
            self._launch(params)
        assert self._store is not None
        began, self._version = time.perf_counter(), version
        model, weights = self._config.model, self._config.rl.rollout_weights
        pushed = publisher.rollout_params(params, model, weights)
        made = self._store.publish(quantized.to_dicts(pushed), version)
        if made is None:  # of another process
            return
        self._ask("/publish", {"folder": made.name.folder, "version": version})
        logging.log_first_n(
            logging.INFO,
            "The servers have the first weights after %.2f s.",
            1,
            time.perf_counter() - began,
        )

    def start(self, state: Mapping[str, Any], folder: pathlib.Path | None) -> None:
        """Lets the orchestrator begin to play."""
        journal = folder and str(folder.absolute())
        self._ask("/start", {"groups": state, "journal": journal})

    def take(self, version: int) -> actors.Taken:
        """Lets groups begin with a version; waits for those of the step after it.

        Raises:
          ActorError: no episode advances, or the servers failed again and again.
        """
        found = self._wait_for("/take", {"version": version})
        metrics = {f"rollout/{name}": n for name, n in found["counts"].items()}
        metrics |= {f"groups/{name}": n for name, n in found["ledger"].items()}
        metrics |= found["figures"]
        metrics["actors/loop_lag_seconds"] = round(found["lag"], 3)
        metrics["actors/servers_repaired"] = found["repaired"]
        *groups, episodes, unused = trajectories.unpack(found["played"])
        evaluated = None
        if found["evaluated"] is not None:
            version, records = found["evaluated"]
            played = trajectories.all_from_json(records)
            evaluated = held_out.Evaluation(version, played)
        memory = found["memory"]
        return actors.Taken(groups, episodes, unused, metrics, memory, evaluated)

    def evaluate(self) -> Sequence[episodes_lib.Episode]:
        """Plays the held-out tasks beside the other episodes."""
        return trajectories.all_from_json(self._wait_for("/evaluate", {})["episodes"])

    def evaluate_beside(self, version: int) -> None:
        """Begins to play the held-out tasks, for a later `take`."""
        self._ask("/evaluate_beside", {"version": version})

    def memory(self, version: int) -> Mapping[str, Any]:
        """Returns which groups are done, and which must begin again."""
        return self._ask("/memory", {"version": version})

    def close(self) -> None:
        """Ends the processes and deletes the store."""
        for child in self._children.values():
            child.terminate()
        for child in self._children.values():
            try:
                child.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if self._own is not None:
            self._own.close()

    def _launch(self, params: dict) -> None:
        """Starts all processes and waits until they answer."""
        config = self._config
        if config.rl.weights_store:
            self._store = _shared_store(pathlib.Path(config.rl.weights_store))
        if not together.is_first():
            return
        root = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        self._own = own_folder.OwnFolder("glm5_jax_rl_", root)
        self._folder = self._own.path
        settings = self._folder / "config.json"
        settings.write_text(json.dumps(command_line.to_json_dict(config)))
        logging.info(
            "Starting an orchestrator and %d servers here; their logs are in %s.",
            config.rl.num_engines,
            self._folder,
        )
        if self._store is None:
            self._store = writer_lib.Writer(self._folder / "store")
        url = config.rl.servers or self._start_servers(params)
        self._port = _free_port()
        orchestrate = ("glm5_jax.orchestrate", f"--settings={settings}")
        where = (f"--servers={url}", f"--port={self._port}")
        self._start("orchestrator", [*orchestrate, *where])
        self._wait("orchestrator", self._port, "/status")

    def _start_servers(self, params: dict) -> str:
        """Starts servers behind a router; returns its URL once it answers."""
        port = _free_port()
        self._start("servers", self._serve(params, port))
        self._wait("servers", port, "/health")
        return f"http://127.0.0.1:{port}"

    def _serve(self, params: dict, port: int) -> list[str]:
        """Returns the command of the servers, with a model of the right shapes.

        They begin with the checkpoint that the run begins with, unless it has codes,
        which would not be those of rl.rollout_weights.
        """
        config, rl = self._config, self._config.rl
        assert self._folder is not None
        checkpoint, changes = config.init_from, []
        if checkpoint is None or loading.find(checkpoint).is_quantized:
            checkpoint = str(self._folder / "start")
            huggingface_export.save_params(params, config.model, checkpoint)
        stored = loading.read_config(loading.find(checkpoint))
        for field in dataclasses.fields(config.model):
            value = getattr(config.model, field.name)
            if value != getattr(stored, field.name):
                changes.append(f"--config.model.{field.name}={value}")
        if rl.rollout_weights != "same":
            changes.append(f"--quantize={rl.rollout_weights}")
        return [
            "glm5_jax.serve",
            f"--checkpoint={checkpoint}",
            f"--num_replicas={rl.num_engines}",
            f"--port={port}",
            f"--weights_root={self._folder / 'store'}",
            f"--num_slots={rl.slots}",
            f"--num_pages={rl.num_pages}",
            f"--num_drafts={rl.num_drafts}",
            f"--capacity={config.data.sequence_length}",
            f"--seed={config.seed}",
            f"--max_concurrency={4 * rl.slots}",
            f"--routed_experts={config.replays_routing}",
            *changes,
        ]

    def _start(self, name: str, command: Sequence[str]) -> None:
        assert self._folder is not None
        command = [sys.executable, "-m", *command]
        path = self._folder / f"{name}.log"
        self._children[name] = simulate.start(command, {**os.environ}, path)

    def _wait(self, name: str, port: int, path: str) -> None:
        """Waits until a process answers with 200."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._children[name].poll() is not None:
                raise ActorError(f"the {name} ended: {self._last_lines(name)}")
            try:
                if _request(port, "GET", path, None, 5.0)[0] == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(_POLL_SECONDS)
        raise ActorError(
            f"the {name} did not answer in {_START_SECONDS:g} s: "
            f"{self._last_lines(name)}"
        )

    def _wait_for(self, path: str, body: dict[str, Any]) -> Any:
        """Returns the orchestrator's answer, for which episodes must end before."""
        body, found = {**body, "seconds": _TURN_SECONDS}, {"is_ready": False}
        while not found.get("is_ready", True):
            found = self._ask(path, body, _TURN_SECONDS + _LATE_SECONDS)
        return found

    def _ask(self, path: str, body: Any, seconds: float = 900.0) -> Any:
        """Returns the orchestrator's answer.

        Raises:
          ActorError: it fails, has ended, or does not answer in time.
        """
        try:
            status, answer = _request(self._port, "POST", path, body, seconds)
        except TimeoutError as error:
            raise ActorError(
                f"the orchestrator has not answered for {seconds:g} s, so its event "
                f"loop is blocked, as by an environment that computes or waits outside "
                f"of asyncio.to_thread: {self._last_lines('orchestrator')}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise ActorError(
                f"the orchestrator is lost ({error!r}): "
                f"{self._last_lines('orchestrator')}"
            ) from error
        if status != 200:
            raise ActorError(
                f"{answer.get('type', status)}: {answer.get('error', answer)}"
            )
        return answer

    def _last_lines(self, name: str) -> str:
        assert self._folder is not None
        try:
            text = (self._folder / f"{name}.log").read_text(errors="replace")
        except OSError as error:
            return str(error)
        return "\n".join(text.splitlines()[-_LAST_LINES:])


def _shared_store(root: pathlib.Path) -> writer_lib.Writer:
    """Returns this process's hand on a store that all processes of a trainer fill."""

    def next_incarnation() -> str:
        names = manifest.names(root)
        return str(names[-1].incarnation + 1 if names else 0)

    numbers = itertools.count()
    return writer_lib.Writer(
        root,
        incarnation=int(together.from_first("weights_store", next_incarnation)),
        process=jax.process_index(),
        gather=lambda text: together.to_first(f"weights_store/{next(numbers)}", text),
    )


def _require_servers(name: str, url: str | None) -> None:
    """Checks that a router answers at the URL of a setting, if it is set.

    Raises:
      InputError: none does.
    """
    if not url:
        return
    from glm5_jax.rl.actors import fleet  # needs the extra serve

    headers = api_key.header(api_key.given())
    asked = urllib.request.Request(url.rstrip("/") + fleet.REPLICAS, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=_ANSWER_SECONDS) as answer:
            json.load(answer)["replicas"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise config_lib.InputError(
            f"rl.{name}={url!r} is no router that answers ({error}): start one with "
            f"python -m glm5_jax.serve --num_replicas=N, or launch/ray_serve.py; its "
            f"key goes into ${api_key.VARIABLE}."
        ) from error


def _request(
    port: int, method: str, path: str, body: Any, seconds: float
) -> tuple[int, Any]:
    """Returns status and JSON of an answer from this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else {}
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
