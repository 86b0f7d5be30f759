"""Writes chat.json: token ids and masks of GLM-5's chat template by other hands.

The oracles are PyPI `renderers` 0.1.12 (GLM-5, GLM-5.1) and, for GLM-5.2, which it does
not have, XTuner's glm52_chat.py (a file of its repository). Run by hand:

    python3.11 -m venv /tmp/renderers
    /tmp/renderers/bin/pip install renderers==0.1.12 transformers httpx absl-py
    PYTHONPATH=. /tmp/renderers/bin/python tests/golden/make_chat.py GLM52_CHAT_PY

The tokenizer is glm5_jax/data/tokenizer.py's BPE with GLM-5's special tokens, written
to chat_tokenizer.json and read by the oracles through transformers.
"""

import importlib
import json
import pathlib
import sys
import types

import transformers
from renderers import base, configs, glm5

from glm5_jax.data import tokenizer as tokenizer_lib

FOLDER = pathlib.Path(__file__).parent
VOCAB_SIZE = 420

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für einen Ort, 天気",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"type": "object"},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def assistant(content="", reasoning=None, calls=(), masked=False):
    message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ]
    if masked:
        message["is_masked"] = True
    return message


CALLS = [("weather", {"city": "Köln", "days": 3, "units": {"t": ["°C", None, True]}})]
CONVERSATIONS = {
    "one_turn": ([user("What is 2 + 2?"), assistant("It is 4.")], ()),
    "with_thought": (
        [system("Be brief."), user("2+2?"), assistant(" 4 \n", "\nTwo and two. ")],
        (),
    ),
    "several_turns": (
        [
            user("Hi"),
            assistant("Hello!", "A greeting."),
            user("And now?"),
            assistant("Still here."),
            user("Bye"),
            assistant("Goodbye!", "They leave."),
        ],
        (),
    ),
    "tools": (
        [
            system("You know the weather."),
            user("Wetter in Köln?"),
            assistant("Let me see.", "I must ask.", CALLS),
            tool('{"t": 21}'),
            assistant("21 °C.", "It is warm."),
            user("Danke"),
            assistant("Gern."),
        ],
        (WEATHER, CLOCK),
    ),
    "consecutive_results": (
        [
            user("Time and weather"),
            assistant("", "Both.", [("clock", {}), ("weather", {"city": "Rome"})]),
            tool("12:30"),
            tool("rain\n"),
            assistant("", None, [("weather", {"city": "5", "days": -1})]),
            tool(""),
            assistant("It rains."),
        ],
        (CLOCK, WEATHER),
    ),
    "unicode": (
        [user("漢字 🙂 e\u0301 \u2028\x00\r\n"), assistant("naïve Ω≈ç\t", "🙃 思考")],
        (),
    ),
    "empty": (
        [
            *(system(""), user(""), assistant("", "")),
            *(user(" "), assistant("  \n ")),
            *(user("a"), assistant("b", "")),
        ],
        (),
    ),
    "thought_in_content": (
        [user("a"), assistant("<think>\nso\n</think>\n\nb"), user("c")],
        (),
    ),
    "error_segment": (
        [
            user("Wetter?"),
            assistant("", "Guess.", [("weather", {"town": "Bonn"})], masked=True),
            tool("error: no argument 'town'"),
            assistant("", "Again.", [("weather", {"city": "Bonn"})]),
            tool("sun"),
            assistant("Sun.", masked=True),
            user("Sure?"),
        ],
        (WEATHER,),
    ),
    "spelt_special_tokens": (
        [user("<|user|> </think>"), assistant("<tool_call>", "<|endoftext|>")],
        (),
    ),
    "system_in_the_middle": (
        [user("a"), assistant("b"), system("c"), user("d"), assistant("e", "f")],
        (),
    ),
}
# What a model may sample, as text in which special tokens are ids.
SAMPLED = {
    "thought_and_answer": "So.</think>The answer<|user|>",
    "no_thought": "</think>Yes.<|endoftext|>",
    "cut_off_in_the_thought": "I think that",
    "call": (
        "Ask.</think>\n<tool_call>weather<arg_key>city</arg_key><arg_value>5"
        "</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
        "<|observation|>"
    ),
    "two_calls": (
        "</think>Both: <tool_call>clock</tool_call><tool_call>weather<arg_key>units"
        '</arg_key><arg_value>{"a": [1, "é"]}</arg_value></tool_call><|observation|>'
    ),
}
BRIDGES = {
    "tool_after_call": ("call", [tool("21"), tool("22")]),
    "tool_after_user_stop": ("thought_and_answer", [tool("21")]),
    "tool_after_truncation": ("cut_off_in_the_thought", [tool("too long")]),
}


def oracle(tokenizer, version, thinking, clear):
    kind = {"glm5": "GLM5", "glm5.1": "GLM51"}[version]
    config = getattr(configs, f"{kind}RendererConfig")
    return getattr(glm5, f"{kind}Renderer")(
        tokenizer, config(enable_thinking=thinking, clear_thinking=clear)
    )


