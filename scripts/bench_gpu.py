#!/usr/bin/env python3
"""train_gpt on a GPU: GPT-2 124M and 1558M in bf16, T=1024: tokens/s, MFU, memory; against PyTorch;
attention by itself.

Prints the rows of docs/results/speed.md. One round runs every contestant once, each as a process of
its own, and rounds alternate their order; a run's figure is the median step after WARMUP steps, a
ratio is taken inside a round (tokens/s of train_gpt over PyTorch's: above 1 means that train_gpt is
faster) and given as lowest, median, highest. MFU is of the dense bf16 peak of the device, as its
maker states it. PyTorch takes part where .venv-peers/bin/python or this Python has one that finds a
GPU: torch.compile, scaled_dot_product_attention, fused AdamW, bf16 by autocast, no gradient
clipping (train_gpt is told so too), the same micro-batch and one update per micro-batch.
--attention takes several programs (one built on cuDNN, say): the ratio is the first one's time over
each. --dry tries all of this on the emulated GPU with a model of no use: only that the script works
is seen.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import namedtuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WARMUP = 3
VOCAB = 50257
Case = namedtuple(
    "Case", "model layers heads channels vocab rows T steps goals"
)  # rows: the micro-batch; steps: timed ones
CASES = {
    "124M": Case("gpt2:124M", 12, 12, 768, VOCAB, 64, 1024, 20, "1.15 x PyTorch, MFU 50 %"),
    "1558M": Case("gpt2:1558M", 48, 25, 1600, VOCAB, 16, 1024, 10, "MFU 60 %"),
}
DRY = {"dry": Case("layers=2,heads=2,channels=16,vocab=100", 2, 2, 16, 100, 2, 16, 4, "none")}
PEERS = (os.path.join(ROOT, ".venv-peers/bin/python"), sys.executable)
Run = namedtuple(
    "Run", "tokens_per_s mfu device predicted measured"
)  # the last two: bytes of device memory


def write_shard(path, vocab, tokens=1_000_000):
    with open(path, "wb") as file:
        file.write(
            b"".join(n.to_bytes(4, "little") for n in (20240520, 1, tokens)).ljust(1024, b"\0")
        )
        file.write(b"".join((i * 7919 % vocab).to_bytes(2, "little") for i in range(tokens)))


def read_run(lines, case):
    """What a log tells: of ours, or of the PyTorch side, which has only steps."""
    events = [json.loads(line) for line in lines]
    steps = [e["ms"] for e in events if e["event"] == "step"][WARMUP:]
    start, end = ([e for e in events if e["event"] == name] for name in ("start", "end"))
    speed = case.rows * case.T / statistics.median(steps) * 1e3
    if not start:
        return Run(speed, None, None, None, None)
    mfu = statistics.median([e["mfu"] for e in events if e["event"] == "step"][WARMUP:])
    return Run(
        speed,
        mfu,
        start[0]["device"],
        *(end[0]["memory"][side]["device"] for side in ("predicted", "measured")),
    )


def our_command(program, case, shard, log):
    return [
        "mpirun",
        "-np",
        "1",
        program,
        "--train",
        shard,
        "--model",
        case.model,
        "--dtype",
        "bf16",
        "--seq-len",
        case.T,
        "--micro-batch",
        case.rows,
        "--steps",
        WARMUP + case.steps,
        "--val-every",
        0,
        "--weight-decay",
        0.1,
        "--grad-clip",
        0,
        "--log",
        log,
    ]


def peer_command(python, name, case, log):
    return [
        python,
        os.path.abspath(__file__),
        "--peer",
        name,
        "--micro-batch",
        case.rows,
        "--log",
        log,
    ]


def measure(command, case, log):
    environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(
            f"bench_gpu: exit {done.returncode}:"
            f" {' '.join(map(str, command))}\n{done.stderr[-2000:]}"
        )
    with open(log) as lines:
        return read_run(lines, case)


def peer_python():
    for python in PEERS:
        if (
            os.path.exists(python)
            and subprocess.run(
                [python, "-c", "import torch; assert torch.cuda.is_available()"],
                capture_output=True,
            ).returncode
            == 0
        ):
            return python
    return None


def rounds_of(commands, case, log, rounds):
    """{contestant: [Run per round]}, in alternating order."""
    runs = {name: [] for name in commands}
    for r in range(rounds):
        for name in list(commands)[:: -1 if r % 2 else 1]:
            if os.path.exists(log):
                os.remove(log)
            runs[name].append(measure(commands[name], case, log))
            print(
                f"  round {r + 1} of {rounds}: {name} {runs[name][-1].tokens_per_s:.0f} tokens/s",
                file=sys.stderr,
            )
    return runs


def spread(values, form="{:.2f}"):
    return " ".join(form.format(x) for x in (min(values), statistics.median(values), max(values)))


def row(name, case, ours, theirs):
    """A line of the table."""
    middle = statistics.median(run.tokens_per_s for run in ours)
    peer = (
        [
            f"{statistics.median(run.tokens_per_s for run in theirs):.0f}",
            spread([a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, theirs)]),
        ]
        if theirs
        else ["not measured"] * 2
    )
    memory = f"{ours[0].predicted / 2**30:.2f} {ours[0].measured / 2**30:.2f}"
    return (
        "| "
        + " | ".join(
            [
                f"{name}, B={case.rows} T={case.T}",
                f"{middle:.0f}",
                spread([100 * run.mfu for run in ours], "{:.1f}"),
                *peer,
                memory,
                case.goals,
            ]
        )
        + " |"
    )


def bench_steps(cases, program, rounds, folder):
    python, shard, log = (
        peer_python(),
        os.path.join(folder, "train.bin"),
        os.path.join(folder, "log.jsonl"),
    )
    table = [
        (
            "| work | tokens/s | MFU, % | PyTorch, tokens/s | ratio | memory, GiB, predicted and"
            " taken | goal |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        write_shard(shard, case.vocab)
        commands = {"train_gpt": our_command(program, case, shard, log)}
        if python and name in CASES:
            commands["PyTorch"] = peer_command(python, name, case, log)
        runs = rounds_of(commands, case, log, rounds)
        table.append(row(name, case, runs["train_gpt"], runs.get("PyTorch")))
    print(
        "\n".join([f"device: {runs['train_gpt'][0].device}; {rounds} rounds", *table]), flush=True
    )


def bench_attention(programs, words):
    results = [
        [
            json.loads(line)
            for line in subprocess.run(
                [program, *words], check=True, capture_output=True, text=True
            ).stdout.splitlines()
        ]
        for program in programs
    ]
    print(
        "| attention, bf16 | program | forward, ms | TFLOP/s | backward, ms | TFLOP/s | first one's"
        " time over this, forward, backward |\n|---|---|---|---|---|---|---|"
    )
    for shapes in zip(*results):
        for program, r in zip(programs, shapes):
            print(
                f"| B={r['rows']} T={r['T']} C={r['C']} {r['heads']} heads |"
                f" {os.path.basename(program)} | {r['forward_ms']:.3f} | {r['forward_tflops']:.4g}"
                f" | {r['backward_ms']:.3f} | {r['backward_tflops']:.4g} |"
                f" {shapes[0]['forward_ms'] / r['forward_ms']:.2f}"
                f" {shapes[0]['backward_ms'] / r['backward_ms']:.2f} |"
            )


def train_peer(case, log):
    """The PyTorch side, in a process of its own."""
    import torch
    from bench_peers import GPT

    torch.manual_seed(0)
    model = GPT(case.layers, case.heads, case.channels).cuda()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    step_model = torch.compile(model)
    with open(log, "w") as file:
        for step in range(1, WARMUP + case.steps + 1):
            tokens = torch.randint(case.vocab, (case.rows, case.T + 1), device="cuda")
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with torch.autocast("cuda", torch.bfloat16):
                loss = step_model(tokens[:, :-1], tokens[:, 1:])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            loss.item()
            torch.cuda.synchronize()
            print(
                json.dumps(
                    {"event": "step", "step": step, "ms": 1e3 * (time.perf_counter() - begin)}
                ),
                file=file,
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", default=",".join(CASES), help="comma-separated, default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batch", type=int, help="instead of each case's")
    parser.add_argument("--program", default="./train_gpt_cuda")
    parser.add_argument(
        "--attention", action="append", metavar="PROGRAM", help="default: build/gpu_bench_attention"
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--peer", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--log", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.peer.split() if options.peer else options.cases.split(",")
    if not set(names) <= set(CASES):
        parser.error(f"--cases knows {', '.join(CASES)}")
    cases = DRY if options.dry else {name: CASES[name] for name in names}
    if options.micro_batch:
        cases = {name: case._replace(rows=options.micro_batch) for name, case in cases.items()}
    if options.peer:
        train_peer(cases[options.peer], options.log)
        return
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        bench_steps(
            cases, "./train_gpt_emu" if options.dry else options.program, options.rounds, folder
        )
    programs = options.attention or [
        "build/bench_attention_emu" if options.dry else "build/gpu_bench_attention"
    ]
    bench_attention(programs, ["1", "40", "16", "2"] if options.dry else [])


if __name__ == "__main__":
    main()
