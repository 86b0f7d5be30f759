"""Books close on every day, customers are who the seed says, and keepers differ."""

import asyncio
import dataclasses
import math
import random
import statistics

from absl.testing import absltest, parameterized

from glm5_jax import config, environments
from glm5_jax.environments import proofs, tool_calls
from glm5_jax.environments.worlds.business import keepers, setting, shop, world
from tests.environments import episodes

SEEDS = ("a", "b", "c")


def careless(seed):
    """Returns a keeper who orders and prices at random, often what cannot be."""
    rng = random.Random(seed)

    def keep(kept):
        for _ in range(rng.randint(0, 4)):
            supplier, item = rng.choice(list(kept.setting.offers))
            try:
                kept.order(supplier, item, rng.randint(1, 60))
                kept.set_price(item, rng.randint(0, 1500))
            except shop.RuleError:
                pass

    return keep


class ShopTest(parameterized.TestCase):
    @parameterized.parameters(*SEEDS)
    def test_books_close_on_every_day(self, seed):
        kept = shop.Shop(setting.draw(seed, 200))
        keep, num_spoiled = careless(seed), 0
        while not kept.is_over:
            cash, orders = kept.cash, len(kept.orders)
            keep(kept)
            paid = sum(o.units * o.offer.price for o in kept.orders[orders:])
            self.assertEqual(kept.cash, cash - paid)
            stock = {name: kept.stock(name) for name in kept.setting.items}
            coming = {name: kept.coming(name) for name in kept.setting.items}
            cash = kept.cash
            day = kept.next_day()
            earned = sum(day.sold[name] * kept.prices[name] for name in stock)
            self.assertEqual(day.revenue, earned)
            self.assertEqual(kept.cash, cash + day.revenue - day.fee)
            for name in stock:
                came = [(o, n) for o, n in day.arrived if o.offer.item == name]
                self.assertEqual(day.sold[name], min(stock[name], day.wanted[name]))
                after = stock[name] - day.sold[name] - day.spoiled[name]
                self.assertEqual(kept.stock(name), after + sum(n for _, n in came))
                left = coming[name] - sum(order.units for order, _ in came)
                self.assertEqual(kept.coming(name), left)
                for order, units in came:
                    self.assertEqual(units, int(order.units * order.offer.share))
                    self.assertEqual(order.due, kept.day)
            num_spoiled += sum(day.spoiled.values())
        self.assertGreater(num_spoiled, 0)

    def test_units_are_sold_through_their_last_day_the_oldest_first(self):
        one = dataclasses.replace(setting.draw("a", 60), weekdays=(0.0,) * 7)
        name, item = next(iter(one.items.items()))
        offer = next(o for o in one.offers.values() if o.item == name and o.share == 1)
        kept = shop.Shop(one)
        order = kept.order(offer.supplier, name, offer.least)
        self.assertBetween(order.due, offer.days, offer.days + offer.most_late)
        while not kept.stock(name):
            kept.next_day()
        arrived = kept.day
        self.assertEqual(arrived, order.due)
        spoiled = [kept.next_day().spoiled[name] for _ in range(item.shelf_days)]
        self.assertEqual(spoiled, [0] * (item.shelf_days - 1) + [offer.least])

    def test_the_shop_closes_after_its_days_of_debt(self):
        kept = shop.Shop(setting.draw("a", 365))
        while not kept.is_over:
            kept.next_day()
        affordable = kept.setting.cash // kept.setting.fee
        self.assertEqual(kept.day, affordable + shop.DAYS_OF_DEBT)
        with self.assertRaisesRegex(shop.RuleError, "closed"):
            kept.next_day()

    def test_net_worth_counts_what_was_paid_for(self):
        kept = shop.Shop(setting.draw("b", 60))
        for supplier, item in list(kept.setting.offers)[:6]:
            kept.order(supplier, item, 20)
        self.assertEqual(kept.net_worth(), kept.setting.cash)

    @parameterized.parameters(
        (("nobody", "{item}", 20), "is sold by"),
        (("{supplier}", "gold", 20), "there is no 'gold'"),
        (("{supplier}", "{item}", 1), "an order has"),
        (("{supplier}", "{item}", 1001), "to 1000 units"),
        (("{supplier}", "{item}", 1000), "and cash is 50000"),
    )
    def test_orders_that_cannot_be(self, terms, message):
        kept = shop.Shop(setting.draw("a", 60))
        supplier, item = next(iter(kept.setting.offers))
        said = [str(x).format(supplier=supplier, item=item) for x in terms[:2]]
        with self.assertRaisesRegex(shop.RuleError, message):
            kept.order(*said, terms[2])
        self.assertEqual((kept.cash, kept.orders), (50_000, []))


