"""Makes delta_rule.npz: what transformers' torch code makes of the delta rule.

    /tmp/oracle/bin/python tests/golden/make_delta_rule.py

in the environment of make_golden.py. Decays of heads ("head"): Qwen3-Next's chunked and
recurrent functions. Decays of channels ("channel"): those of glm5_next (KDA). Each runs
from zeros and from a given state; lengths are no multiples of the chunk.
"""

import functools
import pathlib

import numpy as np
import torch
from torch.nn import functional
from transformers.models.glm5_next import modeling_glm5_next as glm5_next
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

FILE = pathlib.Path(__file__).parent / "delta_rule.npz"
B, T, N, H, O = 1, 11, 2, 4, 3
CASES = {
    "head": (
        1,
        qwen3_next.torch_chunk_gated_delta_rule,
        qwen3_next.torch_recurrent_gated_delta_rule,
    ),
    "channel": (
        H,
        glm5_next.chunk_kimi_delta_attention,
        glm5_next.recurrent_kimi_delta_attention,
    ),
}


@torch.no_grad()
def main() -> None:
    """Writes the file."""
    rng = np.random.default_rng(0)
    draw = functools.partial(rng.normal, size=(B, T, N, H))
    arrays = {
        "q": draw(),
        "k": draw(),
        "v": rng.normal(size=(B, T, N, O)),
        "beta": rng.uniform(size=(B, T, N)),
        "state": rng.normal(size=(B, N, H, O)),
    }
    for name, (channels, _, _) in CASES.items():
        arrays[f"{name}/log_decay"] = -rng.exponential(size=(B, T, N, channels))
    given = {k: torch.from_numpy(x.astype(np.float32)) for k, x in arrays.items()}
    for name, (channels, chunked, recurrent) in CASES.items():
        decay = given[f"{name}/log_decay"]
        for start in ("zeros", "state"):
            for form, function in (("chunked", chunked), ("recurrent", recurrent)):
                sizes = {"chunk_size": 4} if form == "chunked" else {}
                out, last = function(
                    given["q"],
                    given["k"],
                    given["v"],
                    g=decay[..., 0] if channels == 1 else decay,
                    beta=given["beta"],
                    initial_state=None if start == "zeros" else given["state"],
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                    **sizes,
                )
                key = f"{name}/{start}/{form}"
                given[f"{key}/out"], given[f"{key}/last"] = out, last
    given["q"] = functional.normalize(given["q"], dim=-1) / H**0.5
    given["k"] = functional.normalize(given["k"], dim=-1)
    np.savez_compressed(FILE, **{k: x.numpy() for k, x in given.items()})


if __name__ == "__main__":
    main()
