#!/usr/bin/env python3
"""test_pipeline.py: stages of units on ranks, of the real program under mpirun, from outside.

    python3 test/test_pipeline.py       TEST_ALL=1: the exhaustive forms; TEST_SEED=N: the random
                                        choices, printed
                                        TRAIN_GPT=FILE: another binary than ./train_gpt

    Evaluations validation, scores and generated text are those of one rank
    Numbers     messages, reductions and gathers of rank 0 by link, and activations of the first
                stage, are what a plain count gives, to the byte
    Planned     timelines and traces, planned and measured; the plan that the program makes for
                itself is run, and is that of one rank, too
    Refusals    plans, batches and pairs that make no sense: exit 2 and one message, whatever the
                ranks
    Lost        a rank that dies or stops while others wait for what it computes ends the job, and
                the message says what they waited for

Every run is checked for memory and traffic: as predicted (harness.Job) and as counted here
(Check.numbers). That plans and schedules are one computation is in test_layouts.py. The model has
4 blocks, 6 units. Standard library only.
"""

import itertools
import json
import os
import random
import re
import socket
import sys
import types

import harness
from harness import (
    ALL, EXIT_DONE, EXIT_INPUT, EXIT_PEER, EXIT_RESOURCES, Faulty, Job, SAME, SEED, T, VOCAB,
    at_once, sample, scratch, slices, train, train_all,
)
import test_evaluations
import test_zero
from test_zero import Nodes, printable

sys.path.insert(0, os.path.join(harness.ROOT, "scripts"))
import plot  # noqa: E402

LAYERS, HEADS, CHANNELS, PADDED = 4, 2, 16, 128
UNITS = LAYERS + 2
MODEL = f"layers={LAYERS},heads={HEADS},channels={CHANNELS},vocab={VOCAB}"
BLOCK = 12 * CHANNELS**2 + 13 * CHANNELS  # parameters
RUN = dict(model=MODEL, seed=3, steps=6)
SCHEDULES = [
    dict(pipeline_schedule="gpipe"),
    dict(pipeline_schedule="dapple", pipeline_warmup="a"),
    dict(pipeline_schedule="dapple", pipeline_warmup="b"),
    dict(pipeline_schedule="zero-bubble"),
]

SAME_NORM = 10 * SAME  # of equal mathematics in fp32, summed in another order


# --------------------------------------------------------------------------------------------------
# Plans


def compositions(total, parts):
    """All lists of so many numbers from 1 on with this sum."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def plans(ranks, least_stages=2):
    """Every split of the units into stages, with every way to give these ranks to them: [(units,
    replicas), ...] each."""
    for stages in range(least_stages, min(ranks, UNITS) + 1):
        for units, replicas in itertools.product(
            compositions(UNITS, stages), compositions(ranks, stages)
        ):
            yield list(zip(units, replicas))


def text_of(plan):
    return ",".join(f"{units}:{replicas}" for units, replicas in plan)


PLANS = [plan for ranks in (2, 3, 4) for plan in plans(ranks)]
UNEVEN = [
    [(1, 1), (5, 3)],
    [(5, 3), (1, 1)],
    [(1, 2), (4, 1), (1, 1)],
    [(1, 1), (4, 2), (1, 1)],
    [(2, 1), (1, 2), (3, 1)],
    [(1, 1), (1, 1), (3, 1), (1, 1)],
]


def batch(micro_batches, rows, missing):
    """Samples of so many micro-batches of `rows`, the last without `missing` of them."""
    return dict(micro_batch=rows, batch_tokens=T * (micro_batches * rows - missing))


def batches(micro_batches):
    """Rows that divide and that do not, more and fewer than replicas; of a single micro-batch none
    are missing: it would be a shorter one."""
    return [
        batch(micro_batches, rows, missing)
        for rows in (1, 2, 3, 4, 5)
        for missing in range(rows if micro_batches > 1 else 1)
    ]


def of(plan, **changes):
    """The run of a plan."""
    return dict(RUN, ranks=sum(replicas for _, replicas in plan), pipeline=text_of(plan), **changes)


def any_architecture(draw, plan):
    """A plan, and the model of it: GPT-2's, or one of any kind, a block longer or not."""
    if draw.randrange(2):
        return plan, {}
    longer = draw.randrange(2)
    units, replicas = plan[-1]
    plan = [*plan[:-1], (units + longer, replicas)]
    return plan, dict(model=harness.any_model(draw, layers=LAYERS + longer))


