#!/usr/bin/env python3
"""reproduce_dapple.py: DAPPLE's (arXiv 2007.01045, PPoPP 2021) plans and speed-ups, simulated from
the profiles that its authors published.

    scripts/reproduce_dapple.sh --quick | --full [--into FOLDER] [--program FILE] [--profiles FILE]

Asks train_gpt --plan, in which the schedule's replay decides, and prints tables of claim, paper,
ours, and why they differ:

table 4   plans for 16 GPUs on configurations A, B, C: what equations 1 to 3 choose of the kinds of
          plans that the paper has (scripts/papers/dapple_planners.py), and what the search finds
table 3   warm-up policy B over A, the paper's plans on A
table 5   BERT-48 in two stages of one GPU, micro-batch 2, on B: GPipe and DAPPLE by the number of
          micro-batches
figure 11 speed-ups over one GPU of data parallelism and of the best other plan, by the samples of a
          step, on A, B, C: all sizes of the figure, with --quick 128 samples beside its curves
figure 12 the paper's plans and PipeDream's, as the paper's table 6 has them, with the better
          warm-up, on 2x8 GPUs; what the search and PipeDream's planner (as before) find there and,
          with --full, on 4x8
table 7   the largest BERT that fits into 16 GB a GPU with recomputation, by the number of stages
real      this program, training on an emulated cluster of two, then four nodes with a slow network
          (scripts/cluster.sh: root on Linux; elsewhere left out, and said so): schedules against
          each other, and plans of the same batch against the planner's choice, with what was
          predicted; then table 5's two pairings at the paper's ratios of an update to a
          micro-batch, and of activations to the rest of the memory

The profiles are test/golden/dapple_profiles.json: times and bytes of the layers as measured by the
authors (AlibabaPAI/DAPPLE at fd75dcf, directory profiling_results: facts, encoded anew; no code of
theirs is here). FOLDER (default: out/dapple_quick or out/dapple_full) gets each answer as
NAME.json, each real run in a folder of its own, the tables as table.md, and table5.png,
figure11.png, figure12.png, real.png. `make data` makes what real runs train on.

Each finished run has a line: how many of all are done, the time gone and left. The last table gives
the verdict on each claim of docs/results.md that these runs decide.

Exit status: 0 done, 1 a claim that docs/results.md calls MET is not met here, 2 bad usage or
missing input, 3 FOLDER cannot be written, 4 a plan failed, 130 stopped by Ctrl-C.
"""

import argparse
import glob
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from papers import dapple_planners
from reproduce import (
    EXIT_FAILED,
    SCRIPTS,
    Claim,
    Failed,
    Runner,
    complete,
    last_words,
    markdown,
    percent,
    pyplot_or_none,
    run_claims,
    span,
)

