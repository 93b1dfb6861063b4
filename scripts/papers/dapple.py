"""dapple.py: DAPPLE's (arXiv 2007.01045, PPoPP 2021) plans and speed-ups, simulated from the
profiles that its authors published, and measured on an emulated cluster.

    scripts/reproduce_dapple.sh --quick | --full [--part simulated|real] [--into FOLDER]
    [--program FILE] [--profiles FILE]

simulated  asks train_gpt --plan, in which the schedule's replay decides:
  table 4   plans for 16 GPUs on configurations A, B, C: what equations 1 to 3 choose of the kinds
            of plans that the paper has (dapple_planners.py), and what the search finds
  table 3   warm-up policy B over A, the paper's plans on A
  table 5   BERT-48 in two stages of one GPU, micro-batch 2, on B: GPipe and DAPPLE by the number of
            micro-batches
  figure 11 speed-ups over one GPU of data parallelism and of the best other plan, by the samples of
            a step, on A, B, C: all sizes of the figure, with --quick 128 samples beside its curves
  figure 12 the paper's plans and PipeDream's, as the paper's table 6 has them, with the better
            warm-up, on 2x8 GPUs; what the search and PipeDream's planner (as before) find there
            and, with --full, on 4x8
  table 7   the largest BERT that fits into 16 GB a GPU with recomputation, by the number of stages
real       this program, training on an emulated cluster of two, then four nodes with a slow network
           (scripts/cluster.sh: root on Linux; elsewhere left out, and said so): schedules against
           each other, and plans of the same batch against the planner's choice, with what was
           predicted; then table 5's two pairings at the paper's ratios of an update to a
           micro-batch, and of activations to the rest of the memory. Each is run once

The profiles are test/golden/dapple_profiles.json: times and bytes of the layers as measured by the
authors (AlibabaPAI/DAPPLE at fd75dcf, directory profiling_results: facts, encoded anew; no code of
theirs is here). FOLDER also gets each answer as NAME.json; the pictures are table5.png,
figure11.png, figure12.png, real.png. `make data` makes what real runs train on.
"""

import glob
import json
import statistics
from pathlib import Path

import experiment
from experiment import (
    COUNTED, EXIT_RESOURCES, MIB, SCRIPTS, SIMULATED, TEXT, TIMED, Claim, Failed, Paper, bars,
    cluster, first_object, largest, last, markdown, no_cluster, percent, plans, simulated, span,
    step_ms,
)
from papers import dapple_planners

