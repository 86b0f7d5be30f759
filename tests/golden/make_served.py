"""Writes served/: a GLM-5.2 that learned a few conversations by heart, and its answers.

    /tmp/oracle/bin/python tests/golden/make_served.py

In the environment of make_golden.py; a minute. The folder is save_pretrained's, of
model and tokenizer (chat_tokenizer.json). answers.json has what transformers'
apply_chat_template and generate make of each conversation, greedily and in float32.

The template is checked against chat.json, which other hands have rendered.
"""

import json
import pathlib
import re
import shutil

import make_golden
import torch
import transformers

HERE = pathlib.Path(__file__).parent
FOLDER = HERE / "served"
NUM_STEPS, LEARNING_RATE = 160, 4e-3
MIN_GAP = 0.5  # between the likeliest logits; noise of float32 is below 1e-4
NEW_TOKENS = 64
SIZES = {
    "vocab_size": 420,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "index_n_heads": 4,
    "index_topk": 64,
    "n_routed_experts": 4,
    "max_position_embeddings": 1024,
    "num_nextn_predict_layers": 0,  # transformers would drop it
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
TEMPLATE = """\
[gMASK]<sop>
{%- if enable_thinking is not defined or enable_thinking -%}
<|system|>Reasoning Effort: {{ (reasoning_effort or 'max') | capitalize }}
{%- endif -%}
{%- if tools -%}
<|system|>
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{% for tool in tools %}{% set function = tool.function or tool -%}
{% if not function.defer_loading -%}
{ {%- for key, value in function.items() if key not in ('defer_loading', 'strict') -%}
{% if not loop.first %}, {% endif %}{{ key | tojson }}: {{ value | tojson }}
{%- endfor -%} }
{% endif %}{% endfor -%}
</tools>

For each function call, output the function name and arguments within the following \
XML format:
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}\
</arg_value><arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...\
</tool_call>
{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role in ('system', 'user') -%}
<|{{ m.role }}|>{{ m.content }}
{%- elif m.role == 'assistant' -%}
<|assistant|><think>
{%- if m.reasoning_content and (loop.index0 > last.user or clear_thinking is false) -%}
{{ m.reasoning_content }}
{%- endif -%}
</think>{{ (m.content or '').strip() }}
{%- for call in m.tool_calls or [] -%}
{%- set call = call.function or call -%}
<tool_call>{{ call.name }}
{%- for key, value in call.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>
{{- value if value is string else value | tojson }}</arg_value>
{%- endfor -%}
</tool_call>
{%- endfor -%}
{%- else -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}<|observation|>{%- endif -%}
<tool_response>{{ m.content }}</tool_response>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|><think>
{%- if enable_thinking is defined and not enable_thinking -%}</think>{%- endif -%}
{%- endif -%}
"""
# As pydantic-ai describes a Python function, tests/serving/clients_test.py.
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "additionalProperties": False,
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "type": "object",
        },
        "strict": True,
    },
}
# As the program `llm` does, which keeps no thoughts.
PLAIN_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "type": "object",
        },
    },
}
SYSTEM = {"role": "system", "content": "You know the weather."}
WETTER = {"role": "user", "content": "Wetter in Köln?"}
CALL = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}
ASKED = {"role": "assistant", "content": "", "reasoning_content": "I must ask."}
PLAIN_ASKED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "21 °C"}
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello!", "reasoning_content": "A greeting."}
NOW = {"role": "user", "content": "And now?"}
STILL = {"role": "assistant", "content": "Still here.", "reasoning_content": "Yes."}
BYE = {"role": "user", "content": "Bye"}
# Of each: messages, tools, switches of the template, and the answer to learn.
CONVERSATIONS = {
    "one_turn": ([HI], [], {}, "A greeting.</think>Hello!<|user|>"),
    "without_thinking": (
        *([HI], [], {"enable_thinking": False}),
        "Good day!<|user|>",
    ),
    "second_turn": ([HI, HELLO, NOW], [], {}, "Yes.</think>Still here.<|user|>"),
    "third_turn": (
        *([HI, HELLO, NOW, STILL, BYE], [], {}),
        "They leave.</think>Goodbye!<|user|>",
    ),
    "third_turn_with_all_thoughts": (
        *([HI, HELLO, NOW, STILL, BYE], [], {"clear_thinking": False}),
        "All said.</think>Farewell!<|user|>",
    ),
    "high_effort": (
        *([BYE], [], {"reasoning_effort": "high"}),
        "Short.</think>Bye.<|endoftext|>",
    ),
    "call": (
        *([SYSTEM, WETTER], [WEATHER], {}),
        "I must ask.</think><tool_call>weather<arg_key>city</arg_key><arg_value>Köln"
        "</arg_value></tool_call><|observation|>",
    ),
    "result": (
        *([SYSTEM, WETTER, ASKED | {"tool_calls": [CALL]}, RESULT], [WEATHER], {}),
        "It is warm.</think>21 °C.<|user|>",
    ),
    "plain_call": (
        *([SYSTEM, WETTER], [PLAIN_WEATHER], {}),
        "I must ask.</think><tool_call>weather<arg_key>city</arg_key><arg_value>Köln"
        "</arg_value></tool_call><|observation|>",
    ),
    "plain_result": (
        *([SYSTEM, WETTER, PLAIN_ASKED, RESULT], [PLAIN_WEATHER], {}),
        "It is warm.</think>21 °C.<|user|>",
    ),
}