# Constants of the authors' planner, GB/s, but for one: it takes 1 GB/s where many send to one node
# (gather=1), a third of the link. The communication ratios that the paper tells follow from the
# link's whole rate, as here.
CLUSTERS = {"A": "2x8,intra=25,inter=3", "B": "16x1,inter=3", "C": "16x1,inter=1.2"}
# model: samples of a step, micro-batch of equations 1 to 3, and the paper's plan (stages as
# units:replicas), split and speed-up on A, B, C
TABLE4 = {
    "vgg-19": (2048, 1, {"A": ("DP", 14.62), "B": ("DP", 14.62), "C": ("22:15,4:1", 9.04)}),
    "gnmt-16": (
        1024,
        1,
        {"A": ("39:8,57:8", 10.14), "B": ("39:8,57:8", 5.25), "C": ("straight", 4.31)},
    ),
    "bert-48": (
        64,
        1,
        {"A": ("27:8,26:8", 14.05), "B": ("straight", 12.49), "C": ("straight", 12.49)},
    ),
    "xlnet-36": (
        128,
        1,
        {"A": ("24:8,19:8", 14.85), "B": ("24:8,19:8", 10.79), "C": ("straight", 10.72)},
    ),
    "amoebanet-36": (
        128,
        8,
        {"A": ("31:8,13:8", 11.9), "B": ("33:11,11:5", 8.1), "C": ("33:11,11:5", 4.4)},
    ),
}
TABLE3 = {
    "bert-48": ("27:8,26:8", 64, 1.0),
    "xlnet-36": ("24:8,19:8", 128, 1.02),
    "vgg-19": ("17:14,9:2", 2048, 1.1),
    "gnmt-16": ("39:8,57:8", 1024, 1.31),
}
# name, schedule, recomputed, the paper's {micro-batches: samples/s}, and average peak GB of a GPU
TABLE5 = (
    ("GPipe", "gpipe", False, {2: 5.10}, {2: 12.1}),
    ("GPipe, recomputed", "gpipe", True, {2: 4.00, 5: 5.53}, {2: 9.9, 5: 13.2}),
    ("DAPPLE", "dapple", False, {2: 5.10, 8: 7.60, 16: 8.18}, {2: 10.6, 8: 10.6, 16: 10.6}),
    ("DAPPLE, recomputed", "dapple", True, {2: 4.24, 8: 6.23, 16: 6.77}, {2: 8.5, 8: 8.5, 16: 8.5}),
)
# model: samples of a step, and of (DAPPLE, PipeDream): speed-ups on 2x8 and 4x8
FIGURE12 = {
    "xlnet-36": (128, (14.9, 8.6), (23.8, 15.7)),
    "bert-24": (128, (14.5, 11.5), (24.4, 19.2)),
    "amoebanet-36": (128, (11.6, 6.3), (12.7, 7.4)),
    "vgg-19": (1024, (9.6, 3.0), (16.3, 2.2)),
}
FIGURE11 = SCRIPTS.parent / "test/golden/dapple_figure11.json"  # the paper's curves
TABLE6 = {
    "xlnet-36": "24:8,19:8",
    "bert-24": "15:8,14:8",
    "amoebanet-36": "31:8,13:8",
    "vgg-19": "17:14,9:2",
}  # the paper's plans on 2x8
# PipeDream's on the same; "straight" has 16 stages, whose units the paper does not tell: even ones
TABLE6_PIPEDREAM = {
    "xlnet-36": "16",
    "bert-24": "5:2,9:6,3:2,3:2,3:2,6:2",
    "amoebanet-36": "16",
    "vgg-19": "11:8,6:6,2:1,7:1",
}
NEAR = 0.15  # of the paper's speed-up
VGG = (
    "VGG-19's 14 replicas have 5 or 4 samples each, of which the profile, taken with 32, knows no"
    " time, nor what splitting 13.7 MB on the hosts takes"
)
TABLE7 = {1: 48, 2: 106, 4: 215, 8: 428}  # stages: layers
DATA = "data/text_bytes_train_*.bin"
REAL = (
    "--model",
    "layers=6,heads=4,channels=256,vocab=256",
    "--seq-len",
    "128",
    "--threads",
    "1",
    "--val-every",
    "0",
    "--train",
    DATA,
)
CLUSTER = ("2x1", "--rate", "200mbit")
CLUSTER4 = (
    "4x1",
    "--rate",
    "200mbit",
    "--cpu",
    "45",
)  # of a core for each rank: equal computers on two cores
# name: flags, samples of a step. The first two of schedules are the paper's comparison: GPipe with
# as many micro-batches as fit, DAPPLE with more
SCHEDULES = {
    "GPipe, M=2": (("--pipeline", "2", "--pipeline-schedule", "gpipe", "--micro-batch", "2"), 4),
    "DAPPLE, M=16": (("--pipeline", "2", "--micro-batch", "2"), 32),
    "GPipe, M=16": (("--pipeline", "2", "--pipeline-schedule", "gpipe", "--micro-batch", "2"), 32),
    "DAPPLE, M=16, recomputed": (
        ("--pipeline", "2", "--micro-batch", "2", "--recompute", "block"),
        32,
    ),
    "zero-bubble, M=16": (
        ("--pipeline", "2", "--pipeline-schedule", "zero-bubble", "--micro-batch", "2"),
        32,
    ),
}
PLANS = {
    "data parallel 8:2": (("--pipeline", "8:2", "--micro-batch", "16"), 32),
    "3:1,5:1": (("--pipeline", "3:1,5:1", "--micro-batch", "2"), 32),
    "4:1,4:1": (("--pipeline", "4:1,4:1", "--micro-batch", "2"), 32),
    "5:1,3:1": (("--pipeline", "5:1,3:1", "--micro-batch", "2"), 32),
    "auto": (("--pipeline", "auto"), 32),
}
# of four ranks: data parallelism, and each way to give stages their ranks, with units in proportion
# and two samples to the busiest rank; --quick runs the first
SPECS4 = {
    "8:4": 16,
    "4:2,4:2": 4,
    "2:1,2:1,2:1,2:1": 2,
    "3:2,5:2": 4,
    "5:2,3:2": 4,
    "2:1,6:3": 6,
    "6:3,2:1": 6,
    "2:1,2:1,4:2": 4,
    "2:1,4:2,2:1": 4,
    "4:2,2:1,2:1": 4,
}
PLANS4 = {
    "auto": (("--pipeline", "auto"), 32),
    **{
        "data parallel 8:4" if spec == "8:4" else spec: (
            ("--pipeline", spec, "--micro-batch", str(batch)),
            32,
        )
        for spec, batch in SPECS4.items()
    },
}
# GPipe with the micro-batches that fit, and DAPPLE, where a step's update is a larger part of
# GPipe's: small micro-batches; stages of two ranks in two nodes
UPDATES = {
    "GPipe, M=2, 1 sample": (
        ("--pipeline", "2", "--pipeline-schedule", "gpipe", "--micro-batch", "1"),
        2,
    ),
    "DAPPLE, M=16, 1 sample": (("--pipeline", "2", "--micro-batch", "1"), 16),
}
UPDATES4 = {
    "GPipe, M=2, 4:2,4:2": (
        ("--pipeline", "4:2,4:2", "--pipeline-schedule", "gpipe", "--micro-batch", "4"),
        8,
    ),
    "DAPPLE, M=16, 4:2,4:2": (("--pipeline", "4:2,4:2", "--micro-batch", "4"), 64),
}
# Table 5 near the paper's ratios: in its figures an update takes half as long as a micro-batch on a
# stage (5.10 and 8.18 samples/s), and the activations of a micro-batch are 0.46 of what a GPU keeps
# otherwise (10.6 and 12.1 GB). Both follow from the tokens of a micro-batch and the width here: a
# narrow model, whose micro-batches are short.
TABLE5_MODEL = (
    *("--model", "layers=24,heads=4,channels=64,vocab=1024", "--seq-len", "128"),
    *("--threads", "1", "--val-every", "0", "--train", DATA),
)
TABLE5_LENGTH = 128
TABLE5_CLUSTER = ("2x1",)
TABLE5_RUNS = {
    "table 5, GPipe, M=2": (
        ("--pipeline", "2", "--pipeline-schedule", "gpipe", "--micro-batch", "1"),
        2,
    ),
    "table 5, DAPPLE, M=16": (("--pipeline", "2", "--micro-batch", "1"), 16),
    "table 5, GPipe, M=16": (
        ("--pipeline", "2", "--pipeline-schedule", "gpipe", "--micro-batch", "1"),
        16,
    ),
}
# of the paper, DAPPLE with M=16 over GPipe: samples/s and memory; GPipe has no memory for M=16
TABLE5_PAPER = {"GPipe, M=2": ("1.60", "0.88"), "GPipe, M=16": ("", "")}


