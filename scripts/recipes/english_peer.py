#!/usr/bin/env python3
"""english_peer.py: the same training by PyTorch: the losses of a run of train_gpt, step by step.

    ./train_gpt --model arch=llama,... --steps 0 --export FOLDER ...    # the initial weights
    ./train_gpt --model FOLDER --shuffle 0 --log RUN.jsonl ...          # the run
    english_peer.py FOLDER RUN.jsonl --steps 200 --out PEER.csv
    same_loss.py RUN.jsonl PEER.csv
    english_peer.py FOLDER RUN.jsonl --floors                           # all of it, and the floors

FOLDER is a Llama in Hugging Face's form; transformers loads it. Shards, lengths, batches and
AdamW's numbers are those of the log's first line; each step's learning rate is the log's, too.
Only this is done: fp32, one rank, no shuffling, no dropout, decay of matrices only.
--autocast computes products in bf16. --exact sums the squares of the gradient's norm, by which it
is clipped, and the loss that is told in fp64, as train_gpt does, instead of PyTorch's fp32.
--floors makes the runs of FLOORS beside RUN.jsonl, one after the other, but for those that are
there, and prints by how much the losses of each differ from RUN.jsonl's, or, in the last column,
from PyTorch's. --text N continues the first 128 tokens of held-out text by N
tokens, greedily, with the weights of FOLDER, instead of training, as --prompt with --temperature 0
does. Needs torch, transformers and numpy.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy
import torch
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from loss_logs import read_curve  # noqa: E402
from ngram import tokens_of  # noqa: E402
from same_loss import change_weights  # noqa: E402

STEPS = (1, 10), (11, 50), (51, 100), (101, 200)  # the rows of --floors
# AVX2: other kernels, so sums in another order in every step.
AVX2 = {
    "DNNL_MAX_CPU_ISA": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
# Column -> the end of the file's name, the end of that which it is compared with, environment.
FLOORS = {
    "PyTorch": ("pytorch.csv", "", {}),
    "PyTorch, --exact": ("exact.csv", "", {}),
    "one rounding": ("rounded.jsonl", "", {}),
    "AVX2": ("avx2.jsonl", "", AVX2),
    "PyTorch, AVX2": ("pytorch_avx2.csv", "pytorch.csv", AVX2),
}


def sample(tokens, number, length):
    """T + 1 tokens; the window that meets the end goes on at the first token."""
    return tokens[(number * length + numpy.arange(length + 1)) % len(tokens)]


def read_log(path, steps):
    """Returns the flags of the run, and the learning rate of each step."""
    with open(path) as file:
        events = [json.loads(line) for line in file]
    config = next(event for event in events if event["event"] == "start")["flags"]
    rates = [event["lr"] for event in events if event["event"] == "step"]
    if config["shuffle"] != 0 or config["optimizer"] != "adamw" or config["dtype"] != "fp32":
        raise SystemExit("english_peer.py: the run must have --shuffle 0, AdamW and fp32")
    if len(rates) < steps:
        raise SystemExit(f"english_peer.py: the run has {len(rates)} steps of {steps}")
    return config, rates[:steps]


def floors(options):
    """Each run of FLOORS, and the table of their differences."""
    log = Path(options.log)
    place = lambda end: log.with_name(f"{log.stem}_{end}") if end else log
    with open(log) as file:
        command = json.loads(file.readline())["command"]
    threads = ["--threads", str(options.threads)]
    for end, _, environment in FLOORS.values():
        out, model = place(end), Path(options.folder)
        if out.exists():
            continue
        if end == "rounded.jsonl":
            model = place("rounded")
            if not model.exists():
                change_weights(Path(options.folder), model, 0, 0)
        words = [*command, "--model", model, "--log", out, *threads]
        if out.suffix == ".csv":
            words = [sys.executable, __file__, model, log, "--steps", str(options.steps), *threads]
            words += ["--out", out] + ["--exact"] * (end == "exact.csv")
        subprocess.run(words, env={**os.environ, **environment}, check=True)
    curves = {end: read_curve(place(end), None).train for one in FLOORS.values() for end in one[:2]}
    print("| steps |", " | ".join(FLOORS), "|")
    print("|---" * (1 + len(FLOORS)) + "|")
    for first, last in STEPS:
        row = [f"{first} to {last}"]
        for end, other, _ in FLOORS.values():
            a, b = curves[end], curves[other]
            both = [at for at in range(first, last + 1) if at in a and at in b]
            row.append(f"{max(abs(a[at] - b[at]) / b[at] for at in both):.1e}" if both else "")
        print("|", " | ".join(row), "|")


def clip(model, most, exact):
    """Scales the gradients down to a norm of at most so much; returns what it was."""
    if not exact:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), most)
    squares = [p.grad.double().square().sum() for p in model.parameters()]
    norm = torch.stack(squares).sum().sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), most, norm)
    return norm


def train(model, config, rates, options):
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config["weight-decay"]},
        {"params": vectors, "weight_decay": 0},
    ]
    betas = config["beta1"], config["beta2"]
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=config["eps"])
    tokens, T, B = tokens_of(config["train"]), config["seq-len"], config["micro-batch"]
    samples = config["batch-tokens"] // T
    with open(options.out, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", "loss", "grad_norm", "tokens_per_s"])
        for step, rate in enumerate(rates):
            begin, total = time.monotonic(), 0.0
            for first in range(0, samples, B):
                numbers = [step * samples + first + i for i in range(B)]
                rows = torch.from_numpy(numpy.stack([sample(tokens, g, T) for g in numbers]))
                with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
                    logits = model(rows[:, :-1], use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), rows[:, 1:].flatten()
                )
                (loss * (B / samples)).backward()
                if options.exact:
                    exact = logits.detach().double().flatten(0, 1)
                    loss = torch.nn.functional.cross_entropy(exact, rows[:, 1:].flatten())
                total += loss.item() * B / samples
            norm = clip(model, config["grad-clip"] or float("inf"), options.exact)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            rate_now = samples * T / (time.monotonic() - begin)
            table.writerow([step + 1, f"{total:.9g}", f"{norm.item():.9g}", f"{rate_now:.1f}"])
            file.flush()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("log")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="peer.csv")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--floors", action="store_true")
    parser.add_argument("--text", type=int, default=0)
    options = parser.parse_args()
    if options.floors:
        return floors(options)
    torch.set_num_threads(options.threads)
    config, rates = read_log(options.log, 0 if options.text else options.steps)
    model = LlamaForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    if options.text:
        # Of the first document; before it stands an end-of-text, which --prompt does not put there.
        prompt = torch.from_numpy(tokens_of(config["val"])[None, 1:129])
        with torch.no_grad():
            out = model.eval().generate(prompt, max_new_tokens=options.text, do_sample=False)
        print(*out[0, prompt.shape[1] :].tolist())
    else:
        train(model.train(), config, rates, options)


if __name__ == "__main__":
    main()