def read(text):
    """Returns thought, content and calls of a sampled text, read by expressions."""
    text = re.sub(r"<\|\w+\|>$", "", text)
    thought, _, content = text.rpartition("</think>")
    calls = [
        {"name": name, "arguments": dict(re.findall(ARGUMENT, rest))}
        for name, rest in re.findall(r"<tool_call>(\w+)(.*?)</tool_call>", content)
    ]
    content = re.sub(r"<tool_call>.*</tool_call>", "", content)
    return {"reasoning_content": thought, "content": content, "tool_calls": calls}


ARGUMENT = r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>"


def check_template(tokenizer):
    """Compares all cases of GLM-5.2 in chat.json."""
    golden = json.loads((HERE / "chat.json").read_text(encoding="utf-8"))
    cases = [case for case in golden["cases"] if case["version"] == "glm5.2"]
    for case in cases:
        said = golden["conversations"][case["name"]]
        switches = {k: case[k] for k in ("enable_thinking", "clear_thinking")}
        ids = ids_of(tokenizer, said["messages"], said["tools"], switches, False)
        is_ended = said["messages"][-1]["role"] == "assistant"
        assert [*ids, *[0] * is_ended] == case["tokens"], case
    print(f"The template agrees with {len(cases)} cases.")


def ids_of(tokenizer, messages, tools, switches, add_generation_prompt=True):
    return tokenizer.apply_chat_template(
        messages,
        tools=tools or None,
        add_generation_prompt=add_generation_prompt,
        return_dict=False,
        **switches,
    )


def learn(model, rows):
    """Trains on the answers alone, until each of their tokens stands out."""
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, (0.9, 0.99))
    size = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), size, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor([*prompt, *answer])
        labels[i, len(prompt) : end] = torch.tensor(answer)
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / NUM_STEPS)
        logits = model(ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels[:, 1:], label_smoothing=0.02
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(step, round(loss.item(), 4), flush=True)


def rounded(model):
    """Rounds the weights to bfloat16, as a release has them; computes in float32."""
    for name, value in model.named_parameters():
        if not name.endswith("e_score_correction_bias"):
            value.data = value.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config.do_sample = False
    model.save_pretrained(FOLDER)
    return model.float().eval()


def answer(model, tokenizer, prompt, expected):
    """Returns what generate draws, if each token stands out."""
    made = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = made.sequences[0, len(prompt) :].tolist()
    assert ids == expected, (tokenizer.decode(ids), tokenizer.decode(expected))
    first, second = torch.stack(made.logits).topk(2).values[:, 0].T
    assert (first - second).min() > MIN_GAP, (first - second).min()
    return ids


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(HERE / "chat_tokenizer.json"),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    check_template(tokenizer)
    stops = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    ids = tokenizer.convert_tokens_to_ids(stops)
    changes = SIZES | {"eos_token_id": ids, "pad_token_id": ids[0]}
    torch.manual_seed(0)
    model = transformers.GlmMoeDsaForCausalLM(
        transformers.GlmMoeDsaConfig(**(make_golden.CONFIGS["glm5"] | changes))
    )
    rows = [
        (ids_of(tokenizer, *said), tokenizer(text)["input_ids"])
        for *said, text in CONVERSATIONS.values()
    ]
    learn(model, rows)
    model = rounded(model)
    tokenizer.save_pretrained(FOLDER)
    found = {}
    for (name, (*said, _)), row in zip(CONVERSATIONS.items(), rows, strict=True):
        ids = answer(model, tokenizer, *row)
        asked = dict(zip(("messages", "tools", "switches"), said, strict=True))
        answered = {"prompt": row[0], "ids": ids, **read(tokenizer.decode(ids))}
        found[name] = asked | answered
    text = json.dumps(found, ensure_ascii=False)
    (FOLDER / "answers.json").write_text(text + "\n", encoding="utf-8")
    print(*(f"{x.name} {x.stat().st_size}" for x in sorted(FOLDER.iterdir())))


if __name__ == "__main__":
    main()