class Planner:
    def __init__(self, options):
        self.options, self.runner = options, Runner()
        self.found = {}  # measurements by name, which the claims are decided by

    def model(self, name):
        return dapple_planners.Model(Path(self.options.profiles), name)

    def made(self, what, result):
        """The result, of a table or figure whose plans have no lines of their own."""
        self.runner.progress.line(f"plans of {what}")
        return result

    def ask(self, name, model, cluster, samples, *flags, profiles=None):
        """The answer of --plan, or None where nothing fits the memory."""
        output = self.options.into / f"{name}.json"
        command = [
            self.options.program,
            "--plan",
            "--json",
            "--profile",
            f"{profiles or self.options.profiles}:{model}",
            "--cluster",
            cluster,
            "--seq-len",
            "1",
            "--batch-tokens",
            str(samples),
            *flags,
        ]
        status = self.runner.run(command, output)
        group = name.split("_")[0]  # whose plans are too many for a line each
        self.runner.progress.finished(group, f"{name} {profiles or ''}", quiet=True)
        if status == 3:
            return None
        if status:
            raise Failed(
                EXIT_FAILED,
                f"{name}: exit status {status}: {last_words(output)} (all of it: {output})",
                status,
            )
        return json.loads(output.read_text())


def speedup(answer, plan=None):
    return answer["one_rank_ms"] / (plan or answer)["predicted"]["step_ms"]


def shape(plan):
    """DP, straight, or units:replicas of the stages."""
    stages = plan["stages"]
    if len(stages) == 1:
        return "DP"
    if len(stages) > 8 and all(stage["replicas"] == 1 for stage in stages):
        return f"straight, {len(stages)} stages"
    return " ".join(f"{stage['units']}:{stage['replicas']}" for stage in stages)


def kind(text):
    """Of a plan: the replicas of its stages, DP or straight."""
    stages = text.replace(",", " ").split()
    return tuple(stage.rpartition(":")[2] for stage in stages) if ":" in text else stages[0]


def other(answer, name):
    return next((plan for plan in answer["alternatives"] if plan["name"] == name), None)


def both(plan, answer):
    return f"{shape(plan)}: {speedup(answer, plan):.2f}" if plan else "nothing fits"


def better_warmup(planner, name, model, cluster, samples, stages, *flags):
    """The answer for a plan with the better warm-up, and that."""
    tries = {
        warmup: planner.ask(
            *(f"{name}_{warmup}", model, cluster, samples, *flags),
            *("--pipeline", stages, "--pipeline-warmup", warmup),
        )
        for warmup in "ab"
    }
    best = min(tries, key=lambda warmup: tries[warmup]["predicted"]["step_ms"])
    return tries[best], best


def table4(planner):
    lines, alike = [], []
    for model, (samples, batch, papers) in TABLE4.items():
        for letter, (paper, reached) in papers.items():
            profile, cluster = planner.model(model), dapple_planners.Cluster(CLUSTERS[letter])
            seconds, plan = dapple_planners.equations(profile, cluster, samples, batch)
            whole = samples * profile.seconds(0, profile.units)
            chosen, _ = better_warmup(
                *(planner, f"table4_{model}_{letter}_equations", model, CLUSTERS[letter], samples),
                dapple_planners.spec(plan),
                *(() if batch == 1 or len(plan) == 1 else ("--micro-batch", str(batch))),
            )
            free = planner.ask(f"table4_{model}_{letter}", model, CLUSTERS[letter], samples)
            alike.append(kind(shape(chosen)) == kind(paper))
            lines.append(
                [
                    f"{model}, {letter}",
                    f"{paper.replace(',', ' ')}: {reached}",
                    f"{shape(chosen)}: {whole / seconds:.2f}",
                    both(chosen, chosen),
                    both(free, free),
                    both(other(free, "data parallel"), free),
                ]
            )
    planner.found["kinds"] = alike
    return "## Table 4: plans for 16 GPUs\n\n" + markdown(
        [
            "model, configuration",
            "paper: plan and measured speed-up (figure 11)",
            "equations 1 to 3: plan and speed-up",
            "that plan replayed, whole samples",
            "the search's plan, replayed",
            "best data parallel",
        ],
        lines,
    )


