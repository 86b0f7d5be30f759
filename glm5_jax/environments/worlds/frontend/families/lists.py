"""Pages about many things: tasks to do, a table, a cart."""

import json
import random

from glm5_jax.environments.worlds.frontend.draft import (
    Draft,
    Flaw,
    Item,
    document,
    item,
)

_THINGS = (
    *("bread", "milk", "apples", "cheese", "rice", "lemons", "salt", "honey"),
    *("pears", "oats", "tea", "beans"),
)


def to_do(rng: random.Random) -> Draft:
    """Makes a list of things to buy."""
    first, second, one, two, three = rng.sample(_THINGS, 5)
    page = _to_do_page(first, second)
    both = (f"type #new | {one}", "click #add", f"type #new | {two}", "click #add")
    return Draft(
        brief=(
            f"A list of things to buy, at first {first} and {second}. The button #add, "
            "or Enter in the input #new, appends the text of #new, without blanks "
            "around it, to #list as li and empties #new; an empty text is not added. A "
            "click on an entry gives it the class done, another click takes it away. "
            "#left shows how many entries are not done. The button #tidy removes those "
            "that are."
        ),
        items=_to_do_items((first, second), two, three, both),
        page=page,
        flaws=(
            Flaw("if (!text) return;", "", ("blank",)),
            Flaw("classList.toggle", "classList.add", ("undone",)),
            Flaw("event.key === 'Enter'", "event.key === 'Tab'", ("enter",)),
            Flaw("$('new').value = '';", "", ("emptied",)),
        ),
    )


def _to_do_page(first: str, second: str) -> str:
    return document(
        "To do",
        '<input id="new"> <button id="add">Add</button>\n<ul id="list"></ul>\n'
        '<p><span id="left">0</span> left</p>\n<button id="tidy">Remove done</button>',
        f"const before = ['{first}', '{second}'];\n"
        """function show() {
  $('left').textContent = document.querySelectorAll('#list li:not(.done)').length;
}
function add() {
  append($('new').value.trim());
  $('new').value = '';
}
function append(text) {
  if (!text) return;
  const item = document.createElement('li');
  item.textContent = text;
  item.onclick = () => { item.classList.toggle('done'); show(); };
  $('list').append(item);
  show();
}
$('add').onclick = add;
$('new').onkeydown = event => { if (event.key === 'Enter') add(); };
$('tidy').onclick = () => {
  document.querySelectorAll('#list .done').forEach(item => item.remove());
  show();
};
before.forEach(append);""",
    )


def _to_do_items(
    before: tuple[str, str], two: str, three: str, both: tuple[str, ...]
) -> tuple[Item, ...]:
    return (
        item(
            "begins",
            f"It begins with {' and '.join(before)}.",
            "count #list li | 2; reads #left | 2",
            *(f"reads li:nth-child({i}) | {x}" for i, x in enumerate(before, 1)),
        ),
        item("add", "Add appends.", *both, f"reads li:nth-child(4) | {two}"),
        item(
            "enter",
            "Enter appends, too.",
            f"type #new | {three}; press #new | Enter; reads li:nth-child(3) | {three}",
        ),
        item("emptied", "The input is emptied.", *both, "value #new |"),
        item("blank", "An empty text is not added.", "click #add; count li | 2"),
        item("left", "It counts entries.", *both, "reads #left | 4"),
        item(
            "done",
            "A click marks an entry as done, and it no longer counts.",
            *both,
            "click li:nth-child(1); count li.done | 1; reads #left | 3",
        ),
        item(
            "undone",
            "A second click takes the mark away.",
            *both,
            *["click li:nth-child(1)"] * 2,
            "count li | 4; count li.done | 0; reads #left | 4",
        ),
        item(
            "tidy",
            "Remove done leaves the others.",
            *both,
            "click li:nth-child(1); click #tidy; count li | 3",
            f"reads li:nth-child(3) | {two}",
        ),
    )


