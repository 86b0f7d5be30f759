"""The taskset "business:DAYS": a shop that an agent keeps, day by day.

A long episode: a year has 365 days and thousands of calls, more than a context holds;
notes are kept for the agent. The reward compares the gain in net worth with that of the
scripted keeper: 1 is as good as it, 0 is no gain.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import config, messages
from glm5_jax.environments import proofs, protocol, tool_calls
from glm5_jax.environments.worlds.business import keepers
from glm5_jax.environments.worlds.business import setting as setting_lib
from glm5_jax.environments.worlds.business import shop as shop_lib

PREFIX = "business"
MIN_DAYS, MAX_DAYS = 20, 365
_TURNS_A_DAY = 12
_MAX_NOTES, _MAX_CHARACTERS = 50, 2_000  # of a note
_MIN_GAIN = 5_000  # cents that the scripted keeper earns, or the shop is not served
_HELD_OUT = 5  # one shop in so many
_TOLD = """You keep a small shop for {days} days. Money is in cents; you have {cash}. \
Each day costs {fee}. After {debt} days in a row with less than nothing the shop is \
closed. Only what is on the shelves when a day begins is sold on it. Not every \
supplier is honest. What counts is your net worth at the end: cash, and what stock and \
orders cost. Notes are kept for you when the conversation is not.

Goods, with the usual price, units sold on an average day at it, and days until they \
spoil:
{goods}"""
TOOLS = (
    tool_calls.schema("report", "The day, cash, stock, prices and orders under way."),
    tool_calls.schema(
        "offers",
        "What suppliers ask for an item: cents a unit, least units, days to deliver.",
        item="Its name.",
    ),
    tool_calls.schema(
        "order",
        "Orders and pays.",
        integers=("units",),
        supplier="Its name.",
        item="Its name.",
        units="How many.",
    ),
    tool_calls.schema(
        "set_price",
        "Sets the price of an item.",
        integers=("price",),
        item="Its name.",
        price="Cents a unit.",
    ),
    tool_calls.schema(
        "sales",
        "Units of each item that were sold on the last days.",
        integers=("days",),
        days="How many.",
    ),
    tool_calls.schema("note", "Keeps a note.", text="What to keep."),
    tool_calls.schema("notes", "All notes."),
    tool_calls.schema(
        "next_day", "Lets the shop sell for a day; deliveries come before the next."
    ),
)


class Business:
    """Shops of one number of days."""

    def __init__(self, name: str) -> None:
        """Takes "business", a year, or "business:DAYS".

        Raises:
            config.InputError: the number of days is wrong.
        """
        self.name = name
        days = name.partition(":")[2] or str(MAX_DAYS)
        if not days.isdigit() or not MIN_DAYS <= int(days) <= MAX_DAYS:
            raise config.InputError(
                f"{name!r}: the days must be from {MIN_DAYS} to {MAX_DAYS}, as in "
                f"{PREFIX}:60."
            )
        self._num_days = int(days)

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns the first shop, of those that the numbers begin, that can be kept."""
        number = 0
        while True:
            key = f"{split}/{seed}/{index}/{number}"
            if (
                _is_held_out(key) == (split == "held_out")
                and _gain(key, self._num_days) >= _MIN_GAIN
            ):
                break
            number += 1
        setting = setting_lib.draw(key, self._num_days)
        goods = "\n".join(
            f"- {item.name}: {item.usual_price}, {item.demand:.1f}, {_days_kept(item)}"
            for item in setting.items.values()
        )
        text = _TOLD.format(
            days=setting.num_days,
            cash=setting.cash,
            fee=setting.fee,
            debt=shop_lib.DAYS_OF_DEBT,
            goods=goods,
        )
        said = ({"role": "user", "content": text},)
        return protocol.Task(key, said, (key, self._num_days), TOOLS, tag=self.name)

    def environment(self) -> "Environment":
        """Returns an environment for one episode."""
        return Environment()

    def demonstration(self, task: protocol.Task) -> None:
        """Returns None: the results of calls are not known beforehand."""

    def attempts(self, task: protocol.Task) -> proofs.Attempts:
        """Returns the turns of the scripted keepers."""
        setting = setting_lib.draw(*task.answer)
        wrong = tuple(_turns(setting, keeper) for keeper in keepers.FOOLISH)
        return proofs.Attempts(_turns(setting, keepers.careful), wrong)