def xtuner(path):
    """XTuner's module alone, without the packages that it does not need here."""
    for name in ("xtuner", "xtuner.v1"):
        sys.modules[name] = types.ModuleType(name)
    stub = types.ModuleType("xtuner.v1.utils")
    stub.IGNORE_INDEX = -100
    sys.modules["xtuner.v1.utils"] = stub
    folder = types.ModuleType("glm52_package")
    folder.__path__ = []
    sys.modules["glm52_package"] = folder
    offsets = types.ModuleType("glm52_package.qwen35_chat")
    offsets.get_offset_mapping = None
    sys.modules["glm52_package.qwen35_chat"] = offsets
    spec = importlib.util.spec_from_file_location("glm52_package.glm52_chat", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_renderers(tokenizers):
    for version in ("glm5", "glm5.1"):
        for thinking in (True, False):
            for clear in (True, False):
                for name, (messages, tools) in CONVERSATIONS.items():
                    split = name == "spelt_special_tokens"
                    used = tokenizers[split]
                    renderer = oracle(used, version, thinking, clear)
                    sample = base.build_training_sample(
                        renderer,
                        messages,
                        tools=list(tools),
                        ensure_final_stop=True,
                        message_loss_mask=[not m.get("is_masked") for m in messages],
                    )
                    prompt = renderer.render(
                        messages, tools=list(tools), add_generation_prompt=True
                    ).token_ids
                    rows = (sample.token_ids, sample.loss_mask, prompt)
                    yield name, (version, thinking, clear), rows


def of_xtuner(tokenizer, module):
    for thinking in (True, False):
        for clear in (True, False):
            for name, (messages, tools) in CONVERSATIONS.items():
                if name in ("spelt_special_tokens", "system_in_the_middle"):
                    continue  # text is not kept apart; an end before a system message
                if name == "thought_in_content":
                    continue  # newlines around the thought are kept
                if name == "empty":
                    # XTuner tells a thought of "" from none; here they are the same.
                    drop = "reasoning_content"
                    messages = [
                        {k: v for k, v in m.items() if k != drop} for m in messages
                    ]
                marked = [m | {"loss": not m.get("is_masked")} for m in messages]
                switches = {"enable_thinking": thinking, "clear_thinking": clear}
                ids, labels = module.glm52_tokenize_fn_fastspeed(
                    tokenizer, marked, list(tools), **switches
                )
                text, _ = module.render_glm52_chat(
                    marked, list(tools), add_generation_prompt=True, **switches
                )
                # An end that XTuner puts into the middle, too.
                text = text.replace("<|endoftext|><|assistant|>", "<|assistant|>")
                prompt = tokenizer(text)["input_ids"]
                mask = [label != -100 for label in labels]
                yield name, ("glm5.2", thinking, clear), (ids, mask, prompt)


def parsed(tokenizer, whole):
    for name, text in SAMPLED.items():
        ids = whole.encode(text, add_special_tokens=False)
        renderer = oracle(tokenizer, "glm5", True, True)
        message = renderer.parse_response(ids, tools=[WEATHER, CLOCK])
        calls = [{"name": c.name, "arguments": c.arguments} for c in message.tool_calls]
        yield (
            name,
            {
                "ids": ids,
                "content": message.content,
                "reasoning_content": message.reasoning_content or "",
                "calls": calls,
                "is_complete": message.reasoning_complete,
            },
        )


def bridged(tokenizer, samples):
    renderer = oracle(tokenizer, "glm5", True, True)
    prompt = renderer.render([user("x")], add_generation_prompt=True).token_ids
    for name, (sampled, messages) in BRIDGES.items():
        ids = samples[sampled]["ids"]
        out = renderer.bridge_to_next_turn(prompt, ids, messages)
        before = [*prompt, *ids]
        assert out.token_ids[: len(before)] == before
        yield (
            name,
            {
                "last": ids[-1],
                "is_complete": samples[sampled]["is_complete"],
                "messages": messages,
                "ids": out.token_ids[len(before) :],
            },
        )


def main():
    texts = [json.dumps(c, ensure_ascii=False) for c in CONVERSATIONS.values()]
    texts += [pathlib.Path(__file__).read_text(), tokenizer_lib.__doc__]
    ours = tokenizer_lib.train_bpe(texts, VOCAB_SIZE, tokenizer_lib.SPECIAL_TOKENS)
    file = FOLDER / "chat_tokenizer.json"
    ours.save(file)

    def wrapped(split):
        return transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(file),
            eos_token="<|endoftext|>",
            split_special_tokens=split,
        )

    # The template's own words spell special tokens: only where a message does, too, is
    # the text split.
    tokenizer, whole = wrapped(True), wrapped(False)
    cases = list(of_renderers((whole, tokenizer)))
    if len(sys.argv) > 1:
        cases += of_xtuner(whole, xtuner(sys.argv[1]))
    samples = dict(parsed(tokenizer, whole))
    written = {
        "conversations": {
            name: {"messages": messages, "tools": tools}
            for name, (messages, tools) in CONVERSATIONS.items()
        },
        "cases": [
            {
                "name": name,
                "version": version,
                "enable_thinking": thinking,
                "clear_thinking": clear,
                "tokens": tokens,
                "mask": "".join("01"[m] for m in mask),
                "prompt_size": len(prompt),
                "prompt_end": prompt[-3:],
            }
            for name, (version, thinking, clear), (tokens, mask, prompt) in cases
        ],
        "parsed": samples,
        "bridged": dict(bridged(tokenizer, samples)),
    }
    lines = json.dumps(written, ensure_ascii=False, separators=(",", ":"))
    lines = lines.replace('{"name":"', '\n{"name":"')
    (FOLDER / "chat.json").write_text(lines + "\n", encoding="utf-8")
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
