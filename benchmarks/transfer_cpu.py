"""Pushes weights to an engine's process by jax's transfer server, and by the store.

    python benchmarks/transfer_cpu.py --models=glm5_1m,glm5_10m,glm5_100m

This process is the trainer; it starts an engine on this machine that only takes
weights. First the engine pulls a uuid that the trainer never awaits: a watchdog ends
the pull after three seconds, and the engine connects again. Then each version has new
parameters in bfloat16 and goes both ways in turn: by `jax.experimental.transfer` over
TCP on 127.0.0.1, and as a whole version of the weight store in `--root`. The engine's
arrays must have the SHA-256 of the trainer's. The store proves its bytes within its
time; those of the transfer are compared after it.

Prints a JSON line a model, with `mib` in `arrays` and medians over `n` pushes a way:

- `transfer_ms`, `store_ms`: from parameters that are ready in the trainer to arrays
  that are ready in the engine; `*_all_ms` has every push, and the first is not counted;
- `write_ms`: the part of `store_ms` until the version is complete;
- `sha256_ms`: what one thread of the engine takes to hash the arrays;
- `hung_s`, `error`: when the watchdog had ended the pull, and what that raised.
"""

import argparse
import hashlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import jax
import numpy as np
import weight_push_cpu

from glm5_jax.model import transformer
from glm5_jax.rl.weight_store import reader, writer

try:
    from jax.experimental import transfer
except ImportError:
    transfer = None

WAYS = ("transfer", "store")
LIMIT = 3.0  # seconds of the pull that hangs
ANSWER = 100  # seconds after which an engine that says nothing is killed


def start_server(num_sockets: int) -> Any:
    """Returns a transfer server of this process that other hosts cannot reach."""
    if not hasattr(transfer, "start_transfer_server"):
        sys.exit(f"jax {jax.__version__} has no jax.experimental.transfer.")
    sockets = ["127.0.0.1:0"] * num_sockets  # without any, jax aborts the process
    client = jax.devices()[0].client
    return transfer.start_transfer_server(client, "127.0.0.1:0", sockets)


def layout(params: dict) -> list:
    """Returns what must be equal on both sides: jax's server compares sizes alone."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    blocks = [x.sharding.shard_shape(x.shape) for _, x in leaves]
    return [
        [jax.tree_util.keystr(path), x.dtype.name, [*x.shape], [*block]]
        for (path, x), block in zip(leaves, blocks, strict=True)
    ]


def digest(params: dict) -> str:
    """Returns the SHA-256 of all bytes."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def pull(connection: Any, uuid: int, like: dict, limit: float) -> dict:
    """Returns the arrays of a uuid.

    Raises:
      jax.errors.JaxRuntimeError: the peer failed, or `limit` seconds went by; the
        connection is of no use afterwards.
    """
    watchdog = threading.Timer(limit, connection._poison_connection)
    watchdog.start()
    try:
        return jax.block_until_ready(connection.pull(uuid, like))
    finally:
        watchdog.cancel()


def engine(model: str, num_sockets: int) -> None:
    """Does what the lines of the trainer say, and answers each with a line."""
    like = weight_push_cpu.abstract(weight_push_cpu.config_of(model))
    hello = json.loads(sys.stdin.readline())
    if hello["layout"] != layout(like):
        sys.exit("The trainer's arrays have other names, shapes, dtypes or shards.")
    server, eye, held = start_server(num_sockets), reader.Reader(hello["root"]), None
    connection = server.connect(hello["address"])
    print("{}", flush=True)
    for line in sys.stdin:
        order, began = json.loads(line), time.time()
        try:
            if order["way"] == "store":
                held = eye.follow(held)
                params = jax.block_until_ready(reader.place(held, like))
            else:
                params = pull(connection, order["uuid"], like, order["limit"])
            done = time.time()
            answer = {"done": done, "digest": digest(params), "hashed": time.time()}
        except jax.errors.JaxRuntimeError as error:
            answer = {"hung_s": time.time() - began, "error": str(error)[:60]}
            connection = server.connect(hello["address"])
        print(json.dumps(answer), flush=True)


class Trainer:
    """The trainer's ends of both ways to one engine, and the seconds they took."""

    def __init__(self, root: str, process: subprocess.Popen, num_sockets: int) -> None:
        """Starts a server, and a store whose versions are all whole."""
        self.server = start_server(num_sockets)
        self._store = writer.Writer(root, full_every=1)
        self._process, self._uuids = process, itertools.count(1)
        self.seconds = {name: [] for name in (*WAYS, "write", "sha256")}

    def tell(self, **order: Any) -> dict:
        """Returns the engine's answer to an order."""
        killer = threading.Timer(ANSWER, self._process.kill)
        killer.start()
        print(json.dumps(order), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        killer.cancel()
        return json.loads(line) if line else sys.exit("The engine ended.")

    def push(self, way: str, params: dict, version: int) -> None:
        """Pushes a version; ends the program if it arrives as other bytes."""
        sent, uuid, began = digest(params), next(self._uuids), time.time()
        if way == "store":
            self._store.publish(params, version)
            self.seconds["write"].append(time.time() - began)
        else:
            self.server.await_pull(uuid, params)
        answer = self.tell(way=way, uuid=uuid, limit=ANSWER / 2)
        if answer.get("digest") != sent:
            sys.exit(f"{way}: version {version} arrived as other bytes: {answer}.")
        self.seconds[way].append(answer["done"] - began)
        self.seconds["sha256"].append(answer["hashed"] - answer["done"])


def measure(model: str, root: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one model."""
    config = weight_push_cpu.config_of(model)
    draw = jax.jit(
        lambda key: transformer.cast(transformer.init_params(config, key), config)
    )
    command = [sys.executable, __file__, "--engine", f"--models={model}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, f"--sockets={args.sockets}"], **pipes)
    try:
        trainer = Trainer(root, process, args.sockets)
        arrays = layout(draw(jax.random.key(0)))
        trainer.tell(root=root, address=trainer.server.address(), layout=arrays)
        hung = trainer.tell(way="transfer", uuid=10**9, limit=LIMIT)
        for version in range(args.pushes + 1):
            params = jax.block_until_ready(draw(jax.random.key(version)))
            for way in WAYS if version % 2 else WAYS[::-1]:
                trainer.push(way, params, version)
    finally:
        process.kill()
    size = sum(x.nbytes for x in jax.tree.leaves(params)) / 2**20
    found = {"model": model, "mib": round(size, 1), "arrays": len(arrays)}
    found |= {"n": args.pushes, "jax": jax.__version__, "sockets": args.sockets}
    for name, taken in trainer.seconds.items():
        times = [round(1e3 * x, 1) for x in taken]
        found[f"{name}_ms"] = statistics.median(times[1:])
        found |= {f"{name}_all_ms": times} if name in WAYS else {}
    return found | {"hung_s": round(hung["hung_s"], 2), "error": hung["error"]}


def main() -> None:
    """Parses flags and prints the JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="glm5_1m,glm5_10m", help="presets")
    parser.add_argument("--pushes", type=int, default=7, help="of each way, counted")
    parser.add_argument("--sockets", type=int, default=4, help="of the transfer server")
    parser.add_argument("--root", default="/dev/shm", help="of the store's folder")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        engine(args.models, args.sockets)
        return
    for model in args.models.split(","):
        with tempfile.TemporaryDirectory(dir=args.root) as folder:
            print(json.dumps(measure(model, folder, args)), flush=True)


if __name__ == "__main__":
    main()