def table3(planner):
    lines = []
    for model, (stages, samples, paper) in TABLE3.items():
        times = {}
        for warmup in "ab":
            answer = planner.ask(
                f"table3_{model}_{warmup}",
                model,
                CLUSTERS["A"],
                samples,
                "--pipeline",
                stages,
                "--pipeline-warmup",
                warmup,
            )
            times[warmup] = answer["predicted"]["step_ms"]
        planner.found.setdefault("b over a", []).append((paper, times["a"] / times["b"]))
        lines.append(
            [
                f"{model}: policy B over A",
                f"{paper:.2f}",
                f"{times['a'] / times['b']:.2f}",
                f"{percent(times['a'] / times['b'] / paper)}; each with its best micro-batch",
            ]
        )
    return lines


def table5(planner):
    """The lines, and what is drawn of them: (name, paper's rates, memory, ours), by the number of
    micro-batches."""
    lines, curves = [], []
    for name, schedule, recompute, rates, memories in TABLE5:
        ours = {}
        for batches in (2, 3, 5, 8, 16):
            flags = [
                "--pipeline",
                "27:1,26:1",
                "--pipeline-schedule",
                schedule,
                "--micro-batch",
                "2",
                "--recompute",
                "block" if recompute else "none",
            ]
            answer = planner.ask(
                f"table5_{schedule}_{recompute}_{batches}",
                "bert-48",
                "2x1,inter=3",
                2 * batches,
                *flags,
            )
            ours[batches] = (
                2 * batches / answer["predicted"]["step_ms"] * 1000,
                sum(answer["predicted"]["memory"]) / 2e9,
            )
        planner.found.setdefault("table 5", {})[name] = ours
        curves.append((name, rates, memories, ours))
        lines += [
            [
                f"{name}, M={batches}: samples/s",
                f"{paper:.2f}",
                f"{ours[batches][0]:.2f} ({ours[batches][1]:.1f} GB a GPU)",
                (
                    "no update in the profile; its activations are the layers' outputs only, so"
                    " memory is lower than measured"
                ),
            ]
            for batches, paper in rates.items()
        ]
    return lines, curves


def draw_table5(pyplot, curves, out):
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for index, (name, rates, memories, ours) in enumerate(curves):
        for place, (axes, papers) in enumerate(zip(panels, (rates, memories))):
            axes.plot(
                list(ours),
                [pair[place] for pair in ours.values()],
                color=f"C{index}",
                linestyle="--" if name.startswith("DAPPLE") else "-",  # on top of GPipe's
                label=name,
            )
            axes.plot(
                list(papers), list(papers.values()), color=f"C{index}", linestyle="none", marker="o"
            )
    for axes, what in zip(panels, ("samples/s", "GB a GPU")):
        axes.set(
            xlabel="micro-batches of a step",
            ylabel=what,
            ylim=(0, None),
            title="lines: simulated; dots: the paper, measured",
        )
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(out, dpi=120)


def other_than_data_parallel(answer):
    """The fastest plan that has several stages, or None."""
    plans = [answer, *answer["alternatives"]]
    plans = [plan for plan in plans if len(plan["stages"]) > 1]
    return min(plans, key=lambda plan: plan["predicted"]["step_ms"], default=None)


def figure11(planner, full):
    """Model -> configuration -> [(samples, the paper's speed-ups of data parallelism and of the
    best hybrid plan, ours)]."""
    papers, curves = json.loads(FIGURE11.read_text()), {}
    del papers["_source"]
    for model, by_letter in papers.items():
        for letter, points in by_letter.items():
            for samples, *theirs in points:
                if not full and samples != 128:
                    continue
                answer = planner.ask(
                    f"figure11_{model}_{letter}_{samples}", model, CLUSTERS[letter], samples
                )
                plans = other(answer, "data parallel"), other_than_data_parallel(answer)
                ours = [speedup(answer, plan) if plan else None for plan in plans]
                curves.setdefault(model, {}).setdefault(letter, []).append((samples, theirs, ours))
    return curves


def figure11_table(planner, curves):
    lines, ratios_at_128 = [], {letter: [] for letter in CLUSTERS}
    for model, by_letter in curves.items():
        for letter, points in by_letter.items():
            for samples, theirs, ours in points:
                cells = [
                    f"{data:.2f}, {hybrid:.2f}: {hybrid / data:.2f}" if data and hybrid else ""
                    for data, hybrid in (theirs, ours)
                ]
                lines.append([f"{model}, {letter}", str(samples), *cells])
                if samples == 128 and all(ours):
                    ratios = [hybrid / data for data, hybrid in (theirs, ours)]
                    ratios_at_128[letter].append(ratios)
    planner.found["over data parallel"] = [
        statistics.mean(ours for _, ours in ratios) for ratios in ratios_at_128.values() if ratios
    ]
    for letter, ratios in ratios_at_128.items():
        means = [f"{statistics.mean(column):.2f}" for column in zip(*ratios)]
        lines.append([f"mean of the models, {letter}", "128", *means])
    header = [
        "model, configuration",
        "samples a step",
        "paper: data parallel, best hybrid: ratio",
        "simulated",
    ]
    return "## Figure 11: by the samples of a step\n\n" + markdown(header, lines)


