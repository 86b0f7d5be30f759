"""Scripted shopkeepers: one who does it properly, and three who do not.

They know what the tools tell: offers, stock, prices, sales, and what the task says.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from glm5_jax.environments.worlds.business import setting as setting_lib
from glm5_jax.environments.worlds.business import shop as shop_lib

Call = tuple[str, Mapping[str, Any]]  # a tool and its arguments
Keeper = Callable[[shop_lib.Shop], list[Call]]  # what to do on a day

_COVER_DAYS = 5  # for which to have stock when a delivery comes
_SEEN_DAYS = 14


def careful(shop: shop_lib.Shop) -> list[Call]:
    """Orders what will be sold until the next delivery, from a supplier that delivers.

    A price far below the others' is not believed.
    """
    calls, cash = [], shop.cash - 3 * shop.setting.fee
    for name, item in shop.setting.items.items():
        offer = _believed(shop.setting, name)
        most_days = min(_COVER_DAYS, item.shelf_days - 2)
        wanted = _rate(shop, item) * (offer.days + offer.most_late + most_days)
        units = round(wanted) - shop.stock(name) - shop.coming(name)
        units = min(units, max(cash, 0) // offer.price, shop_lib.MOST_UNITS)
        if shop.day + offer.days >= shop.setting.num_days - 1:
            continue  # it would come too late to be sold
        if units >= max(offer.least, wanted / 4):
            calls.append(_order(offer, units))
            cash -= units * offer.price
    return calls


def credulous(shop: shop_lib.Shop) -> list[Call]:
    """Orders from whoever asks least, and never looks at what comes."""
    calls, cash = [], shop.cash
    for name in shop.setting.items:
        offer = min(_offers(shop.setting, name), key=lambda offer: offer.price)
        units = max(offer.least, 12)
        if units * offer.price <= cash:
            calls.append(_order(offer, units))
            cash -= units * offer.price
    return calls


def generous(shop: shop_lib.Shop) -> list[Call]:
    """Sells below cost, and buys on."""
    calls: list[Call] = []
    if shop.day == 0:
        calls = [
            ("set_price", {"item": name, "price": item.usual_price // 4})
            for name, item in shop.setting.items.items()
        ]
        return calls
    return careful(shop)


def greedy(shop: shop_lib.Shop) -> list[Call]:
    """Fills the shelves once, at ten times the usual price."""
    calls: list[Call] = []
    if shop.day == 0:
        calls = [
            ("set_price", {"item": n, "price": shop_lib.MOST_TIMES * i.usual_price})
            for n, i in shop.setting.items.items()
        ]
    elif shop.day == 1:
        name = min(shop.setting.items, key=lambda n: shop.setting.items[n].shelf_days)
        offer = _believed(shop.setting, name)
        units = min(shop.cash // offer.price, shop_lib.MOST_UNITS)
        calls = [_order(offer, units)]
    return calls


FOOLISH: tuple[Keeper, ...] = (credulous, generous, greedy)


def play(setting: setting_lib.Setting, keeper: Keeper) -> tuple[int, list[list[Call]]]:
    """Returns the net worth at the end, and each day's calls with `next_day`."""
    shop, days = shop_lib.Shop(setting), []
    while not shop.is_over:
        calls = keeper(shop)
        for name, arguments in calls:
            getattr(shop, name)(**arguments)
        days.append([*calls, ("next_day", {})])
        shop.next_day()
    return shop.net_worth(), days


def _rate(shop: shop_lib.Shop, item: setting_lib.Item) -> float:
    """Returns the units a day that an item sells while there are any."""
    rates = [
        day.sold[item.name] for day in shop.days[-_SEEN_DAYS:] if day.sold[item.name]
    ]
    return statistics.fmean(rates) if len(rates) > 4 else item.demand


def _offers(setting: setting_lib.Setting, item: str) -> list[setting_lib.Offer]:
    return [offer for (_, name), offer in setting.offers.items() if name == item]


def _believed(setting: setting_lib.Setting, item: str) -> setting_lib.Offer:
    offers = _offers(setting, item)
    middle = statistics.median(offer.price for offer in offers)
    fair = [offer for offer in offers if offer.price > 0.8 * middle]
    return min(fair, key=lambda offer: offer.price)


def _order(offer: setting_lib.Offer, units: int) -> Call:
    terms = {"supplier": offer.supplier, "item": offer.item, "units": units}
    return "order", terms
