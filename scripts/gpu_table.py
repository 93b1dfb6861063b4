#!/usr/bin/env python3
"""What the compiled GPU code says of its speed, for docs/gpu.md: no GPU is needed.

    scripts/gpu_table.py [--work FOLDER] [--write docs/gpu.md]

Compiles train_gpt.cu for sm_90, reads registers, spills and shared memory from ptxas and
instructions from cuobjdump -sass (both of the CUDA toolkit; c++filt names the kernels), adds the
formulas below for what each kernel moves, and estimates training steps on an H100. --work keeps
what was compiled, and a second run with the same FOLDER takes it from there. --write replaces the
part of the page between its two marks; without it that part is printed.
"""

import argparse
import collections
import math
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BEGIN, END = (
    "<!-- begin: made by scripts/gpu_table.py -->",
    "<!-- end: made by scripts/gpu_table.py -->",
)

# An H100 SXM, as NVIDIA states it
MEMORY_RATE, PRODUCT_RATE = 3.35e12, 989.4e12  # bytes/s; dense bf16 FLOP/s
SMS, CLOCK, SCHEDULERS = (
    132,
    1.755e9,
    4,
)  # each scheduler issues one instruction of a warp in a cycle
ISSUE_RATE = SMS * CLOCK * SCHEDULERS  # warp instructions/s
# Assumed: nobody has measured them for this program
OF_MEMORY, OF_PRODUCTS, OF_ISSUE, OF_MMA = 0.85, 0.70, 0.60, 0.62
LAUNCH = 2e-6  # seconds between a kernel and the next
HMMA_FLOPS = 4096  # of one mma.m16n8k16
CLASSIFIER_ROWS = 2048

Model = collections.namedtuple("Model", "name B T L C heads V")
MODELS = [
    (Model("124M", 64, 1024, 12, 768, 12, 50257), (1,)),
    (Model("1558M", 16, 1024, 48, 1600, 25, 50257), (1, 8)),
]
# Operation codes by class; what is in none counts as "other": integers, addresses, conditions,
# jumps.
CLASSES = {
    "tensor": ("HMMA",),
    "global": ("LDG", "STG", "LDGSTS", "RED", "REDG", "ATOMG", "ATOM", "LD", "ST"),
    "shared": ("LDS", "STS", "LDSM", "ATOMS"),
    "local": ("LDL", "STL"),
    "fp32": (
        "FADD",
        "FMUL",
        "FFMA",
        "FMNMX",
        "FSETP",
        "FSEL",
        "F2F",
        "F2FP",
        "HADD2",
        "HFMA2",
        "PRMT",
    ),
    "fp64": ("DADD", "DMUL", "DFMA", "DSETP"),
    "special": ("MUFU",),
    "wait": ("BAR", "WARPSYNC", "DEPBAR", "SHFL", "LDGDEPBAR"),
}
Code = collections.namedtuple("Code", "registers stores loads shared counts")


def run(*words):
    return subprocess.run(
        [str(word) for word in words], cwd=ROOT, check=True, capture_output=True, text=True
    )


def compile_program(folder):
    """The paths of the machine code and of what ptxas said."""
    cubin, said = os.path.join(folder, "train_gpt.cubin"), os.path.join(folder, "ptxas.txt")
    if not (os.path.exists(cubin) and os.path.exists(said)):
        places = run("mpicc", "--showme:incdirs").stdout.split()
        words = [
            "nvcc",
            "-std=c++17",
            "-O3",
            "-arch",
            "sm_90",
            "-D_GNU_SOURCE",
            "-Xcompiler",
            "-fopenmp",
            "-I.",
            "-cubin",
            "-Xptxas",
            "-v",
            "train_gpt.cu",
        ]
        text = run(
            *words, *[word for place in places for word in ("-isystem", place)], "-o", cubin
        ).stderr
        with open(said, "w") as file:
            file.write(text)
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


def class_of(opcode):
    for name, opcodes in CLASSES.items():
        if opcode in opcodes:
            return name
    return "other"


def read_sass(text):
    """{mangled name: Counter of instruction classes}"""
    found, counts = {}, None
    for line in text.splitlines():
        name = re.search(r"Function : (\S+)", line)
        if name:
            counts = found[name[1]] = collections.Counter()
        instruction = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", line)
        if instruction and instruction[1] != "NOP":
            counts[class_of(instruction[1])] += 1
    return found


def read_code(folder):
    """{name of a kernel with its template's arguments: Code}"""
    cubin, said = compile_program(folder)
    with open(said) as file:
        resources = read_ptxas(file.read())
    sass = read_sass(run("cuobjdump", "-sass", cubin).stdout)
    names = run("c++filt", *sass).stdout.splitlines()
    short = [
        re.sub(r"^void ", "", re.sub(r"\(.*", "", name)).replace("__nv_bfloat16", "bf16")
        for name in names
    ]
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