def draw_figure11(pyplot, curves, out):
    figure, panels = pyplot.subplots(
        len(CLUSTERS), len(curves), figsize=(4 * len(curves), 9), layout="constrained"
    )
    papers = json.loads(FIGURE11.read_text())
    for column, (model, by_letter) in zip(panels.T, curves.items()):
        for axes, (letter, points) in zip(column, by_letter.items()):
            ours = [(samples, *found) for samples, _, found in points]
            for which, name in enumerate(("data parallel", "best other plan")):
                for whose, rows, style in (
                    ("paper", papers[model][letter], "o:"),
                    ("simulated", ours, "s-"),
                ):
                    values = [row[1 + which] for row in rows]
                    label = f"{name}, {whose}"
                    axes.plot([r[0] for r in rows], values, style, color=f"C{which}", label=label)
            axes.set(xscale="log", ylim=(0, None), title=f"{model}, {letter}")
            axes.set(xlabel="samples a step", ylabel="speed-up over one GPU")
            axes.grid(alpha=0.3)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(out, dpi=100)


def replayed(planner, name, model, cluster, samples, stages):
    """The speed-up of a plan, with the better warm-up; its text."""
    name = f"figure12_{model}_{name}"
    best, warmup = better_warmup(planner, name, model, cluster, samples, stages)
    return speedup(best), f"{both(best, best)}, warm-up {warmup}"


def table6(planner, model, samples, cluster, papers):
    """The text and speed-ups of the paper's two plans."""
    names = ("dapple", TABLE6[model]), ("pipedream", TABLE6_PIPEDREAM[model])
    found = [replayed(planner, name, model, cluster, samples, plan) for name, plan in names]
    told = "; ".join(
        f"{text} ({percent(ours / paper)})" for (ours, text), paper in zip(found, papers)
    )
    ours = [value for value, _ in found]
    planner.found.setdefault("planner", []).append(ours[0] / ours[1])
    planner.found.setdefault("near", {})[model] = ours[0] / papers[0]
    return f"the paper's plans: {told}; ratio {ours[0] / ours[1]:.2f}", ours


def near_line(planner):
    """Which of DAPPLE's plans are as fast as in the paper."""
    near = planner.found["near"]
    good = [model for model, ratio in near.items() if abs(ratio - 1) <= NEAR]
    rest = [f"{model} ({percent(near[model])})" for model in near if model not in good]
    return [
        f"DAPPLE's plans on 2x8 within {100 * NEAR:.0f} % of the paper's speed-up",
        "",
        f"{', '.join(good) or 'none'}; not {', '.join(rest) or 'any'}",
        VGG,
    ]


def figure12(planner, full):
    """The lines, and bars: (name, the paper's two, ours of the same plans)."""
    lines, bars = [], []
    for model, (samples, *papers) in FIGURE12.items():
        for nodes, (dapple, pipedream) in zip((2, 4) if full else (2,), papers):
            cluster = f"{nodes}x8,intra=25,inter=3"
            answer = planner.ask(f"figure12_{model}_{nodes}", model, cluster, samples)
            stages = dapple_planners.spec(
                dapple_planners.pipedream(planner.model(model), dapple_planners.Cluster(cluster))
            )
            theirs, told = replayed(planner, f"{nodes}_planner", model, cluster, samples, stages)
            text = f"search {both(answer, answer)}; PipeDream {told}"
            planner.found.setdefault("search", []).append(speedup(answer) / theirs)
            if nodes == 2:
                more, ours = table6(planner, model, samples, cluster, (dapple, pipedream))
                text += f"; {more}"
                bars.append((model, (dapple, pipedream), ours))
            lines.append(
                [
                    f"{model} on {nodes}x8: DAPPLE's plan, PipeDream's",
                    f"{dapple}, {pipedream}",
                    text,
                    (
                        "the search knows the micro-batch, more than two stages, and no limit of"
                        " memory"
                    ),
                ]
            )
    return [*lines, near_line(planner)], bars


