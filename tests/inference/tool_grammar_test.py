"""The grammar of tool calls, against texts that the chat template writes and parses."""

import functools
import json

import numpy as np
from absl.testing import parameterized

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import parsing, templates
from glm5_jax.inference import constraints, grammars, tool_grammar
from tests import environment

TOKENIZER = tokenizer_lib.byte_tokenizer(tokenizer_lib.SPECIAL_TOKENS)
TEMPLATE = templates.Template(TOKENIZER)
END = TOKENIZER.special_ids["<|observation|>"]
PROPERTIES = {
    "path": {"type": "string"},
    "mode": {"type": ["string"], "enum": ['r"', "w b"]},
    "code": {"type": "string", "pattern": "^[a-c]{2}$"},
    "part": {"type": "string", "pattern": "x/y"},
    "short": {"type": "string", "minLength": 1, "maxLength": 3},
    "brief": {"type": "string", "maxLength": 2},
    "long": {"type": "string", "minLength": 2},
    "fixed": {"type": "string", "const": "on"},
    "size": {"$ref": "#/$defs/size"},
    "any": {},
    "flags": {"type": "array", "items": {"type": "boolean"}},
    "maybe": {"type": ["string", "null"]},
    "free": True,
}
OPEN = {
    "name": "open",
    "parameters": {
        "type": "object",
        "properties": PROPERTIES,
        "required": ["path"],
        "$defs": {"size": {"type": "integer", "maximum": 99}},
    },
}
BOTH = {"type": "string", "enum": ["a"], "pattern": "a"}
TOOLS = [{"type": "function", "function": OPEN}, {"name": "stop"}]
WHOLE = {
    "path": "a\n<b>/é",
    "mode": 'r"',
    "code": "ab",
    "part": "ax/yb",
    "short": "a",
    "fixed": "on",
    "size": 7,
    "any": {"k": [1, None]},
    "flags": [True, False],
    "maybe": None,
}


@functools.cache
def constraint(name=None, is_single=False):
    compiler = grammars.Grammars(TOKENIZER, TOKENIZER.vocab_size)
    source = tool_grammar.source(TOOLS, name, is_single=is_single)
    return compiler.compile([source], frozenset([END]))


def written(*calls):
    """Returns the ids of calls as the template writes them, with the end."""
    said = [{"name": name, "arguments": arguments} for name, arguments in calls]
    turn = {"role": "assistant", "content": "", "tool_calls": said}
    messages = [{**turn, "reasoning_content": ""}, {"role": "tool", "content": ""}]
    ids = TEMPLATE.render(messages).tokens
    first = ids.index(TOKENIZER.special_ids["<tool_call>"])
    return ids[first : ids.index(END) + 1]


def follows(ids, **options):
    """Returns whether a constraint allows each of the ids."""
    return all_follow(constraint(**options), ids)


