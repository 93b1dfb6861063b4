#!/usr/bin/env python3
"""Golden numbers of Muon by torch.optim.Muon and torch.optim.AdamW.

    python3 test/make_muon_golden.py    writes test/golden/muon_*.json; needs torch, transformers
                                        and numpy

torch.optim.Muon rounds a matrix to bf16 before its iteration. Here it does not (`exact`), so that
the numbers can be compared to 1e-4 with a run in fp32; the rest of its code runs as it is. The
script prints what the rounding would change: the distance of the weights after the last step.

gpt2 is the model of golden/make_golden.py in float64, from golden/gpt_tiny_model.bin. Others are
those of make_transformers_golden.py, in float32. Each matrix of a block is a parameter of its own:
q, k and v, gate and up. Ten steps, the batches and the clipping of these scripts; rates and decay
are below. Embeddings, the head and vectors have AdamW; vectors do not decay.

A file has: versions; flags of the run; losses and norms of the steps (before clipping); weights
after the last: of each tensor its norm and some elements, number i of them at index i n / count.
"""

import json
import math
import os
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "golden")]
import make_golden as gpt2  # noqa: E402
import make_transformers_golden as modern  # noqa: E402

STEPS = 10
FLAGS = {
    "optimizer": "muon", "lr": 1e-3, "weight-decay": 0.1, "muon-lr": 0.02, "muon-momentum": 0.95,
    "muon-weight-decay": 0.2, "grad-clip": 1.0,
}
MODERN = "llama", "qwen3"


class Exact:
    """torch, without bf16."""

    bfloat16 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def step_of(parameters, matrices, exact):
    """parameters: name -> tensor; matrices: the names that Muon takes. Returns a function that
    makes the updates."""
    others = {name: p for name, p in parameters.items() if name not in matrices}
    decay = FLAGS["weight-decay"]
    groups = [
        {"params": [p for p in others.values() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in others.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=FLAGS["lr"], betas=(0.9, 0.95), eps=1e-8)
    muon = torch.optim.Muon(
        [parameters[name] for name in matrices],
        lr=FLAGS["muon-lr"],
        momentum=FLAGS["muon-momentum"],
        weight_decay=FLAGS["muon-weight-decay"],
    )

    def step():
        torch.optim._muon.torch = Exact() if exact else torch
        adamw.step()
        muon.step()

    return step


def train(parameters, matrices, loss_of, exact=True):
    """loss_of(k): the loss of step k. Returns losses and norms."""
    step = step_of(parameters, matrices, exact)
    losses, norms = [], []
    for k in range(STEPS):
        for p in parameters.values():
            p.grad = None
        loss = loss_of(k)
        loss.backward()
        losses.append(loss.item())
        squares = sum(p.grad.double().square().sum().item() for p in parameters.values())
        norms.append(math.sqrt(squares))
        for p in parameters.values():
            p.grad *= min(1.0, FLAGS["grad-clip"] / norms[-1])
        step()
    return losses, norms


# ------------------------------------------------------------------------------------------------
def gpt2_weights():
    with open(os.path.join(HERE, "golden", "gpt_tiny_model.bin"), "rb") as file:
        values, at, weights = np.frombuffer(file.read()[1024:], "<f4").astype(float), 0, {}
    for name, (shape, *_) in gpt2.TENSORS.items():
        rows = gpt2.VP if name == "wte" else shape[0]
        size = math.prod((rows, *shape[1:]))
        weights[name] = torch.tensor(values[at : at + size].reshape(rows, *shape[1:])[: shape[0]])
        at += size
    return weights


def gpt2_leaves(weights):
    """The parameters as Muon sees them: of each layer apart, and q, k and v apart."""
    leaves = {}
    for name, value in weights.items():
        for l in range(gpt2.L if value.ndim > 1 and name not in ("wte", "wpe") else 0):
            parts = value[l].chunk(3) if name == "qkvw" else [value[l]]
            for part, rows in zip("qkv", parts):
                leaves[f"{name}.{l}" + (f".{part}" if name == "qkvw" else "")] = rows
        if name in ("wte", "wpe", "lnfw", "lnfb"):
            leaves[name] = value
    return {name: value.clone().requires_grad_() for name, value in leaves.items()}


def gpt2_joined(leaves):
    layers = {}
    for name in gpt2.TENSORS:
        if name in leaves:
            layers[name] = leaves[name]
            continue
        of = lambda l: torch.cat(
            [p for key, p in leaves.items() if key == f"{name}.{l}" or f"{name}.{l}." in key]
        )
        layers[name] = torch.stack([of(l) for l in range(gpt2.L)])
    return layers


def make_gpt2(exact=True):
    tokens = modern.stream()
    leaves = gpt2_leaves(gpt2_weights())
    matrices = [n for n, p in leaves.items() if p.ndim == 2 and n not in ("wte", "wpe")]

    def loss_of(k):
        x, y = gpt2.shard_batch(tokens, k)
        logits = gpt2.forward(gpt2_joined(leaves), x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    losses, norms = train(leaves, matrices, loss_of, exact)
    return losses, norms, {name: p.detach() for name, p in gpt2_joined(leaves).items()}


def make_modern(name, exact=True):
    config = modern.CASES[name]
    start = modern.modern.initial(config, name, modern.DEVIATIONS.get(name, {}).items())
    tokens = modern.stream()
    with tempfile.TemporaryDirectory() as folder:
        model = modern.Transformers(modern.modern.write_folder(folder, config, start))
    parameters = dict(model.named_parameters())
    matrices = [n for n, p in parameters.items() if p.ndim == 2 and ".layers." in n]

    def loss_of(k):
        x, y = modern.batch(tokens, k)
        return F.cross_entropy(model.logits(x).flatten(0, 1), y.flatten())

    losses, norms = train(parameters, matrices, loss_of, exact)
    return losses, norms, {n: p.detach() for n, p in parameters.items()}


def write(name, losses, norms, weights):
    found = {
        "versions": {"torch": torch.__version__},
        "flags": FLAGS,
        "losses": modern.numbers(losses),
        "norms": modern.numbers(norms),
        "weights": {n: modern.some(p, modern.WEIGHT_ELEMENTS) for n, p in weights.items()},
    }
    print(f"{name}: losses {losses[0]:.6f} to {losses[-1]:.6f}, norms", norms)
    with open(os.path.join(modern.FOLDER, f"muon_{name}.json"), "w") as file:
        file.write(modern.compact(json.dumps(found, indent=1)) + "\n")


def distance(a, b):
    """Of weights, in relation to those of `a`."""
    change = sum((a[n].double() - b[n].double()).square().sum().item() for n in a)
    return math.sqrt(change / sum(p.double().square().sum().item() for p in a.values()))


def main():
    torch.set_num_threads(1)  # one order of summation, so the same bytes each time
    for name in ("gpt2", *MODERN):
        torch.set_default_dtype(torch.float64 if name == "gpt2" else torch.float32)
        make = make_gpt2 if name == "gpt2" else lambda exact: make_modern(name, exact)
        losses, norms, weights = make(True)
        write(name, losses, norms, weights)
        moved = distance(weights, make(False)[2])
        print(f"    bf16 in the iteration moves the weights by {moved:.2e}")


if __name__ == "__main__":
    main()
