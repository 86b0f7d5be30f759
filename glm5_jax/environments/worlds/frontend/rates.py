"""The figures of an evaluation: builds, items, instances, agreement, rank."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Instance:
    """A submission that was decided.

    Attributes:
        task: of the submission.
        builds: whether it opens.
        truth: of each item, whether it passes.
        verdicts: of a judge; an item that it left open has failed. None: not judged.
    """

    task: str
    builds: bool
    truth: Mapping[str, bool]
    verdicts: Mapping[str, bool] | None = None


def summarize(instances: Sequence[Instance]) -> dict[str, Any]:
    """Returns build success, checklist and instance rates, and the judge's agreement.

    The checklist rate is the share of all items that pass, the instance rate the share
    of submissions whose items all pass. Rank correlation compares the shares of passed
    items that judge and truth give the submissions; None where one is constant.
    """
    figures: dict[str, Any] = {
        "submissions": len(instances),
        "items": sum(len(one.truth) for one in instances),
        "build_success": _mean([one.builds for one in instances]),
        **_rates("", [one.truth for one in instances]),
    }
    pairs = [(one.truth, one.verdicts) for one in instances if one.verdicts is not None]
    if pairs:
        same = [
            said[name] == true for truth, said in pairs for name, true in truth.items()
        ]
        shares = [(_share(truth), _share(said)) for truth, said in pairs]
        figures |= _rates("judged_", [said for _, said in pairs])
        figures["agreement"] = _mean(same)
        figures["spearman"] = spearman([a for a, _ in shares], [b for _, b in shares])
    return figures


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Returns the correlation of ranks; equal values share their mean rank."""
    a, b = _ranks(first), _ranks(second)
    middle = (len(a) - 1) / 2
    both = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    sizes = (sum((x - middle) ** 2 for x in side) for side in (a, b))
    size = 1.0
    for square in sizes:
        size *= square
    return None if size == 0 else both / size**0.5


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [sum(places[value]) / len(places[value]) for value in values]


def _rates(prefix: str, lists: Sequence[Mapping[str, bool]]) -> dict[str, float]:
    items = [value for one in lists for value in one.values()]
    return {
        f"{prefix}checklist_rate": _mean(items),
        f"{prefix}instance_rate": _mean([all(one.values()) for one in lists]),
    }


def _share(items: Mapping[str, bool]) -> float:
    return _mean([*items.values()])


def _mean(values: Sequence[bool]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0
