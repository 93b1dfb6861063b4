#!/usr/bin/env python3
"""What the compiled GPU code says of its speed, for docs/gpu.md: no GPU is needed.

    scripts/gpu_table.py [--work FOLDER] [--write docs/gpu.md] [--kernels FILE] [--estimates FILE]

Compiles train_gpt.cu for sm_90, reads registers, spills and shared memory from ptxas and
instructions from cuobjdump -sass (both of the CUDA toolkit; c++filt names the kernels), adds the
formulas below for what each kernel moves, and estimates training steps on an H100 and an H200.
--work keeps what was compiled, and a second run with the same FOLDER takes it from there. --write
replaces the part of the page between its two marks; without it that part is printed. --kernels
writes the tables of kernels (docs/results/logs/gpu_kernels.txt), --estimates the steps, which
results_page() puts beside what gpu_ten.py has measured.
"""

import argparse
import collections
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BEGIN, END = (f"<!-- {mark}: made by scripts/gpu_table.py -->" for mark in ("begin", "end"))

# An H100 or H200 SXM, as NVIDIA states them
MEMORY_RATES = {"H100": 3.35e12, "H200": 4.8e12}  # bytes/s
PRODUCT_RATE = 989.4e12  # dense bf16 FLOP/s
SMS = 132
ISSUE_RATE = SMS * 1.755e9 * 4  # warp instructions/s: clock, schedulers
# What an H200 reached of these, with kernels of this program that move bytes and with cuDNN's; the
# other three are assumed. A step draws more power than the card may, which lowers its clock.
OF_MEMORY = 0.80
OF_PRODUCTS, OF_ISSUE, OF_MMA = 0.76, 0.60, 0.62
DEPTH = 170  # k of a product with which it reaches half of its rate
OF_CUDNN = 0.32, 0.22  # of the peak: attention's forward and backward pass, heads of 64
LAUNCH = 2e-6  # seconds between a kernel and the next
# Of their instructions about half run: divisions of 64 bits have a second path, for large numbers
DIVIDING = ("adamw_kernel",)
HMMA_FLOPS = 4096  # of one mma.m16n8k16
# Of kernels with several paths: the instructions for each access in the one that most numbers take,
# read from the machine code
OF_PATH = {
    "embedding_kernel<bf16>": 21,
    "classifier_kernel<false, bf16>": 61,
    "embedding_backward_wte_kernel<4, bf16>": 40,
    "embedding_backward_wpe_kernel<4, bf16>": 16,
    "order_tokens_kernel": 120,
    "square_sum_kernel": 11,
}
with open(os.path.join(ROOT, "ops/cuda/device_cuda.cuh")) as header:
    CLASSIFIER_ROWS = int(re.search(r"define CLASSIFIER_ROWS (\d+)", header.read())[1])
EACH, WIDE = 8, 4  # numbers that a thread reads or writes at once
HEAD = 64

# F: the width of the feed-forward layer; two of them where it is gated (Llama, which has RMSNorm
# and rotary positions, too)
Model = collections.namedtuple("Model", "name B T L C heads kv F V gated")
GPT2 = {
    name: Model(name, B, 1024, L, C, C // HEAD, C // HEAD, 4 * C, 50257, False)
    for name, B, L, C in (("124M", 64, 12, 768), ("774M", 16, 36, 1280), ("1558M", 16, 48, 1600))
}
MODELS = {**GPT2, "Llama 1B": Model("Llama 1B", 8, 2048, 16, 2048, 32, 8, 8192, 128256, True)}
OWN, CUDNN = "own attention", "cuDNN"
# Operation codes by class; what is in none counts as "other": integers, addresses, conditions,
# jumps.
CLASSES = {
    "tensor": "HMMA",
    "global": "LDG STG LDGSTS RED REDG ATOMG ATOM LD ST",
    "shared": "LDS STS LDSM ATOMS",
    "local": "LDL STL",
    "fp32": "FADD FMUL FFMA FMNMX FSETP FSEL F2F F2FP HADD2 HFMA2 PRMT",
    "fp64": "DADD DMUL DFMA DSETP",
    "special": "MUFU",
    "wait": "BAR WARPSYNC DEPBAR SHFL LDGDEPBAR",
}
CLASS_OF = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes.split()}
Code = collections.namedtuple("Code", "registers stores loads shared counts")


