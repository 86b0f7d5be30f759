"""A board of cards in three columns, as a project of React and of Vue."""

import json
import random

from glm5_jax.environments.worlds.frontend.draft import Draft, Flaw, Item, item

_NAMES = ("paint", "sweep", "glaze", "weigh", "grind", "plant", "mow", "solder")
_ON = "click #todo li:nth-child(1) .on"


def make(rng: random.Random, framework: str) -> Draft:
    """Makes a board with three cards and a limit."""
    *names, new = rng.sample(_NAMES, 4)
    first = json.dumps(names)
    page = {"react": _REACT, "vue": _VUE}[framework].replace("FIRST", first)
    return Draft(
        brief=(
            "A board with the columns #todo, #doing and #done, each a ul with an li "
            "for each card, its text in an element .name. At first #todo has "
            f"{', '.join(names)}, the others nothing. A card's button .on moves it to "
            "the end of the next column, .back to the end of the column before; there "
            "is no .back in #todo and no .on in #done. While #doing has two cards, .on "
            'is disabled in #todo, and #full, "doing is full", is visible. The button '
            "#add appends a card with the text of #new, without blanks around it, to "
            "#todo and empties #new; it is disabled while there is no text. Typing in "
            "#find leaves only cards that have the text, in small or capital letters. "
            '#left says "3 to do, 0 doing, 0 done", of all cards.'
        ),
        items=_items(names, new),
        page=page,
        flaws=_FLAWS[framework],
        framework=framework,
    )


def _items(names: list[str], new: str) -> tuple[Item, ...]:
    one, two, three = names
    return (
        item(
            "first",
            "Three cards are to do.",
            f"count #todo li | 3; reads #todo li:nth-child(1) .name | {one}",
        ),
        item("left", "It counts cards.", "reads #left | 3 to do, 0 doing, 0 done"),
        item(
            "on",
            "On moves a card to the next column.",
            f"{_ON}; reads #doing .name | {one}; count #todo li | 2",
            "reads #left | 2 to do, 1 doing, 0 done",
        ),
        item(
            "end",
            "Cards arrive at the end.",
            f"click #todo li:nth-child(3) .on; {_ON}",
            f"reads #doing li:nth-child(1) .name | {three}",
            f"reads #doing li:nth-child(2) .name | {one}",
        ),
        item(
            "back",
            "Back moves a card to the end of the column before.",
            f"{_ON}; click #doing .back; reads #todo li:nth-child(3) .name | {one}",
        ),
        item(
            "edges",
            "Nothing moves beyond the first and the last column.",
            f"count #todo .back | 0; {_ON}; click #doing .on; count #done .on | 0",
            "count #done .back | 1",
        ),
        item(
            "full",
            "A third card cannot be done at a time.",
            f"hidden #full; {_ON}; {_ON}; shown #full; count #todo .on:disabled | 1",
        ),
        item(
            "free",
            "It can once one is done.",
            f"{_ON}; {_ON}; click #doing li:nth-child(1) .on; hidden #full",
            f"{_ON}; reads #doing li:nth-child(2) .name | {three}",
        ),
        *_entered(two, new),
    )


def _entered(two: str, new: str) -> tuple[Item, ...]:
    """Returns the items of the two inputs."""
    return (
        item(
            "add",
            "Add appends a card and empties the input.",
            f"type #new | {new}; click #add; value #new |",
            f"reads #todo li:nth-child(4) .name | {new}",
        ),
        item(
            "blank",
            "Without a text it is disabled.",
            f"count #add:disabled | 1; type #new | {new}; count #add:disabled | 0",
        ),
        item(
            "find",
            f'Typing "{two.upper()}" leaves its card, and the counts.',
            f"type #find | {two.upper()}; count #todo li | 1",
            f"reads #todo .name | {two}; reads #left | 3 to do, 0 doing, 0 done",
        ),
    )


