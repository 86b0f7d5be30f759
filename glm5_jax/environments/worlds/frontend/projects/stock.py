"""A table of goods in stock, as a project of React and of Vue."""

import json
import random

from glm5_jax.environments.worlds.frontend.draft import Draft, Flaw, Item, item

_GOODS = ("rope", "nails", "hinges", "glue", "bolts", "wire", "tiles", "felt")
_LEAST = 5


def make(rng: random.Random, framework: str) -> Draft:
    """Makes a stock of four goods, one of which is low."""
    names = sorted(rng.sample(_GOODS, 4))
    names = [names[2], *rng.sample([names[0], names[3]], 2), names[1]]  # not in order
    numbers = rng.sample(range(_LEAST + 1, 30), 3)
    numbers.insert(rng.randrange(4), _LEAST)
    rows = [*zip(names, numbers, strict=True)]
    first = json.dumps([{"name": name, "number": number} for name, number in rows])
    page = {"react": _REACT, "vue": _VUE}[framework].replace("FIRST", first)
    listed = ", ".join(f"{name} {number}" for name, number in rows)
    return Draft(
        brief=(
            f"A stock of goods: {listed}. tbody #rows has a tr for each, in this order "
            "at first: a checkbox .pick, the name in .name, the number in .number, and "
            "the buttons .less and .more, which change the number by 1; .less is "
            f"disabled at 0. A row with fewer than {_LEAST} has the class low, and "
            '#low says "0 low", how many there are. The select #by sorts the rows by '
            "its options: given (at first), name, number; numbers stay sorted as they "
            "change. The checkbox #all picks all rows or none, and is checked exactly "
            "while all are picked. The button #remove, disabled while none is picked, "
            "removes the rows that are; then #undo, hidden otherwise, is visible, and "
            "brings them back where they were, with none picked. A removal can be "
            "undone until the next one."
        ),
        items=_items(names, rows),
        page=page,
        flaws=_FLAWS[framework],
        framework=framework,
    )


def _items(names: list[str], rows: list[tuple[str, int]]) -> tuple[Item, ...]:
    low = 1 + next(i for i, (_, number) in enumerate(rows) if number == _LEAST)
    by_name, fewest = sorted(names), min(rows, key=lambda row: row[1])[0]
    first, last = "#rows tr:nth-child(1)", "#rows tr:nth-child(4)"
    return (
        item(
            "rows",
            "It has four rows in the given order.",
            f"count #rows tr | 4; reads {first} .name | {names[0]}",
            f"reads {last} .number | {rows[3][1]}",
        ),
        item(
            "more",
            "More adds one to its row alone.",
            f"click {first} .more; reads {first} .number | {rows[0][1] + 1}",
            f"reads {last} .number | {rows[3][1]}",
        ),
        item(
            "low",
            f"A row below {_LEAST} is low.",
            f"reads #low | 0 low; click #rows tr:nth-child({low}) .less",
            f"reads #low | 1 low; count #rows tr:nth-child({low}).low | 1",
            "count #rows .low | 1",
        ),
        item(
            "least",
            "Nothing falls below 0.",
            *[f"click #rows tr:nth-child({low}) .less"] * _LEAST,
            f"count #rows tr:nth-child({low}) .less:disabled | 1",
            "count #rows .less:disabled | 1",
        ),
        item(
            "by_name",
            "It sorts by name, and back.",
            f"choose #by | name; reads {first} .name | {by_name[0]}",
            f"reads {last} .name | {by_name[3]}",
            f"choose #by | given; reads {first} .name | {names[0]}",
            f"reads {last} .name | {names[3]}",
        ),
        item(
            "by_number",
            "It sorts by number.",
            f"choose #by | number; reads {first} .name | {fewest}",
        ),
        *_picked(names),
    )


def _picked(names: list[str]) -> tuple[Item, ...]:
    """Returns the items of the checkboxes and what they are for."""
    first = "#rows tr:nth-child(1)"
    return (
        item(
            "all",
            "All picks all, and none.",
            "click #all; count .pick:checked | 4; click #all; count .pick:checked | 0",
        ),
        item(
            "follows",
            "All is checked while all are picked.",
            *[f"click #rows tr:nth-child({i}) .pick" for i in (1, 2, 3, 4)],
            "count #all:checked | 1; click #rows tr:nth-child(2) .pick",
            "count #all:checked | 0",
        ),
        item(
            "remove",
            "Remove removes what is picked.",
            f"count #remove:disabled | 1; click {first} .pick; click #remove",
            f"count #rows tr | 3; reads {first} .name | {names[1]}",
            "count #remove:disabled | 1",
        ),
        item(
            "undo",
            "Undo brings it back where it was.",
            "hidden #undo; click #rows tr:nth-child(2) .pick; click #remove",
            "shown #undo; click #undo; hidden #undo; count #rows tr | 4",
            f"reads #rows tr:nth-child(2) .name | {names[1]}; count .pick:checked | 0",
        ),
    )