def run(*words):
    return subprocess.run(
        [str(word) for word in words], cwd=ROOT, check=True, capture_output=True, text=True
    )


def compile_program(folder):
    """The paths of the machine code and of what ptxas said."""
    cubin, said = os.path.join(folder, "train_gpt.cubin"), os.path.join(folder, "ptxas.txt")
    if not (os.path.exists(cubin) and os.path.exists(said)):
        words = "nvcc -std=c++17 -O3 -arch sm_90 -D_GNU_SOURCE -Xcompiler -fopenmp -I. -cubin"
        words = [*words.split(), "-Xptxas", "-v", "train_gpt.cu", "-o", cubin]
        for place in run("mpicc", "--showme:incdirs").stdout.split():
            words += ["-isystem", place]
        with open(said, "w") as file:
            file.write(run(*words).stderr)
    return cubin, said


def read_ptxas(text):
    """{mangled name: (registers, bytes of spill stores and loads, bytes of shared memory)}"""
    found = {}
    pattern = (
        r"Function properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill"
        r" loads\n.*?Used (\d+) registers([^\n]*)"
    )
    for name, stores, loads, registers, rest in re.findall(pattern, text):
        shared = re.search(r"(\d+) bytes smem", rest)
        found[name] = (int(registers), int(stores), int(loads), int(shared[1]) if shared else 0)
    return found


def read_sass(text):
    """{mangled name: Counter of instruction classes}"""
    found, counts = {}, None
    for line in text.splitlines():
        name = re.search(r"Function : (\S+)", line)
        if name:
            counts = found[name[1]] = collections.Counter()
        instruction = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", line)
        if instruction and instruction[1] != "NOP":
            counts[CLASS_OF.get(instruction[1], "other")] += 1
    return found


def read_code(folder):
    """{name of a kernel with its template's arguments: Code}"""
    cubin, said = compile_program(folder)
    with open(said) as file:
        resources = read_ptxas(file.read())
    sass = read_sass(run("cuobjdump", "-sass", cubin).stdout)
    names = run("c++filt", *sass).stdout.replace("__nv_bfloat16", "bf16").splitlines()
    short = [re.sub(r"^void ", "", re.sub(r"\(.*", "", name)) for name in names]
    return {
        name: Code(*resources[mangled], sass[mangled])
        for name, mangled in zip(short, sass)
        if mangled in resources
    }


# --------------------------------------------------------------------------------------------------
# What a micro-step of B x T tokens launches. Of each kernel: how often in a micro-step (or once a
# step), the bytes that it must move at least, how many elements its threads read and write one at a
# time (again counts again), and what its tensor cores compute.

Launch = collections.namedtuple("Launch", "kernel calls bytes accesses flops once")


def padded(m):
    return (m.V + 127) // 128 * 128


def linears(m):
    """(inputs, outputs) of a block's matrices."""
    q, F = m.heads * HEAD, m.F * (2 if m.gated else 1)
    return (m.C, q + 2 * m.kv * HEAD), (q, m.C), (m.C, F), (m.F, m.C)


def parameters_of(m):
    block = sum(inputs * outputs for inputs, outputs in linears(m))
    others = 2 * m.C if m.gated else sum(outputs for _, outputs in linears(m)) + 4 * m.C
    return m.L * (block + others) + padded(m) * m.C + (m.C if m.gated else (m.T + 2) * m.C)


def score_flops(m):
    """Of one product of scores in a block, causal."""
    return m.B * m.T * m.T * m.heads * HEAD