def draw_figure12(pyplot, bars, out):
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for place, label in enumerate(
        ("DAPPLE's plan: paper", "simulated", "PipeDream's plan: paper", "simulated")
    ):
        heights = [(papers if place % 2 == 0 else ours)[place // 2] for _, papers, ours in bars]
        axes.bar(
            [at + 0.2 * (place - 1.5) for at in range(len(bars))],
            heights,
            0.2,
            label=label,
            color=f"C{place // 2}",
            alpha=1 if place % 2 else 0.5,
        )
    axes.set_xticks(range(len(bars)), [name for name, _, _ in bars])
    axes.set_ylabel("speed-up over one GPU, 2x8")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    figure.savefig(out, dpi=120)


def bert_profile(planner, layers):
    """BERT-48's profile with another number of layers."""
    model = json.loads(Path(planner.options.profiles).read_text())["models"]["bert-48"]
    first = next(node for node in model["nodes"] if node["name"] == "layer_0")
    nodes = [dict(first, id=i + 1, name=f"layer_{i}") for i in range(layers)]
    edges = [[i, i + 1] for i in range(1, layers)]
    path = planner.options.into / f"bert_{layers}_profile.json"
    path.write_text(json.dumps({"models": {"bert": dict(model, nodes=nodes, edges=edges)}}))
    return path


def table7(planner):
    lines = []
    for stages, paper in TABLE7.items():

        def fits(layers):
            even = ",".join(f"{layers // stages + (s < layers % stages)}:1" for s in range(stages))
            return planner.ask(
                f"table7_{stages}",
                "bert",
                f"1x{stages},intra=25",
                64,
                "--pipeline",
                even,
                "--pipeline-schedule",
                "dapple",
                "--micro-batch",
                "2",
                "--recompute",
                "block",
                "--device-memory",
                "16000000000",
                profiles=bert_profile(planner, layers),
            )

        low, high = stages, 2000
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        planner.found.setdefault("layers", {})[stages] = low
        lines.append(
            [
                f"largest BERT on {stages} GPUs of 16 GB, layers",
                str(paper),
                f"{low} ({(1 - fits(low)['predicted']['bubble']) * 100:.0f} % busy)",
                (
                    "states at 16 bytes a parameter as in the paper; inner activations are unknown"
                    " to the profile, and no memory is lost to the framework"
                ),
            ]
        )
    return lines


class Measured:
    """A real run: what a step took, and was predicted to take; memory of the first stage."""

    def __init__(self, log, samples):
        events = [json.loads(line) for line in log.read_text().splitlines()]
        end = events[-1]
        self.ms = statistics.median(
            event["ms"] for event in events if event["event"] == "step" and event["step"] > 1
        )
        self.predicted, self.samples = end["step_ms"]["predicted"], samples
        self.idle, self.memory = end["idle"]["measured"], end["memory"]["measured"]
        self.mean_memory = end["memory"]["mean"]  # of all ranks


def real_runs(planner, names, steps, cluster=CLUSTER, model=REAL, length=128):
    runs = {}
    for name, (flags, samples) in names.items():
        folder = (
            planner.options.into
            / "real"
            / f"{cluster[0]}_{name}".replace(" ", "_").replace(",", "").replace(":", "-")
        )
        command = [
            str(SCRIPTS / "cluster.sh"),
            *cluster,
            "--",
            planner.options.program,
            *model,
            *flags,
            "--batch-tokens",
            str(length * samples),
            "--steps",
            str(steps),
        ]
        log, fresh = complete(planner.runner, folder, command)
        runs[name] = Measured(log, samples)
        planner.runner.progress.finished("real", folder.name, fresh, f": {runs[name].ms:.1f} ms")
    return runs


def real_lines(runs):
    return [
        [
            name,
            f"{run.ms:.1f}",
            f"{run.predicted:.1f} ({percent(run.predicted / run.ms)})",
            f"{1000 * run.samples / run.ms:.1f}",
            f"{100 * run.idle:.1f} %",
            f"{run.memory['activations'] / 2**20:.1f}",
            f"{run.memory['device'] / 2**20:.1f}",
        ]
        for name, run in runs.items()
    ]


def per_sample(run):
    return run.ms / run.samples


def against_gpipe(runs, why):
    """The paper's comparison of the first two runs: GPipe with as many micro-batches as fit, DAPPLE
    with more."""
    (name, gpipe), (_, dapple) = list(runs.items())[:2]
    ratio = per_sample(gpipe) / per_sample(dapple)
    return [
        f"DAPPLE M=16 over {name}, samples/s",
        "1.6 (8.18 / 5.10)",
        f"{ratio:.2f}",
        f"unequal batches, as in the paper; {why}",
    ]


def table5_pairs(planner, full):
    """Table 5's two pairings, measured at the paper's ratios, each with speed and memory."""
    runs = real_runs(
        planner, TABLE5_RUNS, 30 if full else 12, TABLE5_CLUSTER, TABLE5_MODEL, TABLE5_LENGTH
    )
    dapple, lines = runs["table 5, DAPPLE, M=16"], []
    for name, (speed, memory) in TABLE5_PAPER.items():
        gpipe = runs[f"table 5, {name}"]
        ours = per_sample(gpipe) / per_sample(dapple), dapple.mean_memory / gpipe.mean_memory
        planner.found.setdefault("pairs", {})[name] = ours
        lines.append(
            [
                f"DAPPLE, M=16 against {name}",
                *(speed, f"{ours[0]:.2f}", memory, f"{ours[1]:.2f}"),
                f"{1000 / per_sample(dapple):.1f} and {1000 / per_sample(gpipe):.1f}",
                f"{dapple.mean_memory / 2**20:.1f} and {gpipe.mean_memory / 2**20:.1f}",
            ]
        )
    header = [
        *("pairing", "samples/s, paper", "ours", "memory, paper", "ours"),
        *("samples/s", "MiB, mean of the ranks"),
    ]
    return (
        f"### Table 5's pairings at its ratios, {' '.join(TABLE5_CLUSTER)}\n\n"
        + markdown(header, lines)
        + "Where memory falls most, GPipe has as many micro-batches and is as fast.\n\n"
    )


def against_plans(plans, data_parallel):
    """The planner's choice against data parallelism and the best of all."""
    best = min(plans, key=lambda name: plans[name].ms)
    return (
        f"{plans[data_parallel].ms / plans['auto'].ms:.2f}, {plans[best].ms / plans['auto'].ms:.2f}"
        f" ({best})"
    )


def no_real_runs():
    """Why there are none, empty where there are."""
    check = subprocess.run(
        [SCRIPTS / "cluster.sh", "check"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if check.returncode:
        return check.stdout.strip() or "no cluster"
    return "" if glob.glob(DATA) else "make data makes what they train on."


def plans_of_four(full):
    return PLANS4 if full else dict(list(PLANS4.items())[:4])


def real(planner, full, pyplot):
    title, missing = f"## Real runs on an emulated cluster, {' '.join(CLUSTER)}\n\n", no_real_runs()
    if missing:
        return title + f"Left out: {missing}\n\n"
    steps = 12 if full else 4
    schedules, plans, updates = (
        real_runs(planner, runs, steps) for runs in (SCHEDULES, PLANS, UPDATES)
    )
    plans4, updates4 = (
        real_runs(planner, runs, steps, CLUSTER4) for runs in (plans_of_four(full), UPDATES4)
    )
    if pyplot:
        draw(pyplot, {**schedules, **plans}, planner.options.into / "real.png")
    dapple, gpipe, most = (
        schedules[name] for name in ("DAPPLE, M=16", "GPipe, M=2", "GPipe, M=16")
    )
    header = [
        "run",
        "ms a step",
        "predicted",
        "samples/s",
        "idle, first stage",
        "activations, MiB",
        "all memory, MiB",
    ]
    lines = [
        against_gpipe(schedules, "bubbles alone: 24/17 = 1.41"),
        against_gpipe(updates, "the update is a larger part of a short step"),
        against_gpipe(
            updates4,
            "each update has sums over the slow link, as where the paper replicates stages",
        ),
        [
            "the same, activations",
            "0.88 of all memory",
            (
                f"{dapple.memory['activations'] / gpipe.memory['activations']:.2f}; all memory"
                f" {dapple.memory['device'] / gpipe.memory['device']:.2f}"
            ),
            "a stage holds 2 micro-batches in both",
        ],
        [
            "DAPPLE over GPipe at M=16, memory",
            "",
            (
                f"activations {dapple.memory['activations'] / most.memory['activations']:.2f}, all"
                f" {dapple.memory['device'] / most.memory['device']:.2f}"
            ),
            "2 micro-batches instead of 16",
        ],
        [
            "the planner's choice against data parallelism and the best of these plans",
            "",
            against_plans(plans, "data parallel 8:2"),
            "2 ranks",
        ],
        [
            "the same",
            "",
            against_plans(plans4, "data parallel 8:4"),
            f"4 ranks, {' '.join(CLUSTER4)}",
        ],
    ]
    tables = [
        markdown(header, real_lines(runs))
        for runs in ({**schedules, **updates}, plans, {**plans4, **updates4})
    ]
    text = "".join(tables) + markdown(["what", "paper", "ours", "why they differ"], lines)
    return title + text + table5_pairs(planner, full)


def draw(pyplot, runs, out):
    figure, axes = pyplot.subplots(figsize=(9, 4))
    places = range(len(runs))
    axes.bar(
        [place - 0.2 for place in places],
        [run.ms / run.samples for run in runs.values()],
        0.4,
        label="measured",
    )
    axes.bar(
        [place + 0.2 for place in places],
        [run.predicted / run.samples for run in runs.values()],
        0.4,
        label="predicted",
    )
    axes.set_xticks(list(places), list(runs), rotation=30, ha="right")
    axes.set_ylabel("ms a sample")
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=120)


# --------------------------------------------------------------------------------------------------
# The claims

CLAIMS = (
    # What is simulated at the paper's size shows a claim in part.
    Claim(
        "D1",
        "1.26x to 3.2x (figure 12)",
        ("planner",),
        lambda ratios: f"simulated: {span(ratios, '{:.2f}x')}",
        partly=lambda ratios: min(ratios) > 1,
    ),
    # Both of one pairing: M=16 against GPipe's M=2, at the paper's ratios.
    Claim(
        "D2",
        "1.6x over GPipe",
        ("pairs",),
        lambda pairs: f"{pairs['GPipe, M=2'][0]:.2f}x; {pairs['GPipe, M=16'][0]:.2f}x at equal M",
        met=lambda pairs: round(pairs["GPipe, M=2"][0], 2) >= 1.6,
        partly=lambda pairs: pairs["GPipe, M=2"][0] > 1,
    ),
    Claim(
        "D3",
        "0.88 of GPipe's memory",
        ("pairs",),
        lambda pairs: f"{pairs['GPipe, M=2'][1]:.2f}; {pairs['GPipe, M=16'][1]:.2f} at equal M",
        met=lambda pairs: round(pairs["GPipe, M=2"][1], 2) <= 0.88,
        partly=lambda pairs: min(pair[1] for pair in pairs.values()) <= 0.88,
    ),
    # Simulated, which no machine disturbs: as fast at equal M, and the memory falls.
    Claim(
        "D4",
        "no cost beside GPipe",
        ("table 5",),
        lambda rows: f"{span(recomputed(rows)[0], '{:.3f}')} of GPipe's speed,"
        f" {recomputed(rows)[1]:.2f} of the memory",
        met=lambda rows: min(recomputed(rows)[0]) >= 0.97 and recomputed(rows)[1] < 1,
        partly=lambda rows: recomputed(rows)[1] < 1,
    ),
    # ResNet-50 has no profile.
    Claim(
        "D5",
        "15 plans of table 4",
        ("kinds",),
        lambda alike: f"{sum(alike)} of {len(alike)} of the same kind",
        partly=any,
    ),
    Claim(
        "D6",
        "1.71x, 1.37x, 1.79x",
        ("over data parallel",),
        lambda means: f"simulated: {', '.join(f'{mean:.2f}x' for mean in means)}",
        partly=lambda means: min(means) > 1,
    ),
    Claim(
        "D7",
        "faster (figure 12)",
        ("search",),
        lambda ratios: f"simulated: {span(ratios, '{:.2f}x')}",
        partly=lambda ratios: min(ratios) >= 1 < max(ratios),
    ),
    Claim(
        "D8",
        "b over a: 1.0 to 1.31",
        ("b over a",),
        lambda pairs: f"simulated: {', '.join(f'{ours:.2f}' for _, ours in pairs)}",
        partly=lambda pairs: all(ours >= 1 for _, ours in pairs),
    ),
    # In proportion to the GPUs is a part of it.
    Claim(
        "D9",
        "48, 106, 215, 428 layers",
        ("layers",),
        lambda layers: f"simulated: {', '.join(map(str, layers.values()))}",
        partly=lambda layers: all(layers[n] >= 0.9 * n * layers[1] for n in layers),
    ),
)


def recomputed(rows):
    """Of table 5 at M=2: DAPPLE's speed over GPipe's without and with recomputation, and DAPPLE's
    memory with it over that without."""
    speed = [
        rows["DAPPLE" + recompute][2][0] / rows["GPipe" + recompute][2][0]
        for recompute in ("", ", recomputed")
    ]
    return speed, rows["DAPPLE, recomputed"][2][1] / rows["DAPPLE"][2][1]


def planned(full):
    """Group -> how many runs and plans there will be at most."""
    points = json.loads(FIGURE11.read_text())
    at = [
        samples
        for model, by_letter in points.items()
        if model != "_source"
        for found in by_letter.values()
        for samples, *_ in found
    ]
    real_count = len(TABLE5_RUNS)
    real_count += sum(map(len, (SCHEDULES, PLANS, UPDATES, plans_of_four(full), UPDATES4)))
    return {
        "table5": 5 * len(TABLE5),
        "figure11": len(at) if full else at.count(128),
        "figure12": (10 if full else 7) * len(FIGURE12),
        "table3": 2 * len(TABLE3),
        "table7": 11 * len(TABLE7),
        "table4": 3 * 3 * len(TABLE4),
        "real": 0 if no_real_runs() else real_count,
    }


def reproduce(options):
    planner = Planner(options)
    planner.runner.progress.plan(planned(options.full))
    pyplot = pyplot_or_none("reproduce_dapple")
    table5_lines, curves = planner.made("table 5", table5(planner))
    by_samples = planner.made("figure 11", figure11(planner, options.full))
    figure12_lines, bars = planner.made("figure 12", figure12(planner, options.full))
    if pyplot:
        draw_table5(pyplot, curves, options.into / "table5.png")
        draw_figure11(pyplot, by_samples, options.into / "figure11.png")
        draw_figure12(pyplot, bars, options.into / "figure12.png")
    lines = planner.made("table 3", table3(planner)) + table5_lines + figure12_lines
    lines += planner.made("table 7", table7(planner))
    text = (
        planner.made("table 4", table4(planner))
        + figure11_table(planner, by_samples)
        + "## Tables 3, 5, 7 and figure 12\n\n"
        + markdown(["what", "paper", "ours (simulated)", "why they differ"], lines)
    )
    return text + real(planner, options.full, pyplot), planner.found


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="reproduce_dapple.sh --quick | --full [option ...]",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--quick", dest="full", action="store_false")
    size.add_argument("--full", dest="full", action="store_true")
    parser.add_argument("--into", type=Path, metavar="FOLDER")
    parser.add_argument("--program", default="./train_gpt", metavar="FILE")
    parser.add_argument(
        "--profiles",
        default=str(SCRIPTS.parent / "test/golden/dapple_profiles.json"),
        metavar="FILE",
    )
    options = parser.parse_args()
    options.into = options.into or Path("out") / ("dapple_full" if options.full else "dapple_quick")
    if not shutil.which(options.program):
        parser.error(f"{options.program} is not there: run make first")
    if not Path(options.profiles).exists():
        parser.error(f"{options.profiles} is not there")
    return options


def main():
    options = arguments()
    return run_claims("reproduce_dapple", options.into, CLAIMS, lambda: reproduce(options))


if __name__ == "__main__":
    sys.exit(main())
