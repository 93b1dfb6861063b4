#!/usr/bin/env python3
"""make_experts_golden.py: writes test/golden/experts.json, the losses and norms of small models
with experts, which a GPU must give, too (test_gpu.py, test_gpu_device.py). They are train_gpt's,
which test_modern.py compares with transformers and a reference.

python3 test/make_experts_golden.py
"""

import json
import os

import harness
from test_gpu import Experts

CHANGES = {
    "llama": dict(moe_balance="aux", moe_aux_coefficient=0.05, moe_z_coefficient=0.01),
    "qwen3": dict(moe_balance="bias"),
    "prototypes": dict(micro_batch=1),
    "gpt2": dict(recompute="block", moe_balance="bias"),
}


def main():
    golden = {}
    for name, changes in CHANGES.items():
        flags = dict(changes, val_every=0)
        losses, norms, *_ = Experts.found("train_gpt", 1, 1, **Experts.flags(name, **flags))[0]
        golden[name] = {"flags": flags, "losses": losses, "norms": norms}
    with open(os.path.join(harness.ROOT, "test/golden/experts.json"), "w") as file:
        file.write(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
