"""Tasks about data with a structure: JSON, and tables of a database."""

import json
import random

from glm5_jax.environments.worlds.terminal.draft import Draft, answer, names


def json_filter(rng: random.Random) -> Draft:
    """Asks for the names of the items of a list that satisfy two conditions."""
    people, tag = names(rng, 12), rng.choice(["red", "blue"])
    least = rng.randrange(30, 60)
    items = [
        {
            "name": person,
            "score": rng.randrange(100),
            "tags": rng.sample(["red", "blue", "green"], rng.randrange(3)),
        }
        for person in people
    ]
    items[0] |= {"score": least, "tags": [tag]}
    items[1] |= {"score": least - 1, "tags": [tag]}
    items[2] |= {"score": 99, "tags": []}
    chosen = sorted(
        x["name"] for x in items if x["score"] >= least and tag in x["tags"]
    )
    select = _python(_SELECT)
    both = f"x['score'] >= {least} and '{tag}' in x['tags']"
    return Draft(
        instruction=(
            f"team.json has a list of members. Write into answer.txt the names of "
            f"those who have a score of at least {least} and the tag {tag}, one a "
            f"line, sorted."
        ),
        files={"team.json": json.dumps({"members": items}, indent=1) + "\n"},
        solution=select.replace("CONDITION", both),
        wrong=(
            select.replace("CONDITION", both.replace(">=", ">")),
            select.replace("CONDITION", both.replace(" and ", " or ")),
            select.replace("CONDITION", f"x['score'] >= {least}"),
        ),
        expects=answer("\n".join(chosen)),
    )


def sqlite_join(rng: random.Random) -> Draft:
    """Asks a question that joins two tables of an SQLite database."""
    people = names(rng, 5)
    orders = [
        (
            number,
            rng.randrange(1, 6),
            rng.randrange(5, 90),
            rng.choice(["paid", "open"]),
        )
        for number in range(1, 31)
    ]
    for person in range(1, 6):  # no two have the same sum
        orders.append((30 + person, person, 100 * person, "paid"))
        orders.append((40 + person, person, 1000 * (6 - person), "open"))
    totals = {
        person: sum(o[2] for o in orders if o[1] == person and o[3] == "paid")
        for person in range(1, 6)
    }
    ranked = sorted(totals, key=lambda person: -totals[person])
    assert len({*totals.values()}) == len(totals)
    text = "\n".join(f"{people[p - 1]} {totals[p]}" for p in ranked)
    rows = [(number, name) for number, name in enumerate(people, 1)]
    make = _MAKE.replace("PEOPLE", f"{rows}").replace("ORDERS", f"{orders}")
    ask = _python(_ASK)
    paid = ask.replace("WHERE", "where state = 'paid'")
    return Draft(
        instruction=(
            "shop.db is an SQLite database with the tables people (id, name) and "
            "orders (id, person, amount, state), where person is an id of people. "
            "Write into answer.txt a line for each person, the name, a space and the "
            "sum of the amounts of orders whose state is paid, the largest sum first."
        ),
        setup=f"python3 -I - <<'END'\n{make}\nEND",
        solution=paid.replace("ORDER", "desc"),
        wrong=(
            paid.replace("ORDER", "asc"),
            ask.replace("WHERE", "").replace("ORDER", "desc"),
            paid.replace("ORDER", "desc limit 4"),
        ),
        expects=answer(text),
    )


def _python(code: str) -> str:
    """Returns a command that writes what code prints into answer.txt."""
    return f"python3 -I - > answer.txt <<'END'\n{code}\nEND"


_SELECT = """import json
members = json.load(open("team.json"))["members"]
print(*sorted(x["name"] for x in members if CONDITION), sep="\\n")"""
_MAKE = """import sqlite3
shop = sqlite3.connect("shop.db")
shop.execute("create table people (id integer, name text)")
shop.execute("create table orders (id integer, person integer, amount, state text)")
shop.executemany("insert into people values (?, ?)", PEOPLE)
shop.executemany("insert into orders values (?, ?, ?, ?)", ORDERS)
shop.commit()"""
_ASK = '''import sqlite3
query = """select name, sum(amount) total from orders join people
    on people.id = person WHERE group by name order by total ORDER"""
for row in sqlite3.connect("shop.db").execute(query):
    print(*row)'''
