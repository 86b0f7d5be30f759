"""Pages that compute from what is entered: counter, converter, sign-up, quiz."""

import random

from glm5_jax.environments.worlds.frontend.draft import (
    Draft,
    Flaw,
    Item,
    document,
    item,
)

_COINS = ("crowns", "ducats", "florins", "guilders", "marks", "shillings")
# Odd, and no multiple of 5: then no quotient ends in a 5 right behind its second
# decimal, which multiplying by 1 / factor could round another way than dividing.
_RATES = [rate for rate in range(101, 900) if rate % 2 and rate % 5]


def counter(rng: random.Random) -> Draft:
    """Makes a counter with a step and a limit."""
    step, turns = rng.randrange(2, 40), rng.randrange(2, 5)
    most = step * turns
    page = _counter_page(step, most)
    full = ["click #add"] * turns
    return Draft(
        brief=(
            "A counter. #value shows a number, 0 at first. The button #add adds "
            f"{step}, #sub subtracts {step}, #reset makes it 0 again. It never falls "
            f'below 0 nor rises above {most}. #note says "limit" and is visible only '
            f"at {most}."
        ),
        items=_counter_items(step, most, full),
        page=page,
        flaws=(
            Flaw(f"Math.min(value + {step}, {most})", f"value + {step}", ("most",)),
            Flaw(f"Math.max(value - {step}, 0)", f"value - {step}", ("least",)),
            Flaw("{ value = 0; show(); }", "{ value = 0; }", ("reset",)),
            Flaw(f"= value < {most}", "= true", ("note", "note_goes")),
        ),
    )


def _counter_page(step: int, most: int) -> str:
    return document(
        "Counter",
        '<p id="value">0</p>\n<button id="add">Add</button> <button id="sub">Subtract'
        '</button>\n<button id="reset">Reset</button> <p id="note" hidden>limit</p>',
        f"""let value = 0;
function show() {{
  $('value').textContent = value;
  $('note').hidden = value < {most};
}}
$('add').onclick = () => {{ value = Math.min(value + {step}, {most}); show(); }};
$('sub').onclick = () => {{ value = Math.max(value - {step}, 0); show(); }};
$('reset').onclick = () => {{ value = 0; show(); }};""",
    )


def _counter_items(step: int, most: int, full: list[str]) -> tuple[Item, ...]:
    return (
        item("start", "The counter shows 0 at first.", "reads #value | 0"),
        item("add", f"Add adds {step}.", f"click #add; reads #value | {step}"),
        item(
            "sub",
            f"Subtract subtracts {step}.",
            f"click #add; click #add; click #sub; reads #value | {step}",
        ),
        item("least", "It stays at 0.", "click #sub; reads #value | 0"),
        item(
            "most", f"It stays at {most}.", *full, f"click #add; reads #value | {most}"
        ),
        item(
            "reset", "Reset makes it 0.", "click #add; click #reset; reads #value | 0"
        ),
        item("quiet", "The note is not visible at first.", "hidden #note"),
        item("note", f"The note is visible at {most}.", *full, "shown #note"),
        item(
            "note_goes",
            "The note goes away below the limit.",
            *full,
            "shown #note; click #sub; hidden #note",
        ),
    )


def converter(rng: random.Random) -> Draft:
    """Makes a converter of two coins."""
    left, right = rng.sample(_COINS, 2)
    factor = rng.choice(_RATES) / 100
    number = 10 * rng.randrange(1, 9)  # their products lack the second decimal
    page = _converter_page(left, right, factor)
    there, back = f"{number * factor:.2f}", f"{number / factor:.2f}"
    return Draft(
        brief=(
            f"A converter. The input #left is in {left}, #right in {right}; one of "
            f"{left} is {factor} of {right}. Typing in one fills the other at once, "
            "with two decimals. A text that is no number empties the other and shows "
            '#error, "not a number", which is hidden otherwise. The button #clear '
            "empties both."
        ),
        items=_converter_items(left, right, number, there, back),
        page=page,
        flaws=(
            Flaw("'left', 1 / ", "'left', ", ("back",)),
            Flaw(".toFixed(2)", "", ("forth", "back", "decimals")),
            Flaw("= !isNaN(value)", "= true", ("wrong", "mended")),
            Flaw("$('left').value = $('right').value = ''", "0", ("clear",)),
        ),
    )


