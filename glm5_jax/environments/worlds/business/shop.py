"""A shop from day to day: what is ordered arrives, is sold or spoils, and costs.

All money is whole cents and all goods are whole units, so that books close exactly.
"""

import collections
import dataclasses
from collections.abc import Mapping

from glm5_jax.environments.worlds.business import setting as setting_lib

MOST_UNITS = 1000  # of an order
MOST_TIMES = 10  # the usual price
DAYS_OF_DEBT = 10  # in a row, after which the shop closes


class RuleError(Exception):
    """Raised if something cannot be done; the shopkeeper reads the message."""


@dataclasses.dataclass
class Batch:
    """Units of an item that were bought together."""

    units: int
    cost: int  # cents a unit, as paid for what came
    last_day: int  # on which they can be sold


@dataclasses.dataclass(frozen=True)
class Order:
    """An order that is paid and has not arrived."""

    offer: setting_lib.Offer
    units: int
    due: int  # the day


@dataclasses.dataclass(frozen=True)
class Day:
    """What happened from an opening to the next: units by item, and cents."""

    day: int
    wanted: Mapping[str, int]
    sold: Mapping[str, int]
    spoiled: Mapping[str, int]
    arrived: tuple[tuple[Order, int], ...]  # with the units that came
    revenue: int
    fee: int


class Shop:
    """The state of a shop."""

    def __init__(self, setting: setting_lib.Setting) -> None:
        """Opens on day 0 with cash, usual prices and empty shelves."""
        self.setting = setting
        self.day, self.cash = 0, setting.cash
        self.prices = {item.name: item.usual_price for item in setting.items.values()}
        self.batches: dict[str, list[Batch]] = {name: [] for name in setting.items}
        self.orders: list[Order] = []
        self.days: list[Day] = []
        self._days_of_debt = 0

    @property
    def is_over(self) -> bool:
        """Returns whether the last day has passed, or the shop is closed for debt."""
        return self.day >= self.setting.num_days or self._days_of_debt >= DAYS_OF_DEBT

    def stock(self, item: str) -> int:
        """Returns the units of an item."""
        return sum(batch.units for batch in self.batches[item])

    def coming(self, item: str) -> int:
        """Returns the units of an item that are ordered."""
        return sum(order.units for order in self.orders if order.offer.item == item)

    def net_worth(self) -> int:
        """Returns the cash, and what stock and orders cost, in cents."""
        stock = sum(b.units * b.cost for found in self.batches.values() for b in found)
        return self.cash + stock + sum(o.units * o.offer.price for o in self.orders)

    def order(self, supplier: str, item: str, units: int) -> Order:
        """Orders and pays.

        Raises:
            RuleError: there is no such offer, the units are out of its bounds, or the
                cash does not suffice.
        """
        self._known(item)
        offer = self.setting.offers.get((supplier, item))
        if offer is None:
            sellers = [s for s, name in self.setting.offers if name == item]
            raise RuleError(f"{item} is sold by {', '.join(sellers)}.")
        if not offer.least <= units <= MOST_UNITS:
            raise RuleError(f"an order has {offer.least} to {MOST_UNITS} units.")
        if units * offer.price > self.cash:
            raise RuleError(f"it costs {units * offer.price}, and cash is {self.cash}.")
        self.cash -= units * offer.price
        number = len(self.days), len(self.orders)
        late = self.setting.uniform(*number, supplier, item, "late")
        days = offer.days + int(late * (offer.most_late + 1))
        self.orders.append(Order(offer, units, self.day + days))
        return self.orders[-1]

    def set_price(self, item: str, price: int) -> None:
        """Sets the price of a unit.

        Raises:
            RuleError: there is no such item, or the price is out of bounds.
        """
        most = MOST_TIMES * self._known(item).usual_price
        if not 1 <= price <= most:
            raise RuleError(f"the price of {item} must be from 1 to {most} cents.")
        self.prices[item] = price

    def next_day(self) -> Day:
        """Sells, throws away what is too old, pays the fee; then deliveries arrive.

        Raises:
            RuleError: the year is over.
        """
        if self.is_over:
            raise RuleError("the shop is closed.")
        wanted, sold, spoiled, revenue = {}, {}, {}, 0
        for name, item in self.setting.items.items():
            wanted[name] = self.setting.demand(item, self.day, self.prices[name])
            sold[name] = self._take(name, wanted[name])
            revenue += sold[name] * self.prices[name]
            kept = [b for b in self.batches[name] if b.last_day > self.day]
            spoiled[name] = self.stock(name) - sum(b.units for b in kept)
            self.batches[name] = kept
        self.cash += revenue - self.setting.fee
        self._days_of_debt = self._days_of_debt + 1 if self.cash < 0 else 0
        self.day += 1
        arrived = tuple((o, self._arrive(o)) for o in self.orders if o.due <= self.day)
        self.orders = [order for order in self.orders if order.due > self.day]
        fee = self.setting.fee
        day = Day(self.day - 1, wanted, sold, spoiled, arrived, revenue, fee)
        self.days.append(day)
        return day

    def sales(self, days: int) -> Mapping[str, list[int]]:
        """Returns the units sold of each item in the last days, the oldest first."""
        found = collections.defaultdict(list)
        for day in self.days[-days:]:
            for name, units in day.sold.items():
                found[name].append(units)
        return found

    def _known(self, item: str) -> setting_lib.Item:
        if item not in self.setting.items:
            raise RuleError(f"there is no {item[:40]!r}; there are {self._names()}.")
        return self.setting.items[item]

    def _names(self) -> str:
        return ", ".join(self.setting.items)

    def _take(self, item: str, wanted: int) -> int:
        """Takes units from the shelf, the oldest first; returns how many there were."""
        taken = 0
        for batch in self.batches[item]:
            units = min(batch.units, wanted - taken)
            batch.units -= units
            taken += units
        self.batches[item] = [batch for batch in self.batches[item] if batch.units]
        return taken

    def _arrive(self, order: Order) -> int:
        offer = order.offer
        units = int(order.units * offer.share)
        if units:
            cost = order.units * offer.price // units
            last = self.day + self.setting.items[offer.item].shelf_days - 1
            self.batches[offer.item].append(Batch(units, cost, last))
            self.batches[offer.item].sort(key=lambda batch: batch.last_day)
        return units