def table(rng: random.Random) -> Draft:
    """Makes a table that is sorted and filtered."""
    names = rng.sample(_THINGS, 5)
    # Equal ones would have no order that the brief tells.
    prices = dict(zip(names, rng.sample(range(100, 999), 5), strict=True))
    rows = [[name, price] for name, price in prices.items()]
    by_name, by_price = sorted(names), sorted(names, key=prices.__getitem__)
    part = names[0][:3]
    matching = [name for name in names if part in name]
    page = _table_page(rows)
    first, last = "#rows tr:nth-child(1) td", "#rows tr:nth-child(5) td"
    listed = ", ".join(f"{name} {price}" for name, price in rows)
    return Draft(
        brief=(
            f"A table of names and prices: {listed}. tbody #rows has a tr with two td "
            "for each, in this order at first. A click on the heading #name or "
            "#price sorts by it, upwards; another click on the same one turns the "
            "order around. Typing in #filter leaves only rows whose name has the "
            'text, in small or capital letters. #count says "N of 5" for the rows '
            'that are shown. #none, "nothing found", is visible only where there are '
            "none."
        ),
        items=_table_items(names, by_name, by_price, part, matching, first, last),
        page=page,
        flaws=(
            Flaw("column === by ? -sign : 1", "1", ("around",)),
            Flaw(".toLowerCase()", "", ("capitals",)),
            Flaw("$('price').onclick", "$('price').onkeydown", ("price", "around")),
            Flaw("${found.length} of", "${rows.length} of", ("fewer",)),
        ),
    )


def _table_page(rows: list[list[str | int]]) -> str:
    return document(
        "Prices",
        '<input id="filter"> <p id="count"></p>\n<table><thead><tr><th id="name">Name'
        '</th><th id="price">Price</th></tr></thead>\n<tbody id="rows"></tbody></table>'
        '\n<p id="none" hidden>nothing found</p>',
        f"""const rows = {json.dumps(rows)};
let column = null, sign = 1;
function show() {{
  const part = $('filter').value.toLowerCase();
  const found = rows.filter(row => row[0].includes(part));
  if (column !== null) found.sort((a, b) =>
    sign * (a[column] < b[column] ? -1 : a[column] > b[column] ? 1 : 0));
  $('rows').replaceChildren(...found.map(row => {{
    const line = document.createElement('tr');
    for (const text of row) line.insertCell().textContent = text;
    return line;
  }}));
  $('count').textContent = `${{found.length}} of ${{rows.length}}`;
  $('none').hidden = found.length > 0;
}}
function sort(by) {{ sign = column === by ? -sign : 1; column = by; show(); }}
$('name').onclick = () => sort(0);
$('price').onclick = () => sort(1);
$('filter').oninput = show;
show();""",
    )


def _table_items(
    names: list[str],
    by_name: list[str],
    by_price: list[str],
    part: str,
    matching: list[str],
    first: str,
    last: str,
) -> tuple[Item, ...]:
    return (
        item(
            "rows",
            "It has five rows in the given order.",
            f"count #rows tr | 5; reads {first}:nth-child(1) | {names[0]}",
        ),
        item(
            "name",
            "A click on Name sorts by name.",
            f"click #name; reads {first}:nth-child(1) | {by_name[0]}",
            f"reads {last}:nth-child(1) | {by_name[-1]}",
        ),
        item(
            "price",
            "A click on Price sorts by price.",
            f"click #price; reads {first}:nth-child(1) | {by_price[0]}",
            f"reads {last}:nth-child(1) | {by_price[-1]}",
        ),
        item(
            "around",
            "A second click turns the order around.",
            "click #price; click #price",
            f"reads {first}:nth-child(1) | {by_price[-1]}",
        ),
        item(
            "filter",
            f'Typing "{part}" leaves {len(matching)}.',
            f"type #filter | {part}; count #rows tr | {len(matching)}",
        ),
        item(
            "capitals",
            "Capitals do not matter.",
            f"type #filter | {part.upper()}; count #rows tr | {len(matching)}",
        ),
        item("count", "It says 5 of 5.", "reads #count | 5 of 5"),
        item(
            "fewer",
            "The count follows the filter.",
            f"type #filter | {part}; reads #count | {len(matching)} of 5",
        ),
        item(
            "none",
            "Where nothing is found, it says so.",
            "hidden #none; type #filter | zzz; shown #none",
        ),
    )