def parameters_of(m):
    return m.L * (12 * m.C**2 + 13 * m.C) + (padded(m) + m.T + 2) * m.C


def padded(m):
    return (m.V + 127) // 128 * 128


def kernel_launches(m):
    N, n = m.B * m.T, m.B * m.T * m.C
    chunks, P, scores = (
        math.ceil(N / CLASSIFIER_ROWS),
        parameters_of(m),
        m.B * m.T * m.T * m.C,
    )  # FLOP of one product of scores, causal
    chunk = min(N, CLASSIFIER_ROWS) * padded(m)
    of = lambda kernel, calls, bytes_, accesses, flops=0, once=False: Launch(
        kernel, calls, bytes_, accesses, flops, once
    )  # noqa: E731
    return [
        of("embedding_kernel<bf16>", 1, 4 * n, 3 * n),
        of("layernorm_kernel<bf16>", m.L + 1, 4 * n, 6 * n),
        of("layernorm_kernel<bf16>, with the residual", m.L, 8 * n, 9 * n),
        of("residual_kernel<bf16>", m.L, 6 * n, 3 * n),
        of("attention_mma_kernel<64, 2, 64>", m.L, 8 * n, 0, 2 * scores),
        of("classifier_kernel<bf16>", chunks, 4 * chunk, 4 * chunk),
        of("layernorm_backward_kernel<bf16>", 2 * m.L + 1, 8 * n, 8 * n),
        of("column_partials_kernel<bf16>", 2 * m.L + 1, 4 * n, 4 * n),
        of("attention_delta_kernel<bf16>", m.L, 4 * n, 2 * n),
        of("attention_mma_keys_kernel<64, 2, 32>", m.L, 12 * n, 0, 4 * scores),
        of("attention_mma_queries_kernel<64, 2, 32>", m.L, 10 * n, 0, 3 * scores),
        of("order_tokens_kernel", 1, 8 * N, N * N),
        of("embedding_backward_wte_kernel<bf16>", 1, 2 * n + 8 * n, 3 * n),
        of("embedding_backward_wpe_kernel<bf16>", 1, 2 * n, n),
        of("square_sum_kernel", 1, 4 * P, P, 0, True),
        of("adamw_kernel", 1, 30 * P, 8 * P, 0, True),
    ]


def code_of(code, launch):
    return code[launch.kernel.split(", with")[0]]


def issue_seconds(c, launch):
    """From how many instructions the kernel has for each element that it reads or writes, or for
    each product of its tensor cores."""
    total = sum(c.counts.values())
    if launch.flops:
        return (
            launch.flops * 1.1 / HMMA_FLOPS * total / c.counts["tensor"] / ISSUE_RATE
        )  # 1.1: tiles that the diagonal cuts
    inner = c.counts["shared"] if launch.kernel == "order_tokens_kernel" else c.counts["global"]
    wide = (
        4 if launch.kernel == "order_tokens_kernel" else 1
    )  # comparisons for a load of shared memory
    return launch.accesses / 32 * total / (inner * wide) / ISSUE_RATE


def launch_seconds(c, launch):
    """(seconds, what bounds them)"""
    bounds = {
        "memory": launch.bytes / MEMORY_RATE / OF_MEMORY,
        "instructions": issue_seconds(c, launch) / OF_ISSUE,
        "tensor cores": launch.flops * 1.1 / PRODUCT_RATE / OF_MMA,
    }
    bound = max(bounds, key=bounds.get)
    return bounds[bound], bound


def products(m, more):
    """(FLOP, bytes) of each matrix product of a micro-step; weight gradients are fp32, and added to
    after the first micro-step."""
    N, C, found = m.B * m.T, m.C, []
    for rows, columns, calls in ((C, 3 * C, m.L), (C, C, m.L), (C, 4 * C, m.L), (4 * C, C, m.L)):
        flops, moved = 2 * N * rows * columns, 2 * (N * (rows + columns) + rows * columns)
        pre = 2 * N * 4 * C if 4 * C in (rows, columns) else 0  # GELU's input is written, and read
        gradient = 2 * N * (rows + columns) + (8 if more else 4) * rows * columns
        found += [(flops, moved + (pre if columns == 4 * C else 0))] * calls + [
            (flops, moved + (pre if rows == 4 * C else 0))
        ] * calls
        found += [(flops, gradient)] * calls
    rows = min(N, CLASSIFIER_ROWS)
    head = 2 * rows * C * padded(m), 2 * (rows * C + rows * padded(m) + C * padded(m))
    for _ in range(math.ceil(N / rows)):
        found += [head, head, (head[0], head[1] + 8 * C * padded(m))]
    return found


