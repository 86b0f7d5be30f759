"""Prints docs/kernels_reference.md: every public op, from its docstring.

python benchmarks/kernels_reference.py > docs/kernels_reference.md
"""

import inspect
import re
import sys

import pallas_kernels
from pallas_kernels import eight_bits, selection

HEAD = """# Kernels: reference

Made by `python benchmarks/kernels_reference.py` from the docstrings.
[kernels.md](kernels.md) says how the ops belong together. Letters: B sequences, T
queries, S keys, N heads, H and O dims of a head, C and R latent and rotated dims
(row = C + R), I heads and J dims of the indexer, K listed keys, W words of bits, P
pages of s tokens, M rows of E groups.
"""


def page() -> str:
    """The page, without a device."""
    parts = [HEAD]
    for name in pallas_kernels.__all__:
        if callable(function := getattr(pallas_kernels, name)):
            parts.append(_entry(f"pallas_kernels.{name}", function))
    names = (
        "as_sorted",
        "check_lists",
        "form",
        "pack",
        "to_list",
        "to_mask",
        "unpack",
        "visible",
    )
    for name in names:
        function = getattr(selection, name)
        parts.append(_entry(f"pallas_kernels.selection.{name}", function))
    for name in ("power", "restored", "rounded"):
        function = getattr(eight_bits, name)
        parts.append(_entry(f"pallas_kernels.eight_bits.{name}", function))
    return "\n".join(parts)


def _entry(name: str, function: object) -> str:
    signature = inspect.signature(function)
    lines = [f"    {_plain(p)}," for p in map(str, signature.parameters.values())]
    after = next(
        (
            i
            for i, p in enumerate(signature.parameters.values())
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        ),
        None,
    )
    if after is not None:
        lines.insert(after, "    *,")
    returns = _plain(inspect.formatannotation(signature.return_annotation))
    code = "\n".join([f"{name.split('.')[-1]}(", *lines, f") -> {returns}"])
    text = inspect.getdoc(function)
    return f"## `{name}`\n\n```python\n{code}\n```\n\n```text\n{text}\n```\n"


def _plain(text: str) -> str:
    """Annotations as they are written."""
    return re.sub(r"\b(jaxlib\._jax|jaxtyping|jax|numpy)\.(?=[A-Za-z])", "", text)


if __name__ == "__main__":
    sys.stdout.write(page())
