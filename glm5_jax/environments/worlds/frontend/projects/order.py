"""An order in steps, as a project of React and of Vue."""

import random

from glm5_jax.environments.worlds.frontend.draft import Draft, Flaw, Item, item

_GOODS = ("prints", "candles", "notebooks", "mugs")


def make(rng: random.Random, framework: str) -> Draft:
    """Makes an order with two prices and a discount."""
    good = rng.choice(_GOODS)
    small, more = 10 * rng.randrange(4, 20), 10 * rng.randrange(3, 20)
    large, least = small + more, rng.randrange(5, 8)
    page = {"react": _REACT, "vue": _VUE}[framework]
    for name, value in (("SMALL", small), ("LARGE", large), ("LEAST", least)):
        page = page.replace(name, str(value))
    page = page.replace("GOOD", good)
    return Draft(
        brief=(
            f"An order of {good} in three steps, one of which is in the document at a "
            "time. #step_1 has the select #size (small, at first, and large), the "
            f"input #number, 1 at first, and #price. A small one costs {small}, a "
            f"large one {large}; from {least} on all are 10% cheaper. The button #next "
            "leads to #step_2 and is disabled unless #number is a whole number from 1 "
            "to 9. #step_2 has the inputs #name and #mail, the button #back, which "
            "leads back and keeps what was entered in both steps, and the button "
            "#send, disabled unless there is a name and an address with a text before "
            "and after its @. #send leads to #step_3, where #said says "
            f'"NAME ordered NUMBER SIZE {good} for PRICE". Its button #again begins '
            "anew, with nothing kept."
        ),
        items=_items(good, small, large, least),
        page=page,
        flaws=_FLAWS[framework],
        framework=framework,
    )


def _items(good: str, small: int, large: int, least: int) -> tuple[Item, ...]:
    filled = "choose #size | large; type #number | 4; click #next"
    sent = f"{filled}; type #name | Ada; type #mail | ada@site.test; click #send"
    return (
        item(
            "first",
            "It begins with step 1 alone.",
            "shown #step_1; count #step_2 | 0; count #step_3 | 0; value #number | 1",
        ),
        item("price", "A small one has its price.", f"reads #price | {small}"),
        item(
            "large",
            "Three large ones have their price.",
            f"choose #size | large; type #number | 3; reads #price | {3 * large}",
        ),
        item(
            "cheaper",
            f"{least} are cheaper, {least - 1} are not.",
            f"type #number | {least}; reads #price | {least * small * 9 // 10}",
            f"type #number | {least - 1}; reads #price | {(least - 1) * small}",
        ),
        item(
            "range",
            "Only 1 to 9 can be ordered.",
            "count #next:disabled | 0; type #number | 10; count #next:disabled | 1",
            "type #number | 0; count #next:disabled | 1",
        ),
        item("whole", "Parts cannot.", "type #number | 2.5; count #next:disabled | 1"),
        item("next", "Next leads on.", "click #next; shown #step_2; count #step_1 | 0"),
        item(
            "kept",
            "Back keeps what was entered.",
            f"{filled}; type #name | Ada; click #back; value #number | 4",
            "value #size | large; click #next; value #name | Ada",
        ),
        item(
            "closed",
            "It cannot be sent without a name and an address.",
            "click #next; count #send:disabled | 1; type #name | Ada",
            "count #send:disabled | 1; type #mail | ada@; count #send:disabled | 1",
            "type #mail | a@b; count #send:disabled | 0",
        ),
        item(
            "sent",
            "The last step says what was ordered.",
            f"{sent}; reads #said | Ada ordered 4 large {good} for {4 * large}",
        ),
        item(
            "again",
            "Again begins anew.",
            f"{sent}; click #again; value #number | 1; value #size | small",
            "click #next; value #name |",
        ),
    )


