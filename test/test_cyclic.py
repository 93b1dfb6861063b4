#!/usr/bin/env python3
"""test_cyclic.py: Cyclic Data Parallelism of the real program under mpirun, from outside.
(test_cyclic.c: the schedules and their proof; test_reference.py: the rules.)

    python3 test/test_cyclic.py         TEST_ALL=1: the exhaustive forms; TEST_SEED=N: the random
                                        choices, printed
                                        TRAIN_GPT=FILE: another binary than ./train_gpt

    Equality    one stage is plain training; texts are the same in every mode; nothing depends on
                when messages are posted
    Numbers     what all ranks send adds up to 2 (N - 1) times the parameters, balanced; of mode
                zero to less than 3 (N - 1), and states to a stage's; activations are those of N (N
                + 1) / 2 of N^2 stages
    Resume      in other modes, after a graceful stop; a plain run goes on with a cyclic one's
                checkpoint, and the other way round; validation on the way changes nothing
    Refusals    what does not fit ends with exit 2 and one message
    Notes       flags with which a delay is known to cost loss are named at start, no others
    Lost        a rank that dies ends the job; numbers that are not finite do not stop it

Every run is checked for memory and traffic as predicted (harness.Job). The model has 4 blocks, 6
units. Rules are in test_reference.py; that modes are one computation, bit by bit, in
test_layouts.py. Standard library only.
"""

import os
import random
import re
import signal

import harness
from harness import (
    EXIT_DONE, EXIT_INPUT, EXIT_PEER, EXIT_RESOURCES, FAULTY, Faulty, Job, SEED, T, at_once,
    checkpoints, get, sample, scratch, train, train_all,
)

from test_pipeline import BLOCK, CHANNELS, HEADS, MODEL, PADDED, UNITS, aligned

RUN = dict(
    model=MODEL, seed=3, steps=6, shuffle=1, micro_batch=8, threads=1
)  # so many threads, so many sums; no micro-batch is longer
V1, V1_FREE, V2 = (
    dict(cyclic="v1"), dict(cyclic="v1", grad_clip=0), dict(cyclic="v2", grad_clip=None),
)
V2_SLACK, V2_CLIP = dict(V2, cyclic_slack=1), dict(V2, grad_clip=0.05, cyclic_clip="storage")
RULES = [V1, V1_FREE, V2, V2_SLACK, V2_CLIP]
STATS_BYTES = 8 * (
    1
    + 69
    + 2
    # bytes of step statistics, sent to the next rank: loss, an exact sum of squares, two numbers of
    # steps
)


def single(N, **changes):
    return dict(dict(RUN, ranks=1, cyclic_stages=N, batch_tokens=2 * N * T), **changes)


def data(N, **changes):
    """The same on N ranks. Of one it is asked for by name."""
    same = dict(single(N, **changes), ranks=N, cyclic_mode="data")
    return dict(same, cyclic_stages=None)


def model(N, **changes):
    """A rank for each stage."""
    return dict(data(N, **changes), cyclic_mode="model")


