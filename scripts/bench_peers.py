#!/usr/bin/env python3
"""train_gpt against PyTorch on this machine's processor: GPT-2 124M, fp32, the same shapes, in alternation.

One round of a case runs every contestant once, each as a process of its own; rounds alternate the order, so a drift of
the machine does not favour one. A run's figure is the median step after WARMUP steps. Ratios are taken inside a round and
are PyTorch's time over ours: above 1 means that train_gpt is faster. Memory is the peak resident size of the largest
process of a run (not below this harness's own half a gigabyte). Use an idle machine: the load average is printed first.

The PyTorch side is meant to be as fast as it goes with plain means: scaled_dot_product_attention, fused AdamW, vocabulary
padded to 50304, no gradient clipping (train_gpt is told so too), one thread per core; between ranks DDP over gloo, and FSDP
(fully_shard of each block and of the whole) beside train_gpt's ZeRO stage 3, which is compared with its own stage 0 as well.
    eager       as installed
    compiled    torch.compile; this and the next need a C++ compiler and Python's headers
    tuned       compiled, and malloc keeps freed memory, which saves the page faults of new activations
    stage0      not PyTorch: train_gpt again, with --zero 0

With --peer the file is the PyTorch side: it trains and writes step times in the form of train_gpt's log.
"""
import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import namedtuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

LAYERS, HEADS, CHANNELS, MAX_T, VOCAB, PADDED_VOCAB = 12, 12, 768, 1024, 50257, 50304
WARMUP = 2
CORES = len(os.sched_getaffinity(0))

Case = namedtuple("Case", "B T ranks steps zero peers")  # steps: timed ones, after the warm-up; zero: train_gpt's stage
ALONE = ("eager", "compiled", "tuned")
CASES = {
    "b4t64": Case(4, 64, 1, 8, 0, ALONE),
    "b4t256": Case(4, 256, 1, 4, 0, ALONE),
    "b1t1024": Case(1, 1024, 1, 4, 0, ALONE),
    "ddp": Case(4, 64, 2, 6, 0, ALONE),
    "fsdp": Case(4, 64, 2, 6, 3, ("eager", "stage0")),
}
PEERS = {  # environment of each
    "eager": {},
    "compiled": {},
    "tuned": {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)},
}
Run = namedtuple("Run", "ms bytes")


# ---------------------------------------------------------------------------------------------------------------------
# The PyTorch side

