#!/usr/bin/env python3
"""train_gpt against PyTorch on this machine's processor: GPT-2 124M, the same shapes, in
alternation; fp32 against fp32, bf16 against bf16.

One round of a case runs every contestant once, each as a process of its own; rounds alternate the
order, so a drift of the machine does not favour one. A run's figure is the median step after WARMUP
steps. Ratios are taken inside a round and are PyTorch's time over ours: above 1 means that
train_gpt is faster. Memory is the peak resident size of the largest process of a PyTorch run (not
below this harness's own half a gigabyte). Use an idle machine: the load average is printed first.

The PyTorch side is meant to be as fast as it goes with plain means: scaled_dot_product_attention,
fused AdamW, vocabulary padded to 50304, no gradient clipping (train_gpt is told so too), one thread
per core; between ranks DDP over gloo, and FSDP (fully_shard of each block and of the whole) beside
train_gpt's ZeRO stage 3, which is compared with its own stage 0 as well.
    eager       as installed
    compiled    torch.compile; this and the next need a C++ compiler and Python's headers
    tuned       compiled, and malloc keeps freed memory, which saves the page faults of new
                activations
    bf16 eager  with products in bf16 (torch.autocast); parameters stay fp32
    bf16        the same, tuned
    ours bf16   not PyTorch: train_gpt again, with --dtype bf16, which the two are compared with
    stage0      not PyTorch: train_gpt again, with --zero 0

Case dp: private training, of 6 blocks of 384 channels. What counts there is how much privacy costs
each program, private against its own non-private run, and the tokens/s of both. Ours sample by
Poisson's rule, so a run's figure there is the time of all its timed steps over the samples that
they took, for B samples; Opacus gets B samples in every step.
    unit, flat  train_gpt with --dp-clip-style unit and flat
    plain       PyTorch, of modules that Opacus knows (positions are an embedding, the classifier a
                linear layer tied to the tokens'), eager
    hooks       the same with Opacus: gradients of every sample. It adds up those of the tied
                table's two uses, so its norms are exact
    untied      plain with a table of its own for the classifier
    ghost       the same with Opacus' ghost clipping, which refuses tied tables
Case dpfsdp is the same between two ranks: train_gpt with --zero 3, against
    sharded     untied with FSDP, as Opacus' FSDP2Wrapper cuts it
    ghost fsdp  the same with Opacus' ghost clipping; its optimizer adds noise to each shard
Case cyclic is the model of papers/cyclic.py on four ranks; that script runs its PyTorch side on
the emulated cluster, too.

fastDP, whose figures the documentation has, is not on PyPI, and pins PyTorch 1.11: it does not take
part.

With --peer the file is the PyTorch side: it trains and writes step times in the form of train_gpt's
log.
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
import warnings
from collections import namedtuple
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from experiment import events, random_shard, timed_steps, words
from torch_gpt import GPT, VOCAB, padded

Shape = namedtuple(
    "Shape", "layers heads channels model vocab", defaults=(VOCAB,)
)  # model: as train_gpt knows it
GPT2_124M, SMALL = Shape(12, 12, 768, "gpt2:124M"), Shape(
    6, 6, 384, f"layers=6,heads=6,channels=384,vocab={VOCAB}"
)
CYCLIC = Shape(12, 4, 128, "layers=12,heads=4,channels=128,vocab=256", 256)  # papers/cyclic.py's
WARMUP = 2
CORES = len(os.sched_getaffinity(0))

# steps: timed ones, after the warm-up; zero: train_gpt's stage
Case = namedtuple("Case", "B T ranks steps zero peers shape", defaults=(GPT2_124M,))
ALONE = ("eager", "compiled", "tuned", "ours bf16", "bf16 eager", "bf16")
CASES = {
    "b4t64": Case(4, 64, 1, 8, 0, ALONE),
    "b4t256": Case(4, 256, 1, 4, 0, ALONE),
    "b1t1024": Case(1, 1024, 1, 4, 0, ALONE),
    "ddp": Case(4, 64, 2, 6, 0, ALONE),
    "fsdp": Case(4, 64, 2, 6, 3, ("eager", "stage0")),
    "cyclic": Case(4, 64, 4, 25, 0, ("eager",), CYCLIC),
    "dp": Case(12, 256, 1, 6, 0, ("unit", "flat", "plain", "hooks", "untied", "ghost"), SMALL),
    "dpfsdp": Case(6, 256, 2, 4, 3, ("unit", "sharded", "ghost fsdp"), SMALL),
}
PRIVATE = "--dp-noise 1 --dp-delta 1e-5 --dp-show-private --dp-clip-style"
OURS = {  # flags of train_gpt where it is the contestant
    "train_gpt": "",
    "ours bf16": "--dtype bf16",
    "stage0": "",
    "unit": f"{PRIVATE} unit",
    "flat": f"{PRIVATE} flat",
}
AGAINST = {"bf16": "ours bf16", "bf16 eager": "ours bf16"}  # of ours; else train_gpt in fp32
WITHOUT = {  # privacy
    "unit": "train_gpt",
    "flat": "train_gpt",
    "hooks": "plain",
    "ghost": "untied",
    "ghost fsdp": "sharded",
}
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
COMPILED = ("compiled", "tuned", "bf16")
KEEPING_MEMORY = ("tuned", "bf16")
PEERS = ("eager", "compiled", "tuned", "bf16 eager", "bf16")
PEERS += ("plain", "hooks", "untied", "ghost", "sharded", "ghost fsdp")
Run = namedtuple("Run", "ms bytes")


# --------------------------------------------------------------------------------------------------
# The PyTorch side


class GPTOfModules(GPT):
    """The same, with every parameter in a module that Opacus knows, and called as one."""

    def __init__(self, shape, tied):
        super().__init__(shape.layers, shape.heads, shape.channels)
        self.head = nn.Linear(shape.channels, padded(shape.vocab), bias=False)
        if tied:
            self.head.weight = self.wte.weight
        else:
            nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, x):
        positions = torch.arange(x.shape[1]).repeat(x.shape[0], 1)
        return self.head(self.lnf(self.blocks(self.wte(x) + self.wpe(positions))))


def make_private(model, optimizer, case, mode):
    """The model, the optimizer and the loss as Opacus makes them: samples clipped to norm 1 over
    all parameters, noise 1, B samples a step."""
    warnings.filterwarnings("ignore")
    from opacus import PrivacyEngine

    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.zeros(100 * case.B)), batch_size=case.B
    )  # it wants one, for its account
    made = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=data, criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=mode,
    )
    return made[0], made[1], made[2] if "ghost" in mode else None


def log_step(log, step, loss, begin):
    """The first rank's line for a step that began at this time."""
    ms = 1e3 * (time.perf_counter() - begin)
    if int(os.environ.get("RANK", 0)) == 0:
        event = {"event": "step", "step": step, "loss": loss.item(), "ms": ms}
        print(json.dumps(event), file=log, flush=True)