def cart(rng: random.Random) -> Draft:
    """Makes a cart with a discount."""
    names = rng.sample(_THINGS, 3)
    prices = [rng.randrange(2, 40) for _ in names]
    code, share = rng.choice(("SPRING", "HELLO", "TEN")), rng.choice((10, 20, 50))
    goods = dict(zip(names, prices, strict=True))
    buttons = " ".join(
        f'<button id="add_{n}">{n} {p}</button>' for n, p in goods.items()
    )
    page = _cart_page(code, share, goods, buttons)
    (a, b, _), (x, y, _) = names, prices
    two = f"click #add_{a}", f"click #add_{a}", f"click #add_{b}"
    less = f"{(2 * x + y) * (100 - share) / 100:.2f}"
    listed = ", ".join(f"{name} {price}" for name, price in goods.items())
    return Draft(
        brief=(
            f"A cart for goods with these prices: {listed}. A button of id add_NAME "
            'adds one. #cart has a li of id line_NAME that says "NAME x COUNT -", '
            'where "-" is a button of class less that takes one away; at none the '
            "line goes. #total is the sum with two decimals. #empty is visible while "
            f"the cart is empty. The code {code} in #code and the button #apply take "
            f"{share} percent off the total; another code takes nothing off and shows "
            '#wrong, "wrong code".'
        ),
        items=_cart_items(code, share, a, b, x, y, two, less),
        page=page,
        flaws=(
            Flaw(
                "(counts[name] || 0) + 1",
                "1",
                ("twice", "total", "less", "code", "code_first", "wrong"),
            ),
            Flaw(f"good ? {share} : 0", f"{share}", ("wrong",)),
            Flaw(
                ".filter(name => counts[name])", ".filter(n => n in counts)", ("gone",)
            ),
            Flaw("= names.length > 0", "= false", ("full",)),
        ),
    )


def _cart_page(code: str, share: int, goods: dict[str, int], buttons: str) -> str:
    return document(
        "Cart",
        f'{buttons}\n<ul id="cart"></ul>\n<p id="empty">the cart is empty</p>\n'
        '<p>Total <span id="total">0.00</span></p>\n<input id="code"> <button '
        'id="apply">Apply</button> <p id="wrong" hidden>wrong code</p>',
        f"""const prices = {json.dumps(goods)}, counts = {{}};
let discount = 0;
function show() {{
  const names = Object.keys(prices).filter(name => counts[name]);
  $('cart').replaceChildren(...names.map(name => {{
    const line = document.createElement('li'), less = document.createElement('button');
    line.id = `line_${{name}}`;
    line.append(`${{name}} x ${{counts[name]}} `);
    less.className = 'less';
    less.textContent = '-';
    less.onclick = () => {{ counts[name] -= 1; show(); }};
    line.append(less);
    return line;
  }}));
  const sum = names.reduce((sum, name) => sum + prices[name] * counts[name], 0);
  $('total').textContent = (sum * (100 - discount) / 100).toFixed(2);
  $('empty').hidden = names.length > 0;
}}
for (const name of Object.keys(prices)) $(`add_${{name}}`).onclick = () => {{
  counts[name] = (counts[name] || 0) + 1; show();
}};
$('apply').onclick = () => {{
  const good = $('code').value === '{code}';
  discount = good ? {share} : 0;
  $('wrong').hidden = good;
  show();
}};""",
    )


def _cart_items(
    code: str,
    share: int,
    a: str,
    b: str,
    x: int,
    y: int,
    two: tuple[str, ...],
    less: str,
) -> tuple[Item, ...]:
    return (
        item("empty", "It begins empty.", "shown #empty; reads #total | 0.00"),
        item("add", f"{a} is added.", f"click #add_{a}; reads #line_{a} | {a} x 1 -"),
        item("twice", f"{a} twice is one line.", *two, f"reads #line_{a} | {a} x 2 -"),
        item("total", "The total is the sum.", *two, f"reads #total | {2 * x + y}.00"),
        item("full", "It is no longer empty.", *two, "hidden #empty"),
        item(
            "less",
            "One less.",
            *two,
            f"click #line_{a} .less; reads #line_{a} | {a} x 1 -",
            f"reads #total | {x + y}.00",
        ),
        item(
            "gone",
            "A line without goods goes.",
            *two,
            f"click #line_{b} .less; count #line_{b} | 0",
        ),
        item(
            "code",
            f"The code takes {share} percent off.",
            *two,
            f"type #code | {code}; click #apply; reads #total | {less}",
        ),
        item(
            "code_first",
            "The code also counts for goods that are added later.",
            f"type #code | {code}; click #apply",
            *two,
            f"reads #total | {less}",
        ),
        item(
            "wrong",
            "Another code is wrong.",
            *two,
            "type #code | NO; click #apply; shown #wrong",
            f"reads #total | {2 * x + y}.00",
        ),
    )


FAMILIES = {"cart": cart, "table": table, "to_do": to_do}