def norm_launches(m, of):
    """What differs between GPT-2 and Llama."""
    N, n, L = m.B * m.T, m.B * m.T * m.C, m.L
    pieces = 4 if m.C <= 4 * 32 * EACH else 8  # pieces_of_row()
    if not m.gated:
        return [
            of("embedding_kernel<bf16>", 1, 4 * n, 3 * n / EACH),
            of(f"layernorm_kernel<bf16, {pieces}>", L + 1, 4 * n, 6 * n / EACH),
            of(f"layernorm_kernel<bf16, {pieces}>, with the residual", L, 8 * n, 9 * n / EACH),
            of(f"layernorm_backward_kernel<bf16, {pieces}>", 2 * L + 1, 8 * n, 8 * n / EACH),
            of("embedding_backward_wpe_kernel<4, bf16>", 1, 2 * n, n / WIDE),
        ]
    turned, wide = N * (m.heads + m.kv) * HEAD, N * m.F
    return [
        of("embedding_kernel<bf16>", 1, 4 * n, 2 * n / EACH),
        of(f"rmsnorm_kernel<bf16, {pieces}>", L + 1, 4 * n, 4 * n / EACH),
        of(f"rmsnorm_kernel<bf16, {pieces}>, with the residual", L, 8 * n, 7 * n / EACH),
        of(f"rmsnorm_backward_kernel<bf16, {pieces}>", 2 * L + 1, 8 * n, 8 * n / EACH),
        of("rotary_kernel<true, bf16>", 2 * L, 4 * turned, 2 * turned / EACH),
        of("swiglu_kernel<bf16>", L, 6 * wide, 3 * wide / EACH),
        of("swiglu_backward_kernel<bf16>", L, 10 * wide, 5 * wide / EACH),
    ]


def kernel_launches(m):
    N, n, P, scores = m.B * m.T, m.B * m.T * m.C, parameters_of(m), score_flops(m)
    rows = min(N, CLASSIFIER_ROWS)
    chunk = rows * padded(m)
    kv = 2 * N * m.kv * HEAD  # elements of keys and values

    def of(kernel, calls, bytes_, accesses, flops=0, once=False):
        return Launch(kernel, calls, bytes_, accesses, flops, once)

    return [
        *norm_launches(m, of),
        of("map_kernel<Add, bf16, bf16>", m.L, 6 * n, 3 * n / EACH),
        of("attention_mma_kernel<64, 2, 64>", m.L, 4 * n + 2 * kv, 0, 2 * scores),
        of("classifier_kernel<false, bf16>", math.ceil(N / rows), 4 * chunk, 2 * chunk / EACH),
        of("column_partials_kernel<bf16>", 2 * m.L + 1, 4 * n, 4 * n / WIDE),
        of("attention_delta_kernel<bf16>", m.L, 4 * n, 2 * n / EACH),
        of("attention_mma_keys_kernel<64, 2, 32>", m.L, 4 * n + 4 * kv, 0, 4 * scores),
        of("attention_mma_queries_kernel<64, 2, 32>", m.L, 6 * n + 2 * kv, 0, 3 * scores),
        of("order_tokens_kernel", 4, 16 * N, 2 * N),  # two digits, each counted and sorted by
        of("embedding_backward_wte_kernel<4, bf16>", 1, 2 * n + 8 * n, 3 * n / WIDE),
        of("square_sum_kernel", 1, 4 * P, P / WIDE, 0, True),
        of("adamw_kernel", 1, 30 * P, 8 * P, 0, True),
    ]


def code_of(code, launch):
    return code[launch.kernel.split(", with")[0]]


def issue_seconds(c, launch):
    """From how many instructions the kernel has for each element that it reads or writes, or for
    each product of its tensor cores."""
    total = sum(c.counts.values())
    if launch.flops:  # 1.1: tiles that the diagonal cuts
        return launch.flops * 1.1 / HMMA_FLOPS * total / c.counts["tensor"] / ISSUE_RATE
    run_ones = total * (0.5 if launch.kernel in DIVIDING else 1) / c.counts["global"]
    return launch.accesses / 32 * OF_PATH.get(launch.kernel, run_ones) / ISSUE_RATE