class CustomersTest(parameterized.TestCase):
    @parameterized.parameters(*SEEDS)
    def test_demand_follows_its_closed_form(self, seed):
        drawn = setting.draw(seed, 365)
        self.assertAlmostEqual(statistics.fmean(drawn.weekdays), 1.0)
        for item in drawn.items.values():
            price, day = item.usual_price, item.best_day
            best = item.demand * (1 + item.amplitude) * drawn.weekdays[day % 7]
            self.assertAlmostEqual(drawn.mean_demand(item, day, price), best)
            ratio = drawn.mean_demand(item, 3, 2 * price) / drawn.mean_demand(
                item, 3, price
            )
            self.assertAlmostEqual(ratio, 2**-item.elasticity)

    def test_draws_have_the_mean_and_the_variance_of_poisson(self):
        rng = random.Random(0)
        for mean in (0.3, 4.0, 30.0):
            found = [setting._poisson(mean, rng.random()) for _ in range(4000)]
            self.assertLess(abs(statistics.fmean(found) / mean - 1), 0.08)
            self.assertLess(abs(statistics.variance(found) / mean - 1), 0.12)
        self.assertEqual(setting._poisson(2.0, 0.0), 0)
        self.assertEqual(setting._poisson(2.0, math.exp(-2) * 1.001), 1)
        self.assertEqual(setting._poisson(2.0, math.exp(-2) * 2.999), 1)
        self.assertEqual(setting._poisson(2.0, math.exp(-2) * 3.001), 2)

    def test_a_lower_price_never_sells_less_on_a_day(self):
        drawn = setting.draw("a", 60)
        for item in drawn.items.values():
            for day in range(60):
                prices = range(item.usual_price // 2, 2 * item.usual_price, 40)
                wanted = [drawn.demand(item, day, price) for price in prices]
                self.assertEqual(wanted, sorted(wanted, reverse=True))


class KeepersTest(parameterized.TestCase):
    @parameterized.parameters(*range(5))
    def test_the_careful_one_gains_and_the_foolish_lose_in_a_year(self, index):
        task = world.Business("business").task("train", 0, index)
        drawn = setting.draw(*task.answer)
        gain = keepers.play(drawn, keepers.careful)[0] - drawn.cash
        self.assertGreater(gain, 10 * drawn.cash)
        for foolish in (lambda _: [], *keepers.FOOLISH):
            self.assertLess(keepers.play(drawn, foolish)[0], drawn.cash)


class WorldTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.world = environments.make("business:20")
        self.task = self.world.task("train", 0, 0)

    def say(self, *calls):
        turns = [tool_calls.turn(name, **arguments) for name, arguments in calls]
        results = episodes.play(self.world, self.task, *turns)
        return [result.messages[0]["content"] for result in results]

    def test_tasks_are_proven_and_splits_are_apart(self):
        for split in ("train", "held_out"):
            for index in range(3):
                task = self.world.task(split, 1, index)
                self.assertEqual(task, self.world.task(split, 1, index))
                self.assertEqual(
                    asyncio.run(proofs.prove(self.world, task, 2)).failures, ()
                )
                self.assertEqual(world._is_held_out(task.id), split == "held_out")

    def test_tools(self):
        drawn = setting.draw(*self.task.answer)
        offer = next(o for o in drawn.offers.values() if o.share == 1)
        terms = {"supplier": offer.supplier, "item": offer.item, "units": offer.least}
        told = self.say(
            ("offers", {"item": offer.item}),
            ("order", terms),
            ("report", {}),
            ("set_price", {"item": offer.item, "price": 7}),
            ("sales", {"days": 2}),
            ("next_day", {}),
            ("sales", {"days": 2}),
            ("notes", {}),
            ("note", {"text": "Dune is late"}),
            ("notes", {}),
            ("report", {}),
        )
        cash = drawn.cash - offer.least * offer.price
        self.assertIn(f"{offer.supplier}: {offer.price}, {offer.least}, ", told[0])
        self.assertEqual(told[1], f"paid {drawn.cash - cash}; cash {cash}")
        self.assertStartsWith(told[2], f"day 0 of 20, cash {cash}\n")
        ordered = f"ordered: {offer.least} {offer.item} from {offer.supplier}"
        self.assertEndsWith(told[2], ordered)
        self.assertEqual(told[3], f"{offer.item} costs 7 now")
        self.assertEqual(told[4], "no day has passed")
        self.assertStartsWith(told[5], "sold nothing for 0; spoiled nothing; day 1: ")
        self.assertLen(told[6].splitlines(), 6)
        self.assertEqual(
            told[7:10], ["there are none", "kept as note 1", "1. Dune is late"]
        )
        self.assertIn(f"{offer.item}: price 7; stock ", told[10])

    @parameterized.parameters(
        ("order", {"supplier": "x", "item": "y"}, "order needs units"),
        ("order", {"supplier": "x", "item": "y", "units": "3"}, "of type integer"),
        ("offers", {"item": "gold"}, "nobody sells 'gold'"),
        ("sales", {"days": 0}, "at least 1"),
        ("set_price", {"item": "gold", "price": 3}, "there is no 'gold'"),
        ("note", {"text": "x" * 2001}, "notes of 2000 characters"),
        ("close", {}, "there is no tool 'close'"),
    )
    def test_wrong_calls_are_told(self, name, arguments, message):
        (told,) = self.say((name, arguments))
        self.assertIn(message, told)

    def test_leaving_lets_the_days_pass(self):
        (result,) = episodes.play(self.world, self.task, "I am done.")
        self.assertEqual((result.terminated, result.reward.total), (True, 0.0))
        self.assertEqual(result.reward.parts["days"], 20.0)
        self.assertEqual(result.reward.parts["gain_in_cents"], -20 * 2000)

    def test_turns_are_bounded(self):
        turns = [tool_calls.turn("report")] * 240
        *_, before, last = episodes.play(self.world, self.task, *turns)
        self.assertFalse(before.truncated)
        self.assertEqual((last.truncated, last.terminated), (True, False))

    @parameterized.parameters("business:19", "business:366", "business:x")
    def test_wrong_names_are_refused(self, name):
        with self.assertRaisesRegex(config.InputError, "from 20 to 365"):
            environments.make(name)


if __name__ == "__main__":
    absltest.main()
