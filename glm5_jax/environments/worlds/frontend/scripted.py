"""A judge that errs at a set rate: plays an item's steps through the judge's tools."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import messages
from glm5_jax.environments import tool_calls
from glm5_jax.environments.worlds.frontend import draft, judge, oracle


def ask(item: draft.Item, rate: float, seed: str) -> judge.Ask:
    """Returns a scripted model that decides an item.

    Args:
        item: to decide.
        rate: probability that its verdict is the wrong one.
        seed: decides whether it is, together with the item.
    """
    errs = random.Random(f"{seed}/{item.name}").random() < rate

    async def answer(
        history: Sequence[messages.Message], tools: Sequence[Mapping[str, Any]]
    ) -> messages.Message:
        del tools
        said = [m["content"] for m in history if m["role"] == "tool"]
        if not said:
            return _turn(0, "open")
        for step, result in zip(item.steps, said[1:], strict=False):
            if not _agrees(step, result):
                return _turn(len(said), judge.VERDICT, answer=_word(False, errs))
        if len(said) > len(item.steps):
            return _turn(len(said), judge.VERDICT, answer=_word(True, errs))
        return _turn(len(said), *_call(item.steps[len(said) - 1]))

    return answer


def _agrees(step: draft.Step, result: str) -> bool:
    if result.startswith("error:"):
        return False
    return not oracle.is_expectation(step) or oracle.holds(step, json.loads(result))


def _word(is_good: bool, errs: bool) -> str:
    return "yes" if is_good != errs else "no"


def _call(step: draft.Step) -> tuple[str, dict[str, str]]:
    action, selector, *rest = step
    if oracle.is_expectation(step):
        return "read", {"selector": selector}
    return action, {"selector": selector} | ({"text": rest[0]} if rest else {})


def _turn(
    number: int, name: str, given: Mapping[str, str] | None = None, **arguments: str
) -> messages.Message:
    turn = tool_calls.turn(name, **{**(given or {}), **arguments})
    calls = [{"id": f"call_{number}", "type": "function", **turn["tool_calls"][0]}]
    return {**turn, "tool_calls": calls}