def launch_seconds(c, launch, card="H100"):
    """(seconds, what bounds them)"""
    bounds = {
        "memory": launch.bytes / MEMORY_RATES[card] / OF_MEMORY,
        "instructions": issue_seconds(c, launch) / OF_ISSUE,
        "tensor cores": launch.flops * 1.1 / PRODUCT_RATE / OF_MMA,
    }
    bound = max(bounds, key=bounds.get)
    return bounds[bound], bound


def products(m, more):
    """((rows, columns, depth), bytes) of each matrix product of a micro-step; weight gradients are
    fp32, and added to after the first micro-step."""
    N, found = m.B * m.T, []
    for inputs, outputs in linears(m):
        moved = 2 * (N * (inputs + outputs) + inputs * outputs)
        # GELU's input is written by one product, and read by another
        wide = 0 if m.gated else 2 * N * m.F
        gradient = 2 * N * (inputs + outputs) + (8 if more else 4) * inputs * outputs
        block = [
            ((N, outputs, inputs), moved + (wide if outputs == m.F else 0)),
            ((N, inputs, outputs), moved + (wide if inputs == m.F else 0)),
            ((outputs, inputs, N), gradient),
        ]
        found += block * m.L
    rows, V = min(N, CLASSIFIER_ROWS), padded(m)
    moved = 2 * (rows * m.C + rows * V + m.C * V)
    head = [((rows, V, m.C), moved), ((rows, m.C, V), moved), ((V, m.C, rows), moved + 8 * m.C * V)]
    return found + head * math.ceil(N / rows)


def product_flops(found):
    return sum(2 * math.prod(shape) for shape, _ in found)


def product_rate(rows, columns, depth):
    """FLOP/s: a tile's begin and end cost as much as DEPTH of its depth; of the multiprocessors
    some are idle in the last round of tiles, which costs half of that with the best tiles; fewer
    tiles than multiprocessors are split in depth."""
    waves = math.ceil(rows / 128) * math.ceil(columns / 256) / SMS
    busy = waves / math.ceil(waves) if waves >= 1 else 0.8
    return PRODUCT_RATE * OF_PRODUCTS * depth / (depth + DEPTH) * (1 + busy) / 2


def product_seconds(found, card):
    return sum(
        max(2 * math.prod(shape) / product_rate(*shape), moved / MEMORY_RATES[card] / OF_MEMORY)
        for shape, moved in found
    )


def model_flops(m):
    """As the program counts them for its MFU: causal attention, the padded vocabulary."""
    return product_flops(products(m, False)) + 6 * m.L * score_flops(m)


def estimate(code, m, micro_steps=1, attention=OWN, card="H100"):
    """{part: seconds of a step}"""
    parts = collections.Counter()
    for i in range(micro_steps):
        found = products(m, i > 0)
        parts["matrix products"] += product_seconds(found, card)
        parts["between launches"] += LAUNCH * len(found)
    for launch in kernel_launches(m):
        times = launch.calls * (1 if launch.once else micro_steps)
        name = "norm and optimizer" if launch.once else "other kernels"
        if launch.kernel.startswith("attention"):
            name = "attention"
            if attention == CUDNN:
                continue
        parts[name] += times * launch_seconds(code_of(code, launch), launch, card)[0]
        parts["between launches"] += LAUNCH * times
    if attention == CUDNN:
        forward, backward = (PRODUCT_RATE * share for share in OF_CUDNN)
        flops = 2 * m.L * score_flops(m)
        parts["attention"] = micro_steps * (flops / forward + 2.5 * flops / backward)
    return parts


def figures(code, m, attention, card):
    parts = estimate(code, m, 1, attention, card)
    seconds = sum(parts.values())
    return {
        "ms": round(1e3 * seconds, 1),
        "tokens_per_s": round(m.B * m.T / seconds),
        "mfu": round(model_flops(m) / seconds / PRODUCT_RATE, 3),
        "parts": {name: round(1e3 * value, 1) for name, value in parts.items()},
    }


