"""Asks all replicas at once: pause, updates of the weights, resume.

An update of the weights may also go to one replica apart, which missed it.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from glm5_jax.http_server import errors
from glm5_jax.serving.router import pool as pool_lib
from glm5_jax.serving.router import upstream

PAUSE, RESUME, IS_PAUSED = "/pause", "/resume", "/is_paused"
FINISH = "/finish_weight_update"  # publishes the new weights
UPDATES = (
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
    FINISH,
)
_NO_ANSWER = 502
_WRONG = frozenset((400, 404, 405, 409, 415, 422))  # a request that no replica takes


async def ask(
    pool: pool_lib.Pool,
    link: upstream.Upstream,
    method: str,
    target: str,
    body: bytes,
    seconds: float,
) -> dict[str, upstream.Answer]:
    """Returns the answers of all replicas by address.

    Those that do not answer have 502 as their status. A replica that missed an update
    of the weights, or does not pause or resume, is out of service until it has.

    Args:
      pool: replicas, also those that are out of service.
      link: to them.
      method: of HTTP.
      target: path and query.
      body: for each.
      seconds: for an answer.
    """
    path = target.partition("?")[0]
    async with pool.in_service:
        is_leaving = pool_lib.State.LEAVING
        asked = [r for r in pool.replicas.values() if r.state != is_leaving]
        answers = await asyncio.gather(
            *(_ask_one(link, r, method, target, body, seconds) for r in asked)
        )
        if any(answer.is_ok for answer in answers):
            if path == FINISH:
                # Now, as none may be left to ask when another one joins.
                versions = [_version_in(a) for a in answers if a.is_ok]
                pool.version = next((v for v in versions if v is not None), None)
            for replica, answer in zip(asked, answers, strict=True):
                await _note(pool, replica, path, answer.is_ok)
        return {r.url: answer for r, answer in zip(asked, answers, strict=True)}


async def ask_one(
    pool: pool_lib.Pool,
    link: upstream.Upstream,
    url: str,
    path: str,
    body: bytes,
    seconds: float,
) -> dict[str, upstream.Answer]:
    """Returns the answer of one replica to a part of an update, by its address.

    It comes into service once it has the version of the others.

    Args:
      pool: replicas.
      link: to them.
      url: of the replica, as GET /replicas tells it.
      path: one of UPDATES.
      body: for the replica.
      seconds: for an answer.

    Raises:
      ApiError: there is no such replica.
      InputError: the address is none.
    """
    replica = pool.replicas.get(pool_lib.checked(url))
    if replica is None:
        raise errors.ApiError(404, "There is no such replica; see GET /replicas.")
    answer = await _ask_one(link, replica, "POST", path, body, seconds)
    return {replica.url: answer}


def merged(answers: Mapping[str, upstream.Answer], path: str) -> upstream.Answer:
    """Returns one answer: success if all did it, else a report of each.

    Args:
      answers: of the replicas by address.
      path: of the request, which decides the form of an error.
    """
    found = [*answers.values()]
    if found and all(answer.is_ok for answer in found):
        return found[0]
    statuses = {answer.status for answer in found}
    is_wrong = len(statuses) == 1 and statuses <= _WRONG
    number = sum(not answer.is_ok for answer in found)
    error = errors.ApiError(
        min(statuses) if is_wrong else _NO_ANSWER,
        f"{path} failed at {number} of {len(found)} replicas; see `replicas`.",
    )
    report = {
        url: {"status": answer.status, "body": answer.json}
        for url, answer in answers.items()
    }
    return as_json({**error.body(path), "replicas": report}, error.status)


def pauses(answers: Mapping[str, upstream.Answer]) -> upstream.Answer:
    """Returns the answer to GET /is_paused: whether all replicas are paused."""
    if not answers or not all(answer.is_ok for answer in answers.values()):
        return merged(answers, IS_PAUSED)
    each = {url: answer.json["is_paused"] for url, answer in answers.items()}
    return as_json({"is_paused": all(each.values()), "replicas": each})


def as_json(fields: Mapping[str, Any], status: int = 200) -> upstream.Answer:
    """Returns an answer of the router itself."""
    body = json.dumps(fields).encode()
    return upstream.Answer(status, {"content-type": "application/json"}, body)


def _version_in(answer: upstream.Answer) -> float | None:
    """Returns the version of the weights that a replica says that it has now."""
    found = answer.json.get("weight_version") if isinstance(answer.json, dict) else None
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if is_number else None


async def _ask_one(
    link: upstream.Upstream,
    replica: pool_lib.Replica,
    method: str,
    target: str,
    body: bytes,
    seconds: float,
) -> upstream.Answer:
    try:
        return await link.ask(method, replica.url + target, seconds, body)
    except upstream.FAILURES as error:
        shown = str(error) or "no answer in time"
        return upstream.Answer(_NO_ANSWER, {}, shown.encode())


async def _note(
    pool: pool_lib.Pool, replica: pool_lib.Replica, path: str, is_done: bool
) -> None:
    """Takes a replica out of service if it is not as the others any more."""
    if path not in (PAUSE, RESUME, FINISH):
        return
    if path in (PAUSE, RESUME):
        pool.is_paused = path == PAUSE
        replica.missed_resume = path == RESUME and not is_done
    else:
        replica.is_trusted = False
    if not is_done and replica.state == pool_lib.State.READY:
        await pool.change(replica, pool_lib.State.UNFIT, f"{path} failed.")
