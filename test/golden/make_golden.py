#!/usr/bin/env python3
"""Golden numbers for the tests: a tiny GPT-2 in plain PyTorch, in float64, so that they are exact
to fp32.

    python3 test/golden/make_golden.py      writes the three files below beside itself; needs torch
                                            and numpy

The model is GPT-2: pre-layernorm (eps 1e-5), tanh GELU, learned positions, tied classifier, biases
everywhere, attention scaled by 1/sqrt(head size). L=3 layers, 3 heads, C=48 channels, maxT=24
positions, V=101 tokens padded to Vp=128. Weights are fp32 numbers. Layernorms and biases are random
too: a gradient that is lost or misplaced must show. A C program in fp32 should meet the losses to
1e-5 and the gradients to 1e-4 (relative to the largest of each tensor).

All files are little-endian and begin with 256 int32, the unused ones zero.

gpt_tiny_model.bin    llm.c model, version 3
    header            20240326, 3, maxT, V, L, heads, C, Vp
    16 tensors        fp32, in the order of TENSORS below; wte is padded to Vp rows with zeros

gpt_tiny_tokens.bin   llm.c token shard
    header            20240520, 1, n = 571
    tokens            uint16[n], each below V; n is no multiple of T, so the runs below wrap inside
                      a window

gpt_tiny.bin          llm.c debug state, then an appendix
    header            20240327, 2, B = 3, T = 20
    x, y              int32[B][T] each
    logits            fp32[B][T][V]
    loss              fp32, the mean over B*T tokens
    gradients         fp32, 16 tensors as in the model file (padding rows are zero)
    appendix, fp64    double loss[3][10], norm[3][10]      runs 0..2, on the batch (x, y) again and
                      again
                      double loss[10], norm[10]            run 3, on the token shard

loss[k] and norm[k] (the gradient norm before clipping) belong to update k: they are taken at the
weights after k updates. Each run begins at the weights of the model file.

    run 0   AdamW   lr 1e-3, betas 0.9 0.95, eps 1e-8, no clipping
    run 1   AdamW   the same, clipped at norm 1: g *= min(1, 1 / norm)
    run 2   SGD     lr 0.05, momentum 0.9: b = momentum b + g + wd p; p -= lr b; no clipping
    run 3   AdamW   as run 1; sample g is tokens (g T + 0 .. T) mod n, update k takes samples 3k ..
            3k + 2

Weight decay is 0.1 in all runs, on the 2-D tensors only (wte and wpe included). The learning rate
is constant.
"""

import math
import os

import numpy as np
import torch
import torch.nn.functional as F

L, HEADS, C, MAX_T, V, VP = 3, 3, 48, 24, 101, 128
B, T, UPDATES, SHARD_TOKENS = 3, 20, 10, 571
HERE = os.path.dirname(os.path.abspath(__file__))

# llm.c's order; a layered tensor holds all layers, outermost. Name: shape, initial mean, initial
# deviation, decayed.
TENSORS = {
    "wte": ((V, C), 0, 0.1, True),
    "wpe": ((MAX_T, C), 0, 0.1, True),
    "ln1w": ((L, C), 1, 0.1, False),
    "ln1b": ((L, C), 0, 0.1, False),
    "qkvw": ((L, 3 * C, C), 0, 0.15, True),
    "qkvb": ((L, 3 * C), 0, 0.1, False),
    "attprojw": ((L, C, C), 0, 0.1, True),
    "attprojb": ((L, C), 0, 0.1, False),
    "ln2w": ((L, C), 1, 0.1, False),
    "ln2b": ((L, C), 0, 0.1, False),
    "fcw": ((L, 4 * C, C), 0, 0.1, True),
    "fcb": ((L, 4 * C), 0, 0.1, False),
    "fcprojw": ((L, C, 4 * C), 0, 0.1, True),
    "fcprojb": ((L, C), 0, 0.1, False),
    "lnfw": ((C,), 1, 0.1, False),
    "lnfb": ((C,), 0, 0.1, False),
}
STORED = sum(math.prod(shape) for shape, *_ in TENSORS.values()) + (VP - V) * C


# --------------------------------------------------------------------------------------------------
# The model


def initial_weights(generator):
    draw = lambda shape, mean, deviation, _: mean + deviation * torch.randn(
        shape, generator=generator
    )
    return {
        name: draw(*spec).float().double() for name, spec in TENSORS.items()
    }  # float(): as the file will hold them