def estimates(code):
    """{card: {model: {attention: figures}}}"""
    return {
        card: {
            name: {attention: figures(code, m, attention, card) for attention in (OWN, CUDNN)}
            for name, m in MODELS.items()
        }
        for card in MEMORY_RATES
    }


# --------------------------------------------------------------------------------------------------
# The page


def table(head, rows):
    """Of Markdown, with an empty line behind it."""
    lines = [head, ["---"] * len(head), *rows]
    lines = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def resource_rows(code):
    launches = [launch for m in MODELS.values() for launch in kernel_launches(m)]
    for name in dict.fromkeys(launch.kernel.split(", with")[0] for launch in launches):
        c = code[name]
        counts = [c.counts[kind] for kind in (*CLASSES, "other")]
        yield [f"`{name}`", c.registers, f"{c.stores} / {c.loads}", c.shared, *counts]


def time_rows(code, m):
    for launch in kernel_launches(m):
        seconds, bound = launch_seconds(code_of(code, launch), launch)
        yield [
            f"`{launch.kernel}`",
            launch.calls,
            "step" if launch.once else "micro-step",
            f"{launch.bytes / 1e6:.0f}",
            f"{1e6 * seconds:.0f}",
            bound,
            f"{1e3 * seconds * launch.calls:.2f}",
        ]


def part_rows(code):
    """A head, and of each model the parts of a step in ms."""
    parts = list(estimate(code, MODELS["124M"]))
    yield ["model", "attention", *parts, "step"]
    for name, m in MODELS.items():
        for attention in (OWN, CUDNN):
            found = figures(code, m, attention, "H100")
            yield [name, attention, *(found["parts"][part] for part in parts), found["ms"]]


def part_of_page(code):
    head, *rows = part_rows(code)
    title = "### Parts of a step, ms, estimated for an H100"
    return "\n".join([BEGIN, title, "", *table(head, rows)]) + END


def kernel_tables(code):
    spills = sorted(f"`{name}`" for name, c in code.items() if c.stores + c.loads)
    lines = [
        "### Resources and instructions",
        "",
        "Of one thread: registers, spilled bytes (stores / loads). Of a block: static shared memory"
        " (attention's is dynamic). Instructions as they stand in the machine code, each once, by"
        " class; `other` are integers, addresses, conditions, jumps.",
        "",
        *table(
            ["kernel", "registers", "spills, bytes", "shared, bytes", *CLASSES, "other"],
            resource_rows(code),
        ),
        f"Of all {len(code)} kernels these spill registers: {', '.join(spills) or 'none'}.",
        "",
    ]
    for name in ("124M", "Llama 1B"):
        m = MODELS[name]
        lines += [f"### Time of each kernel, {m.name}, B={m.B}, T={m.T}", ""]
        lines += table(
            ["kernel", "calls", "in each", "MB", "us, one call", "bound by", "ms, all calls"],
            time_rows(code, m),
        )
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# docs/results/gpu.md: the estimates beside what scripts/gpu_ten.py has measured

ESTIMATES = os.path.join(ROOT, "docs/results/logs/gpu_estimates.json")
# ms of the steps of other models and modes, by `train_gpt --dry-run --cluster "1x1,gpu=h200"`
PREDICTED = os.path.join(ROOT, "docs/results/logs/gpu_predicted.json")
NOT = "not measured"
EXPLAINED = (
    "`scripts/gpu_ten.py table` writes this page ([how a run"
    " goes](../gpu.md#the-first-ten-minutes)). The estimates are for an {}, by the roofline of"
    " `scripts/gpu_table.py` ([its assumptions](../gpu.md#what-the-compiled-code-says)), and were"
    " committed before this run. The error is the estimated time over the measured one, less 1. MFU"
    " is of 989.4 TFLOP/s, with causal attention counted as half. Also every ceiling,"
    " kernel and command:"
)
SHOWS_ALL = "    scripts/gpu_ten.py table --whole --page - docs/results/logs/gpu_h200"
# What others say they reach, in tokens/s of a GPU, and the model here that is nearest to theirs
ANCHORS = (
    ("llm.c: GPT-2 1558M, T=1024, one of 8 H100", "47,700", "1558M"),
    ("PyTorch: GPT-2 124M, T=1024, H100", "349,000", "124M"),
    ("LLMQ: Qwen2.5 1.5B, H100", "58,900", "Llama 1B"),
    ("LLMQ: Qwen2.5 7B, H100", "13,850", None),
)
PROVEN = ("first steps", "correctness", "nccl", "memory errors")  # steps that say what is right


