#!/usr/bin/env python3
"""PyTorch on the GPU that train_gpt runs on, for gpu_ten.py: what the GPU reaches at most, and
steps of the same models. Prints a line of JSON for each figure.

    gpu_peer.py ceilings                   # a copy, products of the blocks' shapes, attention
    gpu_peer.py warm NAME:ROWS ...         # compiles what these steps will run; no figures
    gpu_peer.py steps NAME:ROWS            # median step

A step is meant to be as fast as PyTorch goes with plain means: bf16 by autocast, attention by
scaled_dot_product_attention, fused AdamW, no gradient clipping. One block is compiled and serves
all of them, which takes a small part of the time that the whole model takes. Where ROWS do not fit,
half as many are tried. --toy: small shapes, on the CPU where no GPU is at hand.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_gpt import GPT, VOCAB

T = 1024
MODELS = {"124M": (12, 12, 768), "774M": (36, 20, 1280), "1558M": (48, 25, 1600), "toy": (2, 2, 16)}
WARMUP, STEPS, CALLS = 3, 8, 7
# m, n, k of a block's products in 124M (B=64) and 1558M (B=16), and of a chunk of the classifier
PRODUCTS = [(8192, 8192, 8192)]
PRODUCTS += [(65536, n, k) for n, k in ((2304, 768), (768, 768), (3072, 768), (768, 3072))]
PRODUCTS += [(16384, n, k) for n, k in ((4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400))]
PRODUCTS += [(2048, 50304, 768), (2048, 50304, 1600)]
ATTENTIONS = [(64, 1024, 12, 64), (16, 1024, 25, 64), (8, 2048, 32, 64)]  # rows, T, heads, D
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def tell(**figures):
    print(json.dumps(figures), flush=True)


def median_ms(call):
    """Of some calls, by the device's own clock where it has one."""
    times = []
    for _ in range(WARMUP + CALLS):
        if DEVICE == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[WARMUP:])


def normal(*shape, **options):
    """Numbers that take the power which a model's do: products of zeros are faster."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16, **options)


def ceilings(toy):
    source = normal(1 << (16 if toy else 30))
    copy = torch.empty_like(source)
    ms = median_ms(lambda: copy.copy_(source))
    tell(what="copy", ms=ms, gb_per_s=2e-6 * source.nbytes / ms)
    del source, copy
    for m, n, k in [(64, 32, 16)] if toy else PRODUCTS:
        x, weight, gradient = normal(m, k), normal(n, k), normal(m, n)
        calls = {
            "forward": lambda: F.linear(x, weight),
            "input": lambda: gradient @ weight,
            "weight": lambda: gradient.t() @ x,
        }
        ms = {name: median_ms(call) for name, call in calls.items()}
        tflops = {name: 2e-9 * m * n * k / value for name, value in ms.items()}
        tell(what="product", m=m, n=n, k=k, ms=ms, tflops=tflops)
    for shape in [(2, 16, 2, 8)] if toy else ATTENTIONS:
        for name in ["flash"] if toy else BACKENDS:
            try:
                attention(name, *shape)
            except RuntimeError as error:  # this backend takes no such shape
                tell(what="attention", by=name, shape=shape, error=str(error)[:200])


def attention(by, rows, t, heads, d):
    qkv = normal(rows, t, 3, heads, d, requires_grad=True)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    with sdpa_kernel(BACKENDS[by]):
        out = forward()
        gradient = torch.randn_like(out)
        backward = lambda: torch.autograd.grad(  # noqa: E731
            out, (q, k, v), gradient, retain_graph=True
        )
        ms = median_ms(forward), median_ms(backward)
    gflop = 2e-9 * rows * heads * t * t * d  # causal: half of two products
    tell(what="attention", by=by, rows=rows, T=t, heads=heads, D=d, forward_ms=ms[0],
         backward_ms=ms[1], forward_tflops=gflop / ms[0], backward_tflops=2.5 * gflop / ms[1])


def train(name, rows, layers, steps):
    """Milliseconds of each step."""
    heads, channels = MODELS[name][1:]
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = GPT(layers, heads, channels)
    for block in model.blocks:
        block.compile(dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    found = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (rows, (16 if name == "toy" else T) + 1), device=DEVICE)
        synchronize()
        begin = time.perf_counter()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()
        synchronize()
        found.append(1e3 * (time.perf_counter() - begin))
    return found


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def steps_that_fit(name, rows):
    while rows:
        try:
            ms = train(name, rows, MODELS[name][0], WARMUP + STEPS)
        except torch.cuda.OutOfMemoryError:
            rows //= 2
            torch.cuda.empty_cache()
            continue
        median = statistics.median(ms[WARMUP:])
        t = 16 if name == "toy" else T
        memory = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
        tell(what="steps", model=name, rows=rows, ms=median, first_ms=ms[0],
             tokens_per_s=1e3 * rows * t / median, memory=memory)
        return
    raise SystemExit(f"gpu_peer: {name} does not fit with one sample")


def main():
    global DEVICE
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("ceilings", "warm", "steps"))
    parser.add_argument("models", nargs="*", metavar="NAME:ROWS")
    parser.add_argument("--toy", action="store_true", help="small shapes; a CPU will do")
    options = parser.parse_intermixed_args()
    if not (torch.cuda.is_available() or options.toy):
        raise SystemExit("gpu_peer: PyTorch finds no GPU")
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
    if options.what == "ceilings":
        ceilings(options.toy)
    for model in options.models:
        name, _, rows = model.partition(":")
        if name not in MODELS or not rows.isdigit():
            parser.error(f"{model} is no NAME:ROWS, with a name of {', '.join(MODELS)}")
        if options.what == "warm":
            train(name, int(rows), 1, 1)
        else:
            steps_that_fit(name, int(rows))


if __name__ == "__main__":
    main()
