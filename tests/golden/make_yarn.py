"""Makes yarn.json: what transformers makes of rope_scaling and rope_parameters.

    /tmp/oracle/bin/python tests/golden/make_yarn.py

in the environment of make_golden.py. Each case is the model of glm5/ with some keys of
its config.json replaced: the frequencies and factors that transformers makes of it,
and for some its logits of the first row of input_ids at every eighth token, in float32.
"""

import copy
import json
import os
import pathlib
import shutil
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from make_golden import load

GOLDEN = pathlib.Path(__file__).parent
OLD = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}
CASES = {
    # rope_scaling wins, and with it the theta beside it.
    "both": {"rope_scaling": OLD, "rope_theta": 5e4},
    "theta_is_lost": {"rope_scaling": OLD},
    "defaults": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    "outer_context": {
        "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
        "original_max_position_embeddings": 16,
    },
    "mscale": {
        "rope_parameters": OLD
        | {"rope_theta": 1e4, "rope_type": "yarn"}
        | {"mscale": 0.707, "mscale_all_dim": 2.0, "beta_fast": 4, "beta_slow": 0.5}
    },
    "given": {
        "rope_parameters": OLD
        | {"rope_theta": 1e3, "rope_type": "yarn", "factor": 8.0}
        | {"attention_factor": 1.5, "truncate": False, "beta_fast": 2}
    },
}

WITH_LOGITS = ("both", "mscale")


@torch.no_grad()
def main() -> None:
    """Writes the file."""
    ids = np.load(GOLDEN / "glm5" / "reference.npz")["input_ids"][:1]
    cases = []
    for name, changes in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(GOLDEN / "glm5", folder, dirs_exist_ok=True)
            path = pathlib.Path(folder) / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))
            model = load(folder)
            logits = model(torch.from_numpy(ids).long(), use_cache=False).logits[0]
            rope = model.model.rotary_emb
            exact = copy.deepcopy(model).double()(
                torch.from_numpy(ids).long(), use_cache=False
            )
            noise = (exact.logits[0] - logits).abs().max().item()
            print(f"{name}: noise {noise:.1e}")
            assert noise < 5e-6
        case = {
            "name": name,
            "changes": changes,
            "rope_theta": model.config.rope_parameters["rope_theta"],
            "frequencies": rope.inv_freq.tolist(),
            "table_factor": rope.attention_scaling,
            "softmax_scale": model.model.layers[0].self_attn.scaling,
        }
        if name in WITH_LOGITS:
            case["logits"] = [
                [round(x, 6) for x in row] for row in logits[::8].tolist()
            ]
        cases.append(case)
    (GOLDEN / "yarn.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()