class Block(nn.Module):
    def __init__(self, heads, channels):
        super().__init__()
        self.heads, self.channels = heads, channels
        self.ln1, self.ln2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.attproj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.fc, self.fcproj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        rows, t, _ = x.shape
        q, k, v = (part.view(rows, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln1(x)).split(self.channels, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(mixed.transpose(1, 2).reshape(rows, t, CHANNELS))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers=LAYERS, heads=HEADS, channels=CHANNELS):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(PADDED_VOCAB, channels), nn.Embedding(MAX_T, channels)
        self.blocks, self.lnf = nn.Sequential(*(Block(heads, channels) for _ in range(layers))), nn.LayerNorm(channels)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x, y):
        h = self.wte(x) + self.wpe.weight[: x.shape[1]]
        logits = F.linear(self.lnf(self.blocks(h)), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def train_peer(case, compiled, log):
    torch.manual_seed(0)
    model = GPT()
    if case.ranks > 1:
        dist.init_process_group("gloo")
    if case.zero:
        mesh = dist.device_mesh.init_device_mesh("cpu", (case.ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif case.ranks > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step_model = torch.compile(model) if compiled else model
    for step in range(1, WARMUP + case.steps + 1):
        tokens = torch.randint(VOCAB, (case.B, case.T + 1))
        begin = time.perf_counter()
        loss = step_model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()
        ms = 1e3 * (time.perf_counter() - begin)
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps({"event": "step", "step": step, "loss": loss.item(), "ms": ms}), file=log, flush=True)
    if case.ranks > 1:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# The harness

def write_shard(path, tokens):
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, tokens
    with open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(np.random.default_rng(0).integers(VOCAB, size=tokens).astype("<u2").tobytes())


def threads(case):
    return max(1, CORES // case.ranks)


def our_command(program, shard, case, zero, log):
    return ["mpirun", "-np", str(case.ranks), "--bind-to", "none", program, "--train", shard, "--val", shard,
            "--model", "gpt2:124M", "--micro-batch", str(case.B), "--seq-len", str(case.T),
            "--batch-tokens", str(case.B * case.T * case.ranks), "--steps", str(WARMUP + case.steps), "--val-every", "0",
            "--weight-decay", "0.1", "--grad-clip", "0", "--threads", str(threads(case)), "--zero", str(zero), "--log", log]


def peer_command(name, peer, case, log):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)] if case.ranks > 1 else []
    return [sys.executable, *launcher, __file__, "--peer", peer, "--cases", name, "--times", log]


def measure(command, variables, case, log):
    """Runs the command to its end. Resident size is the largest among it and its descendants, as wait4 reports it."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads(case)), **variables)
    if os.geteuid() == 0:  # mpirun asks root twice
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            output.seek(0)
            sys.exit(f"bench_peers: failed: {' '.join(command)}\n{output.read()[-2000:]}")
    with open(log) as lines:
        steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
    return Run(statistics.median(event["ms"] for event in steps if event["step"] > WARMUP), 1024 * usage.ru_maxrss)


def can_compile():
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return compiler and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))


def compare(name, program, rounds, folder):
    """All rounds of a case. Returns {contestant: [Run per round]}."""
    case, log, shard = CASES[name], os.path.join(folder, "log"), os.path.join(folder, "shard.bin")
    commands = {"train_gpt": our_command(program, shard, case, case.zero, log)}
    for peer in case.peers if can_compile() else [peer for peer in case.peers if peer in ("eager", "stage0")]:
        commands[peer] = our_command(program, shard, case, 0, log) if peer == "stage0" else peer_command(name, peer, case, log)
    runs = {contestant: [] for contestant in commands}
    for r in range(rounds):
        for contestant in list(commands)[:: -1 if r % 2 else 1]:
            open(log, "w").close()
            runs[contestant].append(measure(commands[contestant], PEERS.get(contestant, {}), case, log))
            print(f"  {name} round {r + 1} of {rounds}: {contestant} {runs[contestant][-1].ms:.1f} ms", file=sys.stderr)
    return runs


def print_rows(name, runs):
    case, ours = CASES[name], runs.pop("train_gpt")
    shape = f"{name:8} {case.ranks} x {case.B} x {case.T:<5}"
    middle = lambda results, field: statistics.median(getattr(result, field) for result in results)
    for peer, theirs in runs.items():
        ratios = [b.ms / a.ms for a, b in zip(ours, theirs)]
        print(f"{shape} {middle(ours, 'ms'):10.1f} {peer:>9} {middle(theirs, 'ms'):10.1f}   "
              f"{min(ratios):5.2f} {statistics.median(ratios):6.2f} {max(ratios):5.2f}   "
              f"{middle(ours, 'bytes') / 1e6:9.0f} {middle(theirs, 'bytes') / 1e6:9.0f}", flush=True)


def cpu_model():
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def benchmark(cases, program, rounds):
    print(f"machine {cpu_model()}, {CORES} threads, load {os.getloadavg()[0]:.2f}; PyTorch {torch.__version__}; "
          f"{rounds} rounds; ratio: PyTorch / train_gpt")
    print(f"{'case':8} {'ranks x B x T':13} {'ours, ms':>10} {'PyTorch':>9} {'ms':>10}   "
          f"{'min':>5} {'median':>6} {'max':>5}   {'ours, MB':>9} {'their MB':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_shard(os.path.join(folder, "shard.bin"), 100_000)
        for name in cases:
            print_rows(name, compare(name, program, rounds, folder))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated, default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="2 rounds instead of 5")
    parser.add_argument("--program", default="./train_gpt")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--times", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = options.cases.split(",")
    if not set(cases) <= set(CASES):
        parser.error(f"--cases knows {', '.join(CASES)}")
    if options.peer:
        with open(options.times, "a") as log:
            train_peer(CASES[cases[0]], options.peer != "eager", log)
        return
    if not shutil.which(options.program):
        parser.error(f"{options.program} is not there: run make first")
    benchmark(cases, options.program, 2 if options.quick else 5)


if __name__ == "__main__":
    main()