def cell(value, form="{}", scale=1):
    return "–" if value is None else form.format(scale * value)


def outcome(entry):
    """How it ended, and why there is no figure."""
    if not entry or entry["status"] in ("passed", "out of time"):
        return entry["status"] if entry else NOT
    return f"{entry['status']}: {' '.join(entry['reason'].split())[-120:]}"


def step_rows(entries, estimates):
    for name, m in MODELS.items():
        for attention in (OWN, CUDNN, "PyTorch"):
            entry = entries.get(f"{name}, {attention}", {})
            found, guess = entry.get("figures", {}), estimates[name].get(attention, {})
            found = (found.get("found") or [found])[-1]  # PyTorch's side prints a list
            if not (guess or entry):
                continue
            ms, speed = found.get("ms"), found.get("tokens_per_s")
            yield [
                f"{name}, B={found.get('rows', m.B)}, T={m.T}",
                attention,
                cell(guess.get("ms"), "{:.0f}"),
                cell(ms, "{:.1f}") if ms else outcome(entry),
                cell(guess["ms"] / ms - 1 if guess and ms else None, "{:+.0f} %", 100),
                cell(guess.get("tokens_per_s"), "{:,}"),
                cell(speed, "{:,.0f}"),
                cell(guess.get("mfu"), "{:.0f} %", 100),
                cell(
                    speed and speed * model_flops(m) / (m.B * m.T) / PRODUCT_RATE, "{:.1f} %", 100
                ),
            ]


def system_rows(entries, predicted):
    for name, guess in predicted.items():
        entry = entries.get(name, {})
        if entry:
            found = entry["figures"]
            yield [
                name,
                cell(guess, "{:.0f}"),
                cell(found["ms"], "{:.1f}") if found else outcome(entry),
                cell(guess / found["ms"] - 1 if found else None, "{:+.0f} %", 100),
                cell(found.get("tokens_per_s"), "{:,.0f}"),
                cell(found.get("mfu"), "{:.1f} %", 100),
                cell(found.get("memory", {}).get("measured"), "{:.1f}", 1e-9),
            ]


