"""Writes chat_model/: a tiny GLM-5 with its texts, as transformers leaves a release.

    /tmp/oracle/bin/python tests/golden/make_chat_model.py

In the environment of make_golden.py. config.json, generation_config.json and weights
are save_pretrained's of the model, tokenizer.json, tokenizer_config.json and
chat_template.jinja that of the tokenizer (chat_tokenizer.json). config.json has a key
that nobody knows.
"""

import pathlib
import shutil

import make_golden
import torch
import transformers

HERE = pathlib.Path(__file__).parent
SIZES = {
    "vocab_size": 420,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "index_n_heads": 2,
    "n_routed_experts": 4,
    "num_nextn_predict_layers": 0,  # transformers would drop it
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "a_key_of_others": {"kept": [1, None, "yes"]},
}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}\n"


def main() -> None:
    folder = HERE / "chat_model"
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(HERE / "chat_tokenizer.json"),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|user|>", "<|assistant|>", "<|observation|>"],
        chat_template=TEMPLATE,
    )
    ids = tokenizer.convert_tokens_to_ids(
        ["<|endoftext|>", "<|user|>", "<|observation|>"]
    )
    changes = SIZES | {"eos_token_id": ids, "pad_token_id": ids[0]}
    config = transformers.GlmMoeDsaConfig(**(make_golden.CONFIGS["glm5"] | changes))
    torch.manual_seed(0)
    model = transformers.GlmMoeDsaForCausalLM(config)
    make_golden.randomize(model)
    for name, value in model.named_parameters():
        if not name.endswith("e_score_correction_bias"):
            value.data = value.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(*sorted(path.name for path in folder.iterdir()))


if __name__ == "__main__":
    main()
