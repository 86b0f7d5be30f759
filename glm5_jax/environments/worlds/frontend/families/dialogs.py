"""A page with a dialog."""

import random

from glm5_jax.environments.worlds.frontend.draft import (
    Draft,
    Flaw,
    Item,
    document,
    item,
)

_TOPICS = (
    *("Prices", "Hours", "Ways", "Jobs", "Press", "Rooms", "Tours", "Rules"),
    *("Maps", "News", "Shops", "Trips"),
)


def dialog(rng: random.Random) -> Draft:
    """Makes a dialog that changes a name."""
    one, two, new = rng.sample(_TOPICS, 3)
    old = f"{one} and {two.lower()}"
    page = _dialog_page(old)
    changed = "click #open", f"type #name | {new}"
    return Draft(
        brief=(
            f"A heading #title that says {old}, and a button #open that opens the "
            "dialog #dialog, hidden at first. Its input #name has the heading's text "
            "and the focus when it opens. #save takes the text, without blanks "
            "around it, for the heading and closes; it is disabled while there is no "
            'text. #cancel and the key Escape close without a change. #count says "N '
            'changes", of those that were saved.'
        ),
        items=_dialog_items(old, new, changed),
        page=page,
        flaws=(
            Flaw("event.key === 'Escape'", "event.key === 'Q'", ("escape",)),
            Flaw(
                "$('cancel').onclick = close",
                "$('cancel').onclick = $('save').onclick",
                ("cancel", "not_counted"),
            ),
            Flaw(
                "$('name').value = $('title').textContent;", "", ("filled", "nothing")
            ),
            Flaw("$('save').disabled = !$('name').value.trim();", "", ("nothing",)),
        ),
    )


def _dialog_page(old: str) -> str:
    return document(
        "Dialog",
        f'<h1 id="title">{old}</h1> <button id="open">Rename</button>\n<div '
        f'id="dialog" '
        'role="dialog" hidden><input id="name"> <button '
        'id="save">Save</button>\n<button '
        'id="cancel">Cancel</button></div> <p id="count">0 changes</p>',
        """let changes = 0;
function close() { $('dialog').hidden = true; }
$('open').onclick = () => {
  $('dialog').hidden = false;
  $('name').value = $('title').textContent;
  $('name').focus();
};
$('name').oninput = () => { $('save').disabled = !$('name').value.trim(); };
$('save').onclick = () => {
  changes += 1;
  $('title').textContent = $('name').value.trim();
  $('count').textContent = `${changes} changes`;
  close();
};
$('cancel').onclick = close;
document.onkeydown = event => { if (event.key === 'Escape') close(); };""",
    )


def _dialog_items(old: str, new: str, changed: tuple[str, ...]) -> tuple[Item, ...]:
    return (
        item("closed", "It is closed at first.", "hidden #dialog"),
        item("open", "Rename opens it.", "click #open; shown #dialog"),
        item("filled", "It has the old name.", f"click #open; value #name | {old}"),
        item("focus", "The input has the focus.", "click #open; count #name:focus | 1"),
        item("save", "Save renames.", *changed, f"click #save; reads #title | {new}"),
        item("closes", "Save closes it.", *changed, "click #save; hidden #dialog"),
        item(
            "cancel",
            "Cancel changes nothing.",
            *changed,
            f"click #cancel; reads #title | {old}; hidden #dialog",
        ),
        item(
            "escape",
            "Escape closes it.",
            "click #open; shown #dialog; press #name | Escape; hidden #dialog",
        ),
        item(
            "nothing",
            "Without a text it cannot be saved.",
            "click #open; type #name |; count #save:disabled | 1",
        ),
        item(
            "count",
            "Changes are counted.",
            *changed,
            "click #save",
            *changed,
            "click #save; reads #count | 2 changes",
        ),
        item(
            "not_counted",
            "What is cancelled does not count.",
            *changed,
            "click #cancel; reads #count | 0 changes",
        ),
    )


FAMILIES = {"dialog": dialog}
