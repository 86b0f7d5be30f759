"""The goods, suppliers and customers of a shop, drawn from a seed."""

import dataclasses
import functools
import math
import random
from collections.abc import Mapping

_GOODS = (
    *("apples", "bread", "cheese", "flowers", "juice", "milk"),
    *("batteries", "candles", "notebooks", "soap", "tea", "umbrellas"),
)
_NUM_PERISHABLE = 6  # of _GOODS, the first
_SUPPLIERS = ("Adler", "Birch", "Corvus", "Dune", "Ember")
_NUM_ITEMS = 6
_YEAR = 365
_CASH = 50_000  # cents, at the beginning
_FEE = 2_000  # cents a day


@dataclasses.dataclass(frozen=True)
class Item:
    """A good, and how customers want it.

    Attributes:
        name: of the good.
        usual_price: cents a unit, at which `demand` is meant.
        demand: units a day, on average.
        elasticity: a price higher by 1% sells less by so many percent.
        shelf_days: for which a unit can be sold.
        amplitude: of the season, a share of the demand.
        best_day: of the year.
    """

    name: str
    usual_price: int
    demand: float
    elasticity: float
    shelf_days: int
    amplitude: float
    best_day: int


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a supplier asks and does.

    Attributes:
        supplier: its name.
        item: that it sells.
        price: cents a unit, paid with the order.
        least: units of an order.
        days: until a delivery, usually.
        most_late: days by which it may be late.
        share: of the ordered units that comes; told to nobody.
    """

    supplier: str
    item: str
    price: int
    least: int
    days: int
    most_late: int
    share: float


@dataclasses.dataclass(frozen=True)
class Setting:
    """A shop before its first day."""

    seed: str
    num_days: int
    items: Mapping[str, Item]
    offers: Mapping[tuple[str, str], Offer]  # by supplier and item
    weekdays: tuple[float, ...]  # customers, against an average day
    cash: int = _CASH
    fee: int = _FEE

    def mean_demand(self, item: Item, day: int, price: int) -> float:
        """Returns the units that customers want on a day, on average."""
        phase = 2 * math.pi * (day - item.best_day) / _YEAR
        season = 1 + item.amplitude * math.cos(phase)
        cheaper = (item.usual_price / price) ** item.elasticity
        return item.demand * season * self.weekdays[day % 7] * cheaper

    def demand(self, item: Item, day: int, price: int) -> int:
        """Returns the units that customers want; a lower price never sells less."""
        mean = min(self.mean_demand(item, day, price), 500.0)
        return _poisson(mean, self.uniform(day, item.name, "demand"))

    def uniform(self, *what: object) -> float:
        """Returns a number from 0 to 1 that depends on the seed and its name alone."""
        return random.Random(f"{self.seed}/{'/'.join(map(str, what))}").random()


@functools.lru_cache(256)
def draw(seed: str, num_days: int) -> Setting:
    """Returns the shop of a seed."""
    rng = random.Random(seed)
    perishable = rng.sample(_GOODS[:_NUM_PERISHABLE], _NUM_ITEMS // 2)
    lasting = rng.sample(_GOODS[_NUM_PERISHABLE:], _NUM_ITEMS // 2)
    items = {name: _item(rng, name, name in perishable) for name in perishable}
    items |= {name: _item(rng, name, False) for name in lasting}
    offers = {}
    for item in items.values():
        # One asks little and delivers a part; the others differ in price and days.
        cost = round(item.usual_price * rng.uniform(0.45, 0.6))
        for place, supplier in enumerate(rng.sample(_SUPPLIERS, 3)):
            is_false = place == 2
            price = round(cost * (0.65 if is_false else rng.uniform(1.0, 1.25)))
            share = rng.uniform(0.2, 0.4) if is_false else 1.0
            days, most_late = rng.randint(1, 4), rng.randint(0, 2)
            least = rng.choice((5, 10, 20))
            offers[supplier, item.name] = Offer(
                supplier, item.name, price, least, days, most_late, share
            )
    weights = [rng.uniform(0.6, 1.4) for _ in range(7)]
    weekdays = tuple(7 * weight / sum(weights) for weight in weights)
    return Setting(seed, num_days, items, offers, weekdays)


def _item(rng: random.Random, name: str, is_perishable: bool) -> Item:
    return Item(
        name=name,
        usual_price=rng.randint(150, 900),
        demand=rng.uniform(4, 16),
        elasticity=rng.uniform(2.0, 3.5),
        shelf_days=rng.randint(5, 9) if is_perishable else 2 * _YEAR,
        amplitude=rng.uniform(0.0, 0.5),
        best_day=rng.randrange(_YEAR),
    )


def _poisson(mean: float, uniform: float) -> int:
    """Returns the quantile of a Poisson distribution."""
    count, term = 0, math.exp(-mean)
    below = term
    while below < uniform and count < 1000:
        count += 1
        term *= mean / count
        below += term
    return count