def _converter_page(left: str, right: str, factor: float) -> str:
    return document(
        "Converter",
        f'<label>{left} <input id="left"></label>\n<label>{right} <input id="right">'
        '</label>\n<button id="clear">Clear</button> <p id="error" hidden>not a number'
        "</p>",
        f"""function convert(from, to, factor) {{
  const text = $(from).value.trim(), value = Number(text);
  $('error').hidden = !isNaN(value);
  $(to).value = text === '' || isNaN(value) ? '' : (value * factor).toFixed(2);
}}
$('left').oninput = () => convert('left', 'right', {factor});
$('right').oninput = () => convert('right', 'left', 1 / {factor});
$('clear').onclick = () => {{
  $('left').value = $('right').value = '';
  $('error').hidden = true;
}};""",
    )


def _converter_items(
    left: str, right: str, number: int, there: str, back: str
) -> tuple[Item, ...]:
    return (
        item("empty", "Both are empty at first.", "value #left |; value #right |"),
        item(
            "forth",
            f"{number} {left} are {there} {right}.",
            f"type #left | {number}; value #right | {there}",
        ),
        item(
            "back",
            f"{number} {right} are {back} {left}.",
            f"type #right | {number}; value #left | {back}",
        ),
        item(
            "decimals",
            "Results have two decimals.",
            "type #left | 0; value #right | 0.00",
        ),
        item(
            "wrong",
            "A text shows the error.",
            "type #left | many; shown #error; reads #error | not a number",
        ),
        item(
            "emptied",
            "A text empties the other field.",
            "type #left | 5; type #left | many; value #right |",
        ),
        item(
            "mended",
            "The error goes when a number follows.",
            "type #left | many; shown #error; type #left | 5; hidden #error",
        ),
        item(
            "clear",
            "Clear empties both.",
            "type #left | 5; click #clear; value #left |; value #right |",
        ),
    )


def sign_up(rng: random.Random) -> Draft:
    """Makes a form that is checked."""
    least, age = rng.randrange(3, 8), rng.randrange(12, 40)
    good = "type #name | Elisabeth", "type #mail | e@example.org", f"type #age | {age}"
    page = _sign_up_page(least, age)
    return Draft(
        brief=(
            "A form with the inputs #name, #mail, #age and the button #send. Sending "
            'lists what is wrong as li in #errors, in this order: "name is too '
            f'short" (less than {least} letters, blanks around it aside), "mail is '
            'wrong" (it needs a text, one @ and a text), "age is too low" (a number '
            f"of at least {age}). Where nothing is wrong, #done is visible and says "
            '"Welcome, NAME"; it is hidden otherwise.'
        ),
        items=_sign_up_items(least, age, good),
        page=page,
        flaws=(
            Flaw(f"name.length < {least}", "name.length < 1", ("name", "blanks")),
            Flaw("'age is too low'", "'too young'", ("age",)),
            Flaw("= errors.length > 0", "= false", ("not_done",)),
            Flaw("replaceChildren(...", "append(...", ("mended",)),
        ),
    )


def _sign_up_page(least: int, age: int) -> str:
    return document(
        "Sign up",
        '<form id="form"><input id="name"> <input id="mail"> <input id="age">\n'
        '<button id="send">Send</button></form>\n<ul id="errors"></ul>\n'
        '<p id="done" hidden></p>',
        f"""$('form').onsubmit = event => {{
  event.preventDefault();
  const errors = [], name = $('name').value.trim(), mail = $('mail').value;
  if (name.length < {least}) errors.push('name is too short');
  if (!/^[^@ ]+@[^@ ]+$/.test(mail)) errors.push('mail is wrong');
  if (!(Number($('age').value) >= {age})) errors.push('age is too low');
  $('errors').replaceChildren(...errors.map(text => {{
    const item = document.createElement('li');
    item.textContent = text;
    return item;
  }}));
  $('done').hidden = errors.length > 0;
  $('done').textContent = `Welcome, ${{name}}`;
}};""",
    )


def _sign_up_items(least: int, age: int, good: tuple[str, ...]) -> tuple[Item, ...]:
    return (
        item("quiet", "No error is shown at first.", "count #errors li | 0"),
        item("all", "An empty form has 3 errors.", "click #send; count li | 3"),
        item(
            "good",
            "A right form is welcomed.",
            *good,
            "click #send; shown #done; reads #done | Welcome, Elisabeth",
        ),
        item(
            "name",
            f"A name of {least - 1} letters is too short.",
            *good,
            f"type #name | {'x' * (least - 1)}; click #send",
            "reads #errors | name is too short",
        ),
        item(
            "blanks",
            "Blanks do not make a name longer.",
            *good,
            "type #name | x",
            *["press #name | Space"] * 6,
            "click #send; count li | 1",
        ),
        item(
            "mail",
            "A mail without @ is wrong.",
            *good,
            "type #mail | example.org; click #send",
            "reads #errors | mail is wrong",
        ),
        item(
            "age",
            f"{age - 1} is too low.",
            *good,
            f"type #age | {age - 1}; click #send",
            "reads #errors | age is too low",
        ),
        item(
            "mended",
            "Errors go when the form is right.",
            "click #send; count li | 3",
            *good,
            "click #send; count li | 0",
        ),
        item(
            "not_done",
            "A wrong form is not welcomed.",
            *good,
            "type #age | 1; click #send; hidden #done",
        ),
    )