def alone(case):
    """The same on one rank, the samples of a step in micro-steps of 4 at most."""
    left_out = (
        "pipeline", "pipeline_schedule", "pipeline_warmup", "zero", "ranks_per_node", "recompute",
        "reduce_dtype", "zero_hpz_partition_size",
    )
    return dict(
        {name: value for name, value in case.items() if name not in left_out},
        ranks=1,
        micro_batch=4,
    )


# --------------------------------------------------------------------------------------------------
# What rank 0 must take and send, counted another way than the program does: a micro-batch and a
# message at a time


def part(begin, end, parts, i):
    """The i-th of so many nearly equal parts of a range."""
    n = end - begin
    return begin + n * i // parts, begin + n * (i + 1) // parts


def live(plan, case, stage=0):
    """Micro-batches whose activations stage holds at once: of DAPPLE section 3."""
    M, S = micro_batches(case), len(plan)
    if case.get("pipeline_schedule", "dapple") == "gpipe":
        return M
    if case.get("pipeline_schedule") == "zero-bubble":
        return min(S, M)
    return min(S - stage if case.get("pipeline_warmup", "a") == "a" else 2 * (S - stage) - 1, M)


def micro_batches(case):
    return -(-(case["batch_tokens"] // T) // min(case["micro_batch"], case["batch_tokens"] // T))


def micro_rows(case):
    return min(case["micro_batch"], case["batch_tokens"] // T)


def aligned(bytes_):
    return -(-bytes_ // 64) * 64


def words(case):
    return 2 if case.get("dtype") == "bf16" else 4


def expected_activations(plan, case):
    """Of rank 0: what it holds of each live micro-batch, and two places for what it sends."""
    (units, replicas), recompute = plan[0], case.get("recompute") == "block"
    N, C, word = -(-micro_rows(case) // replicas) * T, CHANNELS, words(case)
    boundary = aligned(N * C * word)
    tensors = [
        1, 3, 1, 1, 1, 4, 4,
    ]  # of ln1, qkv, attention, residual, ln2, fc, gelu: x channels; four statistics and one a head
    values = sum(aligned(word * N * C * n) for n in tensors)
    block = values + 4 * aligned(4 * N) + aligned(4 * N * HEADS)
    blocks = units - 1
    kept = (units - 1) * boundary + aligned(4 * N)  # inputs of units, and tokens
    if recompute:
        return live(plan, case) * kept + min(blocks, 1) * block + 2 * boundary
    return live(plan, case) * (kept + blocks * block) + 2 * boundary


def expected_sends(plan, case):
    """[inside, between nodes] that rank 0 sends a step: the rows that it shares with each replica
    of the next stage, of each micro-batch."""
    samples, rows, sent = case["batch_tokens"] // T, micro_rows(case), [0, 0]
    per_node = case.get("ranks_per_node") or sum(r for _, r in plan)
    first, width = plan[0][1], plan[1][1]
    for begin in range(0, samples, rows):
        end = min(begin + rows, samples)
        mine = set(range(*part(begin, end, first, 0)))
        for i in range(width):
            both = mine & set(range(*part(begin, end, width, i)))
            sent[(first + i) // per_node != 0] += len(both) * T * CHANNELS * words(case)
    return sent


def compute_order(plan, case):
    """Which micro-batches the first stage computes, in order: ("F", m) or ("B", m). Not of
    zero-bubble."""
    M, K, done, order = micro_batches(case), live(plan, case), 0, []
    for m in range(M):
        if m - done >= K:
            order.append(("B", done))
            done += 1
        order.append(("F", m))
    return order + [("B", m) for m in range(done, M)]


def expected_collectives(plan, case):
    """{kind: [inside, between nodes]} that rank 0 sends for its storages, with the ranks that have
    them. Not of zero-bubble at stage 3."""
    (units, replicas), stage, M = plan[0], case.get("zero", 0), micro_batches(case)
    ranks = sum(r for _, r in plan)
    stages = list(range(replicas))
    tied = sorted({*stages, *range(ranks - plan[-1][1], ranks)})
    reduce_word = 2 if case.get("reduce_dtype") == "bf16" else 4
    sent = {"all_gather": [0, 0], "reduce_scatter": [0, 0]}

    def add(kind, times, members, bytes_):
        if len(members) > 1:
            for link, n in enumerate(
                Nodes(members, case.get("ranks_per_node")).sent(kind == "all_gather", bytes_, 0)
            ):
                sent[kind][link] += times * n

    storages = [
        (PADDED * CHANNELS, tied, None),
        (T * CHANNELS, stages, 0),
        *[(BLOCK, stages, u) for u in range(1, units)],
    ]
    for elements, members, unit in storages:
        parts, gathers, reductions = slices(elements, len(members)), 1, 1
        if unit is not None and stage >= 2:
            reductions = M
        if (
            unit is not None
            and stage == 3
            # a use of a unit right after another of it needs no new gather; weight parts use
            # nothing, nor does the embedding's backward
        ):
            uses = [
                u
                for how, _ in compute_order(plan, case)
                for u in (range(units) if how == "F" else range(units - 1, 0, -1))
            ]
            gathers = sum(u == unit and (i == 0 or uses[i - 1] != u) for i, u in enumerate(uses))
        add("reduce_scatter", reductions, members, [reduce_word * n for n in parts])
        add("all_gather", gathers, members, [words(case) * n for n in parts])
    return sent


def expected_directions(plan, case):
    """[inside, between nodes] that rank 0 sends in all_to_all: parts of Muon's matrices, of the
    blocks of its stage. How many blocks are in a wave follows from the widest stage."""
    (units, replicas), run = plan[0], types.SimpleNamespace()
    run.storages = [0, 0, *[BLOCK] * (units - 1), 0]
    run.ranks, run.per_node = replicas, case.get("ranks_per_node")
    run.channels, run.grain = CHANNELS, harness.NORM_CHUNK
    run.widest = max(
        width
        for at, (n, width) in enumerate(plan)
        if n > (at == 0) + (at == len(plan) - 1)  # has blocks
    )
    muon = case.get("optimizer") == "muon" and units > 1
    return [4 * n for n in test_zero.directions_away(run)] if muon else [0, 0]


class Check(harness.TestCase):
    def numbers(self, case, job):
        """Rank 0's activations and traffic; a plan's prediction is a number."""
        end, plan = job.end(), [
            tuple(map(int, stage.split(":"))) for stage in case["pipeline"].split(",")
        ]
        self.assertIsNotNone(end["step_ms"]["predicted"], case)
        self.assertTrue(0 <= float(end["idle"]["predicted"]) <= 1, (end["idle"], case))
        self.assertEqual(
            end["memory"]["measured"]["activations"], expected_activations(plan, case), case
        )
        found = {
            kind: [end["traffic"]["measured"][link][kind] for link in ("intra", "inter")]
            for kind in end["traffic"]["measured"]["intra"]
        }
        expected = dict(
            {kind: [0, 0] for kind in found},
            send=expected_sends(plan, case),
            all_to_all=expected_directions(plan, case),
            **expected_collectives(plan, case),
        )
        if case.get("pipeline_schedule") == "zero-bubble" and case.get("zero") == 3:
            del expected["all_gather"]  # the order of its uses is its own
        self.assertEqual({kind: found[kind] for kind in expected}, expected, case)
        self.assertEqual(
            end["traffic"]["measured"]["total"],
            {
                link: sum(found[kind][i] for kind in found)
                for i, link in enumerate(("intra", "inter"))
            },
        )

    def trained(self, cases):
        """The jobs of these cases, each with a file `export` of its weights; pipelines are checked
        for their numbers."""
        cases = [dict(dict(export=harness.export_of(case)), **case) for case in cases]
        jobs = train_all(cases)
        for case, job in zip(cases, jobs):
            job.export = case["export"]
            if "pipeline" in case and case["model"] == MODEL:
                self.numbers(case, job)
        return jobs

    def assert_one_rank(self, case, job, one):
        self.assert_close(job.losses(), one.losses(), SAME, case)
        norms = [[norm for norm, in run.steps("grad_norm")] for run in (job, one)]
        self.assert_close(*norms, SAME_NORM, case)

    def assert_same(self, job, expected, what):
        """Bit by bit."""
        self.assertEqual(job.steps("loss", "grad_norm"), expected.steps("loss", "grad_norm"), what)
        same = harness.exported(job.export) == harness.exported(expected.export)
        self.assertTrue(same, f"weights of {what}")


# --------------------------------------------------------------------------------------------------
class Evaluations(Check):
    def test_each(self):
        """Validation (also of a last batch that is not full), scores of choices, and text: those of
        one rank, and without a trace in training."""
        test_evaluations.HellaSwag.setUpClass()
        choices = test_evaluations.HellaSwag.file(test_evaluations.HellaSwag, [0] * 25)
        draw = random.Random(SEED + 3)
        for plan in (
            draw.sample(PLANS, 10) + UNEVEN if ALL else [draw.choice(draw.choice((PLANS, UNEVEN)))]
        ):
            plan, model = any_architecture(draw, plan)
            size = draw.choice(batches(draw.randrange(1, 5)))
            case = of(plan, **draw.choice(SCHEDULES), **size, zero=draw.randrange(4))
            case.update(model)
            told = dict(
                steps=4, val_every=2, val_batches=-1, hellaswag=choices, sample_every=2,
                sample_tokens=30, tokenizer=printable(),
            )
            one, job, silent = self.trained(
                [dict(alone(case), **told), dict(case, **told), dict(case, steps=4)]
            )
            self.assert_one_rank(case, job, one)
            self.assert_close(
                [e["loss"] for e in job.of("val")], [e["loss"] for e in one.of("val")], SAME, case
            )
            self.assertEqual(len(job.of("val")), 3)
            scores = lambda j: [(e["step"], e["correct"], e["examples"]) for e in j.of("hellaswag")]
            self.assertEqual(scores(job), scores(one), case)
            text = lambda j: re.findall(r"--- sample at step \d+ ---\n.*\n", j.out)
            self.assertEqual((len(text(job)), text(job)), (2, text(one)), case)
            self.assert_same(job, silent, case)


# --------------------------------------------------------------------------------------------------
class Numbers(Check):

    def test_measured(self):
        """Nodes of 1, 2 and 3 ranks, precisions, stages of ZeRO, replicas that do not divide. The
        first has a stage of one block whose replicas have rows in turns, and gather them alike."""
        draw = random.Random(SEED + 4)
        turns = of([(2, 1), (1, 2), (3, 1)], zero=3, **batch(3, 1, 0), **draw.choice(SCHEDULES[:3]))
        cases = [turns] + [
            of(
                draw.choice(draw.choice((PLANS, UNEVEN))),
                ranks_per_node=draw.randrange(1, 4),
                zero=draw.randrange(4),
                dtype=draw.choice(("fp32", "bf16")),
                reduce_dtype=draw.choice(("fp32", "bf16")),
                recompute=draw.choice(("none", "block")),
                optimizer=draw.choice(("adamw", "muon")),
                **draw.choice(SCHEDULES[:3]),
                **draw.choice(batches(draw.randrange(1, 9))),
            )
            for _ in range(300 if ALL else 2)
        ]
        bubble = of(draw.choice(PLANS), zero=draw.randrange(3), **SCHEDULES[3], **batch(4, 3, 1))
        evaluates = dict(steps=2, val_every=draw.randrange(2), val_batches=1)
        self.trained([dict(case, **evaluates) for case in [*cases, bubble]])


# --------------------------------------------------------------------------------------------------
class Planned(Check):
    """What the program says of a step before it, and after it; and the plan that it makes for
    itself."""

    def rows(self, text, what):
        """Busy cells of each rank's row of a timeline."""
        found = re.search(rf"timeline   {what}: .*\n((?:rank \d+ .*\n)+)", text)
        self.assertTrue(found, text)
        rows = [
            re.fullmatch(r"rank (\d+) +\|([FBWU0-9.-]+)\| +(\d+) % busy", line)
            for line in found.group(1).splitlines()
        ]
        self.assertTrue(all(rows), found.group(1))
        self.assertEqual([int(row.group(1)) for row in rows], list(range(len(rows))))
        return [row.group(2) for row in rows]

    def check_trace(self, path, ranks, micro_batches):
        with open(path, encoding="utf-8") as file:
            events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
        self.assertEqual({event["pid"] for event in events}, set(range(ranks)))
        for unit in range(UNITS):  # every unit's forward, of every micro-batch, once
            forwards = [
                event
                for event in events
                if event["name"].startswith("FORWARD ")
                and event["args"]["unit"] == unit
                and event["args"]["rows"]
            ]
            self.assertEqual(
                sorted(event["args"]["micro_batch"] for event in forwards),
                list(range(micro_batches)),
            )
        for event in events:
            self.assertGreaterEqual(event["dur"], 0)

    @staticmethod
    def drawn_as(sign, cells, when):
        """Whether a sign of a printed row is what the trace has then: a letter, or what follows it
        in the cell, or a dot, where the rank is idle."""
        letters = [letter for letter, _, begin, end in cells if begin <= when < end]
        return letters == [sign] if sign.isalpha() else bool(letters) == (sign != ".")

    def test_timelines(self):
        """Planned and measured: a row for each rank, and all forwards in the trace."""
        plan, M = [(2, 1), (3, 1), (1, 1)], 5
        planned, measured = (os.path.join(scratch(), "trace") for _ in range(2))
        case = of(plan, **batch(M, 2, 0))
        shown = Job(**dict(case, show_schedule=1, trace=planned)).done()
        run = Job(**dict(case, steps=3, profile_steps="2:3", trace=measured)).done()
        for job, what, path in ((shown, "planned", planned), (run, "measured", measured)):
            self.assertEqual(len(self.rows(job.out, what)), 3)
            self.check_trace(path, 3, M)
            cells = plot.read_cells(path)
            wrong = [
                (rank, at)
                for rank, row in enumerate(self.rows(job.out, what))
                for at, sign in enumerate(row)
                if not self.drawn_as(sign, cells[rank], (at + 0.5) / len(row) * plot.span_of(cells))
            ]
            self.assertLess(len(wrong), 15, job.out)  # its times are rounded
        self.assertIn("waiting for other stages", run.out)

    def test_auto(self):
        """The planner's choice is a plan of all units and ranks, runs, and computes what one rank
        does."""
        cases = [
            dict(RUN, ranks=ranks, pipeline="auto", batch_tokens=8 * T, **changes)
            for ranks, changes in ((1, {}), (2, {}), (3, dict(zero=1)), (4, dict(micro_batch=2)))
        ]
        cases = sample(cases, 2)
        jobs = train_all([dict(case, micro_batch=case.get("micro_batch")) for case in cases])
        (one,) = train_all([dict(RUN, batch_tokens=8 * T)])
        for case, job in zip(cases, jobs):
            self.assert_close(job.losses(), one.losses(), SAME, case)
            stages = re.search(r"^plan .* ((?:\d+:\d+,?)+)$", job.out, re.M).group(1)
            pairs = [tuple(map(int, stage.split(":"))) for stage in stages.split(",")]
            self.assertEqual(
                (sum(units for units, _ in pairs), sum(ranks for _, ranks in pairs)),
                (UNITS, case["ranks"]),
            )

    def test_auto_of_muon(self):
        """All ranks choose the same plan, though each measures how fast it makes matrices
        orthogonal: they count plans together."""
        shape = "arch=qwen2,layers=5,heads=2,channels=16,vocab=256,tie=1"
        case = dict(model=shape, ranks=3, optimizer="muon", zero=2, seq_len=16, batch_tokens=128)
        case.update(pipeline="auto", micro_batch=None, plan=1, json=1, log=None, muon_steps=40)
        found = at_once(lambda n: Job(**case, seed=n).done().out, range(16))
        for answer in found:
            self.assertEqual(sum(s["units"] for s in json.loads(answer)["stages"]), 7)

    def test_auto_within_memory(self):
        """--device-memory is a limit: what the choice takes, with buffers of messages, is within
        it; a run for which nothing fits is refused. The search may count some percent too much."""
        run = dict(RUN, ranks=2, pipeline="auto", batch_tokens=8 * T)
        run.update(micro_batch=None, offload="none")
        measured = lambda job: job.end()["memory"]["measured"]["device"]
        whole = measured(train(**run))
        for share in (1.1, 1, 0.9, 0.8, 0.2):
            job = Job(**run, device_memory=int(share * whole)).done(code=None)
            self.assertIn(job.code, (0, EXIT_RESOURCES) if share <= 1 else (0,), job.err)
            if job.code:
                self.assertIn("no plan fits", job.err)
            else:
                self.assertLessEqual(measured(job), share * whole, job.out)
        self.assertEqual(job.code, EXIT_RESOURCES)

    def test_searches_within_memory(self):
        """The same of --fit, and of a model with experts, whose plans are all made: what they take
        is counted to the byte."""
        experts = "arch=llama,layers=2,heads=2,channels=16,vocab=101,experts=2,expert_ffn=5"
        for search in (dict(fit=1, model=MODEL), dict(pipeline="auto", model=experts)):
            run = dict(RUN, ranks=3, batch_tokens=9 * T, micro_batch=None, offload="none", **search)
            shares = [random.Random(f"{SEED} {search}").uniform(0.3, 1) for _ in range(3)]
            whole = train(**run).end()["memory"]["measured"]["device"]
            for limit in (whole - 1, *(int(share * whole) for share in shares)):
                job = Job(**run, device_memory=limit).done(code=None)
                self.assertIn(job.code, (0, EXIT_RESOURCES), job.err)
                if job.code:
                    self.assertIn("no way to run fits", job.err)
                else:
                    self.assertLessEqual(job.end()["memory"]["measured"]["device"], limit, job.out)

    def test_plan(self):
        """--plan of the run's own model: the object of --plan --profile, and no training data are
        asked for."""
        job = Job(
            **dict(
                RUN, ranks=2, plan=1, json=1, train=None, val=None, batch_tokens=8 * T,
                micro_batch=None, log=None,
            )
        ).done()
        answer = json.loads(job.out)
        self.assertEqual(sum(stage["units"] for stage in answer["stages"]), UNITS)
        self.assertEqual(
            sorted(rank for stage in answer["stages"] for rank in stage["ranks"]), [0, 1]
        )
        self.assertGreater(answer["predicted"]["step_ms"], 0)


# --------------------------------------------------------------------------------------------------
class Refusals(Check):
    BATCHES = [
        (
            dict(micro_batch=2, micro_batches=3, batch_tokens=100),
            "--batch-tokens 100 is not --micro-batches x --micro-batch x --seq-len, 120",
        ),
        (
            dict(pipeline="auto", micro_batch=2, micro_batches=3, batch_tokens=100),
            "--batch-tokens 100 is not --micro-batches x --micro-batch x --seq-len, 120",
        ),
        (dict(micro_batches=-1), "--micro-batches"),
        (dict(micro_batches="3x"), "--micro-batches"),
        (dict(micro_batches=1 << 62, batch_tokens=None), "--micro-batches"),
        (dict(batch_tokens=50), "--batch-tokens 50 is not a multiple"),
        (dict(micro_batch=0), "--micro-batch"),
        (dict(micro_batch=1, batch_tokens=None, micro_batches=1 << 30), "--micro-batches"),
    ]
    OTHERS = [
        (dict(pipeline="3:1,3:2"), "--pipeline 3:1,3:2: the replicas of the stages add up to 3"),
        (
            dict(pipeline=2, pipeline_schedule="1f1b"),
            "--pipeline-schedule takes one of gpipe|dapple|zero-bubble",
        ),
        (dict(pipeline=2, pipeline_warmup="c"), "--pipeline-warmup takes one of a|b"),
        (
            dict(pipeline="5:1,1:1", zero=3, zero_hpz_partition_size=2),
            "more than the 1 ranks of stage 0",
        ),
    ]

    def check_refused(self, ranks, changes, *found):
        job = train(**dict(RUN, ranks=ranks, code=EXIT_INPUT, **changes))
        self.assertEqual(job.err.count("train_gpt: rank"), 1, job.err)
        self.assertRegex(
            job.err, r"train_gpt: rank \d+ on \S+, \w+\.[hc]:\d+: .", "rank, host and place"
        )
        for words_ in found:
            self.assertIn(words_, job.err, changes)
        self.assertNotIn("step     1", job.out)

    def test_batches(self):
        at_once(
            lambda case: self.check_refused(2, dict(dict(pipeline=2), **case[0]), case[1]),
            sample(self.BATCHES, 2),
        )

    def test_pairs(self):
        """Those of --compat are test_train.py's, plans test_pipeline.c's; here what depends
        on the model and the ranks."""
        at_once(lambda case: self.check_refused(2, case[0], case[1]), sample(self.OTHERS, 1))

    def test_what_is_accepted(self):
        """Even stages take what remains first, --micro-batches makes the batch, and one stage in
        words is none."""
        even, spelt = self.trained(
            [
                of([(2, 1), (2, 1), (2, 1)], steps=2, **batch(3, 2, 0)),
                dict(RUN, ranks=2, steps=2, micro_batch=2, batch_tokens=6 * T),
            ]
        )
        short = lambda **changes: train(**dict(RUN, steps=2, micro_batch=2, **changes))
        self.assertEqual(
            short(ranks=3, pipeline=3, batch_tokens=None, micro_batches=3).steps(
                "loss", "grad_norm"
            ),
            even.steps("loss", "grad_norm"),
        )
        self.assertEqual(
            short(ranks=2, pipeline="6:2", batch_tokens=6 * T).steps("loss", "grad_norm"),
            spelt.steps("loss", "grad_norm"),
        )


# --------------------------------------------------------------------------------------------------
class Lost(Check):
    """Of three stages the middle one has two replicas. Messages of the model are too long to be
    sent before anybody takes them."""

    SAME = dict(
        RUN,
        model="layers=4,heads=3,channels=96,vocab=101",
        steps=None,
        pipeline="2:1,2:2,2:1",
        **batch(4, 6, 1),
    )
    KINDS = (
        "FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "SEND_FORWARD", "RECV_FORWARD",
        "SEND_BACKWARD", "RECV_BACKWARD", "REDUCE", "NORM", "UPDATE",
    )
    CANNOT = {
        ("SEND_FORWARD", 3), ("RECV_FORWARD", 0), ("SEND_BACKWARD", 0), ("RECV_BACKWARD", 3),
    }  # (action, rank): there is no such stage

    @classmethod
    def changes(cls):
        return {name: value for name, value in cls.SAME.items() if name not in ("steps", "ranks")}

    @classmethod
    def setUpClass(cls):
        cls.undisturbed = train(
            ranks=4, **dict(cls.changes(), steps=harness.LAST, shuffle=1, recompute="block")
        ).steps("loss", "grad_norm")

    def test_in_each_action(self):
        """Killed, stopped or silent in any action: exit 4 but for a kill that mpirun sees first;
        and the run resumes bit by bit."""

        def lose(case):
            how, kind, rank = case
            fault = Faulty(
                how,
                rank,
                kind,
                **dict(self.changes(), ranks=4),
                **(dict(watchdog=3) if how == "hang" else {}),
            )
            job = fault.ends()
            self.assertNotEqual(job.code, EXIT_DONE)
            if how != "kill":
                self.assertEqual(job.code, EXIT_PEER, (case, job.err))
                words_ = {"stop": "it is stopped, seen", "hang": "no sign of progress"}[how]
                doing = (
                    r"(message of (activations|gradients) of unit"
                    r" \d|(all_gather|reduce_scatter|all_reduce)[a-z_ ]* \d+|[a-z_ ]+( \d+)?)"
                )
                self.assertRegex(
                    job.err,
                    rf"lost rank {rank} on {socket.gethostname()}: {words_} for \d+.\d s, in"
                    rf" {doing}.*, step {harness.STEPS_THEN}",
                    case,
                )
            fault.resumes(self, self.undisturbed)

        cases = [
            case
            for case in itertools.product(("stop", "kill", "hang"), self.KINDS, range(4))
            if case[1:] not in self.CANNOT
        ]
        at_once(lose, sample(cases, 2))

    def test_what_was_waited_for(self):
        """The message names activations or gradients, the unit that makes them, and the rank that
        is lost."""

        def lose(case):
            kind, rank, waited = case
            job = Faulty("stop", rank, kind, **dict(self.changes(), ranks=4)).ends()
            self.assertEqual(job.code, EXIT_PEER, (case, job.err))
            self.assertRegex(
                job.err,
                rf"lost rank {rank} on {socket.gethostname()}: it is stopped, seen for \d+.\d s, in"
                rf" .*({waited}).*, step {harness.STEPS_THEN}",
                case,
            )

        # The first stage stops before the first forward: the second waits for its activations. The
        # last stops in its first backward pass: the middle one, which has sent all it may, waits
        # for gradients, or for the last to take activations; so does the first.
        at_once(
            lose,
            [
                ("FORWARD", 0, "activations of unit 1"),
                ("BACKWARD_INPUT", 3, "gradients of unit 4|activations of unit 3"),
            ],
        )


if __name__ == "__main__":
    harness.main()