def triangle(N, **changes):
    """Stage j (from 0) has N - j ranks, which take turns."""
    return dict(model(N, **changes), ranks=N * (N + 1) // 2, cyclic_stages=N)


def zero(N, **changes):
    """A rank for each micro-batch, which is of one piece, and for each stage's states."""
    return dict(data(N, **dict(changes, micro_batch=8)), cyclic_mode="zero")


MODES = (single, data, model, triangle, zero)


class Check(harness.TestCase):
    def trained(self, cases):
        """The jobs of these cases, each with an `export` of its weights."""
        cases = [dict(case, export=harness.export_of(case)) for case in cases]
        jobs = train_all(cases)
        for case, job in zip(cases, jobs):
            job.export = case["export"]
        return jobs

    def assert_same(self, job, expected, what):
        """Bit by bit."""
        self.assertEqual(
            job.steps("step", "loss", "grad_norm", "lr"),
            expected.steps("step", "loss", "grad_norm", "lr"),
            what,
        )
        if expected.of("val"):
            self.assertEqual(job.of("val"), expected.of("val"), what)
        same = harness.exported(job.export) == harness.exported(expected.export)
        self.assertTrue(same, f"weights of {what}")


# --------------------------------------------------------------------------------------------------
class Equality(Check):
    def test_one_stage_is_plain(self):
        """N = 1 and v2: new parameters, the gradient of one micro-batch, copied to where sums are:
        every bit of a plain run. v1 and 1 stage is not."""
        variants = dict(), dict(optimizer="sgd", lr=0.05), dict(dtype="bf16", recompute="block")
        for changes in sample(variants, 1):
            plain, new, old = self.trained(
                [dict(RUN, micro_batch=4, batch_tokens=4 * T, grad_clip=0, **changes)]
                + [single(1, **rule, batch_tokens=4 * T, **changes) for rule in (V2, V1_FREE)]
            )
            self.assert_same(new, plain, changes)
            self.assertNotEqual(old.steps()[2:], plain.steps()[2:], "a step later")
            self.assertEqual(old.steps()[:1], plain.steps()[:1], "the first step is a real one")

    def test_micro_batches(self):
        """--micro-batches says how many samples a step has, on one rank, too."""
        given = dict(V2, micro_batch=1, micro_batches=4, batch_tokens=None)
        tokens = dict(V2, micro_batch=1, batch_tokens=4 * T)
        jobs = self.trained([single(2, **tokens), single(2, **given), data(2, **given)])
        for job in jobs[1:]:
            self.assert_same(job, jobs[0], job.command)

    def test_late(self):
        """Store work that is put off, by lot and on each rank otherwise: messages are posted in
        other orders, and something often has to wait. The same bits as this program has on time,
        which is compiled otherwise than ./train_gpt."""
        variants = (
            dict(), dict(dtype="bf16"), dict(micro_batch=1), dict(val_every=2, val_batches=1),
            dict(share="2x2"), dict(steps=12, recompute="block"),
        )
        cases = [
            (N, dict(rule, **variant), percent)
            for N in (2, 3, 4)
            for rule in RULES
            for variant in variants
            for percent in (5, 50)
        ]

        def late(case):
            N, rule, percent = case
            rule = dict(rule, batch_tokens=2 * N * T, export=os.path.join(scratch(), "export.bin"))
            job = Job(
                binary=FAULTY,
                environment={"LATE": f"{random.Random(SEED).randrange(1 << 30)} {percent}"},
                **data(N, **rule),
            )
            on_time = dict(rule, binary=FAULTY)
            (expected,) = self.trained([(data if "share" in rule else single)(N, **on_time)])
            job.done()
            job.export = rule["export"]
            self.assert_same(job, expected, case)

        at_once(late, sample(cases, 2))

    def test_texts(self):
        """Samples of text, of parameters that are here and of those that come."""
        rule, N = random.Random(SEED).choice(RULES), random.Random(SEED).randrange(2, 5)
        jobs = self.trained(
            [mode(N, **rule, sample_every=3, sample_tokens=12, temperature=1) for mode in MODES]
        )
        texts = [re.findall(r"(?s)--- sample at step \d+ ---\n.*?\n---\n", job.out) for job in jobs]
        self.assertEqual([len(text) for text in texts], [2] * len(MODES))
        self.assertEqual([text for text in texts if text != texts[0]], [], (rule, N))
        for job in jobs[1:]:
            self.assert_same(job, jobs[0], (rule, N))


# --------------------------------------------------------------------------------------------------
def elements(storage):
    return {0: PADDED * CHANNELS, 1: T * CHANNELS, UNITS: 2 * CHANNELS}.get(storage, BLOCK)


PARAMETERS = sum(map(elements, range(UNITS + 1)))


class Numbers(Check):
    def sent(self, word, **case):
        """Bytes that each rank sends in a step, by the schedule."""
        sent = []
        for line in train(**case, show_schedule=1).out.splitlines():
            words = line.split()
            if words[:1] == ["rank"] and words[-1] == "actions":
                sent.append(0)
            elif words[1:2] in (["SEND_SUM"], ["SEND_PARAMETERS"]):
                sent[-1] += elements(int(words[words.index("storage") + 1])) * (
                    4 if words[1] == "SEND_SUM" else word
                )
            elif words[1:2] == ["SEND_STATS"]:
                sent[-1] += STATS_BYTES
        return sent

    @staticmethod
    def stats_bytes(N, rule):
        """Of the statistics that all ranks send: each its own, and where updates wait for the norm,
        it returns to the owners in between."""
        return STATS_BYTES * (N + (N - 2 if rule is V1 else 0))

    def test_sent(self):
        """Sums in fp32, parameters in working precision, each N - 1 times over all ranks; and the
        statistics."""

        def check(case):
            N, word, rule = case
            run = data(N, **rule, **(dict(dtype="bf16") if word == 2 else {}))
            sent = self.sent(word, **run)
            expected = (N - 1) * PARAMETERS * (4 + word) + self.stats_bytes(N, rule)
            self.assertEqual(sum(sent), expected, case)
            measured = train(**run).end()["traffic"]["measured"]
            self.assertEqual(measured["total"]["intra"], sent[0], case)
            self.assertEqual(measured["intra"]["send"], sent[0], case)

        at_once(
            check,
            sample(
                [(2, 4, V1), (2, 2, V2), (3, 4, V2), (3, 2, V1), (4, 4, V2_SLACK), (4, 2, V2)], 2
            ),
        )

    def test_zero(self):
        """Parameters travel once for each use of a stage, which in the last one are one, and wte to
        the head, too; the embedding's backward pass reads none. What a rank keeps is a stage's:
        rank 0 the last one's, of v2 in one version."""

        def check(case):
            N, word, rule = case
            case = zero(N, **rule, **(dict(dtype="bf16") if word == 2 else {}))
            last = range(
                UNITS + 1 - UNITS // N, UNITS + 1
            )  # storages: blocks are storages 2 .. UNITS - 1
            once = [1, UNITS, *last]
            travels = sum(elements(s) * (1 if s in once else 2) for s in range(UNITS + 1))
            sent = self.sent(word, **case)
            expected = (N - 1) * (travels * word + PARAMETERS * 4) + self.stats_bytes(N, rule)
            self.assertEqual(sum(sent), expected, case)
            end = train(**case).end()
            self.assertEqual(end["traffic"]["measured"]["intra"]["send"], sent[0], case)
            own = sum(map(elements, last))
            fresh = "v2" in rule.values() and not rule.get("cyclic_slack")
            memory = end["memory"]["measured"]
            self.assertEqual(memory["parameters"], own * word * (1 if fresh else 2), case)
            self.assertEqual(memory["gradients"], own * 4 * (2 if rule is V1 else 1), case)
            self.assertEqual(memory["optimizer"], own * (8 + 4 * (word == 2)), case)

        at_once(
            check,
            sample([(N, word, rule) for N in (2, 3, 4) for word in (4, 2) for rule in RULES], 2),
        )

    def test_activations(self):
        """One rank holds N - j micro-batches of stage j (from 0), always; with N = 1, or on N
        ranks, one of each; a triangle's first, one of stage 0."""
        rows, boundary = 2, aligned(2 * T * CHANNELS * 4)
        tensors = [1, 3, 1, 1, 1, 4, 4]
        block = (
            sum(aligned(4 * rows * T * CHANNELS * n) for n in tensors)
            + 4 * aligned(4 * rows * T)
            + aligned(4 * rows * T * HEADS)
        )
        of_unit = (
            [aligned(4 * rows * T)]
            + [boundary + block] * 4
            + [boundary + 2 * boundary + 4 * aligned(4 * rows * T)]
        )
        stages = lambda N: [j for j in range(N) for _ in range(UNITS // N + (j < UNITS % N))]
        numbers = sample((1, 2, 3, 4, 6), 2)
        jobs = train_all(
            [
                mode(N, **V2, steps=2)
                for N in numbers
                for mode in (single, data)
                if mode is single or N < 5
            ]
            + [triangle(3, **V2, steps=2)]
        )
        for N in numbers:
            live = sum((N - j) * bytes_ for j, bytes_ in zip(stages(N), of_unit))
            self.assertEqual(jobs.pop(0).end()["memory"]["measured"]["activations"], live, N)
            if N < 5:
                self.assertEqual(
                    jobs.pop(0).end()["memory"]["measured"]["activations"], sum(of_unit), N
                )
        self.assertEqual(
            jobs.pop(0).end()["memory"]["measured"]["activations"],
            sum(of_unit[:2]) + 2 * boundary,
            "and two places of what is sent",
        )


# --------------------------------------------------------------------------------------------------
class Resume(Check):
    def test_pauses_change_nothing(self):
        """Validation and checkpoints wait for all of a step; the steps between are the same."""
        cases = [
            (mode, dict(rule, **changes))
            for mode in MODES
            for rule in RULES
            for changes in (dict(), dict(dtype="bf16"))
        ]
        for mode, rule in sample(cases, 1):
            free, *paused = self.trained(
                [
                    dict(mode(3, **rule), **pause)
                    for pause in (
                        dict(),
                        dict(val_every=1, val_batches=1),
                        dict(val_every=2, val_batches=1),
                        dict(save_every=3, out=os.path.join(scratch(), "out")),
                    )
                ]
            )
            for job in paused:
                self.assert_same(job, free, (mode, rule))

    def legs(self, legs):
        """The same run in several legs of 3 steps each, one after another from checkpoint to
        checkpoint: all losses and norms, and the weights."""
        out, steps = os.path.join(scratch(), "out"), []
        for i, leg in enumerate(legs):
            (job,) = self.trained(
                [
                    dict(
                        leg, steps=3 * (i + 1), out=out, save_every=3, resume=int(i > 0),
                        batch_tokens=6 * T,
                    )
                ]
            )
            steps += job.steps("loss", "grad_norm")
        return steps, get(job.export)

    def test_in_another_mode(self):
        """From one rank to several and back: the same bits. And another number of stages: in either
        mode alike."""
        for rule in sample(RULES, 1):
            one = dict(rule, micro_batch=8)
            whole, whole_of_one = [single(3, **rule)] * 3, [single(3, **one)] * 3
            pairs = [
                (whole, [triangle(3, **rule), data(3, **rule), model(3, **rule)]),
                (whole, [model(3, **rule), triangle(3, **rule), single(3, **rule)]),
                ([single(N, **rule) for N in (2, 3, 1)], [data(N, **rule) for N in (2, 3, 1)]),
                (whole_of_one, [zero(3, **rule), data(3, **one), zero(3, **rule)]),
                ([single(N, **one) for N in (2, 3, 1)], [zero(N, **rule) for N in (2, 3, 1)]),
            ]
            pairs = sample(pairs, 1)
            chains = at_once(self.legs, [legs for pair in pairs for legs in pair])
            for pair, expected, found in zip(pairs, chains[::2], chains[1::2]):
                self.assertTrue(found == expected, pair)

    def test_with_plain_runs(self):
        """One stage of v2 is plain training: so plain runs take its place, before and after. A
        plain run has no version before its newest: both are it."""
        plain, one = dict(RUN, micro_batch=6, ranks=1, grad_clip=0), single(1, **V2)
        rule = random.Random(SEED).choice((V1_FREE, V2, V2_SLACK))
        cases = [(mode, legs) for mode in (single, data, zero) for legs in ((0, 3, 0), (3, 0, 3))]
        cases = sample(cases, 1)
        chains = at_once(
            self.legs,
            [
                [other if leg == 0 else mode(leg, **rule) for leg in legs]
                for mode, legs in cases
                for other in (plain, one)
            ],
        )
        for case, found, expected in zip(cases, chains[::2], chains[1::2]):
            self.assertTrue(found == expected, (case, rule))

    def test_begins_with_a_checkpoint(self):
        """Of a run that is over, plain or cyclic, whose blocks may share: a new one, whose first
        step knows one version, the same in all modes; of one stage a plain one."""
        rule, share = random.Random(SEED).choice(RULES), random.Random(SEED).choice((None, "2"))
        for first in sample((dict(RUN, batch_tokens=6 * T), single(2, **V1)), 1):
            out = os.path.join(scratch(), "out")
            train(
                **dict(
                    first, share=share, cyclic_cut=first.get("cyclic") and "3,3", out=out, steps=3,
                    save_every=3,
                )
            )
            same = dict(model=harness.checkpoint(out, 3), batch_tokens=6 * T, grad_clip=0)
            one, plain, *modes = self.trained(
                [
                    single(1, **{**V2, **same, "micro_batch": 6}),
                    dict(RUN, **{**same, "micro_batch": 6}),
                    *(mode(2, **{**same, **rule}, cyclic_cut="3,3") for mode in MODES),
                ]
            )
            self.assert_same(one, plain, rule)
            for job, mode in zip(modes[1:], MODES[1:]):
                self.assert_same(job, modes[0], (mode.__name__, rule, share))

    def test_graceful_stops(self):
        """What is under way is finished and saved, and the run goes on as if nothing had been."""

        def stop(case):
            how, mode, N, rule = case
            out, log = os.path.join(scratch(), "out"), os.path.join(scratch(), "log")
            same = dict(mode(N, **rule), out=out)
            job = Job(**dict(same, steps=10**9, log=log))
            job.wait_until(lambda: job.logged() > 5, "a step")
            if how == "file":
                open(os.path.join(out, "stop"), "w").close()
            else:
                (
                    job.process.send_signal(signal.SIGUSR1)
                    if how == "usr1"
                    else os.kill(job.pids()[-1], signal.SIGTERM)
                )
            job.done()
            last = job.of("step")[-1]["step"]
            self.assertEqual(checkpoints(out), [last], "a checkpoint of the last step")
            self.assertRegex(job.out, rf"(?m)^stopped at step {last}\. To go on: mpirun ")
            whole, again = self.trained(
                [dict(mode(N, **rule), steps=last + 4), dict(same, steps=last + 4, resume=1)]
            )
            self.assertEqual(
                job.steps("step", "loss", "grad_norm") + again.steps("step", "loss", "grad_norm"),
                whole.steps("step", "loss", "grad_norm"),
                case,
            )
            self.assertTrue(get(again.export) == get(whole.export), case)

        at_once(
            stop,
            sample(
                [
                    (how, mode, N, rule)
                    for how in ("usr1", "term", "file")
                    for mode in MODES
                    for N in (2, 3)
                    for rule in RULES
                ],
                1,
            ),
        )


# --------------------------------------------------------------------------------------------------
class Refusals(Check):
    # ranks, flags, what the message must say. Pairs of flags are in test_options.c.
    CASES = [
        (2, dict(cyclic="v3"), "--cyclic takes one of off|v1|v2"),
        (
            1,
            dict(cyclic="v1", cyclic_stages=7),
            "7 cyclic stages are more than the model's 6 units",
        ),
        (2, dict(cyclic="v1", cyclic_stages=3), "3 stages, 2 ranks"),
        (2, dict(V1, share="all", cyclic_mode="model"), "--share all"),
        (1, dict(V1, share="2x2", cyclic_stages=2), "--share 2x2"),
        (2, dict(cyclic="v1", cyclic_mode="single"), "runs on one rank, not on 2"),
        (3, dict(V2, cyclic_mode="model", cyclic_stages=4), "4 stages, 3 ranks"),
        (7, dict(V2, cyclic_mode="model"), "7 cyclic stages are more than the model's 6 units"),
        *(
            (2, dict(V1, cyclic_cut=cut), "--cyclic-cut")
            for cut in ("6", "3,2", "3,3,0", "0,6", "3;3", "3,3,", "x")
        ),
        (2, dict(V2, cyclic_mode="zero", micro_batch=1), "--cyclic-mode zero adds no pieces up"),
        (2, dict(V2, cyclic_slack=-1), "--cyclic-slack"),
    ]

    def test_each(self):
        def refused(case):
            ranks, changes, words = case
            job = train(**dict(RUN, ranks=ranks, batch_tokens=6 * T, code=EXIT_INPUT, **changes))
            self.assertEqual(job.err.count("train_gpt: rank"), 1, job.err)
            self.assertIn(words, job.err, changes)

        at_once(refused, sample(self.CASES, 3))


# --------------------------------------------------------------------------------------------------
class Notes(Check):
    STABLE = (
        "note: with --momentum 0.9, --cyclic v1 is stable up to 1/38 of the learning rate of plain"
        " training"
    )
    SHORT = "note: --cyclic {} in 100 steps: "
    SGD = dict(optimizer="sgd", lr="1e-4")
    # flags, the notes about the delay
    CASES = [
        (dict(V1_FREE, **SGD), [STABLE, SHORT.format("v1")]),
        (dict(V1_FREE, momentum=0.4, **SGD), [SHORT.format("v1")]),
        (V1, [SHORT.format("v1")]),
        (dict(V2, **SGD), [SHORT.format("v2")]),
        (dict(V1_FREE, steps=99, **SGD), []),
        (SGD, []),
    ]

    def test_each(self):
        jobs = train_all(
            [
                dict(dict(single(2), steps=100), **flags)
                if "cyclic" in flags
                else dict(RUN, ranks=1, batch_tokens=4 * T, steps=100, **flags)
                for flags, _ in self.CASES
            ]
        )
        for job, (flags, notes) in zip(jobs, self.CASES):
            said = [line for line in job.out.splitlines() if line.startswith("note: ")]
            self.assertEqual(len(said), len(notes), (flags, said))
            for line, note in zip(said, notes):
                self.assertIn(note, line, flags)


# --------------------------------------------------------------------------------------------------
class Lost(Check):
    KINDS = (
        "FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "SEND_SUM", "RECV_SUM", "SEND_PARAMETERS",
        "RECV_PARAMETERS", "SEND_STATS", "RECV_STATS", "STATS", "REDUCE", "UPDATE",
    )

    def test_in_each_action(self):
        """Nobody waits for a rank that is gone; and the checkpoint before goes on as if nothing had
        been."""

        def lose(case):
            how, kind, rank, rule, mode = case
            fault = Faulty(how, rank, kind, **self.changes(rule, mode))
            job = fault.ends()
            if how == "kill":
                self.assertNotEqual(job.code, EXIT_DONE, (case, job.err))
            else:
                self.assertEqual(job.code, EXIT_PEER, (case, job.err))

        at_once(
            lose,
            sample(
                [
                    (how, kind, rank, rule, mode)
                    for how in ("kill", "stop")
                    for kind in self.KINDS
                    for rank in (0, 1, 2)
                    for rule in (V1, V2)
                    for mode in (data, zero)
                ],
                2,
            ),
        )

    def test_in_a_triangle(self):
        """The same of two stages on three ranks; 1 adds up and updates what 0 and 1 make."""
        kinds = [
            ("FORWARD", 0), ("BACKWARD_WEIGHT", 1), ("SEND_FORWARD", 1), ("RECV_FORWARD", 2),
            ("SEND_BACKWARD", 2), ("RECV_BACKWARD", 0), ("SEND_SUM", 0), ("RECV_SUM", 1),
            ("ADD", 1), ("SEND_PARAMETERS", 1), ("RECV_PARAMETERS", 0), ("RECV_PARAMETERS", 2),
            ("SEND_PART", 2), ("RECV_PART", 1), ("STATS", 0), ("UPDATE", 2),
        ]

        def lose(case):
            how, (kind, rank) = case
            job = Faulty(
                how, rank, kind, **dict(self.changes(V2), cyclic_mode="model", cyclic_stages=2)
            ).ends()
            self.assertTrue(
                job.code != EXIT_DONE if how == "kill" else job.code == EXIT_PEER,
                (case, job.code, job.err),
            )

        at_once(lose, sample([(how, kind) for how in ("kill", "stop") for kind in kinds], 2))

    @staticmethod
    def changes(rule, mode=data):
        left_out = ("ranks", "steps", "shuffle")
        return {name: value for name, value in mode(3, **rule).items() if name not in left_out}

    def test_not_finite(self):
        """Steps that lead nowhere: no rank waits for ever, all are made, and the run says that it
        has diverged."""
        cases = sample([(mode, rule) for mode in MODES for rule in RULES], 2)

        def check(case):
            mode, rule = case
            job = train(code=EXIT_RESOURCES, **mode(3, **dict(rule, optimizer="sgd", lr=1e6)))
            self.assertEqual(job.steps("step"), [(k + 1,) for k in range(6)])
            self.assertIn("the run has diverged", job.err)

        at_once(check, cases)


if __name__ == "__main__":
    harness.main()