class Environment:
    """One shop."""

    def __init__(self) -> None:
        """Opens no shop yet."""
        self.shop: shop_lib.Shop | None = None
        self._kept: list[str] = []  # notes
        self._num_turns = self._gain = 0

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Opens the shop."""
        self.shop = shop_lib.Shop(setting_lib.draw(*task.answer))
        self._gain, self._kept, self._num_turns = _gain(*task.answer), [], 0
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Answers calls; a turn without one leaves the shop alone until the end."""
        shop = self._open()
        self._num_turns += 1
        results, _ = await tool_calls.answer(message, TOOLS, self._call)
        is_left = not message.get("tool_calls")
        is_cut = self._num_turns >= _TURNS_A_DAY * shop.setting.num_days
        if is_left or shop.is_over or is_cut:
            while not shop.is_over:
                shop.next_day()
            return self._ending(results, is_cut=is_cut and not is_left)
        return protocol.StepResult(results, None, False, False)

    async def close(self) -> None:
        """Frees nothing."""

    def _ending(
        self, results: Sequence[messages.Message], is_cut: bool
    ) -> protocol.StepResult:
        shop = self._open()
        gain = shop.net_worth() - shop.setting.cash
        parts = {"gain_in_cents": float(gain), "days": float(shop.day)}
        reward = protocol.Reward(max(gain / self._gain, 0.0), parts)
        return protocol.StepResult(tuple(results), reward, not is_cut, is_cut)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        try:
            return getattr(self, f"_{name}")(**arguments)
        except shop_lib.RuleError as error:
            raise tool_calls.CallError(str(error)) from error

    def _open(self) -> shop_lib.Shop:
        assert self.shop is not None  # reset was called
        return self.shop

    def _report(self) -> str:
        shop = self._open()
        lines = [f"day {shop.day} of {shop.setting.num_days}, cash {shop.cash}"]
        for name, price in shop.prices.items():
            batches = ", ".join(
                f"{batch.units} until day {batch.last_day}"
                for batch in shop.batches[name]
            )
            lines.append(f"{name}: price {price}; stock {batches or 'none'}")
        lines += [
            f"ordered: {order.units} {order.offer.item} from {order.offer.supplier}"
            for order in shop.orders
        ]
        return "\n".join(lines)

    def _offers(self, item: str) -> str:
        found = [o for o in self._open().setting.offers.values() if o.item == item]
        if not found:
            raise tool_calls.CallError(f"nobody sells {item[:40]!r}.")
        return "\n".join(
            f"{o.supplier}: {o.price}, {o.least}, {o.days} to {o.days + o.most_late}"
            for o in found
        )

    def _order(self, supplier: str, item: str, units: int) -> str:
        shop = self._open()
        order = shop.order(supplier, item, units)
        return f"paid {units * order.offer.price}; cash {shop.cash}"

    def _set_price(self, item: str, price: int) -> str:
        self._open().set_price(item, price)
        return f"{item} costs {price} now"

    def _sales(self, days: int) -> str:
        if days < 1:
            raise tool_calls.CallError("days must be at least 1.")
        found = self._open().sales(days)
        rows = (f"{name}: {' '.join(map(str, x))}" for name, x in found.items())
        return "\n".join(rows) or "no day has passed"

    def _note(self, text: str) -> str:
        if len(self._kept) >= _MAX_NOTES or len(text) > _MAX_CHARACTERS:
            raise tool_calls.CallError(
                f"there are at most {_MAX_NOTES} notes of {_MAX_CHARACTERS} characters."
            )
        self._kept.append(text)
        return f"kept as note {len(self._kept)}"

    def _notes(self) -> str:
        lines = (f"{i}. {text}" for i, text in enumerate(self._kept, 1))
        return "\n".join(lines) or "there are none"

    def _next_day(self) -> str:
        shop = self._open()
        day = shop.next_day()
        sold = ", ".join(f"{units} {name}" for name, units in day.sold.items() if units)
        spoiled = ", ".join(f"{units} {n}" for n, units in day.spoiled.items() if units)
        came = ", ".join(
            f"{units} {order.offer.item} of {order.units} from {order.offer.supplier}"
            for order, units in day.arrived
        )
        return (
            f"sold {sold or 'nothing'} for {day.revenue}; "
            f"spoiled {spoiled or 'nothing'}; "
            f"day {shop.day}: arrived {came or 'nothing'}; cash {shop.cash}"
        )


@functools.lru_cache(1024)
def _gain(key: str, num_days: int) -> int:
    """Returns what the scripted keeper adds to the cash of the beginning."""
    setting = setting_lib.draw(key, num_days)
    return keepers.play(setting, keepers.careful)[0] - setting.cash


def _turns(setting: setting_lib.Setting, keeper: keepers.Keeper) -> proofs.Turns:
    """Returns a turn a day, with its calls."""
    turns = []
    for calls in keepers.play(setting, keeper)[1]:
        said = [tool_calls.turn(name, **arguments) for name, arguments in calls]
        together = [call for turn in said for call in turn["tool_calls"]]
        turns.append({**said[0], "tool_calls": together})
    return turns


def _days_kept(item: setting_lib.Item) -> str:
    return str(item.shelf_days) if item.shelf_days <= MAX_DAYS else "never"


def _is_held_out(key: str) -> bool:
    return hashlib.sha256(key.encode()).digest()[0] % _HELD_OUT == 0