_REACT = """import { useMemo, useState } from 'react';

const ORDERS = {
  given: () => 0,
  name: (a, b) => a.name.localeCompare(b.name),
  number: (a, b) => a.number - b.number,
};

export default function App() {
  const [rows, setRows] = useState(FIRST);
  const [picked, setPicked] = useState(new Set());
  const [by, setBy] = useState('given');
  const [before, setBefore] = useState(null);
  const sorted = useMemo(() => [...rows].sort(ORDERS[by]), [rows, by]);
  const change = (name, step) => setRows(rows.map(
    row => row.name === name ? { ...row, number: row.number + step } : row));
  const toggle = name => {
    const next = new Set(picked);
    if (!next.delete(name)) next.add(name);
    setPicked(next);
  };
  const isAll = rows.length > 0 && picked.size === rows.length;
  const remove = () => {
    setBefore(rows);
    setRows(rows.filter(row => !picked.has(row.name)));
    setPicked(new Set());
  };
  const undo = () => {
    setRows(before);
    setBefore(null);
    setPicked(new Set());
  };
  return (
    <main>
      <select id="by" value={by} onChange={event => setBy(event.target.value)}>
        {Object.keys(ORDERS).map(name => <option key={name}>{name}</option>)}
      </select>
      <input id="all" type="checkbox" checked={isAll}
        onChange={() => setPicked(new Set(isAll ? [] : rows.map(row => row.name)))} />
      <button id="remove" disabled={picked.size === 0} onClick={remove}>Remove</button>
      <button id="undo" hidden={before === null} onClick={undo}>Undo</button>
      <p id="low">{rows.filter(row => row.number < 5).length} low</p>
      <table><tbody id="rows">
        {sorted.map(({ name, number }) => (
          <tr key={name} className={number < 5 ? 'low' : ''}>
            <td><input type="checkbox" className="pick" checked={picked.has(name)}
              onChange={() => toggle(name)} /></td>
            <td className="name">{name}</td>
            <td className="number">{number}</td>
            <td>
              <button className="less" disabled={number === 0}
                onClick={() => change(name, -1)}>Less</button>
              <button className="more" onClick={() => change(name, 1)}>More</button>
            </td>
          </tr>
        ))}
      </tbody></table>
    </main>
  );
}
"""
_VUE = """<script setup>
import { computed, ref } from 'vue';

const ORDERS = {
  given: () => 0,
  name: (a, b) => a.name.localeCompare(b.name),
  number: (a, b) => a.number - b.number,
};
const rows = ref(FIRST);
const picked = ref([]);
const by = ref('given');
const before = ref(null);
const sorted = computed(() => [...rows.value].sort(ORDERS[by.value]));
const isAll = computed({
  get: () => rows.value.length > 0 && picked.value.length === rows.value.length,
  set: value => { picked.value = value ? rows.value.map(row => row.name) : []; },
});

function remove() {
  before.value = rows.value;
  rows.value = rows.value.filter(row => !picked.value.includes(row.name));
  picked.value = [];
}

function undo() {
  rows.value = before.value;
  before.value = null;
  picked.value = [];
}
</script>

<template>
  <main>
    <select id="by" v-model="by">
      <option v-for="(order, name) in ORDERS" :key="name">{{ name }}</option>
    </select>
    <input id="all" type="checkbox" v-model="isAll">
    <button id="remove" :disabled="!picked.length" @click="remove">Remove</button>
    <button id="undo" v-show="before" @click="undo">Undo</button>
    <p id="low">{{ rows.filter(row => row.number < 5).length }} low</p>
    <table><tbody id="rows">
      <tr v-for="row in sorted" :key="row.name" :class="{ low: row.number < 5 }">
        <td><input type="checkbox" class="pick" :value="row.name" v-model="picked"></td>
        <td class="name">{{ row.name }}</td>
        <td class="number">{{ row.number }}</td>
        <td>
          <button class="less" :disabled="row.number === 0" @click="row.number -= 1">
            Less
          </button>
          <button class="more" @click="row.number += 1">More</button>
        </td>
      </tr>
    </tbody></table>
  </main>
</template>
"""
_FLAWS = {
    "react": (
        Flaw(" disabled={number === 0}", "", ("least",)),
        Flaw(
            "[...rows].sort(ORDERS[by]), [rows, by]",
            "rows.sort(ORDERS[by]), [rows, by]",
            ("by_name",),
        ),
        Flaw(
            "setRows(before);",
            "setRows([...new Set([...rows, ...before])]);",
            ("undo",),
        ),
        Flaw("checked={isAll}", "", ("follows",)),
        Flaw(
            "    setPicked(new Set());\n  };\n  const undo",
            "  };\n  const undo",
            ("remove",),
        ),
    ),
    "vue": (
        Flaw(':disabled="row.number === 0" ', "", ("least",)),
        Flaw("[...rows.value].sort", "rows.value.sort", ("by_name",)),
        Flaw(
            "rows.value = before.value;",
            "rows.value = [...new Set([...rows.value, ...before.value])];",
            ("undo",),
        ),
        Flaw(
            "  picked.value = [];\n}\n\nfunction undo",
            "}\n\nfunction undo",
            ("remove",),
        ),
        Flaw(
            "picked.value.length === rows.value.length",
            "picked.value.length > 0",
            ("follows",),
        ),
    ),
}