def attention(x, p, l):
    rows, t, _ = x.shape
    qkv = F.linear(x, p["qkvw"][l], p["qkvb"][l])
    q, k, v = (
        part.view(rows, t, HEADS, C // HEADS).transpose(1, 2) for part in qkv.split(C, dim=2)
    )
    scores = q @ k.transpose(2, 3) / math.sqrt(C // HEADS)
    future = torch.ones(t, t).triu(1).bool()
    mixed = scores.masked_fill(future, -math.inf).softmax(dim=3) @ v
    return F.linear(mixed.transpose(1, 2).reshape(rows, t, C), p["attprojw"][l], p["attprojb"][l])


def mlp(x, p, l):
    return F.linear(
        F.gelu(F.linear(x, p["fcw"][l], p["fcb"][l]), approximate="tanh"),
        p["fcprojw"][l],
        p["fcprojb"][l],
    )


def forward(p, x):
    norm = lambda h, weight, bias: F.layer_norm(h, (C,), weight, bias, eps=1e-5)
    h = p["wte"][x] + p["wpe"][: x.shape[1]]
    for l in range(L):
        h = h + attention(norm(h, p["ln1w"][l], p["ln1b"][l]), p, l)
        h = h + mlp(norm(h, p["ln2w"][l], p["ln2b"][l]), p, l)
    return norm(h, p["lnfw"], p["lnfb"]) @ p["wte"].T


def backward(p, x, y):
    """Sets every p.grad; returns logits and loss."""
    for tensor in p.values():
        tensor.grad = None
    logits = forward(p, x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss.backward()
    return logits.detach(), loss.item()


# --------------------------------------------------------------------------------------------------
# Training


def trainable(weights):
    return {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}


def groups(p):
    select = lambda decayed: [p[name] for name, spec in TENSORS.items() if spec[3] == decayed]
    return [
        {"params": select(True), "weight_decay": 0.1},
        {"params": select(False), "weight_decay": 0.0},
    ]


def adamw(p):
    return torch.optim.AdamW(groups(p), lr=1e-3, betas=(0.9, 0.95), eps=1e-8)


def sgd(p):
    return torch.optim.SGD(groups(p), lr=0.05, momentum=0.9)


def clip_gradients(p, clip):
    """By hand, because torch's clip_grad_norm_ adds 1e-6 to the norm. Returns the norm before."""
    norm = math.sqrt(sum(tensor.grad.square().sum().item() for tensor in p.values()))
    for tensor in p.values():
        tensor.grad *= min(1.0, clip / norm)
    return norm


def train(weights, make_optimizer, clip, bucket_of):
    """Returns [losses, norms], one number of each per update."""
    p = trainable(weights)
    optimizer = make_optimizer(p)
    losses, norms = [], []
    for k in range(UPDATES):
        losses.append(backward(p, *bucket_of(k))[1])
        norms.append(clip_gradients(p, clip))
        optimizer.step()
    return [losses, norms]


def shard_batch(tokens, k):
    windows = torch.tensor(
        [[(g * T + i) % len(tokens) for i in range(T + 1)] for g in range(k * B, (k + 1) * B)]
    )
    samples = tokens[windows]
    return samples[:, :-1], samples[:, 1:]


# --------------------------------------------------------------------------------------------------
# Files


def write(name, header, *arrays):
    with open(os.path.join(HERE, name), "wb") as file:
        file.write(np.array(header + [0] * (256 - len(header)), dtype="<i4").tobytes())
        for array, dtype in arrays:
            file.write(np.ascontiguousarray(array, dtype=dtype).tobytes())


def stored(tensors):
    """The 16 tensors as one fp32 vector in file order, wte padded."""
    padded = dict(tensors, wte=F.pad(tensors["wte"], (0, 0, 0, VP - V)))
    return torch.cat([padded[name].flatten() for name in TENSORS]).numpy(), "<f4"


def check_file(name, magic, *parts):
    """Re-reads a file: the magic, the size, and that every floating-point number is finite."""
    with open(os.path.join(HERE, name), "rb") as file:
        assert np.fromfile(file, "<i4", 256)[0] == magic, name
        for count, dtype in parts:
            values = np.fromfile(file, dtype, count)
            assert len(values) == count and np.isfinite(values).all(), (name, dtype, count)
        assert not file.read(), f"{name} is longer than its layout"


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # one order of summation, so the same bytes each time
    generator = torch.Generator().manual_seed(1337)
    weights = initial_weights(generator)
    sequences = torch.randint(V, (B, T + 1), generator=generator)
    tokens = torch.randint(V, (SHARD_TOKENS,), generator=generator)
    x, y = sequences[:, :-1], sequences[:, 1:]

    p = trainable(weights)
    logits, loss = backward(p, x, y)
    gradients = {name: tensor.grad for name, tensor in p.items()}
    same_batch = lambda _: (x, y)
    runs = [
        train(weights, adamw, math.inf, same_batch),
        train(weights, adamw, 1.0, same_batch),
        train(weights, sgd, math.inf, same_batch),
    ]
    shard_run = train(weights, adamw, 1.0, lambda k: shard_batch(tokens, k))
    for number, (losses, norms) in enumerate(runs + [shard_run]):
        print(
            f"run {number}: loss {losses[0]:.6f} to {losses[-1]:.6f}, norm {norms[0]:.4f} to"
            f" {norms[-1]:.4f}"
        )
    assert (
        runs[1][1][0] > 1.0 and abs(runs[0][0][-1] - runs[1][0][-1]) > 1e-3
    ), "clipping would not be exercised"

    write("gpt_tiny_model.bin", [20240326, 3, MAX_T, V, L, HEADS, C, VP], stored(weights))
    write("gpt_tiny_tokens.bin", [20240520, 1, SHARD_TOKENS], (tokens, "<u2"))
    write(
        "gpt_tiny.bin",
        [20240327, 2, B, T],
        (x, "<i4"),
        (y, "<i4"),
        (logits, "<f4"),
        ([loss], "<f4"),
        stored(gradients),
        (np.array(runs).transpose(1, 0, 2), "<f8"),
        (shard_run, "<f8"),
    )

    check_file("gpt_tiny_model.bin", 20240326, (STORED, "<f4"))
    check_file("gpt_tiny_tokens.bin", 20240520, (SHARD_TOKENS, "<u2"))
    check_file(
        "gpt_tiny.bin",
        20240327,
        (2 * B * T, "<i4"),
        (B * T * V + 1 + STORED, "<f4"),
        (4 * 2 * UPDATES, "<f8"),
    )


if __name__ == "__main__":
    main()
