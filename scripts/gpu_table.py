"""gpu_table.py: docs/results/gpu.md, from what runs of gpu_ten.py have found (gpu_ten.py table).

Beside the measured steps it has estimates that were made before any run, from the registers and
instructions of the compiled code and the bytes that each kernel moves: gpu_estimates.json (what
made them: git show 70d6343:scripts/gpu_table.py). The steps of other models and modes were
predicted by `train_gpt --dry-run --cluster 1x1,gpu=h200`.
"""

import itertools
import json
import os
import textwrap

from gpu_ten import CASES, CUDNN, OWN, ROOT

MODELS = ("124M", "774M", "1558M", "Llama 1B")  # that there are estimates of
LOGS = os.path.join(ROOT, "docs/results/logs")
ESTIMATES = os.path.join(LOGS, "gpu_estimates.json")
PREDICTED = os.path.join(LOGS, "gpu_predicted.json")  # ms
NOT = "not measured"
EXPLAINED = (
    "`scripts/gpu_ten.py table` writes this page ([how a run"
    " goes](../gpu.md#the-first-ten-minutes)). The estimates are for an {}, from the compiled code"
    " of each kernel and the bytes that it moves, and were committed before this run. The error is"
    " the estimated time over the measured one, less 1. MFU is of 989.4 TFLOP/s, with causal"
    " attention counted as half. Also every ceiling, kernel and command:"
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


def table(head, rows):
    """Of Markdown, with an empty line behind it."""
    lines = [head, ["---"] * len(head), *rows]
    lines = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def cell(value, form="{}", scale=1):
    return "–" if value is None else form.format(scale * value)


def outcome(entry):
    """How it ended, and why there is no figure."""
    if not entry or entry["status"] in ("passed", "out of time"):
        return entry["status"] if entry else NOT
    return f"{entry['status']}: {' '.join(entry['reason'].split())[-120:]}"


def step_rows(entries, estimates):
    for name in MODELS:
        case, own = CASES[name], entries.get(f"{name}, {OWN}", {}).get("figures", {})
        for attention in (OWN, CUDNN, "PyTorch"):
            entry = entries.get(f"{name}, {attention}", {})
            found, guess = entry.get("figures", {}), estimates[name].get(attention, {})
            found = (found.get("found") or [found])[-1]  # PyTorch's side prints a list
            if not (guess or entry):
                continue
            ms, speed = found.get("ms"), found.get("tokens_per_s")
            share = own["mfu"] / own["tokens_per_s"] if "mfu" in own else None
            yield [
                f"{name}, B={found.get('rows', case.rows)}, T={case.T}",
                attention,
                cell(guess.get("ms"), "{:.0f}"),
                cell(ms, "{:.1f}") if ms else outcome(entry),
                cell(guess["ms"] / ms - 1 if guess and ms else None, "{:+.0f} %", 100),
                cell(guess.get("tokens_per_s"), "{:,}"),
                cell(speed, "{:,.0f}"),
                cell(guess.get("mfu"), "{:.0f} %", 100),
                # PyTorch's steps compute the same, and count nothing
                cell(speed and share and speed * share, "{:.1f} %", 100),
            ]


def system_rows(entries, predicted):
    for name, guess in predicted.items():
        entry = entries.get(name, {})
        if entry:
            found = entry["figures"]
            yield [
                name, cell(guess, "{:.0f}"),
                cell(found["ms"], "{:.1f}") if found else outcome(entry),
                cell(guess / found["ms"] - 1 if found else None, "{:+.0f} %", 100),
                cell(found.get("tokens_per_s"), "{:,.0f}"), cell(found.get("mfu"), "{:.1f} %", 100),
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
        "# Speed on a GPU: estimated, and measured", "", summary(entries, toy), "",
        *textwrap.wrap(EXPLAINED.format(card), 100), "", SHOWS_ALL, "",
        "## Steps in bf16, one GPU, one micro-step", "",
        *table(head, [[*row[:5], row[6], row[8]] for row in steps]), "## What others reach", "",
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