_REACT = """import { useState } from 'react';

const COLUMNS = ['todo', 'doing', 'done'];

function Card({ card, isFull, onMove }) {
  const { name, place } = card;
  return (
    <li>
      <span className="name">{name}</span>
      {place > 0 && (
        <button className="back" onClick={() => onMove(card, -1)}>Back</button>
      )}
      {place < 2 && (
        <button className="on" disabled={place === 0 && isFull}
          onClick={() => onMove(card, 1)}>On</button>
      )}
    </li>
  );
}

export default function App() {
  const [cards, setCards] = useState(FIRST.map(name => ({ name, place: 0 })));
  const [text, setText] = useState('');
  const [part, setPart] = useState('');
  const count = place => cards.filter(card => card.place === place).length;
  const isFull = count(1) >= 2;
  const move = (card, step) => setCards(
    [...cards.filter(other => other !== card), { ...card, place: card.place + step }]);
  const add = () => {
    setCards([...cards, { name: text.trim(), place: 0 }]);
    setText('');
  };
  const shown = cards.filter(
    card => card.name.toLowerCase().includes(part.toLowerCase()));
  return (
    <main>
      <input id="new" value={text} onChange={event => setText(event.target.value)} />
      <button id="add" disabled={!text.trim()} onClick={add}>Add</button>
      <input id="find" value={part} onChange={event => setPart(event.target.value)} />
      <p id="left">{`${count(0)} to do, ${count(1)} doing, ${count(2)} done`}</p>
      <p id="full" hidden={!isFull}>doing is full</p>
      {COLUMNS.map((id, place) => (
        <ul id={id} key={id}>
          {shown.filter(card => card.place === place).map(card => (
            <Card key={card.name} card={card} isFull={isFull} onMove={move} />
          ))}
        </ul>
      ))}
    </main>
  );
}
"""
_VUE = """<script setup>
import { computed, ref } from 'vue';

const COLUMNS = ['todo', 'doing', 'done'];
const cards = ref(FIRST.map(name => ({ name, place: 0 })));
const text = ref('');
const part = ref('');
const count = place => cards.value.filter(card => card.place === place).length;
const isFull = computed(() => count(1) >= 2);
const shown = computed(() => cards.value.filter(
  card => card.name.toLowerCase().includes(part.value.toLowerCase())));

function move(card, step) {
  cards.value = cards.value.filter(other => other.name !== card.name);
  cards.value.push({ name: card.name, place: card.place + step });
}

function add() {
  cards.value.push({ name: text.value.trim(), place: 0 });
  text.value = '';
}
</script>

<template>
  <main>
    <input id="new" v-model="text">
    <button id="add" :disabled="!text.trim()" @click="add">Add</button>
    <input id="find" v-model="part">
    <p id="left">{{ count(0) }} to do, {{ count(1) }} doing, {{ count(2) }} done</p>
    <p id="full" v-show="isFull">doing is full</p>
    <ul v-for="(id, place) in COLUMNS" :id="id" :key="id">
      <li v-for="card in shown.filter(card => card.place === place)" :key="card.name">
        <span class="name">{{ card.name }}</span>
        <button v-if="place > 0" class="back" @click="move(card, -1)">Back</button>
        <button v-if="place < 2" class="on" :disabled="place === 0 && isFull"
          @click="move(card, 1)">On</button>
      </li>
    </ul>
  </main>
</template>
"""
_FLAWS = {
    "react": (
        Flaw(
            "[...cards.filter(other => other !== card), "
            "{ ...card, place: card.place + step }]",
            "cards.map(other => (\n      other === card ? "
            "{ ...card, place: card.place + step } : other))",
            ("end", "back"),
        ),
        Flaw("place === 0 && isFull", "false", ("full",)),
        Flaw("    setText('');\n", "", ("add",)),
        Flaw("includes(part.toLowerCase())", "includes(part)", ("find",)),
    ),
    "vue": (
        Flaw(
            "cards.value.push({ name: card.name",
            "cards.value.unshift({ name: card.name",
            ("end", "back", "free"),
        ),
        Flaw("place === 0 && isFull", "false", ("full",)),
        Flaw("  text.value = '';\n", "", ("add",)),
        Flaw("includes(part.value.toLowerCase())", "includes(part.value)", ("find",)),
    ),
}
