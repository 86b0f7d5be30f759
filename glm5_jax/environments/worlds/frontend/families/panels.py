"""Pages that show and hide: tabs, questions that unfold, parts of a list."""

import random

from glm5_jax.environments.worlds.frontend.draft import (
    Draft,
    Flaw,
    Item,
    document,
    item,
)

_TOPICS = ("Prices", "Hours", "Ways", "Jobs", "Press", "Rooms", "Tours", "Rules")


def tabs(rng: random.Random) -> Draft:
    """Makes tabs that the keyboard moves between."""
    names = rng.sample(_TOPICS, 3)
    body = "".join(
        f'<button id="tab_{i}" role="tab">{name}</button>'
        for i, name in enumerate(names)
    ) + "".join(
        f'\n<div id="panel_{i}" class="panel">About {name.lower()}</div>'
        for i, name in enumerate(names)
    )
    page = _tabs_page(body)
    chosen = '[aria-selected="true"]'
    return Draft(
        brief=(
            f"Three tabs: the buttons #tab_0, #tab_1, #tab_2 say {', '.join(names)}; "
            f'the panels #panel_0, #panel_1, #panel_2 say "About {names[0].lower()}" '
            "and so on. One panel is visible, the first at first; a click on a tab "
            "shows its panel alone. The tab of the visible panel has "
            'aria-selected="true", others "false". ArrowRight and ArrowLeft on a tab '
            "move to the next and the previous one, from the last to the first and "
            "back, and the tab that is reached has the focus."
        ),
        items=_tabs_items(names, chosen),
        page=page,
        flaws=(
            Flaw("ArrowLeft: 2", "ArrowLeft: 0", ("left",)),
            Flaw("$(`tab_${next}`).focus();", "", ("focus",)),
            Flaw(".hidden = i !== place;", ".hidden = i > place;", ("alone", "right")),
            Flaw("ariaSelected = String(i === place)", "title = 'x'", ("selected",)),
        ),
    )


def _tabs_page(body: str) -> str:
    return document(
        "Tabs",
        body,
        """const places = [0, 1, 2];
function show(place) {
  for (const i of places) {
    $(`panel_${i}`).hidden = i !== place;
    $(`tab_${i}`).ariaSelected = String(i === place);
  }
}
for (const i of places) {
  $(`tab_${i}`).onclick = () => show(i);
  $(`tab_${i}`).onkeydown = event => {
    const step = {ArrowRight: 1, ArrowLeft: 2}[event.key];
    if (!step) return;
    const next = (i + step) % 3;
    show(next);
    $(`tab_${next}`).focus();
  };
}
show(0);""",
    )


def _tabs_items(names: list[str], chosen: str) -> tuple[Item, ...]:
    return (
        item("names", "The tabs are named.", f"reads #tab_2 | {names[2]}"),
        item("first", "The first panel is visible.", "shown #panel_0"),
        item("others", "Others are not.", "hidden #panel_1; hidden #panel_2"),
        item(
            "click",
            "A click shows the panel.",
            "click #tab_1; shown #panel_1",
            f"reads #panel_1 | About {names[1].lower()}",
        ),
        item("alone", "It is shown alone.", "click #tab_1; hidden #panel_0"),
        item(
            "selected",
            "The tab is marked as selected.",
            f"click #tab_2; count {chosen} | 1; count #tab_2{chosen} | 1",
        ),
        item(
            "right",
            "ArrowRight moves on.",
            "press #tab_0 | ArrowRight; shown #panel_1; hidden #panel_0",
        ),
        item("left", "ArrowLeft wraps.", "press #tab_0 | ArrowLeft; shown #panel_2"),
        item(
            "focus",
            "The tab that is reached has the focus.",
            "press #tab_0 | ArrowRight; count #tab_1:focus | 1",
        ),
    )


def questions(rng: random.Random) -> Draft:
    """Makes questions with answers that unfold, one at a time."""
    names = rng.sample(_TOPICS, 4)
    body = "".join(
        f'\n<button class="ask" id="ask_{i}">{name}?</button>'
        f'<p class="tell" id="tell_{i}" hidden>{name} are on the door.</p>'
        for i, name in enumerate(names)
    )
    page = _questions_page(body)
    word = names[1].lower()
    return Draft(
        brief=(
            "Four questions, buttons of class ask with ids ask_0 to ask_3: "
            f"{', '.join(f'{name}?' for name in names)} Their answers, of class tell "
            'with ids tell_0 to tell_3, say "NAME are on the door." and are hidden '
            "at first. A click on a question shows its answer and hides the one that "
            "was open; a click on an open one hides it. The button #fold hides all. "
            "Typing in #find leaves only questions that have the text, in small or "
            "capital letters, and hides the answers of the others."
        ),
        items=_questions_items(names, word),
        page=page,
        flaws=(
            Flaw("$(`tell_${i}`).hidden ? i : null", "i", ("close",)),
            Flaw("if (!found) $(`tell_${i}`).hidden = true;", "", ("answers",)),
            Flaw("() => show(null)", "() => 0", ("fold",)),
            Flaw("$(`ask_${i}`).hidden = !found;", "", ("find", "back")),
        ),
    )