_REACT = """import { useState } from 'react';

const PRICES = { small: SMALL, large: LARGE };
const EMPTY = { size: 'small', number: '1', name: '', mail: '' };

function price({ size, number }) {
  const whole = PRICES[size] * Number(number);
  return number >= LEAST ? whole * 0.9 : whole;
}

function Input({ id, order, change }) {
  const set = event => change({ ...order, [id]: event.target.value });
  return <label>{id} <input id={id} value={order[id]} onChange={set} /></label>;
}

export default function App() {
  const [step, setStep] = useState(1);
  const [order, setOrder] = useState(EMPTY);
  const inputs = { order, change: setOrder };
  if (step === 1) return (
    <section id="step_1">
      <select id="size" value={order.size}
        onChange={event => setOrder({ ...order, size: event.target.value })}>
        {Object.keys(PRICES).map(size => <option key={size}>{size}</option>)}
      </select>
      <Input id="number" {...inputs} />
      <p id="price">{Math.round(price(order)) || 0}</p>
      <button id="next" disabled={!/^[1-9]$/.test(order.number)}
        onClick={() => setStep(2)}>Next</button>
    </section>
  );
  if (step === 2) return (
    <section id="step_2">
      <Input id="name" {...inputs} />
      <Input id="mail" {...inputs} />
      <button id="back" onClick={() => setStep(1)}>Back</button>
      <button id="send" onClick={() => setStep(3)}
        disabled={!order.name.trim() || !/^[^@]+@[^@]+$/.test(order.mail)}>Send</button>
    </section>
  );
  return (
    <section id="step_3">
      <p id="said">
        {order.name} ordered {order.number} {order.size} GOOD for{' '}
        {Math.round(price(order))}
      </p>
      <button id="again" onClick={() => { setOrder(EMPTY); setStep(1); }}>Again</button>
    </section>
  );
}
"""
_VUE = """<script setup>
import { computed, reactive, ref } from 'vue';

const PRICES = { small: SMALL, large: LARGE };
const EMPTY = { size: 'small', number: '1', name: '', mail: '' };
const step = ref(1);
const order = reactive({ ...EMPTY });
const price = computed(() => {
  const whole = PRICES[order.size] * Number(order.number);
  return Math.round(order.number >= LEAST ? whole * 0.9 : whole) || 0;
});

function again() {
  Object.assign(order, EMPTY);
  step.value = 1;
}
</script>

<template>
  <section v-if="step === 1" id="step_1">
    <select id="size" v-model="order.size">
      <option v-for="(cost, size) in PRICES" :key="size">{{ size }}</option>
    </select>
    <input id="number" v-model="order.number">
    <p id="price">{{ price }}</p>
    <button id="next" :disabled="!/^[1-9]$/.test(order.number)" @click="step = 2">
      Next
    </button>
  </section>
  <section v-else-if="step === 2" id="step_2">
    <input id="name" v-model="order.name">
    <input id="mail" v-model="order.mail">
    <button id="back" @click="step = 1">Back</button>
    <button id="send" @click="step = 3"
      :disabled="!order.name.trim() || !/^[^@]+@[^@]+$/.test(order.mail)">Send</button>
  </section>
  <section v-else id="step_3">
    <p id="said">
      {{ order.name }} ordered {{ order.number }} {{ order.size }} GOOD for {{ price }}
    </p>
    <button id="again" @click="again">Again</button>
  </section>
</template>
"""
_FLAWS = {
    "react": (
        Flaw("number >= ", "number > ", ("cheaper",)),
        Flaw(
            "/^[1-9]$/.test(order.number)",
            "(order.number >= 1 && order.number < 10)",
            ("whole",),
        ),
        Flaw("setOrder(EMPTY); setStep(1)", "setStep(1)", ("again",)),
        Flaw(
            "onClick={() => setStep(1)}>Back",
            "onClick={() => { setOrder(EMPTY); setStep(1); }}>Back",
            ("kept",),
        ),
        Flaw(
            "/^[^@]+@[^@]+$/.test(order.mail)", "order.mail.includes('@')", ("closed",)
        ),
    ),
    "vue": (
        Flaw("order.number >= ", "order.number > ", ("cheaper",)),
        Flaw(
            "/^[1-9]$/.test(order.number)",
            "(order.number >= 1 && order.number < 10)",
            ("whole",),
        ),
        Flaw("  Object.assign(order, EMPTY);\n", "", ("again",)),
        Flaw('@click="step = 1">Back', '@click="again">Back', ("kept",)),
        Flaw(
            "/^[^@]+@[^@]+$/.test(order.mail)", "order.mail.includes('@')", ("closed",)
        ),
    ),
}