def all_follow(constraint, ids):
    """Returns whether a constraint allows each of the ids."""
    matcher = constraint.start()
    for id in ids:
        words = matcher.allowed()
        if not words[id // constraints.WORD] >> (id % constraints.WORD) & 1:
            return False
        matcher.consume([id])
    return True


class CallTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"path": ""},),
        (WHOLE,),
        ({"path": "x", "short": "abc", "any": "text"} | {"maybe": None},),
        ({"path": "x", "brief": "", "long": "several", "free": [1]},),
        ({"path": "x", "brief": "ab", "long": "ab"},),
    )
    def test_what_the_template_writes_is_allowed(self, arguments):
        arguments = {k: arguments[k] for k in PROPERTIES if k in arguments}
        if isinstance(arguments.get("any"), str):  # of no type: written as JSON
            arguments["any"] = json.dumps(arguments["any"])
        ids = written(("open", arguments), ("stop", {}))
        self.assertTrue(follows(ids))
        self.assertFalse(follows(ids, is_single=True))
        self.assertFalse(follows(ids, name="open", is_single=True))
        found = TEMPLATE.parse(ids, TOOLS)["tool_calls"][0]["function"]
        self.assertEqual(found["name"], "open")
        self.assertEqual(found["arguments"]["path"], arguments["path"])

    @parameterized.parameters(
        ("close", {"path": ""}),
        ("open", {}),
        ("open", {"other": "", "path": ""}),
        ("open", {"path": "", "mode": "x"}),
        ("open", {"path": "", "code": "abc"}),
        ("open", {"path": "", "code": "ad"}),
        ("open", {"path": "", "part": "xy"}),
        ("open", {"path": "", "short": "four"}),
        ("open", {"path": "", "short": ""}),
        ("open", {"path": "", "brief": "abc"}),
        ("open", {"path": "", "long": "a"}),
        ("open", {"path": "", "size": 100}),
        ("open", {"path": "", "size": "7a"}),
        ("open", {"path": "", "flags": [1]}),
        ("stop", {"path": ""}),
    )
    def test_other_calls_are_not(self, name, arguments):
        self.assertFalse(follows(written((name, arguments))))

    def test_a_call_that_has_begun(self):
        """The rest of what the template writes, and further calls."""
        compiler = grammars.Grammars(TOKENIZER, TOKENIZER.vocab_size)
        for is_single in (False, True):
            source = tool_grammar.source(TOOLS, is_single=is_single, has_begun=True)
            inner = compiler.compile([source], frozenset([END]))
            call = TOKENIZER.special_ids["<tool_call>"]
            whole = constraints.After(inner, call, may_end=True)
            calls = ("stop", {}), ("open", {"path": "x"})
            said = TOKENIZER.encode("any text")
            for ids, is_allowed in (
                ([*said, END], True),
                ([*said, *written(*calls[:1])], True),
                ([*said, *written(*calls)], not is_single),
                ([*said, *written(("open", {}))], False),
            ):
                self.assertEqual(all_follow(whole, ids), is_allowed)

    def test_random_draws_parse(self):
        """Whatever the grammar lets through is a call that the parser reads."""
        rng = np.random.default_rng(0)
        for _ in range(5):
            matcher, ids = constraint(is_single=True).start(), []
            while not ids or ids[-1] != END:
                bits = np.unpackbits(
                    matcher.allowed().view(np.uint8), bitorder="little"
                )
                allowed = np.flatnonzero(bits)
                special = allowed[allowed > 255]  # ends texts soon
                pool = special if len(special) and rng.random() < 0.4 else allowed
                ids.append(int(rng.choice(pool)))
                matcher.consume(ids[-1:])
            message = parsing.parse(
                ids, TOKENIZER, is_thinking=False, tools=TOOLS, stop_ids=[END]
            )
            self.assertNotIn("errors", message)
            (call,) = message["tool_calls"]
            names = {"open": {*PROPERTIES}, "stop": set()}[call["function"]["name"]]
            self.assertContainsSubset(call["function"]["arguments"], names)

    @parameterized.parameters(
        ([], None, "there are no tools"),
        (TOOLS, "fly", "no tool named 'fly'"),
        ([{"name": "f", "parameters": {"$ref": "x"}}], None, r"\$ref"),
        ([{"name": "f", "parameters": {"required": ["a"]}}], None, "require 'a'"),
        ([{"name": "f", "parameters": ["a"]}], "f", "must be a JSON schema"),
        ([{"name": "f", "parameters": {"properties": ["a"]}}], "f", "are not a JSON"),
        ([{"name": "f", "parameters": {"required": "a"}}], "f", "are not a JSON"),
        (
            [{"name": "f", "parameters": {"properties": {"a": BOTH}}}],
            "f",
            "f'.a cannot have enum and pattern together",
        ),
    )
    def test_wrong_tools(self, tools, name, message):
        with self.assertRaisesRegex(grammars.GrammarError, message):
            tool_grammar.source(tools, name)


if __name__ == "__main__":
    environment.main()
