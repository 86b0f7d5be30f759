"""Figures of the router, and of its replicas with their address as a label."""

from collections.abc import Iterator, Mapping

from glm5_jax.http_server import guard
from glm5_jax.serving.router import forward
from glm5_jax.serving.router import pool as pool_lib

_NAME = "glm5_jax_router_"


def render(pool: pool_lib.Pool, forwarder: forward.Forward, door: guard.Guard) -> str:
    """Returns the router's own figures in the text form of Prometheus."""
    return "".join(_lines(pool, forwarder, door))


def labelled(texts: Mapping[str, str]) -> str:
    """Returns the figures of all replicas, each with the label `replica`.

    Args:
      texts: answers of GET /metrics by address.
    """
    said: set[str] = set()
    families: dict[str, list[str]] = {}
    for url, text in texts.items():
        name = ""
        for line in text.splitlines():
            if line.startswith("#"):
                _, _, name = line.split(" ")[:3]
                if line not in said:
                    said.add(line)
                    families.setdefault(name, []).append(line)
            elif line:
                families.setdefault(name, []).append(_with_label(line, url))
    lines = [line for family in families.values() for line in family]
    return "".join(f"{line}\n" for line in lines)


def _with_label(line: str, url: str) -> str:
    name, brace, rest = line.partition("{")
    if brace:
        return f'{name}{{replica="{url}",{rest}'
    name, _, value = line.partition(" ")
    return f'{name}{{replica="{url}"}} {value}'


def _lines(
    pool: pool_lib.Pool, forwarder: forward.Forward, door: guard.Guard
) -> Iterator[str]:
    replicas = pool.replicas.values()
    yield _head("replica_ready", "gauge", "1 while the replica is in service.")
    for one in replicas:
        is_ready = int(one.state == pool_lib.State.READY)
        yield f'{_NAME}replica_ready{{replica="{one.url}"}} {is_ready}\n'
    yield _head("replica_requests_active", "gauge", "Requests under way.")
    for one in replicas:
        yield f'{_NAME}replica_requests_active{{replica="{one.url}"}} {one.load}\n'
    yield _head(
        "replica_requests_total", "counter", "Requests by status, broken or cancelled."
    )
    for one in replicas:
        for outcome, number in sorted(one.answered.items()):
            labels = f'replica="{one.url}",outcome="{outcome}"'
            yield f"{_NAME}replica_requests_total{{{labels}}} {number}\n"
    yield _head("replica_ejections_total", "counter", "Times out of service.")
    for one in replicas:
        labels = f'replica="{one.url}"'
        yield f"{_NAME}replica_ejections_total{{{labels}}} {one.num_ejections}\n"
    for name, kind, text, number in (
        ("retries_total", "counter", "Requests sent again.", forwarder.num_retries),
        ("broken_streams_total", "counter", "Streams cut.", forwarder.num_broken),
        ("moved_keys", "gauge", "Keys not at home.", pool.balance.num_moved),
        ("http_requests_active", "gauge", "HTTP requests.", door.num_active),
        ("http_requests_refused_total", "counter", "Refused.", door.num_refused),
    ):
        yield f"{_head(name, kind, text)}{_NAME}{name} {number}\n"


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP {_NAME}{name} {text}\n# TYPE {_NAME}{name} {kind}\n"
