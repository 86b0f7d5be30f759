"""Questions over the source of Python's standard library, which every machine has.

documents_qa: in which module a class is defined, among excerpts of modules (RULER's
question answering with these documents instead of SQuAD's). code_search: which function
a description is of, among functions without their descriptions (RepoQA's search, arXiv
2406.06025, which asks for the whole function). many_shot: the label of a line of code,
where many lines with labels say which module has which (HELMET's in-context learning,
arXiv 2410.02694, with lines instead of TREC and BANKING77).
"""

import ast
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.sources import documents
from glm5_jax.evals import answering, haystack, record

_CLASS = re.compile(r"^class (\w{4,})\b.*:$", re.M)
_EXCERPT = 240  # characters of an excerpt from its class on
_MAX_CODE = 400  # characters of a function
_NUM_PARSED = 60  # modules whose functions are read
_LABELS = 5  # modules of a many-shot task
_MIN_LINE, _MAX_LINE = 20, 60  # characters of a line of code


class Function(NamedTuple):
    """A function without its description."""

    name: str
    code: str
    description: str  # first sentence of its docstring


@functools.cache
def _modules() -> tuple[tuple[str, str], ...]:
    """Returns names and sources of modules in a fixed random order."""
    every = documents.shuffled(documents.read_documents("python"), seed=0)
    return tuple((d.name, d.text) for d in every if d.name.endswith(".py"))


@functools.cache
def excerpts() -> tuple[tuple[str, str, str], ...]:
    """Returns module, class and excerpt; no two have the class or the module alike."""
    found, names = [], set()
    for module, text in _modules():
        for match in _CLASS.finditer(text):
            if match[1] not in names:
                names.add(match[1])
                excerpt = text[match.start() :][:_EXCERPT].rstrip()
                found.append((module, match[1], excerpt))
                break
    return tuple(
        (module, name, excerpt)
        for module, name, excerpt in found
        if sum(f"class {name}" in other for _, _, other in found) == 1
    )


@functools.cache
def functions() -> tuple[Function, ...]:
    """Returns documented functions whose names occur in no other's code."""
    found: dict[str, Function] = {}
    for _, text in _modules()[:_NUM_PARSED]:
        for node in ast.parse(text).body:
            docstring = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
            if docstring and len(node.name) > 4:
                sentence = " ".join(docstring.split("\n\n")[0].split())
                bare = ast.parse(ast.unparse(node)).body[0]
                assert isinstance(bare, ast.FunctionDef)
                bare.body = bare.body[1:] or [ast.Pass()]
                code = ast.unparse(bare)
                if len(code) <= _MAX_CODE and 20 <= len(sentence) <= 120:
                    found[node.name] = Function(node.name, code, sentence)
    every = found.values()
    return tuple(
        one
        for one in every
        if one.name not in one.description
        and sum(one.name in other.code for other in every) == 1
        and one.code.count(one.name) == 1
    )


@functools.cache
def lines() -> dict[str, list[str]]:
    """Returns different lines of code of modules that have many."""
    found = {}
    for module, text in _modules():
        own = dict.fromkeys(line.strip() for line in text.splitlines())
        plain = [x for x in own if _MIN_LINE <= len(x) <= _MAX_LINE and "#" not in x]
        if len(plain) > 100:
            found[module] = plain
    return found


def documents_qa(
    tokenizer: tokenizer_lib.Tokenizer, length: int, rng: np.random.Generator
) -> record.Task:
    """Returns a task: which module defines a class."""
    pool = excerpts()
    order = rng.permutation(len(pool)).tolist()
    module, name, excerpt = pool[order[0]]

    def shown(i: int) -> str:
        return f"\n\nModule {pool[i][0]}:\n{pool[i][2]}"

    return haystack.task(
        tokenizer,
        length,
        texts=(
            "The following are parts of modules.",
            f"\n\nQuestion: Which module defines the class {name}?\nAnswer: Module",
        ),
        needles=[f"\n\nModule {module}:\n{excerpt}"],
        filler=(tokenizer.encode(shown(i)) for i in itertools.cycle(order[1:])),
        answers=[module],
        max_new_tokens=len(tokenizer.encode(f" {module}")) + 2,
        rng=rng,
    )


def code_search(
    tokenizer: tokenizer_lib.Tokenizer, length: int, rng: np.random.Generator
) -> record.Task:
    """Returns a task: which function a description is of."""
    pool = functions()
    order = rng.permutation(len(pool)).tolist()
    wanted = pool[order[0]]
    return haystack.task(
        tokenizer,
        length,
        texts=(
            "The following are functions.",
            f"\n\nThe function with this description: {wanted.description}\n"
            f"has the name",
        ),
        needles=[f"\n\n{wanted.code}"],
        filler=(
            tokenizer.encode(f"\n\n{pool[i].code}") for i in itertools.cycle(order[1:])
        ),
        answers=[wanted.name],
        max_new_tokens=len(tokenizer.encode(f" {wanted.name}")) + 2,
        rng=rng,
    )


def many_shot(
    tokenizer: tokenizer_lib.Tokenizer, length: int, rng: np.random.Generator
) -> record.Task:
    """Returns a task: the label of a new line, after as many examples as fit."""
    known = lines()
    chosen = rng.choice(sorted(known), _LABELS, replace=False)
    labels = rng.choice(np.arange(10, 100), _LABELS, replace=False)
    shuffled = [rng.permutation(known[module]) for module in chosen]
    asked = int(rng.integers(_LABELS))

    def shots() -> Iterator[Sequence[int]]:
        for number in itertools.count(1):
            for i in rng.permutation(_LABELS).tolist():
                line = shuffled[i][number % (len(shuffled[i]) - 1) + 1]
                yield tokenizer.encode(f"\n{line} => {labels[i]}")

    label = str(labels[asked])
    return haystack.task(
        tokenizer,
        length,
        texts=("Each line has a label.", f"\n{shuffled[asked][0]} =>"),
        needles=[],
        filler=shots(),
        answers=[label],
        max_new_tokens=len(tokenizer.encode(f" {label}")),
        rng=rng,
    )


SUITES = (
    answering.suite(
        "documents_qa",
        "The module that defines a class, among excerpts of Python's modules.",
        documents_qa,
        is_share=True,
    ),
    answering.suite(
        "code_search",
        "The name of the function that a description is of, among Python's functions.",
        code_search,
        is_share=True,
    ),
    answering.suite(
        "many_shot",
        "The label of a line of code, after many lines with the labels of 5 modules.",
        many_shot,
        is_share=True,
    ),
)