def _questions_page(body: str) -> str:
    return document(
        "Questions",
        f'{body}\n<button id="fold">Fold all</button> <input id="find">',
        """const places = [0, 1, 2, 3];
function show(place) {
  for (const i of places) $(`tell_${i}`).hidden = i !== place;
}
for (const i of places) $(`ask_${i}`).onclick = () => {
  show($(`tell_${i}`).hidden ? i : null);
};
$('fold').onclick = () => show(null);
$('find').oninput = () => {
  const text = $('find').value.toLowerCase();
  for (const i of places) {
    const found = $(`ask_${i}`).textContent.toLowerCase().includes(text);
    $(`ask_${i}`).hidden = !found;
    if (!found) $(`tell_${i}`).hidden = true;
  }
};""",
    )


def _questions_items(names: list[str], word: str) -> tuple[Item, ...]:
    return (
        item(
            "folded", "No answer is visible at first.", "hidden #tell_0; hidden #tell_3"
        ),
        item(
            "open",
            "A click shows the answer.",
            "click #ask_2; shown #tell_2",
            f"reads #tell_2 | {names[2]} are on the door.",
        ),
        item(
            "one",
            "Only one is open.",
            "click #ask_2; click #ask_0; shown #tell_0; hidden #tell_2",
        ),
        item(
            "close",
            "A second click hides it.",
            "click #ask_2; shown #tell_2; click #ask_2; hidden #tell_2",
        ),
        item(
            "fold",
            "Fold all hides all.",
            "click #ask_1; shown #tell_1; click #fold; hidden #tell_1",
        ),
        item(
            "find",
            f'Typing "{word}" leaves its question.',
            f"type #find | {word}; shown #ask_1; hidden #ask_0",
        ),
        item(
            "answers",
            "Answers of questions that are not found are hidden.",
            f"click #ask_0; shown #tell_0; type #find | {word}; hidden #tell_0",
        ),
        item(
            "back",
            "All questions return with an empty text.",
            f"type #find | {word}; hidden #ask_0; type #find |; shown #ask_0",
        ),
    )


def pager(rng: random.Random) -> Draft:
    """Makes a list that is shown in parts."""
    each = rng.randrange(3, 8)
    rest = rng.randrange(1, each)
    count = 2 * each + rest
    word = rng.choice(("entry", "letter", "picture", "recipe", "song"))
    page = _pager_page(each, count, word)
    return Draft(
        brief=(
            f'A list of {count} lines, "{word} 1" to "{word} {count}", shown {each} '
            'at a time as li in #list. #place says "page 1 of 3". The buttons #back '
            "and #on change the page, #last shows the last one. #back is disabled on "
            "the first page, #on on the last."
        ),
        items=_pager_items(each, rest, word),
        page=page,
        flaws=(
            Flaw(f".filter(n => n <= {count})", "", ("rest",)),
            Flaw("$('on').disabled = place === 3", "0", ("no_on",)),
            Flaw("place -= 1", "place = 1", ("back",)),
            Flaw("place === 1", "false", ("no_back",)),
        ),
    )


def _pager_page(each: int, count: int, word: str) -> str:
    return document(
        "Pages",
        '<ul id="list"></ul>\n<button id="back">Back</button> <span id="place"></span> '
        '<button id="on">On</button>\n<button id="last">Last</button>',
        f"""let place = 1;
function show() {{
  const first = (place - 1) * {each} + 1;
  const numbers = [...Array({each}).keys()].map(i => first + i);
  $('list').replaceChildren(...numbers.filter(n => n <= {count}).map(n => {{
    const line = document.createElement('li');
    line.textContent = `{word} ${{n}}`;
    return line;
  }}));
  $('place').textContent = `page ${{place}} of 3`;
  $('back').disabled = place === 1;
  $('on').disabled = place === 3;
}}
$('back').onclick = () => {{ place -= 1; show(); }};
$('on').onclick = () => {{ place += 1; show(); }};
$('last').onclick = () => {{ place = 3; show(); }};
show();""",
    )


def _pager_items(each: int, rest: int, word: str) -> tuple[Item, ...]:
    return (
        item("part", f"{each} lines are shown.", f"count #list li | {each}"),
        item("first", f"The first is {word} 1.", f"reads li:nth-child(1) | {word} 1"),
        item("place", "It is page 1 of 3.", "reads #place | page 1 of 3"),
        item("no_back", "Back is disabled at first.", "count #back:disabled | 1"),
        item(
            "on",
            f"On shows {word} {each + 1}.",
            f"click #on; reads li:nth-child(1) | {word} {each + 1}",
        ),
        item(
            "back",
            "Back returns.",
            "click #on; click #on; click #back; reads #place | page 2 of 3",
        ),
        item("last", "Last shows page 3.", "click #last; reads #place | page 3 of 3"),
        item(
            "rest",
            f"The last page has {rest}.",
            f"click #last; count #list li | {rest}",
        ),
        item(
            "no_on",
            "On is disabled on the last page alone.",
            "count #on:disabled | 0; click #last; count #on:disabled | 1",
        ),
    )


FAMILIES = {"pager": pager, "questions": questions, "tabs": tabs}