def figure(value):
    if isinstance(value, dict):
        return ", ".join(f"{name} {figure(x)}" for name, x in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def proven_lines(entries):
    """A row for each step that says what is right: its commands, which passed, their seconds."""
    rows = []
    for step in PROVEN:
        made = [entry for entry in entries.values() if entry["step"] == step]
        passed = [entry for entry in made if entry["status"] == "passed"]
        names, seconds = "; ".join(entry["name"] for entry in made), sum(e["seconds"] for e in made)
        bad = [f"; {entry['name']} {outcome(entry)}" for entry in made if entry not in passed]
        rows.append([step, names, f"{len(passed)} of {len(made)}{''.join(bad)}", f"{seconds:.0f}"])
    return table(["step", "commands", "passed", "s"], rows)


def entry_lines(entries):
    """A table of how commands ended, with their single figures."""
    rows = []
    for entry in entries.values():
        single = {k: v for k, v in entry["figures"].items() if not isinstance(v, (list, dict))}
        row = [entry["step"], entry["name"], outcome(entry), entry["seconds"], figure(single)]
        rows.append(row)
    return table(["step", "what", "outcome", "s", "figures"], rows)


def list_lines(entries):
    """A table of each list of figures: ceilings, kernels, attention."""
    for entry in entries.values():
        found = (
            entry["figures"].get("found", []) if entry["step"] in ("ceilings", "kernels") else []
        )
        for names, rows in itertools.groupby(found, key=list):
            rows = [[figure(value) for value in row.values()] for row in rows]
            yield from [f"{entry['name']}:", "", *table(names, rows)]


def summary(entries, toy):
    """The first lines: what was measured on which card, and what was not."""
    gpu = entries.get("GPU", {}).get("figures", {})
    if toy:
        return "**A rehearsal on the emulation: no figure here is a measurement.**"
    if not any(entry["figures"].get("ms") for entry in entries.values()):
        return "**No GPU has run this program yet: every figure here is an estimate.**"
    bad = [entry["name"] for entry in entries.values() if entry["status"] != "passed"]
    card = f"**Measured on one {gpu.get('name', 'GPU')}**, driver {gpu.get('driver_version')}. "
    return card + (f"Without a result: {'; '.join(bad)}." if bad else "Every command passed.")


def results_page(folders, whole=False):
    """Of runs, of which a later one counts more; whole: with every ceiling, kernel and command."""
    entries, toy = {}, False
    for folder in folders:
        with open(os.path.join(folder, "ten.json")) as file:
            results = json.load(file)
        toy |= results["toy"]
        entries.update({entry["name"]: entry for entry in results["entries"]})
    with open(ESTIMATES) as file:
        estimates = json.load(file)
    with open(PREDICTED) as file:
        predicted = json.load(file)
    card = "H200" if "H200" in str(entries.get("GPU")) else "H100"
    steps = list(step_rows(entries, estimates[card]))
    near = lambda m: "; ".join(  # noqa: E731
        f"{row[1]} {row[6]}" for row in steps if row[0].startswith(f"{m},")
    )
    head = ["work", "attention", "ms, estimated", "measured", "error", "tokens/s", "MFU"]
    who = ["who", "tokens/s of a GPU", "the nearest here, measured"]
    lines = [
        "# Speed on a GPU: estimated, and measured",
        "",
        summary(entries, toy),
        "",
        *textwrap.wrap(EXPLAINED.format(card), 100),
        "",
        SHOWS_ALL,
        "",
        "## Steps in bf16, one GPU, one micro-step",
        "",
        *table(head, [[*row[:5], row[6], row[8]] for row in steps]),
        "## What others reach",
        "",
        *table(who, [[*row, near(m) or "–"] for *row, m in ANCHORS]),
    ]
    if entries:
        head = ["steps", "ms, predicted", "measured", "error", "tokens/s", "MFU", "GB of the GPU"]
        systems = list(system_rows(entries, predicted[card]))
        if systems:
            lines += ["## Other models, private steps, offload", "", *table(head, systems)]
        lines += ["## Is it right", "", *proven_lines(entries)]
    if whole:
        lines += ["## Ceilings and kernels", "", *list_lines(entries)]
        lines += ["## All commands", "", *entry_lines(entries)]
    return "\n".join(lines).rstrip() + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", metavar="FOLDER", help="where to keep what is compiled")
    parser.add_argument("--write", metavar="PAGE", help="the page whose marked part is replaced")
    parser.add_argument("--kernels", metavar="FILE", help="the tables of kernels")
    parser.add_argument("--estimates", metavar="FILE", help="JSON of the estimated steps")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.work:
            os.makedirs(options.work, exist_ok=True)
        code = read_code(os.path.abspath(options.work or folder))
    if options.estimates:
        with open(options.estimates, "w") as file:
            file.write(json.dumps(estimates(code), indent=1) + "\n")
    if options.kernels:
        with open(options.kernels, "w") as file:
            file.write(kernel_tables(code))
    if not options.write:
        print(part_of_page(code))
        return 0
    with open(options.write) as file:
        page = file.read()
    if BEGIN not in page or END not in page:
        sys.exit(f"gpu_table: {options.write} lacks the lines {BEGIN} and {END}")
    with open(options.write, "w") as file:
        before, after = page[: page.index(BEGIN)], page[page.index(END) + len(END) :]
        file.write(before + part_of_page(code) + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