GOLDEN = SCRIPTS.parent / "test/golden"
FIGURE11 = json.loads((GOLDEN / "dapple_figure11.json").read_text())  # the paper's curves
# Constants of the authors' planner, GB/s, but for one: it takes 1 GB/s where many send to one node
# (gather=1), a third of the link. The communication ratios that the paper tells follow from the
# link's whole rate, as here.
CLUSTERS = {"A": "2x8,intra=25,inter=3", "B": "16x1,inter=3", "C": "16x1,inter=1.2"}
# model: samples of a step, micro-batch of equations 1 to 3, and the paper's plan (stages as
# units:replicas), split and speed-up on A, B, C
TABLE4 = {
    "vgg-19": (2048, 1, {"A": ("DP", 14.62), "B": ("DP", 14.62), "C": ("22:15,4:1", 9.04)}),
    "gnmt-16": (
        1024, 1, {"A": ("39:8,57:8", 10.14), "B": ("39:8,57:8", 5.25), "C": ("straight", 4.31)},
    ),
    "bert-48": (
        64, 1, {"A": ("27:8,26:8", 14.05), "B": ("straight", 12.49), "C": ("straight", 12.49)},
    ),
    "xlnet-36": (
        128, 1, {"A": ("24:8,19:8", 14.85), "B": ("24:8,19:8", 10.79), "C": ("straight", 10.72)},
    ),
    "amoebanet-36": (
        128, 8, {"A": ("31:8,13:8", 11.9), "B": ("33:11,11:5", 8.1), "C": ("33:11,11:5", 4.4)},
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
# The paper's plans on 2x8, and PipeDream's on the same; "16": 16 stages, whose units the paper does
# not tell: even ones.
TABLE6 = {
    "xlnet-36": ("24:8,19:8", "16"),
    "bert-24": ("15:8,14:8", "5:2,9:6,3:2,3:2,3:2,6:2"),
    "amoebanet-36": ("31:8,13:8", "16"),
    "vgg-19": ("17:14,9:2", "11:8,6:6,2:1,7:1"),
}
NEAR = 0.15  # of the paper's speed-up
VGG = (
    "VGG-19's 14 replicas have 5 or 4 samples each, of which the profile, taken with 32, knows no"
    " time, nor what splitting 13.7 MB on the hosts takes"
)
TABLE7 = {1: 48, 2: 106, 4: 215, 8: 428}  # stages: layers
OVER_DP = (1.71, 1.37, 1.79)  # the best hybrid plan over data parallelism on A, B, C, the paper's

# Of real runs: name -> flags, samples of a step.
TRAINS = f"--threads 1 --val-every 0 --train {TEXT}_train_*.bin"
REAL = f"--model layers=6,heads=4,channels=256,vocab=256 --seq-len 128 {TRAINS}"
CLUSTER2 = "2x1 --rate 200mbit"
CLUSTER4 = "4x1 --rate 200mbit --cpu 45"  # of a core each: equal computers on two cores
GPIPE, DAPPLE = "--pipeline 2 --pipeline-schedule gpipe --micro-batch", "--pipeline 2 --micro-batch"
# The first two are the paper's comparison: GPipe with as many micro-batches as fit, DAPPLE with
# more.
SCHEDULES = {
    "GPipe, M=2": (f"{GPIPE} 2", 4),
    "DAPPLE, M=16": (f"{DAPPLE} 2", 32),
    "GPipe, M=16": (f"{GPIPE} 2", 32),
    "DAPPLE, M=16, recomputed": (f"{DAPPLE} 2 --recompute block", 32),
    "zero-bubble, M=16": ("--pipeline 2 --pipeline-schedule zero-bubble --micro-batch 2", 32),
}
PLANS2 = {
    "data parallel 8:2": ("--pipeline 8:2 --micro-batch 16", 32),
    "3:1,5:1": ("--pipeline 3:1,5:1 --micro-batch 2", 32),
    "4:1,4:1": ("--pipeline 4:1,4:1 --micro-batch 2", 32),
    "5:1,3:1": ("--pipeline 5:1,3:1 --micro-batch 2", 32),
    "auto": ("--pipeline auto", 32),
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
    "auto": ("--pipeline auto", 32),
    **{
        f"data parallel {spec}" if spec == "8:4" else spec: (
            f"--pipeline {spec} --micro-batch {batch}", 32,
        )
        for spec, batch in SPECS4.items()
    },
}
# GPipe with the micro-batches that fit, and DAPPLE, where a step's update is a larger part of
# GPipe's: small micro-batches; stages of two ranks in two nodes
UPDATES = {"GPipe, M=2, 1 sample": (f"{GPIPE} 1", 2), "DAPPLE, M=16, 1 sample": (f"{DAPPLE} 1", 16)}
UPDATES4 = {
    "GPipe, M=2, 4:2,4:2": ("--pipeline 4:2,4:2 --pipeline-schedule gpipe --micro-batch 4", 8),
    "DAPPLE, M=16, 4:2,4:2": ("--pipeline 4:2,4:2 --micro-batch 4", 64),
}
# Table 5 near the paper's ratios: in its figures an update takes half as long as a micro-batch on a
# stage (5.10 and 8.18 samples/s), and the activations of a micro-batch are 0.46 of what a GPU keeps
# otherwise (10.6 and 12.1 GB). Both follow from the tokens of a micro-batch and the width here: a
# narrow model, whose micro-batches are short.
TABLE5_MODEL = f"--model layers=24,heads=4,channels=64,vocab=1024 --seq-len 128 {TRAINS}"
TABLE5_CLUSTER = "2x1"
TABLE5_RUNS = {
    "table 5, GPipe, M=2": (f"{GPIPE} 1", 2),
    "table 5, DAPPLE, M=16": (f"{DAPPLE} 1", 16),
    "table 5, GPipe, M=16": (f"{GPIPE} 1", 16),
}
# of the paper, DAPPLE with M=16 over GPipe: samples/s and memory; GPipe has no memory for M=16
TABLE5_PAPER = {"GPipe, M=2": ("1.60", "0.88"), "GPipe, M=16": ("", "")}


PLANS = plans(
    figure11=((128,), ()),  # samples of a step; none: all of the figure
    nodes=((2,), (2, 4)),  # of figure 12
    plans4=(dict(list(PLANS4.items())[:4]), PLANS4),
    steps=(4, 12),  # of a real run
    table5_steps=(12, 30),
)


# --------------------------------------------------------------------------------------------------
# Plans


def profile_of(bench, name):
    return dapple_planners.Model(Path(bench.options.profiles), name)


def ask(bench, name, model, where, samples, more="", profiles=None):
    """The answer of --plan, or None where nothing fits the memory."""
    profile = f"{profiles or bench.options.profiles}:{model}"
    status, text = bench.ask(f"{name}.json", bench.program, "--plan --json --profile", (profile,),
                             "--cluster", where, f"--seq-len 1 --batch-tokens {samples} {more}",
                             allowed=(0, EXIT_RESOURCES), group=name.split("_")[0])
    return None if status else first_object(text)


def step_of(plan):
    return plan["predicted"]["step_ms"]


def speedup(answer, plan=None):
    return answer["one_rank_ms"] / step_of(plan or answer)


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


def data_parallel(answer):
    plans = answer["alternatives"]
    return next((plan for plan in plans if plan["name"] == "data parallel"), None)


def other_than_data_parallel(answer):
    """The fastest plan that has several stages, or None."""
    plans = [plan for plan in (answer, *answer["alternatives"]) if len(plan["stages"]) > 1]
    return min(plans, key=step_of, default=None)


def both(plan, answer):
    return f"{shape(plan)}: {speedup(answer, plan):.2f}" if plan else "nothing fits"


def by_warmup(bench, name, model, where, samples, stages, more=""):
    """The answers for a plan with each warm-up."""
    return {
        warmup: ask(bench, f"{name}_{warmup}", model, where, samples,
                    f"{more} --pipeline {stages} --pipeline-warmup {warmup}")
        for warmup in "ab"
    }


def better_warmup(*plan):
    """The answer for a plan with the better warm-up, and that."""
    tries = by_warmup(*plan)
    best = min(tries, key=lambda warmup: step_of(tries[warmup]))
    return tries[best], best


def table4(bench):
    lines, alike = [], []
    for model, (samples, batch, papers) in TABLE4.items():
        for letter, (paper, reached) in papers.items():
            profile, where = profile_of(bench, model), CLUSTERS[letter]
            seconds, plan = dapple_planners.equations(
                profile, dapple_planners.Cluster(where), samples, batch
            )
            whole = samples * profile.seconds(0, profile.units)
            chosen, _ = better_warmup(
                bench, f"table4_{model}_{letter}_equations", model, where, samples,
                dapple_planners.spec(plan),
                *(("",) if batch == 1 or len(plan) == 1 else (f"--micro-batch {batch}",)),
            )
            free = ask(bench, f"table4_{model}_{letter}", model, where, samples)
            alike.append(kind(shape(chosen)) == kind(paper))
            lines.append(
                [f"{model}, {letter}", f"{paper.replace(',', ' ')}: {reached}",
                 f"{shape(chosen)}: {whole / seconds:.2f}", both(chosen, chosen), both(free, free),
                 both(data_parallel(free), free)]
            )
    bench.tell("kinds", alike)
    return "## Table 4: plans for 16 GPUs, simulated\n\n" + markdown(
        ["model, configuration", "paper: plan and measured speed-up (figure 11)",
         "equations 1 to 3: plan and speed-up", "that plan simulated, whole samples",
         "the search's plan, simulated", "best data parallel, simulated"],
        lines,
    )


def table3(bench):
    lines, pairs = [], []
    for model, (stages, samples, paper) in TABLE3.items():
        answers = by_warmup(bench, f"table3_{model}", model, CLUSTERS["A"], samples, stages)
        ratio = step_of(answers["a"]) / step_of(answers["b"])
        pairs.append((paper, ratio))
        why = f"{percent(ratio / paper)}; each with its best micro-batch"
        lines.append([f"{model}: policy B over A", f"{paper:.2f}", f"{ratio:.2f}", why])
    bench.tell("b over a", pairs)
    return lines


def table5(bench):
    """Simulated lines; draws (samples/s, GB a GPU) by the number of micro-batches."""
    lines, found = [], {}
    for name, schedule, recompute, rates, _ in TABLE5:
        ours = found[name] = {}
        more = f"--pipeline 27:1,26:1 --pipeline-schedule {schedule} --micro-batch 2"
        more += f" --recompute {'block' if recompute else 'none'}"
        for M in (2, 3, 5, 8, 16):
            answer = ask(
                bench, f"table5_{schedule}_{recompute}_{M}", "bert-48", "2x1,inter=3", 2 * M, more,
            )
            memory = sum(answer["predicted"]["memory"]) / 2e9
            ours[M] = 2 * M / step_of(answer) * 1000, memory
        lines += [
            [f"{name}, M={M}: samples/s", f"{paper:.2f}",
             f"{ours[M][0]:.2f} ({ours[M][1]:.1f} GB a GPU)",
             "no update in the profile; its activations are the layers' outputs only, so"
             " memory is lower than measured"]
            for M, paper in rates.items()
        ]
    bench.tell("table 5", found)
    bench.draw("table5", lambda axes: paint_table5(found, axes), columns=2)
    return lines


def paint_table5(found, panels):
    for index, (name, _, _, *papers) in enumerate(TABLE5):
        ours = found[name]
        style = "--" if name.startswith("DAPPLE") else "-"  # on top of GPipe's
        for place, (axes, paper) in enumerate(zip(panels, papers)):
            values = [pair[place] for pair in ours.values()]
            axes.plot(list(ours), values, color=f"C{index}", linestyle=style, label=name)
            axes.plot(list(paper), list(paper.values()), "o", color=f"C{index}")
    for axes, what in zip(panels, ("samples/s", "GB a GPU")):
        axes.set(xlabel="micro-batches of a step", ylabel=what, ylim=(0, None))
        axes.set(title="lines: simulated; dots: the paper, measured")


def figure11_points(plan):
    """(model, configuration, samples, the paper's speed-ups of data parallelism and of the best
    hybrid plan)."""
    return [
        (model, letter, samples, theirs)
        for model, by_letter in FIGURE11.items()
        if model != "_source"
        for letter, points in by_letter.items()
        for samples, *theirs in points
        if samples in plan.figure11 or not plan.figure11
    ]


def figure11(bench):
    """The table; draws model -> configuration -> [(samples, the paper's speed-ups, ours)]."""
    curves, lines, at_128 = {}, [], {letter: [] for letter in CLUSTERS}
    for model, letter, samples, theirs in figure11_points(bench.plan):
        name = f"figure11_{model}_{letter}_{samples}"
        answer = ask(bench, name, model, CLUSTERS[letter], samples)
        plans = data_parallel(answer), other_than_data_parallel(answer)
        ours = [speedup(answer, plan) if plan else None for plan in plans]
        curves.setdefault(model, {}).setdefault(letter, []).append((samples, theirs, ours))
        cells = [
            f"{dp:.2f}, {hybrid:.2f}: {hybrid / dp:.2f}" if dp and hybrid else ""
            for dp, hybrid in (theirs, ours)
        ]
        lines.append([f"{model}, {letter}", str(samples), *cells])
        if samples == 128 and all(ours):
            at_128[letter].append([hybrid / dp for dp, hybrid in (theirs, ours)])
    means = {letter: [*map(statistics.mean, zip(*ratios))] for letter, ratios in at_128.items()}
    bench.tell("over data parallel", [mean[1] for mean in means.values() if mean])
    for letter, mean in means.items():
        lines.append([f"mean of the models, {letter}", "128", *(f"{ratio:.2f}" for ratio in mean)])
    size = {"rows": len(CLUSTERS), "columns": len(curves), "size": (4, 3)}
    bench.draw("figure11", lambda panels: paint_figure11(curves, panels), **size)
    paper = "paper: data parallel, best hybrid: ratio"
    return "## Figure 11: by the samples of a step, simulated\n\n" + markdown(
        ["model, configuration", "samples a step", paper, "simulated"], lines
    )


def paint_figure11(curves, panels):
    for column, (model, by_letter) in zip(panels.T, curves.items()):
        for axes, (letter, points) in zip(column, by_letter.items()):
            ours = [(samples, *found) for samples, _, found in points]
            both_rows = (("paper", FIGURE11[model][letter], "o:"), ("simulated", ours, "s-"))
            for which, name in enumerate(("data parallel", "best other plan")):
                for whose, rows, style in both_rows:
                    x, y = [row[0] for row in rows], [row[1 + which] for row in rows]
                    axes.plot(x, y, style, color=f"C{which}", label=f"{name}, {whose}")
            axes.set(xscale="log", ylim=(0, None), title=f"{model}, {letter}")
            axes.set(xlabel="samples a step", ylabel="speed-up over one GPU")
    labels = panels[0][0].get_legend_handles_labels()
    panels[0][0].figure.legend(*labels, loc="outside upper center", ncols=4)


def replayed(bench, name, model, where, samples, stages):
    """The speed-up of a plan, with the better warm-up; its text."""
    best, warmup = better_warmup(bench, f"figure12_{model}_{name}", model, where, samples, stages)
    return speedup(best), f"{both(best, best)}, warm-up {warmup}"


def table6(bench, model, samples, where, papers):
    """The text and speed-ups of the paper's two plans."""
    found = [
        replayed(bench, name, model, where, samples, plan)
        for name, plan in zip(("dapple", "pipedream"), TABLE6[model])
    ]
    told = "; ".join(
        f"{text} ({percent(ours / paper)})" for (ours, text), paper in zip(found, papers)
    )
    ours = [value for value, _ in found]
    return f"the paper's plans: {told}; ratio {ours[0] / ours[1]:.2f}", ours


def figure12(bench):
    """Simulated lines; draws (name, the paper's two, ours of the same plans)."""
    lines, found, over_search = [], [], []
    for model, (samples, *papers) in FIGURE12.items():
        for nodes, of_paper in zip(bench.plan.nodes, papers):
            where = f"{nodes}x8,intra=25,inter=3"
            answer = ask(bench, f"figure12_{model}_{nodes}", model, where, samples)
            chosen = dapple_planners.pipedream(
                profile_of(bench, model), dapple_planners.Cluster(where)
            )
            stages = dapple_planners.spec(chosen)
            theirs, told = replayed(bench, f"{nodes}_planner", model, where, samples, stages)
            text = f"search {both(answer, answer)}; PipeDream {told}"
            over_search.append(speedup(answer) / theirs)
            if nodes == 2:
                more, ours = table6(bench, model, samples, where, of_paper)
                text += f"; {more}"
                found.append((model, of_paper, ours))
            what = f"{model} on {nodes}x8: DAPPLE's plan, PipeDream's"
            why = "the search knows the micro-batch, more than two stages, and no limit of memory"
            lines.append([what, ", ".join(map(str, of_paper)), text, why])
    bench.tell("planner", [ours[0] / ours[1] for _, _, ours in found])
    bench.tell("search", over_search)
    bench.draw("figure12", lambda axes: paint_figure12(found, axes[0]), size=(9, 4))
    return [*lines, near_line({model: ours[0] / paper[0] for model, paper, ours in found})]


def near_line(near):
    """Which of DAPPLE's plans are as fast as in the paper."""
    good = [model for model, ratio in near.items() if abs(ratio - 1) <= NEAR]
    rest = [f"{model} ({percent(near[model])})" for model in near if model not in good]
    return [
        f"DAPPLE's plans on 2x8 within {100 * NEAR:.0f} % of the paper's speed-up", "",
        f"{', '.join(good) or 'none'}; not {', '.join(rest) or 'any'}", VGG,
    ]


def paint_figure12(found, axes):
    labels = "DAPPLE's plan: paper", "simulated", "PipeDream's plan: paper", "simulated"
    heights = [[pair[at] for _, *both in found for pair in both] for at in (0, 1)]
    series = [of[who::2] for of in heights for who in (0, 1)]
    shades = [{"color": f"C{at // 2}", "alpha": 1 if at % 2 else 0.5} for at in range(4)]
    bars(axes, [name for name, _, _ in found], list(zip(labels, series)), shades)
    axes.set_ylabel("speed-up over one GPU, 2x8")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)


def bert_profile(bench, layers):
    """BERT-48's profile with another number of layers."""
    model = json.loads(Path(bench.options.profiles).read_text())["models"]["bert-48"]
    first = next(node for node in model["nodes"] if node["name"] == "layer_0")
    nodes = [dict(first, id=i + 1, name=f"layer_{i}") for i in range(layers)]
    edges = [[i, i + 1] for i in range(1, layers)]
    path = bench.into / f"bert_{layers}_profile.json"
    path.write_text(json.dumps({"models": {"bert": dict(model, nodes=nodes, edges=edges)}}))
    return path


def table7(bench):
    lines, found = [], {}
    for stages, paper in TABLE7.items():

        def fits(layers):
            even = ",".join(f"{layers // stages + (s < layers % stages)}:1" for s in range(stages))
            return ask(
                bench, f"table7_{stages}", "bert", f"1x{stages},intra=25", 64,
                f"--pipeline {even} --pipeline-schedule dapple --micro-batch 2 --recompute block"
                " --device-memory 16000000000",
                profiles=bert_profile(bench, layers),
            )

        found[stages] = most = largest(fits, stages, 2000)
        lines.append(
            [f"largest BERT on {stages} GPUs of 16 GB, layers", str(paper),
             f"{most} ({(1 - fits(most)['predicted']['bubble']) * 100:.0f} % busy)",
             "states at 16 bytes a parameter as in the paper; inner activations are unknown"
             " to the profile, and no memory is lost to the framework"]
        )
    bench.tell("layers", found)
    return lines


def simulated_part(bench):
    """A line of progress for each table or figure: their plans have none of their own."""

    def made(what, result):
        bench.runner.progress.line(f"plans of {what}")
        return result

    of_table5 = made("table 5", table5(bench))
    of_figure11 = made("figure 11", figure11(bench))
    of_figure12 = made("figure 12", figure12(bench))
    of_table3, of_table7 = made("table 3", table3(bench)), made("table 7", table7(bench))
    lines = of_table3 + of_table5 + of_figure12 + of_table7
    return made("table 4", table4(bench)) + of_figure11, simulated(lines)


def simulated_count(bench):
    return {
        "table5": 5 * len(TABLE5),
        "figure11": len(figure11_points(bench.plan)),
        "figure12": (10 if len(bench.plan.nodes) > 1 else 7) * len(FIGURE12),
        "table3": 2 * len(TABLE3),
        "table7": 11 * len(TABLE7),
        "table4": 3 * 3 * len(TABLE4),
    }


# --------------------------------------------------------------------------------------------------
# Real runs


class Measured:
    """A real run: what a step took, and was predicted to take; memory of the first stage."""

    def __init__(self, log, samples):
        end = last(log, "end")
        self.ms, self.samples = step_ms(log, 1), samples
        self.predicted = end["step_ms"]["predicted"]
        self.idle, self.memory = end["idle"]["measured"], end["memory"]["measured"]
        self.mean_memory = end["memory"]["mean"]  # of all ranks

    def ms_a_sample(self):
        return self.ms / self.samples


def real_runs(bench, runs, steps, where=CLUSTER2, model=REAL):
    found = {}
    for name, (flags, samples) in runs.items():
        folder = f"{where.split()[0]}_{name}".replace(" ", "_").replace(",", "").replace(":", "-")
        log = bench.run(f"real/{folder}", cluster(where), bench.program, model, flags,
                        f"--batch-tokens {128 * samples} --steps {steps}",
                        say=lambda log: f": {step_ms(log, 1):.1f} ms")
        found[name] = Measured(log, samples)
    return found


def real_table(runs):
    lines = [
        [name, f"{run.ms:.1f}", f"{run.predicted:.1f} ({percent(run.predicted / run.ms)})",
         f"{1000 * run.samples / run.ms:.1f}", f"{100 * run.idle:.1f} %",
         *(f"{run.memory[kind] / MIB:.1f}" for kind in ("activations", "device"))]
        for name, run in runs.items()
    ]
    header = ["run (once)", "ms a step", "predicted", "samples/s", "idle, first stage"]
    return markdown([*header, "activations, MiB", "all memory, MiB"], lines)


def against_gpipe(runs, why):
    """The paper's comparison of the first two runs: GPipe with as many micro-batches as fit, DAPPLE
    with more."""
    (name, gpipe), (_, dapple) = list(runs.items())[:2]
    return [
        f"DAPPLE M=16 over {name}, samples/s", "1.6 (8.18 / 5.10)",
        f"measured: {gpipe.ms_a_sample() / dapple.ms_a_sample():.2f}",
        f"unequal batches, as in the paper; {why}",
    ]


def against_memory(what, paper, dapple, gpipe, why):
    activations, device = (
        f"{dapple.memory[kind] / gpipe.memory[kind]:.2f}" for kind in ("activations", "device")
    )
    return [what, paper, f"measured: activations {activations}, all memory {device}", why]


def against_plans(plans, base, what, why):
    """The planner's choice against data parallelism and the best of all: the line, and the speed
    over data parallelism."""
    best = min(plans, key=lambda name: plans[name].ms)
    auto = plans["auto"].ms
    over_base = plans[base].ms / auto
    ours = f"measured: {over_base:.2f}, {plans[best].ms / auto:.2f} ({best})"
    return [what, "", ours, why], over_base


def table5_pairs(bench):
    """Table 5's two pairings, measured at the paper's ratios, each with speed and memory."""
    runs = real_runs(bench, TABLE5_RUNS, bench.plan.table5_steps, TABLE5_CLUSTER, TABLE5_MODEL)
    dapple, lines, pairs = runs["table 5, DAPPLE, M=16"], [], {}
    for name, (speed, memory) in TABLE5_PAPER.items():
        gpipe = runs[f"table 5, {name}"]
        ours = pairs[name] = (
            gpipe.ms_a_sample() / dapple.ms_a_sample(), dapple.mean_memory / gpipe.mean_memory,
        )
        lines.append(
            [f"DAPPLE, M=16 against {name}", speed, f"{ours[0]:.2f}", memory, f"{ours[1]:.2f}",
             " and ".join(f"{1000 / run.ms_a_sample():.1f}" for run in (dapple, gpipe)),
             " and ".join(f"{run.mean_memory / MIB:.1f}" for run in (dapple, gpipe))]
        )
    bench.tell("pairs", pairs)
    header = ["pairing", "samples/s, paper", "ours", "memory, paper", "ours"]
    return (
        f"### Table 5's pairings at its ratios, {TABLE5_CLUSTER}, measured once\n\n"
        + markdown([*header, "samples/s", "MiB, mean of the ranks"], lines)
        + "Where memory falls most, GPipe has as many micro-batches and is as fast.\n\n"
    )


def no_real_runs():
    """Why there are none, empty where there are."""
    there = glob.glob(f"{TEXT}_train_*.bin")
    return no_cluster() or ("" if there else "make data makes what they train on.")


def real(bench):
    title, missing = f"## Real runs on an emulated cluster, {CLUSTER2}\n\n", no_real_runs()
    if missing:
        return title + f"Left out: {missing}\n\n", []
    steps = bench.plan.steps
    schedules, plans, updates = (
        real_runs(bench, runs, steps) for runs in (SCHEDULES, PLANS2, UPDATES)
    )
    plans4, updates4 = (
        real_runs(bench, runs, steps, CLUSTER4) for runs in (bench.plan.plans4, UPDATES4)
    )
    bench.draw("real", lambda axes: paint_real({**schedules, **plans}, axes[0]), size=(9, 4))
    dapple, gpipe, most = (
        schedules[name] for name in ("DAPPLE, M=16", "GPipe, M=2", "GPipe, M=16")
    )
    what = "the planner's choice against data parallelism and the best of these plans"
    on_two, over_two = against_plans(plans, "data parallel 8:2", what, "2 ranks")
    on_four, over_four = against_plans(
        plans4, "data parallel 8:4", "the same", f"4 ranks, {CLUSTER4}"
    )
    bench.tell("measured over data parallel", [over_two, over_four])
    lines = [
        against_gpipe(schedules, "bubbles alone: 24/17 = 1.41"),
        against_gpipe(updates, "the update is a larger part of a short step"),
        against_gpipe(
            updates4,
            "each update has sums over the slow link, as where the paper replicates stages",
        ),
        against_memory("DAPPLE M=16 over GPipe, M=2, memory", "0.88 of all memory", dapple, gpipe,
                       "a stage holds 2 micro-batches in both"),
        against_memory(
            "DAPPLE over GPipe at M=16, memory", "", dapple, most, "2 micro-batches instead of 16",
        ),
        on_two, on_four,
    ]
    tables = [real_table({**schedules, **updates}), real_table(plans)]
    tables.append(real_table({**plans4, **updates4}))
    return title + "".join(tables) + table5_pairs(bench), lines


def paint_real(runs, axes):
    measured = [run.ms_a_sample() for run in runs.values()]
    predicted = [run.predicted / run.samples for run in runs.values()]
    series = [("measured, once", measured), ("predicted", predicted)]
    bars(axes, list(runs), series, rotation=30, ha="right")
    axes.set_ylabel("ms a sample")


def real_count(bench):
    runs = (SCHEDULES, PLANS2, UPDATES, bench.plan.plans4, UPDATES4, TABLE5_RUNS)
    return {} if no_real_runs() else {"real": sum(map(len, runs))}


# --------------------------------------------------------------------------------------------------
# The claims


def recomputed(rows):
    """Of table 5 at M=2: DAPPLE's speed over GPipe's without and with recomputation, and DAPPLE's
    memory with it over that without."""
    speed = [
        rows["DAPPLE" + recompute][2][0] / rows["GPipe" + recompute][2][0]
        for recompute in ("", ", recomputed")
    ]
    return speed, rows["DAPPLE, recomputed"][2][1] / rows["DAPPLE"][2][1]


def over_data_parallel(means, measured):
    near = all(abs(ours / paper - 1) <= NEAR for ours, paper in zip(means, OVER_DP))
    told = f"{span(measured, '{:.2f}x')}; simulated {', '.join(f'{mean:.2f}x' for mean in means)}"
    return told + ("" if near else ", another setting")


CLAIMS = (
    # What is simulated at the paper's size shows a claim in part.
    Claim("D1", "1.26x to 3.2x (figure 12)", ("planner",), SIMULATED,
          lambda ratios: span(ratios, "{:.2f}x"),
          partly=lambda ratios: min(ratios) > 1),
    # Both of one pairing: M=16 against GPipe's M=2, at the paper's ratios.
    Claim("D2", "1.6x over GPipe", ("pairs",), TIMED,
          lambda pairs: f"{pairs['GPipe, M=2'][0]:.2f}x; {pairs['GPipe, M=16'][0]:.2f}x at equal M",
          met=lambda pairs: round(pairs["GPipe, M=2"][0], 2) >= 1.6,
          partly=lambda pairs: pairs["GPipe, M=2"][0] > 1),
    Claim("D3", "0.88 of GPipe's memory", ("pairs",), COUNTED,
          lambda pairs: f"{pairs['GPipe, M=2'][1]:.2f}; {pairs['GPipe, M=16'][1]:.2f} at equal M",
          met=lambda pairs: round(pairs["GPipe, M=2"][1], 2) <= 0.88,
          partly=lambda pairs: min(pair[1] for pair in pairs.values()) <= 0.88),
    # Simulated, which no machine disturbs: as fast at equal M, and the memory falls.
    Claim("D4", "no cost beside GPipe", ("table 5",), SIMULATED,
          lambda rows: f"{span(recomputed(rows)[0], '{:.3f}')} of GPipe's speed,"
          f" {recomputed(rows)[1]:.2f} of the memory",
          met=lambda rows: min(recomputed(rows)[0]) >= 0.97 and recomputed(rows)[1] < 1,
          partly=lambda rows: recomputed(rows)[1] < 1),
    # ResNet-50 has no profile.
    Claim("D5", "15 plans of table 4", ("kinds",), SIMULATED,
          lambda alike: f"{sum(alike)} of {len(alike)} of the same kind",
          partly=any),
    # Measured on 2 and on 4 ranks. The simulation says nothing for the claim where its gain is not
    # the paper's: a larger one is another setting, in which data parallelism is slower.
    Claim("D6", "1.71x, 1.37x, 1.79x",
          ("over data parallel", "measured over data parallel"), TIMED,
          over_data_parallel,
          partly=lambda means, measured: min(measured) > 1),
    Claim("D7", "faster (figure 12)", ("search",), SIMULATED,
          lambda ratios: span(ratios, "{:.2f}x"),
          partly=lambda ratios: min(ratios) >= 1 < max(ratios)),
    Claim("D8", "b over a: 1.0 to 1.31", ("b over a",), SIMULATED,
          lambda pairs: ", ".join(f"{ours:.2f}" for _, ours in pairs),
          partly=lambda pairs: all(ours >= 1 for _, ours in pairs)),
    # In proportion to the GPUs is a part of it.
    Claim("D9", "48, 106, 215, 428 layers", ("layers",), SIMULATED,
          lambda layers: ", ".join(map(str, layers.values())),
          partly=lambda layers: all(layers[n] >= 0.9 * n * layers[1] for n in layers)),
)


def make_bench(options, plans):
    if not Path(options.profiles).exists():
        raise Failed(f"{options.profiles} is not there")
    return experiment.Bench(options, plans)


PAPER = Paper(
    name="dapple",
    doc=__doc__,
    plans=PLANS,
    parts={"simulated": (simulated_part, simulated_count), "real": (real, real_count)},
    claims=CLAIMS,
    reads_text=(),
    arguments=lambda parser: parser.add_argument(
        "--profiles", default=str(GOLDEN / "dapple_profiles.json"), metavar="FILE"
    ),
    bench=make_bench,
)