def train_private_peer(case, peer, log):
    torch.manual_seed(0)
    model, criterion = GPTOfModules(case.shape, peer in ("plain", "hooks")), None
    if case.ranks > 1:
        from opacus.utils.fsdp_utils import FSDP2Wrapper

        dist.init_process_group("gloo")
        dist.device_mesh.init_device_mesh("cpu", (case.ranks,))
        model = FSDP2Wrapper(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=peer in ("plain", "untied", "sharded"))
    if peer in WITHOUT:
        mode = peer.replace(" ", "_")
        model, optimizer, criterion = make_private(model, optimizer, case, mode)
    for step in range(1, WARMUP + case.steps + 1):
        tokens = torch.randint(case.shape.vocab, (case.B, case.T + 1))
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1].contiguous())  # ghost norms of embeddings want views
        flat, targets = logits.flatten(0, 1), tokens[:, 1:].flatten()
        loss = (
            criterion(flat, targets, shape=logits.shape)
            if criterion
            else F.cross_entropy(flat, targets)
        )
        loss.backward()
        optimizer.step()
        log_step(log, step, loss, begin)
    if case.ranks > 1:
        dist.destroy_process_group()


def train_peer(case, peer, log):
    torch.manual_seed(0)
    model = GPT(case.shape.layers, case.shape.heads, case.shape.channels, case.shape.vocab)
    if "OMPI_COMM_WORLD_RANK" in os.environ:  # started by mpirun, whose first rank is on node0
        os.environ.update(
            RANK=os.environ["OMPI_COMM_WORLD_RANK"], WORLD_SIZE=os.environ["OMPI_COMM_WORLD_SIZE"],
            MASTER_ADDR="node0", MASTER_PORT="29500",
        )
    if case.ranks > 1:
        dist.init_process_group("gloo")
    if case.zero:
        mesh = dist.device_mesh.init_device_mesh("cpu", (case.ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif case.ranks > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    step_model = torch.compile(model) if peer in COMPILED else model
    for step in range(1, WARMUP + case.steps + 1):
        tokens = torch.randint(case.shape.vocab, (case.B, case.T + 1))
        begin = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="bf16" in peer):
            loss = step_model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()
        log_step(log, step, loss, begin)
    if case.ranks > 1:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------
# The harness


def threads(case):
    return max(1, CORES // case.ranks)


def our_command(program, shard, case, zero, log, flags):
    return words(
        f"mpirun -np {case.ranks} --bind-to none", (program,), "--train", shard, "--val", shard,
        f"--model {case.shape.model} --micro-batch {case.B} --seq-len {case.T} --zero {zero}",
        f"--batch-tokens {case.B * case.T * case.ranks} --steps {WARMUP + case.steps}",
        f"--val-every 0 --weight-decay 0.1 --grad-clip 0 --threads {threads(case)}",
        "--log", log, flags,
    )


def peer_command(name, peer, case, log):
    together = f"-m torch.distributed.run --standalone --nproc-per-node {case.ranks}"
    return words((sys.executable,), together if case.ranks > 1 else "", Path(__file__), "--peer",
                 (peer,), "--cases", name, "--times", log)


def measure(command, variables, case, log):
    """Runs the command to its end. Peak memory is what train_gpt says of rank 0, else the largest
    among the process and its descendants, as wait4 reports it."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads(case)), **variables)
    if os.geteuid() == 0:  # mpirun asks root twice
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            output.seek(0)
            sys.exit(f"bench_peers: failed: {' '.join(command)}\n{output.read()[-2000:]}")
    told = [event["memory"]["measured"] for event in events(log, "end")]
    peak = told[0]["device"] + told[0]["host"] if told else 1024 * usage.ru_maxrss
    return Run(run_ms(timed_steps(log, WARMUP), case), peak)


def run_ms(steps, case):
    """Of a step of B samples a rank: the median; in the private cases the mean over samples, since
    private steps take any number of them."""
    if case.shape is not SMALL:
        return statistics.median(event["ms"] for event in steps)
    batch = case.B * case.ranks
    samples = sum(len(step["samples"]) if "samples" in step else batch for step in steps)
    return batch * sum(step["ms"] for step in steps) / samples


def can_compile():
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return compiler and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))


def compare(name, program, rounds, folder):
    """All rounds of a case. Returns {contestant: [Run per round]}."""
    case, log, shard, commands = CASES[name], folder / "log", folder / "shard.bin", {}
    for peer in ("train_gpt", *case.peers):
        if peer in COMPILED and not can_compile():
            continue
        zero = 0 if peer == "stage0" else case.zero
        commands[peer] = (
            our_command(program, shard, case, zero, log, OURS[peer])
            if peer in OURS
            else peer_command(name, peer, case, log)
        )
    runs = {contestant: [] for contestant in commands}
    for r in range(rounds):
        for contestant in list(commands)[:: -1 if r % 2 else 1]:
            log.write_text("")
            variables = KEEPS_MEMORY if contestant in KEEPING_MEMORY else {}
            run = measure(commands[contestant], variables, case, log)
            runs[contestant].append(run)
            text = f"  {name} round {r + 1} of {rounds}: {contestant} {run.ms:.1f} ms"
            print(text, file=sys.stderr)
    return runs


def middle(results, field):
    return statistics.median(getattr(result, field) for result in results)


def ratios_of(results, base):
    """Of their times, within each round."""
    return [a.ms / b.ms for a, b in zip(results, base)]


def spread(ratios):
    return f"{min(ratios):5.2f} {statistics.median(ratios):6.2f} {max(ratios):5.2f}"


def print_private(name, runs):
    """What privacy costs each program: its private over its non-private throughput, and peak
    memory; and our tokens/s (style unit) over its."""
    case = CASES[name]
    print(
        f"{name:8} {case.ranks} x {case.B} x {case.T}; speed: private / non-private throughput;"
        " unit's: tokens/s of train_gpt in style unit over its own"
    )
    print(
        f"  {'':10} {'ms':>8} {'MB':>6}   {'speed: min median max':>22} {'memory':>7}  "
        f" {'units: min median max':>22}"
    )
    for who, results in runs.items():
        ms, size = middle(results, "ms"), middle(results, "bytes")
        line = f"  {who:10} {ms:8.1f} {size / 1e6:6.0f}   "
        if who in WITHOUT:
            base = runs[WITHOUT[who]]
            more = size / middle(base, "bytes")
            line += f"{spread(ratios_of(base, results)):>22} {more:7.3f}   "
        if who in WITHOUT and who not in OURS:
            line += f"{spread(ratios_of(results, runs['unit'])):>22}"
        print(line.rstrip(), flush=True)


def print_rows(name, runs):
    case = CASES[name]
    shape = f"{name:8} {case.ranks} x {case.B} x {case.T:<5}"
    for peer, theirs in runs.items():
        if peer == "train_gpt":
            continue
        ours = runs[AGAINST.get(peer, "train_gpt")]
        (ms, size), (their_ms, their_size) = (
            (middle(results, "ms"), middle(results, "bytes") / 1e6) for results in (ours, theirs)
        )
        print(
            f"{shape} {ms:10.1f} {peer:>10} {their_ms:10.1f}   {spread(ratios_of(theirs, ours))}"
            f"   {size:9.0f} {their_size:9.0f}",
            flush=True,
        )


def cpu_model():
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")),
                    platform.machine())


def benchmark(cases, program, rounds):
    print(
        f"machine {cpu_model()}, {CORES} threads, load {os.getloadavg()[0]:.2f}; PyTorch"
        f" {torch.__version__}; {rounds} rounds; ratio: PyTorch / train_gpt"
    )
    if not set(cases) <= {"dp", "dpfsdp"}:
        print(
            f"{'case':8} {'ranks x B x T':13} {'ours, ms':>10} {'PyTorch':>10} {'ms':>10}   "
            f"{'min':>5} {'median':>6} {'max':>5}   {'ours, MB':>9} {'their MB':>9}",
            flush=True,
        )
    with tempfile.TemporaryDirectory() as folder:
        for name in cases:
            random_shard(Path(folder) / "shard.bin", CASES[name].shape.vocab, 100_000)
            runs = compare(name, program, rounds, Path(folder))
            (print_private if CASES[name].shape is SMALL else print_rows)(name, runs)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES),
                        help="comma-separated, default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="2 rounds instead of 5")
    parser.add_argument("--program", default="./train_gpt")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--times", "--log", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = options.cases.split(",")
    if not set(cases) <= set(CASES):
        parser.error(f"--cases knows {', '.join(CASES)}")
    if options.peer:
        with open(options.times, "a") as log:
            case = CASES[cases[0]]
            if options.peer in (*WITHOUT, *WITHOUT.values()):
                train_private_peer(case, options.peer, log)
            else:
                train_peer(case, options.peer, log)
        return
    if not shutil.which(options.program):
        parser.error(f"{options.program} is not there: run make first")
    benchmark(cases, options.program, 2 if options.quick else 5)


if __name__ == "__main__":
    main()
