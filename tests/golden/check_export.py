"""Folders that transformers wrote, through our converter, back into transformers.

    /tmp/oracle/bin/python tests/golden/check_export.py --python=PYTHON

in the environment of make_golden.py, with accelerate; PYTHON runs glm5_jax. For models
in bfloat16 and in float32, from one file and from several, to one and to several: every
tensor of source -> run folder -> Hugging Face folder must have its bytes, and the model
read back its logits.
Then FP8: what transformers makes of our FP8 folder is what it makes of the same weights
that we wrote in bfloat16. Then texts: tokenizer, chat template and sampling defaults of
chat_model/ are the same after the same way. Prints a line a case and exits with 1 if
one differs.
"""

import argparse
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile

import make_golden
import safetensors.torch
import torch
import transformers

ROOT = pathlib.Path(__file__).parent.parent.parent
NO_MTP = {"num_nextn_predict_layers": 0}  # transformers would drop it
# Several whole blocks of 128: transformers 5.23 refuses to multiply out ragged ones.
WIDE = {"hidden_size": 256, "intermediate_size": 384, "q_lora_rank": 128}

CUT = """
import sys
from glm5_jax.weights import huggingface_export
from glm5_jax.weights import loading
config, params, _ = loading.load_model(sys.argv[1])
huggingface_export.save_params(params, config, sys.argv[2], max_shard_bytes=100_000)
"""


@dataclasses.dataclass
class Converter:
    """Runs our command."""

    python: str

    def __call__(self, source: pathlib.Path, target: pathlib.Path, *flags: str) -> None:
        paths = (f"--source={source}", f"--target={target}")
        self._run("-m", "glm5_jax.convert", *paths, *flags)

    def cut(self, source: pathlib.Path, target: pathlib.Path) -> None:
        """Writes it in files of 100 kB, which the command has no flag for."""
        self._run("-c", CUT, str(source), str(target))

    def _run(self, *arguments: str) -> None:
        subprocess.run(
            [self.python, *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            check=True,
            stdout=subprocess.DEVNULL,
        )


def tensors(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= safetensors.torch.load_file(path)
    return found


def are_same(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Names, dtypes, shapes and bytes."""
    before, after = tensors(one), tensors(other)
    return before.keys() == after.keys() and all(
        value.dtype == after[name].dtype
        and value.shape == after[name].shape
        and torch.equal(
            value.flatten().view(torch.uint8), after[name].flatten().view(torch.uint8)
        )
        for name, value in before.items()
    )


@torch.no_grad()
def logits(folder: pathlib.Path, dtype: torch.dtype, **kwargs) -> torch.Tensor:
    model = transformers.GlmMoeDsaForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", **kwargs
    )
    ids = torch.randint(80, (2, 40), generator=torch.Generator().manual_seed(0))
    return model.eval()(ids).logits


def write(folder: pathlib.Path, dtype: torch.dtype, shard: str, **changes) -> None:
    """A random model as save_pretrained leaves it."""
    torch.manual_seed(0)
    config = make_golden.CONFIGS["glm5"] | NO_MTP | changes
    model = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**config))
    make_golden.randomize(model)
    for name, value in model.named_parameters():
        if not name.endswith("e_score_correction_bias"):
            value.data = value.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard)


def check_bytes(folder: pathlib.Path, convert: Converter, dtype, shard: str) -> bool:
    source, run, back = folder / "source", folder / "run", folder / "back"
    write(source, dtype, shard)
    convert(source, run)
    convert(run, back)
    convert.cut(run, folder / "cut")
    expected, results = logits(source, dtype), []
    for path in (back, folder / "cut"):
        is_same = are_same(source, path)
        is_equal = torch.equal(expected, logits(path, dtype))
        before, after = (len(list(f.glob("*.safetensors"))) for f in (source, path))
        print(
            f"{dtype}, {before} files to {after}: {is_same=}, {is_equal=}", flush=True
        )
        results += [is_same, is_equal]
    return all(results)


def check_fp8(folder: pathlib.Path, convert: Converter) -> bool:
    names = ("source", "fp8", "float32", "bfloat16", "again")
    source, fp8, whole, half, again = (folder / name for name in names)
    write(source, torch.bfloat16, "1GB", **WIDE)
    convert(source, fp8, "--format=hf", "--dtype=fp8")
    convert(fp8, whole, "--format=hf", "--dtype=float32")
    convert(whole, again, "--format=hf", "--dtype=fp8")
    convert(fp8, half, "--format=hf", "--dtype=bfloat16")
    quantization = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = logits(fp8, torch.bfloat16, quantization_config=quantization)
    is_equal = torch.equal(theirs, logits(half, torch.bfloat16))
    is_same = are_same(fp8, again)
    print(f"FP8: logits {is_equal}, bytes after float32 {is_same}")
    return is_equal and is_same


def check_texts(folder: pathlib.Path, convert: Converter) -> bool:
    source, run, back = (
        ROOT / "tests/golden/chat_model",
        folder / "run",
        folder / "back",
    )
    convert(source, run)
    convert(run, back)
    messages = [{"role": "user", "content": "Wie geht's? <|user|>"}]
    before, after = (
        (
            transformers.AutoTokenizer.from_pretrained(path).apply_chat_template(
                messages, return_dict=False
            ),
            transformers.GenerationConfig.from_pretrained(path).to_dict(),
            transformers.AutoConfig.from_pretrained(path).a_key_of_others,
        )
        for path in (source, back)
    )
    is_equal = before == after and torch.equal(
        logits(source, torch.bfloat16), logits(back, torch.bfloat16)
    )
    print(f"texts and logits: {is_equal}, {len(before[0])} tokens of a conversation")
    return is_equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="python3", help="has glm5_jax's packages")
    convert = Converter(parser.parse_args().python)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        for shard in ("1GB", "100KB"):
            with tempfile.TemporaryDirectory() as folder:
                results.append(check_bytes(pathlib.Path(folder), convert, dtype, shard))
    with tempfile.TemporaryDirectory() as folder:
        results.append(check_fp8(pathlib.Path(folder), convert))
        results.append(check_texts(pathlib.Path(folder), convert))
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