def product_seconds(found):
    return sum(
        max(flops / PRODUCT_RATE / OF_PRODUCTS, moved / MEMORY_RATE / OF_MEMORY)
        for flops, moved in found
    )


def model_flops(m):
    """As the program counts them for its MFU: causal attention, the padded vocabulary."""
    tokens = m.B * m.T
    return 3 * tokens * (m.L * (24 * m.C**2 + 2 * m.C * m.T) + 2 * padded(m) * m.C)


def estimate(code, m, micro_steps):
    """{part: seconds of a step}"""
    parts = collections.Counter()
    for i in range(micro_steps):
        found = products(m, i > 0)
        parts["matrix products"] += product_seconds(found)
        parts["between launches"] += LAUNCH * len(found)
    copies = 2 * m.L * 4 * m.B * m.T * m.C / MEMORY_RATE / OF_MEMORY
    parts["copies of gradients"] = micro_steps * copies
    for launch in kernel_launches(m):
        times = launch.calls * (1 if launch.once else micro_steps)
        name = (
            "attention"
            if launch.kernel.startswith("attention")
            else "norm and optimizer" if launch.once else "other kernels"
        )
        parts[name] += times * launch_seconds(code_of(code, launch), launch)[0]
        parts["between launches"] += LAUNCH * times
    return parts


# --------------------------------------------------------------------------------------------------
# The page


def table(head, rows):
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
        "",
    ]


def resource_rows(code):
    used = dict.fromkeys(
        launch.kernel.split(", with")[0] for launch in kernel_launches(MODELS[0][0])
    )
    for name in used:
        c = code[name]
        yield [
            f"`{name}`",
            c.registers,
            f"{c.stores} / {c.loads}",
            c.shared,
            *(c.counts[kind] for kind in CLASSES),
            c.counts["other"],
        ]


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


def estimate_rows(code):
    parts = [
        "matrix products",
        "attention",
        "other kernels",
        "copies of gradients",
        "norm and optimizer",
        "between launches",
    ]
    yield ["model", "B", "micro-steps", *parts, "step, ms", "tokens/s", "MFU"]
    for m, counts in MODELS:
        for micro_steps in counts:
            found = estimate(code, m, micro_steps)
            total = sum(found.values())
            mfu = micro_steps * model_flops(m) / total / PRODUCT_RATE
            yield [
                m.name,
                m.B,
                micro_steps,
                *(f"{1e3 * found[part]:.1f}" for part in parts),
                f"{1e3 * total:.0f}",
                f"{micro_steps * m.B * m.T / total:,.0f}",
                f"{100 * mfu:.0f} %",
            ]


def part_of_page(code):
    spills = [name for name, c in code.items() if c.stores + c.loads]
    head, *rows = estimate_rows(code)
    lines = [
        BEGIN,
        "### Resources and instructions",
        "",
        (
            "Of one thread: registers, spilled bytes (stores / loads). Of a block: static shared"
            " memory (attention's is dynamic). Instructions as they stand in the machine code, each"
            " once, by class; `other` are integers, addresses, conditions, jumps."
        ),
        "",
    ]
    lines += table(
        ["kernel", "registers", "spills, bytes", "shared, bytes", *CLASSES, "other"],
        resource_rows(code),
    )
    lines += [
        f"Of all {len(code)} kernels these spill registers: "
        + (", ".join(f"`{name}`" for name in sorted(spills)) or "none")
        + ".",
        "",
    ]
    for m, _ in MODELS:
        lines += [f"### Time of each kernel, {m.name}, B={m.B}, T={m.T}", ""]
        lines += table(
            ["kernel", "calls", "in each", "MB", "us, one call", "bound by", "ms, all calls"],
            time_rows(code, m),
        )
    lines += ["### Estimated steps", "", "Parts in ms of a step.", "", *table(head, rows)]
    return "\n".join(lines) + END


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", metavar="FOLDER", help="where to keep what is compiled")
    parser.add_argument("--write", metavar="PAGE", help="the page whose marked part is replaced")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.work:
            os.makedirs(options.work, exist_ok=True)
        text = part_of_page(read_code(os.path.abspath(options.work or folder)))
    if not options.write:
        print(text)
        return 0
    with open(options.write) as file:
        page = file.read()
    if BEGIN not in page or END not in page:
        sys.exit(f"gpu_table: {options.write} lacks the lines {BEGIN} and {END}")
    with open(options.write, "w") as file:
        file.write(page[: page.index(BEGIN)] + text + page[page.index(END) + len(END) :])
    return 0


if __name__ == "__main__":
    sys.exit(main())