def quiz(rng: random.Random) -> Draft:
    """Makes a quiz of three sums."""
    sums = [(rng.randrange(2, 30), rng.randrange(2, 30)) for _ in range(3)]
    rights = [rng.randrange(3) for _ in sums]
    rows = [
        [str(a + b + 10 * (place - right)) for place in range(3)]
        for (a, b), right in zip(sums, rights, strict=True)
    ]
    asked = [f"{a} + {b}" for a, b in sums]
    page = _quiz_page(rights, rows, asked)
    right = [f".answer:nth-child({place + 1})" for place in rights]
    wrong = f".answer:nth-child({(rights[0] + 1) % 3 + 1})"
    play = [step for x in right for step in (f"click {x}", "click #next")]
    answers = "; ".join(
        f"{question}: {', '.join(row)}"
        for question, row in zip(asked, rows, strict=True)
    )
    return Draft(
        brief=(
            "A quiz. #question asks a sum, #answers has a button of class answer for "
            f"each answer; the questions with their answers in order: {answers}. A "
            "click gives the answer the class chosen, and takes it from others. "
            "#next is disabled until an answer is chosen. After the last question "
            '#question says "The end", #score is visible and says "N of 3", where N '
            "counts right answers, and the button #again starts anew; both are "
            "hidden before."
        ),
        items=_quiz_items(asked, right, wrong, play),
        page=page,
        flaws=(
            Flaw("= chosen === null", "= false", ("waits",)),
            Flaw("if (chosen === rights[place]) score", "score", ("one_wrong",)),
            Flaw("place = 0; score = 0;", "place = 0;", ("again",)),
            Flaw("$('score').hidden = $", "$", ("score", "one_wrong", "again")),
        ),
    )


def _quiz_page(rights: list[int], rows: list[list[str]], asked: list[str]) -> str:
    return document(
        "Quiz",
        '<p id="question"></p>\n<div id="answers"></div>\n<button id="next" disabled>'
        'Next</button>\n<p id="score" hidden></p> <button id="again" hidden>Again'
        "</button>",
        f"""const asked = {asked}, rows = {rows}, rights = {rights};
let place = 0, chosen = null, score = 0;
function show() {{
  const over = place === asked.length;
  $('question').textContent = over ? 'The end' : asked[place];
  $('answers').replaceChildren(...(over ? [] : rows[place]).map((text, i) => {{
    const button = document.createElement('button');
    button.textContent = text;
    button.className = i === chosen ? 'answer chosen' : 'answer';
    button.onclick = () => {{ chosen = i; show(); }};
    return button;
  }}));
  $('next').disabled = chosen === null;
  $('next').hidden = over;
  $('score').hidden = $('again').hidden = !over;
  $('score').textContent = `${{score}} of ${{asked.length}}`;
}}
$('next').onclick = () => {{
  if (chosen === rights[place]) score += 1;
  place += 1; chosen = null; show();
}};
$('again').onclick = () => {{ place = 0; score = 0; show(); }};
show();""",
    )


def _quiz_items(
    asked: list[str], right: list[str], wrong: str, play: list[str]
) -> tuple[Item, ...]:
    return (
        item("first", f"It asks {asked[0]}.", f"reads #question | {asked[0]}"),
        item("three", "There are three answers.", "count .answer | 3"),
        item("waits", "Next is disabled at first.", "count #next:disabled | 1"),
        item(
            "chosen",
            "A click chooses one answer.",
            f"click {right[0]}; click {wrong}; count .chosen | 1",
        ),
        item(
            "next",
            "Next asks the second question.",
            f"click {wrong}; click #next; reads #question | {asked[1]}",
        ),
        item("score", "All right answers: 3 of 3.", *play, "reads #score | 3 of 3"),
        item(
            "one_wrong",
            "One wrong answer: 2 of 3.",
            f"click {wrong}; click #next",
            *play[2:],
            "reads #score | 2 of 3",
        ),
        item("no_score", "No score is shown at first.", "hidden #score"),
        item(
            "again",
            "Again starts anew, with no points.",
            *play,
            "click #again",
            *play,
            "reads #score | 3 of 3",
        ),
    )


FAMILIES = {
    "converter": converter,
    "counter": counter,
    "quiz": quiz,
    "sign_up": sign_up,
}
