#!/usr/bin/env python3
"""test_train.py: the real program under mpirun, from outside. Each class names what it proves.

    python3 test/test_train.py          TEST_ALL=1: the exhaustive forms; TEST_SEED=N: the random
                                        choices, printed
                                        TRAIN_GPT=FILE: another binary than ./train_gpt

    Golden      losses and norms of PyTorch (float64), for every number of ranks, micro-batch,
                thread, precision, build
    Layouts     which samples a step takes. That ranks never change the mathematics is in
                test_layouts.py
    Optimizers  rates that flags imply, and warnings; which updates are skipped. Rules and rates
                are in test_reference.py
    Models      --export gives the file back byte for byte; validation losses and bits per byte from
                independent numbers
    Divergence  a loss far above that of guessing is told, once, and none of a private run
    Resume      bit-equal to the uninterrupted run; damaged checkpoints; graceful stops and the
                command they print
    Kills       kill -9 or -STOP at random moments, again and again, loses nothing but the steps
                since the last checkpoint
    Log         the JSON interface; what is only printed. Formulas of memory and traffic are in
                test_zero.py and test_pipeline.py
    Tokenizers  data of two tokenizers, or of another one than the model's, are refused; what
                belongs together is not
    Validation  only on the data that belong to those of training
    Failures    every mistake ends with exit code 2 and one message that names it; a full disk does
                not end training

Every run that reaches its end is also checked for memory and traffic as predicted (Job.check_end),
so that holds in all layouts tested here. The model is that of test/golden (92208 parameters): a run
is mostly mpirun's start. Standard library only.
"""

import array
import concurrent.futures
import glob
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import stat
import struct
import subprocess
import time
import unittest

import harness
from harness import (
    ALL, AT_ONCE, BINARY, CHANNELS, EXIT_DONE, EXIT_INPUT, EXIT_PEER, EXIT_RESOURCES, FAULTY, Job,
    LAYERS, MODEL, PADDED, PARAMETERS, POSITIONS, ROOT, SAME, SAME_NORM, SEED, T, TEMPORARY,
    TIMEOUT, TOKENS, TestCase, at_once, VOCAB, WINDOWS, bf16_words, change, checkpoint, checkpoints,
    command_line, get, golden_run, golden_tokens, header, parse_log, put, sample, scratch, shard,
    tensors, tokenizer, train, train_all, weights,
)


with open("/proc/cpuinfo") as cpuinfo:
    FLAGS = set(cpuinfo.read().split())
# as gemm_cpu.h: gemm_same_in_all_tiles()
AVX512 = FLAGS >= {"avx512f", "avx512bw", "avx512vl", "avx512dq"} and not {
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_MAX_CPU_ISA",
} & set(os.environ)


NO_BF16 = "DNNL_MAX_CPU_ISA"  # =AVX512_CORE: as a processor without AVX512-BF16


# --------------------------------------------------------------------------------------------------
class Golden(TestCase):
    def check(self, cases, tolerance=SAME, norm_tolerance=SAME_NORM):
        losses, norms = golden_run()
        jobs = train_all(cases)
        for case, job in zip(cases, jobs):
            self.assert_close(job.losses(), losses, tolerance, case)
            self.assert_close(
                [norm for norm, in job.steps("grad_norm")], norms, norm_tolerance, case
            )
            self.assertEqual(job.steps("step"), [(k + 1,) for k in range(10)])
        return jobs

    def test_ranks_and_accumulation(self):
        cases = [dict(ranks=r, micro_batch=b) for r in (1, 2, 3, 4) for b in (1, 2, 3)]
        self.check(sample(cases, 3))

    def test_muon(self):
        """Numbers of torch.optim.Muon (make_muon_golden.py); weights too, of one layout."""
        with open(os.path.join(ROOT, "test/golden/muon_gpt2.json")) as file:
            golden = json.load(file)
        flags = {name.replace("-", "_"): value for name, value in golden["flags"].items()}
        export = os.path.join(scratch(), "export.bin")
        cases = [dict(ranks=r, zero=z, micro_batch=1) for r in (1, 2, 3, 4) for z in range(4)]
        cases = [dict(export=export), *sample(cases, 2)]
        for case, job in zip(cases, train_all([dict(flags, **case) for case in cases])):
            self.assert_close(job.losses(), golden["losses"], SAME, case)
            norms = [norm for norm, in job.steps("grad_norm")]
            self.assert_close(norms, golden["norms"], SAME_NORM, case)
        values, at = weights(export), 0
        for (n, _), (name, expected) in zip(tensors(), golden["weights"].items()):
            real = n - (PADDED - VOCAB) * CHANNELS if name == "wte" else n  # no rows of padding
            count = len(expected["elements"])
            places = [i * real // count for i in range(count)]
            pairs = [
                (values[at + i], x)
                for i, x in zip(places, expected["elements"])
                # gradients of keys' biases are nothing but rounding, which AdamW makes a step of
                if name != "qkvb" or i // CHANNELS % 3 != 1
            ]
            apart = math.dist(*zip(*pairs)) / math.hypot(*(x for _, x in pairs))
            self.assertLess(apart, 1e-4, name)
            at += n

    def test_threads(self):
        """With AVX-512 products have the same bits in every tile, and so has a run. Numbers of bf16
        are converted, or multiplied in pairs or by tiles."""
        bf16 = [{}, dict(environment={"TRAIN_GPT_LIBRARY_PRODUCTS": "1"})]
        if "avx512_bf16" in FLAGS:
            bf16.append(dict(environment={"TEST_TILES": "1"}, binary=FAULTY))
        kinds = [("fp32", {}), *(("bf16", how) for how in bf16)]
        for ranks in (1, 2) if ALL else (random.Random(SEED).choice((1, 2)),):
            for dtype, how in kinds:
                jobs = self.check(
                    [dict(how, threads=n, ranks=ranks, dtype=dtype) for n in (1, 2, 3)],
                    *((1e-3, 1e-2) if dtype == "bf16" else ()),
                )
                products = jobs[0].events[0]["matmul"]
                self.assertTrue("binary" not in how or products == "own", products)
                if AVX512 and products in ("oneDNN", "own"):
                    for job in jobs[1:]:
                        self.assertEqual(
                            job.steps("loss", "grad_norm"), jobs[0].steps("loss", "grad_norm")
                        )

    def test_bf16(self):
        # A bf16 number has 8 bits, relative error 2^-9 = 0.002; errors of single weights and
        # boundaries are independent and average out in the loss: a tenth of that remains. The norm
        # is not averaged over tokens in the same way.
        for job in self.check(
            [dict(ranks=r, dtype="bf16", micro_batch=b) for r, b in ((1, 3), (2, 1))], 1e-3, 1e-2
        ):
            self.assertGreater(
                abs(job.losses()[0] / golden_run()[0][0] - 1), 1e-6, "nothing was rounded"
            )

    def test_ranks_compute_alike(self):
        """Rank 1's processor has no products of bf16, so rank 0 computes in fp32, too."""
        for zero in (0, 3) if ALL else (random.Random(SEED).choice((0, 3)),):
            case = dict(dtype="bf16", micro_batch=1, zero=zero, steps=4)
            log = os.path.join(scratch(), "log")
            start = " ".join(("-np 1", BINARY, *command_line(dict(case, log=log))))
            mixed = Job(
                log=log,
                shell=f"mpirun --oversubscribe {start} : -x {NO_BF16}=AVX512_CORE {start}",
            ).done()
            alike = train(ranks=2, environment={NO_BF16: "AVX512_CORE"}, **case)
            self.assertEqual(mixed.events[0]["compute"], "fp32")
            self.assertEqual(mixed.steps("loss", "grad_norm"), alike.steps("loss", "grad_norm"))

    def test_other_products_after_a_resume(self):
        """A checkpoint names what products were computed in, and a run says where that changes."""
        out = os.path.join(scratch(), "out")
        case = dict(dtype="bf16", out=out)
        first = train(save_every=2, steps=2, **case).events[0]["compute"]
        self.assertIn(f"\ncompute {first}\n", get(f"{checkpoint(out, 2)}/manifest").decode())
        for environment in ({}, {NO_BF16: "AVX512_CORE"}):
            again = train(environment=environment, resume=1, steps=3, **case)
            now = again.of("start")[-1]["compute"]
            self.assertEqual(
                f"trained with products in {first}, now they are in {now}" in again.out,
                first != now,
            )

    def test_bf16_messages(self):
        # Each gradient is rounded to 2^-9 of itself; AdamW makes that 2^-9 of an update of at most
        # lr = 1e-3 a weight.
        two, three = self.check([dict(ranks=r, reduce_dtype="bf16") for r in (2, 3)], 1e-4, 1e-3)
        one, plain = train_all([dict(reduce_dtype="bf16"), dict()])
        self.assertEqual(
            one.steps("loss", "grad_norm"),
            plain.steps("loss", "grad_norm"),
            "one rank sends nothing, so nothing is rounded",
        )
        for job in (two, three):
            self.assertNotEqual(
                job.steps("grad_norm"), plain.steps("grad_norm"), "nothing was rounded"
            )
            self.assert_close(
                job.losses()[:1], plain.losses()[:1], SAME, "before the first message"
            )


# --------------------------------------------------------------------------------------------------
class Layouts(TestCase):
    def test_batch_tokens_by_default(self):
        """--batch-tokens 0 is one micro-batch of each rank."""
        default, given = train_all(
            [
                dict(ranks=2, micro_batch=2, batch_tokens=None, steps=2),
                dict(ranks=2, micro_batch=2, batch_tokens=80, steps=2),
            ]
        )
        self.assertEqual(default.steps(), given.steps())

    def test_shuffling_is_a_permutation_of_each_epoch(self):
        frozen = dict(lr=0, batch_tokens=T, micro_batch=1)
        plain, shuffled, other = train_all(
            [
                dict(frozen, shuffle=0, steps=WINDOWS),
                dict(frozen, shuffle=1, steps=2 * WINDOWS),
                dict(frozen, shuffle=1, steps=None, seed=43),
            ]
        )
        first, second = shuffled.steps()[:WINDOWS], shuffled.steps()[WINDOWS:]
        self.assertEqual(len(set(plain.steps())), WINDOWS, "a loss names a window")
        self.assertEqual(len(other.steps()), WINDOWS, "--steps -1 is one epoch")
        for order in (first, second, other.steps()):
            self.assertEqual(sorted(order), sorted(plain.steps()))
        self.assertEqual(
            len({tuple(order) for order in (plain.steps(), first, second, other.steps())}),
            4,
            "orders are alike",
        )

    def test_document_windows(self):
        """Padding of a short document is masked: its length does not matter. A document never
        reaches into the next one."""
        draw = random.Random(SEED)
        text = [[draw.randrange(1, VOCAB) for _ in range(T)] for _ in range(6)]
        short = shard(
            [token for words in text for token in [0] + words[:5]]
        )  # end-of-text is token 0
        long = shard([token for words in text for token in [0] + words])
        same = dict(windows="document", micro_batch=2, steps=4)
        tight, padded = train_all(
            [
                dict(same, train=short, seq_len=5, batch_tokens=15),
                dict(same, train=short, seq_len=20, batch_tokens=60),
            ]
        )
        self.assert_close(padded.losses(), tight.losses(), SAME, "masked")
        alone, among = train_all(
            [
                dict(same, train=shard([0] + text[0]), batch_tokens=T, lr=0),
                dict(same, train=long, batch_tokens=T, lr=0),
            ]
        )
        self.assertEqual(alone.steps()[:1], among.steps()[:1], "the first document among others")


def overflowing():
    """The golden model with logits that are too large for fp32."""
    numbers = weights(MODEL)
    for i in range(len(numbers) - 2 * CHANNELS, len(numbers)):
        numbers[i] = 3e38
    return put("model.bin", get(MODEL)[:1024], numbers.tobytes())


# --------------------------------------------------------------------------------------------------
class Optimizers(TestCase):

    def test_a_cosine_that_is_asked_for_falls(self):
        """To a tenth, unless a flag says more; the default schedule stays where it was."""
        same = dict(steps=5, lr="1e-3")
        config = os.path.join(scratch(), "config")
        with open(config, "w") as file:
            file.write("lr-schedule cosine\n")
        cases = [
            (dict(lr_schedule="cosine"), 0.1),
            (dict(lr_schedule=None, config=config), 0.1),
            (dict(lr_schedule="cosine", final_lr_fraction=1), 1),
            (dict(lr_schedule=None), 1),
            (dict(lr_schedule="linear"), 1),
        ]
        jobs = train_all([dict(same, **changes) for changes, _ in cases])
        for (changes, low), job in zip(cases, jobs):
            flags = job.of("start")[0]["flags"]
            self.assertEqual(float(flags["final-lr-fraction"]), low, changes)
            done = 4 / 5
            last = low + (1 - low) * (1 + math.cos(math.pi * done)) / 2
            self.assert_close([job.of("step")[-1]["lr"]], [1e-3 * last], 1e-12, str(changes))
        self.assertIn("0.1 where --lr-schedule cosine", Job(words=["--help", "all"]).done().out)

    def test_warm_up_longer_than_the_run(self):
        """A recipe's first steps are those of its warm-up; that the peak is not reached is said."""
        same = dict(warmup=8, lr="1e-3", lr_schedule="cosine")
        short, whole, at_peak = train_all([dict(same, steps=steps) for steps in (3, 10, 8)])
        self.assertEqual(
            [float(e["lr"]) for e in short.of("step")], [1e-3 * (k + 1) / 8 for k in range(3)]
        )
        self.assertEqual(short.steps("loss", "lr"), whole.steps("loss", "lr")[:3])
        self.assertIn(
            "note: --warmup 8 is longer than the run: after its 3 steps the learning rate is "
            "0.000375, not yet --lr 0.001\n",
            short.out,
        )
        for job in (whole, at_peak):
            self.assertNotIn("note: --warmup", job.out)

    def test_outliers_are_skipped(self):
        """Garbage in the shard: the steps skipped are those whose z, redone from the logged
        numbers, is above the limit."""
        draw, window, out = random.Random(1), 128, os.path.join(scratch(), "out")
        tokens = [5 + 3 * (i % 16) for i in range(8 * 150)]
        tokens[8 * 135 : 8 * 137] = [draw.randrange(VOCAB) for _ in range(16)]
        same = dict(
            train=shard(tokens), val=TOKENS, seq_len=8, batch_tokens=8, micro_batch=1, steps=150,
            val_every=1, val_batches=1, out=out, save_every=132,
        )
        both = train_all(
            [
                dict(same, skip_loss_z=4),
                *(dict(same, skip_grad_z=z, out=None, save_every=None) for z in (4, 1.5)),
            ]
        )
        for job, field, most in zip(both, ("loss", "grad_norm", "grad_norm"), (4, 4, 1.5)):
            values, limit = [float(v) for v, in job.steps(field)], []
            for k in range(window - 1, 150):
                last = values[k - window + 1 : k + 1]
                mean = math.fsum(last) / window
                deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in last) / window)
                limit += [k + 1] if (values[k] - mean) / deviation > most else []
            skipped = [
                int(step) for step in re.findall(r"warning: step (\d+): update skipped", job.err)
            ]
            self.assertTrue(limit, "the garbage is no outlier")
            self.assertEqual(skipped, limit, field)
            val = {e["step"]: e["loss"] for e in job.of("val")}
            self.assertEqual(
                [k for k in range(1, 151) if val[k] == val[k - 1]],
                limit,
                "skipped steps, and no others, leave the weights as they were",
            )
        shutil.rmtree(checkpoint(out, 150))
        resumed = train(**same, skip_loss_z=4, resume=1)
        self.assertEqual(
            resumed.steps(), both[0].steps()[132:], "the statistics are part of a checkpoint"
        )

    def test_not_finite_is_skipped(self):
        out = os.path.join(scratch(), "out")
        same = dict(model=overflowing(), ranks=2, out=out, save_every=1)
        job = train(**same, steps=3, code=EXIT_RESOURCES)
        self.assertEqual(
            len(re.findall("update skipped: loss or gradient norm is not finite", job.err)), 3
        )
        self.assertEqual(job.steps("loss"), [(None,)] * 3, "JSON has no infinities")
        self.assertEqual(checkpoints(out), [])


# --------------------------------------------------------------------------------------------------
# The tensors of the golden model, in the order of the file
NAMES = (
    *("wte", "wpe", "ln1w", "ln1b", "qkvw", "qkvb", "attprojw", "attprojb", "ln2w", "ln2b"),
    *("fcw", "fcb", "fcprojw", "fcprojb", "lnfw", "lnfb"),
)


class Models(TestCase):
    def test_folder_of_a_run(self):
        """--model OUT is its newest checkpoint that can be read, whatever it is used for."""
        folder = scratch()
        out, exports = os.path.join(folder, "out"), [os.path.join(folder, n) for n in "abcd"]
        train(out=out, steps=4, save_every=1, ranks=2)
        newest = dict(steps=0, ranks=2)
        train(**newest, model=checkpoint(out, 4), export=exports[0])
        job = train(**newest, model=out, export=exports[1])
        self.assertIn(f"note: --model is {checkpoint(out, 4)}", job.err)
        tensors = "/model.safetensors"
        self.assertEqual(get(exports[0] + tensors), get(exports[1] + tensors))
        change(os.path.join(checkpoint(out, 4), "state_00001"), 3000)
        os.truncate(os.path.join(checkpoint(out, 3), "manifest"), 100)
        train(**newest, model=checkpoint(out, 2), export=exports[2])
        job = train(**newest, model=out, export=exports[3])
        for step in (3, 4):
            self.assertEqual(job.err.count(f"--model skips {checkpoint(out, step)}"), 1, job.err)
        self.assertEqual(get(exports[2] + tensors), get(exports[3] + tensors))
        jobs = [train(model=m, steps=1, zero=1, ranks=3) for m in (out, checkpoint(out, 2))]
        self.assertEqual(jobs[0].steps(), jobs[1].steps())
        words = harness.command_line(dict(model=out))
        job = Job(words=[*words, "--dry-run", "--json"]).done()
        self.assertEqual(json.loads(job.out)["flags"]["model"], checkpoint(out, 2))
        job = train(model=out, out=out, steps=1, code=EXIT_INPUT)
        self.assertIn("whose checkpoints a new run moves out of the way", job.err)
        for step in (1, 2):
            os.remove(os.path.join(checkpoint(out, step), "manifest"))
        job = train(model=out, steps=1, code=EXIT_INPUT, ranks=2)
        self.assertIn(f"--model {out}: none of its 4 checkpoints is valid", job.err)

    def test_small_tokenizer(self):
        """A tokenizer.json behind white space, shorter than the header of a tokenizer file."""
        end = dict(id=3, content="</s>", special=True)
        bytes_ = dict(type="ByteLevel", add_prefix_space=False, use_regex=True)
        model = dict(type="BPE", vocab={"a": 0, "b": 1, "c": 2}, merges=[])
        data = dict(added_tokens=[end], pre_tokenizer=bytes_, model=model)
        text = b"\n " + json.dumps(data).encode()
        out, path = os.path.join(scratch(), "out"), harness.put("small.json", text)
        same = dict(model="layers=1,heads=1,channels=8,vocab=4", tokenizer=path)
        data = dict(train=harness.shard([0, 1, 2, 3] * 40), val=None)
        train(**same, **data, out=out, steps=1, save_every=1)
        self.assertEqual(get(os.path.join(out, "tokenizer.json")), text)
        said = train(**same, prompt="cab</s>", sample_tokens=5, top_k=1).out
        self.assertRegex(said, r"\A[abc]{0,5}\n\Z")

    def test_tokenizer_of_a_checkpoint(self):
        """It is found by the checkpoint, wherever the run's folder or the data are by then."""
        folder = scratch()
        data, out = os.path.join(folder, "data.json"), os.path.join(folder, "out")
        shutil.copy(os.path.join(ROOT, "test/golden/tokenizer_tiny.json"), data)
        text = get(data)
        train(tokenizer=data, out=out, steps=2, save_every=1)
        ask = dict.fromkeys(("train", "val", "steps", "seq-len", "micro-batch", "batch-tokens"))
        ask.update(prompt="e", sample_tokens=3, temperature=0)
        said = train(**ask, model=checkpoint(out, 2)).out
        self.assertTrue(said.endswith("\n"))
        self.assertEqual(train(**ask, model=out, ranks=2).out, said)
        moved = shutil.move(out, os.path.join(folder, "moved"))
        kept = os.path.join(moved, "tokenizer.json")
        self.assertEqual(get(kept), text)
        os.rename(kept, kept + "_")  # the data are still there
        self.assertEqual(train(**ask, model=checkpoint(moved, 2)).out, said)
        os.remove(data)
        job = train(**ask, model=checkpoint(moved, 2), code=EXIT_INPUT)
        self.assertIn("is neither beside it nor where it was: " + data, job.err)
        with open(kept, "wb") as file:
            file.write(text.replace("café".encode(), b"tea"))  # of another run: not this one
        train(**ask, model=checkpoint(moved, 2), code=EXIT_INPUT)
        os.rename(kept + "_", kept)
        self.assertEqual(train(**ask, model=checkpoint(moved, 2)).out, said)
        train(out=moved, steps=1)  # a new run, of data without a tokenizer
        earlier = os.path.join(moved, "earlier-1")
        self.assertEqual(train(**ask, model=checkpoint(earlier, 2)).out, said)

    def test_numbers_that_are_not_finite(self):
        """In any tensor of any form, on the rank that reads it: refused by the tensor's name."""
        draw, places, begin = random.Random(SEED), [], 0
        for elements, _ in tensors():
            places.append((begin, elements))
            begin += elements
        folder = os.path.join(scratch(), "folder")
        train(steps=0, export=folder)
        (length,) = struct.unpack("<Q", get(folder + "/model.safetensors")[:8])
        names = json.loads(get(folder + "/model.safetensors")[8 : 8 + length])
        cases = []
        for number in (math.nan, math.inf, -math.inf):
            tensor = draw.randrange(len(places))
            at = 1024 + 4 * (places[tensor][0] + draw.randrange(places[tensor][1]))
            word = struct.pack("<f", number)
            bad = put("model.bin", get(MODEL)[:at], word, get(MODEL)[at + 4 :])
            cases.append((dict(model=bad), f"tensor {NAMES[tensor]}( of layer \\d)? has "))
            name = draw.choice([name for name in names if name != "__metadata__"])
            low, high = names[name]["data_offsets"]
            at = 8 + length + low + 4 * draw.randrange((high - low) // 4)
            copy = shutil.copytree(folder, os.path.join(scratch(), "folder"))
            with open(copy + "/model.safetensors", "r+b") as file:
                file.seek(at)
                file.write(word)
            cases.append((dict(model=copy), f"tensor {re.escape(name)} has "))
        layouts = [dict(ranks=3, zero=3), dict(ranks=2, pipeline=2), dict(offload="all"), {}]
        for (flags, words), layout in zip(cases, layouts * 2):
            job = train(**flags, **layout, steps=2, code=EXIT_INPUT)
            self.assertRegex(job.err, words + "(a NaN|an infinite number)", (flags, layout))
            self.assertEqual(job.err.count("a model with such a weight"), 1)

    def test_export_gives_the_file_back(self):
        half = put(
            "half.bin",
            header(20240326, 5, POSITIONS, VOCAB, LAYERS, 3, CHANNELS, PADDED),
            array.array("H", bf16_words(weights(MODEL))).tobytes(),
        )
        cases = [
            dict(model=file, ranks=r, steps=0, export=os.path.join(scratch(), "export.bin"))
            for file, r in ((MODEL, 1), (half, 1), (half, 2))
        ]
        for case, job in zip(cases, train_all(cases)):
            self.assertEqual(get(case["export"]), get(case["model"]))
            self.assertEqual(job.steps(), [])
        upper = train(
            model=MODEL,
            dtype="bf16",
            steps=0,
            export=os.path.join(scratch(), "export.bin"),
            train="no such file",
        )
        self.assertEqual(
            get(re.search(r"--export (\S+)", upper.command)[1]), get(half), "fp32 read as bf16"
        )

    def windows(self):
        """The loss of each whole window of the golden shard, by training with lr 0."""
        return train(lr=0, batch_tokens=T, micro_batch=1, steps=WINDOWS).losses()

    def test_validation_loss(self):
        texts = [b"x" * (1 + (7 * i) % 5) for i in range(VOCAB)]
        tokens, window = golden_tokens(), self.windows()

        def expected(first, last, ranked):
            targets = tokens[first * T + 1 : last * T + 1]
            bits = sum(window[first:last]) * T / math.log(2)
            return sum(window[first:last]) / (last - first), bits / (
                sum(len(texts[t]) * (t != 9) for t in targets) if ranked else len(targets)
            )

        same = dict(steps=0, val_every=1, train="no such file")
        cases = [
            (dict(val_batches=1), (0, 3)),
            (dict(val_batches=2, ranks=3), (0, 6)),
            (dict(val_batches=-1), (0, WINDOWS)),
            (dict(val_batches=-1, ranks=2), (0, WINDOWS)),
            (dict(val_batches=-1, ranks=4, micro_batch=1), (0, WINDOWS)),
            (dict(val_batches=-1, tokenizer=tokenizer(texts, 9)), (0, WINDOWS)),
        ]
        for (changes, part), job in zip(
            cases, train_all([dict(same, **changes) for changes, _ in cases])
        ):
            (event,) = job.of("val")
            self.assertEqual(event["step"], 0)
            self.assert_close(
                [event["loss"], event["bits_per_byte"]],
                expected(*part, "tokenizer" in changes),
                SAME,
                changes,
            )
            if changes == dict(val_batches=1):
                self.assert_close([event["loss"]], golden_run()[0][:1], SAME, "PyTorch's")

    def test_tokenizer_beside_the_shards(self):
        """That of the shards that a run reads, never that of the default ones which it does not."""
        folder, texts = scratch(), [b"x" * (1 + (7 * i) % 5) for i in range(VOCAB)]
        given = tokenizer(texts, 9)
        for source, name in (
            (TOKENS, "mine_train_0.bin"),
            (TOKENS, "mine_val_0.bin"),
            (given, "mine_tokenizer.bin"),
        ):
            shutil.copy(source, os.path.join(folder, name))
        mine = {kind: os.path.join(folder, f"mine_{kind}_*.bin") for kind in ("train", "val")}
        same, too_large = dict(steps=0, val_every=1), tokenizer([b"x"] * 300, 299)
        default = os.path.join(TEMPORARY, "data")
        os.makedirs(default)
        self.addCleanup(shutil.rmtree, default)
        shutil.copy(too_large, os.path.join(default, "text_gpt2_tokenizer.bin"))
        expected, *others, unknown = [
            job.of("val")[0]["bits_per_byte"]
            for job in train_all(
                [
                    dict(same, tokenizer=given), dict(same, train=mine["train"]),
                    dict(same, train=None, val=mine["val"]), dict(same, train=None),
                ]
            )
        ]
        self.assertEqual(others, [expected, expected])
        self.assertNotEqual(unknown, expected)

    def test_bits_per_byte_are_null_where_the_text_is_not_known(self):
        job = train(model="layers=1,heads=1,channels=16,vocab=300", steps=0, val_every=1)
        self.assertIsNone(job.of("val")[0]["bits_per_byte"])
        self.assertAlmostEqual(
            float(job.of("val")[0]["loss"]), math.log(300), delta=0.1
        )  # new weights know nothing

    def test_validation_sees_the_weights_after_each_update(self):
        """The training loss of step k + 1 is that of the weights after k updates on the next 3
        samples."""
        ahead = shard(golden_tokens()[60:] + golden_tokens()[:60])
        job = train(val=ahead, val_every=1, val_batches=1, steps=2, ranks=2)
        self.assertEqual([e["step"] for e in job.of("val")], [0, 1, 2])
        self.assert_close([job.of("val")[1]["loss"]], job.losses()[1:], SAME)
        rare = train(val_every=3, steps=5)
        self.assertEqual(
            [e["step"] for e in rare.of("val")], [0, 3, 5], "every 3 steps, and at the end"
        )

    def test_samples(self):
        """The same text for any number of ranks; at temperature 0 the last token is the likeliest
        of all."""
        texts, end = [bytes([33 + i // 94, 33 + i % 94]) for i in range(VOCAB)], 7
        same = dict(
            tokenizer=tokenizer(texts, end), sample_every=2, steps=3, sample_tokens=50,
            batch_tokens=60,
        )
        cases = [
            dict(same),
            dict(same, ranks=2),
            dict(same, seed=43),
            dict(same, steps=2, lr=0, temperature=0, sample_tokens=T, train=shard(golden_tokens())),
        ]
        found = [
            re.findall(r"--- sample at step (\d+) ---\n(.*)\n---\n", job.out)
            for job in train_all(cases)
        ]
        self.assertEqual(found[0], found[1])
        self.assertNotEqual(found[0], found[2], "the seed does not matter")
        self.assertEqual([step for step, _ in found[0]], ["2", "3"], "every 2 steps and at the end")
        self.assertEqual({len(text) for _, text in found[0]}, {100})
        greedy = [texts.index(found[3][0][1][i : i + 2].encode()) for i in range(0, 2 * T, 2)]
        self.assertNotIn(end, greedy[:-1], "the windows below would be cut")
        candidates = [t for t in range(VOCAB) if t != end]
        documents = shard([token for t in candidates for token in [end] + greedy[:-1] + [t]])
        job = train(
            train=documents, windows="document", tokenizer=same["tokenizer"], lr=0, batch_tokens=T,
            micro_batch=1, steps=len(candidates),
        )
        losses = job.losses()
        self.assertEqual(candidates[losses.index(min(losses))], greedy[-1])

    def test_sample_without_a_step(self):
        """The text of the weights as they are: of a file that a run has exported, its last text,
        since a draw depends on the step only by its number."""
        texts = [bytes([33 + i // 94, 33 + i % 94]) for i in range(VOCAB)]
        export, out = os.path.join(scratch(), "export.bin"), os.path.join(scratch(), "out")
        same = dict(tokenizer=tokenizer(texts, 7), sample_every=2, sample_tokens=20, temperature=0)
        whole = train(steps=3, export=export, out=out, save_every=3, **same)
        cases = [
            dict(same, model=export, steps=0, **more)
            for more in (
                dict(), dict(val_every=1), dict(ranks=2, pipeline="2"), dict(ranks=2, zero=3),
            )
        ]
        cases.append(dict(same, out=out, resume=1, steps=0))
        found = [
            re.findall(r"--- sample at step (\d+) ---\n(.*)\n---\n", job.out)
            for job in [whole, *train_all(cases)]
        ]
        step, text = found[0][-1]
        self.assertEqual((step, len(text)), ("3", 40))
        self.assertEqual(found[1:], [[("0", text)]] * 4 + [[("3", text)]])


# --------------------------------------------------------------------------------------------------
class Divergence(TestCase):
    """One warning of a loss far above ln(vocabulary), after the warm-up, and of one that is no
    number."""

    LIMIT = 2 * (1 + math.log(VOCAB))
    WARNING = (
        r"warning: step (\d+): the loss is (\S+), and guessing alone has ln\(vocabulary\), 4.62:"
        r" .*--lr.*\n"
    )

    @staticmethod
    def louder(factor):
        """The golden model with logits so many times larger: it is confident, and wrong."""
        numbers = weights(MODEL)
        for i in range(len(numbers) - 2 * CHANNELS, len(numbers)):
            numbers[i] *= factor
        return put("model.bin", get(MODEL)[:1024], numbers.tobytes())

    def test_only_far_above(self):
        factors = (1, 40, 80, 120, 160, 200, 240, 1000)
        jobs = train_all(
            [dict(model=self.louder(factor), lr=0, steps=4, warmup=2) for factor in factors]
        )
        told = []
        for factor, job in zip(factors, jobs):
            warnings = [
                (int(step), float(loss)) for step, loss in re.findall(self.WARNING, job.err)
            ]
            high = [k + 1 for k, loss in enumerate(job.losses()) if loss > self.LIMIT and k >= 2]
            self.assertEqual([step for step, _ in warnings], high[:1], factor)
            if high:
                self.assertAlmostEqual(warnings[0][1] / job.losses()[high[0] - 1], 1, delta=1e-5)
            told.append(bool(high))
        self.assertEqual({told[0], told[-1]}, {False, True})

    def test_layouts(self):
        wild = dict(model=self.louder(1000), lr=0, steps=3)
        layouts = [
            dict(ranks=2, zero=3),
            dict(ranks=2, pipeline="2"),
            dict(cyclic="v1", cyclic_stages=2),
            dict(ranks=2, cyclic="v1", batch_tokens=40, micro_batch=1),
            dict(dp_noise=1, dp_key="5" * 64, dp_show_private=1),
        ]
        for layout, job in zip(layouts, train_all([dict(wild, **layout) for layout in layouts])):
            self.assertEqual([step for step, _ in re.findall(self.WARNING, job.err)], ["1"], layout)

    def test_private_losses_are_not_told(self):
        wild = dict(model=self.louder(1000), lr=0, steps=3, dp_noise=1, dp_key="5" * 64)
        for job in train_all([wild, dict(wild, cyclic="v1", cyclic_stages=2)]):
            self.assertNotIn("loss", job.err)

    def test_no_number(self):
        for layout in (dict(), dict(cyclic="v1", cyclic_stages=2)):
            job = train(model=overflowing(), steps=4, warmup=4, **layout, code=EXIT_RESOURCES)
            self.assertEqual([step for step, _ in re.findall(self.WARNING, job.err)], ["1"], layout)


# --------------------------------------------------------------------------------------------------
class Resume(TestCase):
    def test_bit_equal(self):
        cases = [
            dict(
                ranks=2, shuffle=1, micro_batch=1, batch_tokens=4 * T, lr_schedule="cosine",
                final_lr_fraction=0, warmup=2,
            ),
            dict(ranks=2, dtype="bf16", reduce_dtype="bf16", shuffle=1, stochastic_rounding=1),
            dict(optimizer="sgd", lr=0.05, windows="document", shuffle=1),
            dict(ranks=3, recompute="block"),
        ]
        cases = [
            dict(
                case, steps=6, save_every=3, val_every=2, val_batches=2,
                out=os.path.join(scratch(), "out"),
            )
            for case in cases
        ]
        cases = sample(cases, 1)
        for case, whole in zip(cases, train_all(cases)):
            with self.subTest(**case):
                self.check_resumed(case, whole)

    def check_resumed(self, case, whole):
        out, log = case["out"], whole.log_path
        self.assertEqual([e["step"] for e in whole.of("checkpoint")], [3, 6])
        self.assertEqual(
            [e["path"] for e in whole.of("checkpoint")], [checkpoint(out, 3), checkpoint(out, 6)]
        )
        os.rename(checkpoint(out, 6), os.path.join(out, "whole"))
        with open(log, "a") as file:
            file.write('{"event":"st')  # what a kill may leave
        again = Job(**case, resume=1, log=log).wait()
        self.assertEqual(again.code, EXIT_DONE, again.err)
        lines = get(log).decode().splitlines()
        torn = lines.index('{"event":"st')
        before, after = parse_log("\n".join(lines[:torn])), parse_log("\n".join(lines[torn + 1 :]))
        self.assertEqual(before, whole.events, "a resumed run adds to the log")
        pick = lambda events, kind, *names: [
            [e[n] for n in names] for e in events if e["event"] == kind and e["step"] > 3
        ]
        self.assertEqual(
            pick(after, "step", "step", "loss", "grad_norm", "lr"),
            pick(before, "step", "step", "loss", "grad_norm", "lr"),
        )
        self.assertEqual(pick(after, "val", "step", "loss"), pick(before, "val", "step", "loss"))
        self.assertEqual(len(pick(after, "step", "step")), 3)
        for path in glob.glob(os.path.join(out, "whole", "state_*")):
            self.assertEqual(
                get(path),
                get(os.path.join(checkpoint(out, 6), os.path.basename(path))),
                "the states in the end",
            )

    def test_of_something_else(self):
        """In another precision a run goes on (bf16 from fp32 states: as in Golden.test_bf16); with
        another model or optimizer it does not."""
        out = os.path.join(scratch(), "out")
        same = dict(steps=8, out=out)
        whole = train(**same, save_every=4)
        shutil.rmtree(checkpoint(out, 8))
        job = train(**same, dtype="bf16", resume=1)
        self.assert_close(job.losses(), whole.losses()[4:], 2e-3)
        others = [dict(model="layers=1,heads=1,channels=16,vocab=101")]
        others += [dict(optimizer=name) for name in ("sgd", "muon")]
        for changes in others:
            job = train(ranks=2, **dict(same, resume=1, **changes), code=EXIT_INPUT)
            self.assertIn("of another model or optimizer", job.err)

    def test_position_after_another_batch(self):
        """A run that resumes with steps of another size goes on behind the last sample, at each of
        its steps."""
        out = os.path.join(scratch(), "out")
        still = dict(lr=0, weight_decay=0)  # so the loss of a sample does not depend on the step
        alone = train(**still, steps=27, micro_batch=1, batch_tokens=T).losses()
        train(**still, out=out, steps=4, save_every=4)  # 3 samples a step
        losses = train(**still, out=out, steps=7, resume=1, batch_tokens=5 * T).losses()
        means = [sum(alone[k : k + 5]) / 5 for k in (12, 17, 22)]
        self.assert_close(losses, means, SAME)
        epoch = dict(still, out=out, steps=-1, resume=1, batch_tokens=4 * T, save_every=9)
        for made in (4, 0):  # 16 of 28 samples are left; none
            job = train(**epoch)
            self.assertEqual((job.of("start")[0]["steps"], len(job.steps())), (8, made))

    def test_profile(self):
        """Of the steps that the resumed run makes of those that are to be profiled."""
        same = dict(out=os.path.join(scratch(), "out"), save_every=3)
        train(**same, steps=3)
        job = train(**same, steps=6, resume=1, profile_steps="2:5")
        (event,) = job.of("profile")
        self.assertEqual((event["first"], event["steps"]), (4, 2))
        self.assertIn("profile of 2 steps from step 4 on, rank 0: ", job.out)
        parts = [float(action["ms"]) for action in event["actions"]]
        self.assert_close([event["ms"]], [sum(parts) + float(event["waiting_ms"])], 1e-9)

    def test_before_the_first_checkpoint(self):
        """The run starts from the beginning, says so, and adds to the log of the one that was
        lost."""
        out, log = os.path.join(scratch(), "out"), os.path.join(scratch(), "log")
        whole = train(steps=4)
        same = dict(out=out, log=log, save_every=3)
        train(ranks=2, **dict(same, save_every=0), steps=2)
        os.mkdir(os.path.join(out, "step_00000001.tmp"))  # half-written
        job = train(ranks=2, **same, steps=4, resume=1)
        self.assertIn(f"{out} has no checkpoint yet: the run starts from the beginning", job.out)
        self.assertEqual([e["step"] for e in job.of("step")], [1, 2, 1, 2, 3, 4])
        self.assert_close(job.losses()[2:], whole.losses(), SAME)
        self.assertEqual(checkpoints(out), [3, 4])
        again = train(**same, steps=4, resume=1)
        self.assertIn("resumed from", again.out)
        for changes in (dict(steps=0), dict(prompt="a")):  # nothing to train: a typing error
            job = train(out=os.path.join(scratch(), "new"), resume=1, **changes, code=EXIT_INPUT)
            self.assertIn("no valid checkpoint", job.err)

    def test_rate_of_a_longer_run(self):
        """Where the rate has fallen, more steps draw its schedule out: it rises again, which is
        said, with the flags that keep it low."""
        cosine = dict(lr=1e-3, lr_schedule="cosine", warmup=1)
        muon = dict(cosine, optimizer="muon", muon_lr=0.02)
        constant = dict(lr=1e-3, lr_schedule="constant")
        # how a run of 6 steps goes on; what it is given then; does the rate rise?
        cases = [
            (cosine, dict(steps=12), True),
            (dict(lr=1e-3, lr_schedule="wsd-linear", final_lr_fraction=0), dict(steps=8), True),
            (muon, dict(steps=12), True),
            (constant, dict(steps=12), False),
            (constant, dict(steps=12, lr=2e-3), True),
            (cosine, dict(steps=6), False),
            (cosine, dict(steps=7), False),  # drawn out so little that it goes on falling
            (dict(cosine, final_lr_fraction=1), dict(steps=12), False),
            (dict(lr=1e-3, lr_schedule="linear", warmup=40), dict(steps=12), False),
        ]

        def go_on(case):
            before, more, rises = case
            same = dict(before, out=os.path.join(scratch(), "out"), save_every=3)
            whole = train(**same, steps=6)
            shutil.copytree(same["out"], same["out"] + "_low")
            job = train(**dict(same, resume=1, **more))
            said = re.findall(
                r"note: the learning rate goes back up, from (\S+) at step (\d+) to ([^\s:]+?)"
                r"(?:: its schedule now ends at step (\d+))?\. To stay at the rate that was "
                r"reached, give (--lr .*)\n",
                job.out,
            )
            self.assertEqual(len(said), rises, (case, job.out))
            if not rises:
                return
            (first, step, then, ends, flags), last = said[0], whole.of("step")[-1]
            self.assertEqual((first, step), (f"{float(last['lr']):.3g}", "6"))
            self.assertEqual(then, f"{float(job.of('step')[0]['lr']):.3g}")
            self.assertEqual(ends, "" if before is constant else str(more["steps"]))
            words = shlex.split(flags)
            kept = {n[2:].replace("-", "_"): v for n, v in zip(words[::2], words[1::2])}
            self.assertEqual("muon_lr" in kept, before is muon)
            if before is muon:
                low = 0.02 * float(last["lr"]) / 1e-3
                self.assert_close([kept["muon_lr"]], [low], 1e-2)
            low = dict(same, out=same["out"] + "_low", resume=1, **dict(more, **kept))
            rates = [float(e["lr"]) for e in train(**low).of("step")]
            self.assert_close(rates, [last["lr"]] * len(rates), 1e-2)

        at_once(go_on, sample(cases, 3))

    def test_command_with_no_more_steps(self):
        """Its command with --resume 1 --steps 0 --export F, or fewer steps than were made, gives
        the model as it is, in all layouts, and validates it."""
        real = dict(model="layers=3,heads=3,channels=48,vocab=101", warmup=3)
        cases = [
            dict(ranks=2, zero=3, warmup=3, profile_steps="2:3"),
            dict(ranks=2, pipeline=2),
            dict(ranks=2, cyclic="v2", grad_clip=None),
            dict(dp_noise=1),
            dict(real, share="all", delink_at=2),
            dict(real, share="all", delink_at=9),
            dict(offload="optimizer", offload_delay=1),
        ]
        for case in sample(cases, 3):
            folder = scratch()
            same = dict(case, out=os.path.join(folder, "out"), val_every=2, val_batches=2)
            whole = train(**same, steps=4, save_every=2, export=os.path.join(folder, "whole.bin"))
            for steps in sample((0, 1), 1):
                with self.subTest(**case, steps=steps):
                    self.check_no_more_steps(whole, same, steps, folder)

    def check_no_more_steps(self, whole, same, steps, folder):
        export = os.path.join(folder, f"{steps}.bin")
        more = dict(profile_steps="") if steps else {}
        job = train(**dict(same, **more, resume=1, steps=steps, export=export))
        self.assertEqual(get(export), get(os.path.join(folder, "whole.bin")))
        self.assertEqual(checkpoints(same["out"]), [2, 4])
        self.assertEqual(job.steps(), [])
        validated = [[(e["step"], e["loss"]) for e in one.of("val")] for one in (job, whole)]
        self.assertEqual(validated[0], validated[1][-1:])
        self.assertEqual("nothing is trained" in job.out, steps == 1)

    def test_keeps_the_newest_and_moves_earlier_runs(self):
        out = os.path.join(scratch(), "out")
        train(out=out, steps=5, save_every=1, keep=2)
        self.assertEqual(checkpoints(out), [4, 5])
        os.mkdir(checkpoint(out, 9) + ".tmp")  # what a kill leaves
        job = train(out=out, steps=4, save_every=3)
        self.assertEqual(checkpoints(out), [3, 4], "every 3 steps and at the end")
        self.assertEqual(checkpoints(os.path.join(out, "earlier-1")), [4, 5])
        self.assertIn("earlier-1", job.out)
        self.assertFalse(glob.glob(os.path.join(out, "*.tmp")))

    def test_damaged_checkpoints(self):
        out = os.path.join(scratch(), "out")
        whole = train(out=out, steps=7, save_every=1, ranks=2)
        path = lambda step, name: os.path.join(checkpoint(out, step), name)
        size = os.path.getsize(path(7, "state_00001"))
        change(path(7, "state_00001"), random.Random(SEED).randrange(size))
        os.truncate(path(6, "state_00000"), size // 2)
        change(
            path(5, "manifest"), random.Random(SEED).randrange(os.path.getsize(path(5, "manifest")))
        )
        os.remove(path(4, "manifest"))
        os.remove(path(3, "state_00001"))
        shutil.copy(path(1, "state_00000"), path(2, "state_00000"))
        job = train(out=out, steps=7, resume=1, ranks=2)
        self.assertEqual(job.steps(), whole.steps()[1:], "the newest valid one is the first")
        for step in range(2, 8):
            self.assertRegex(
                job.err, rf"warning: .*skips checkpoint {re.escape(checkpoint(out, step))}"
            )
        os.truncate(path(1, "manifest"), 100)
        job = train(out=out, steps=7, resume=1, ranks=2, code=EXIT_INPUT)
        self.assertIn(f"no valid checkpoint in {out}", job.err)
        self.assertEqual(checkpoints(out), [1, 2, 3, 4, 5, 6, 7], "nothing is thrown away")

    def test_other_order(self):
        """What makes windows come twice is told; what does not is not, and nothing is of old
        checkpoints."""
        tokens = harness.golden_tokens()
        folder = scratch()
        for k, part in enumerate((tokens[:300], tokens[300:])):
            shutil.copy(harness.shard(part), os.path.join(folder, f"{k}.bin"))
        both = os.path.join(folder, "*.bin")
        same = dict(batch_tokens=2 * T, micro_batch=2, lr=0)
        in_order = dict(same, train=both, shuffle=0)
        mixed = dict(same, train=both, shuffle=1)
        whole = WINDOWS // 2  # steps of a pass
        cases = [
            (mixed, 3, dict(seed=43), "--seed 43, it had 42"),
            (mixed, 3, dict(shuffle=0), "--shuffle 0, it had 1"),
            (in_order, 3, dict(shuffle=1), "--shuffle 1, it had 0"),
            (mixed, 3, dict(seq_len=T // 2, batch_tokens=T), f"--seq-len {T // 2}, it had {T}"),
            (in_order, 3, dict(windows="document"), "--windows document, it had continuous"),
            (dict(mixed, train=folder + "/0.bin"), 3, dict(train=both), "of 2 shards with 571"),
            (
                dict(mixed, train=folder + "/0.bin"), 3, dict(train=folder + "/1.bin"),
                "of 1 shard with",
            ),
            (dict(in_order, train=folder + "/1.bin"), 3, dict(train=both), "--train of 2 shards"),
            # Nothing comes twice.
            (dict(in_order, train=folder + "/0.bin"), 3, dict(train=both), None),
            (in_order, 3, dict(seed=43), None),
            (mixed, whole, dict(seed=43), None),
            (mixed, whole, dict(shuffle=0), None),
            (mixed, 3, dict(steps=3, seed=43), None),
            (mixed, 3, dict(ranks=2, zero=3, micro_batch=1), None),
        ]

        def check(case):
            flags, steps, changes, words = case
            out = os.path.join(scratch(), "out")
            train(**flags, out=out, steps=steps, save_every=steps)
            job = train(**{**flags, "steps": steps + 1, **changes}, out=out, resume=1)
            if words:
                self.assertIn("with another order of the training data", job.err, case)
                self.assertIn(words, job.err, case)
                self.assertIn(f"sample {2 * steps} of the new order", job.err, case)
            else:
                self.assertNotIn("another order", job.err, case)

        at_once(check, sample(cases, 4))

    def test_renamed_shards_are_the_same(self):
        out, folder = os.path.join(scratch(), "out"), scratch()
        same = dict(out=out, shuffle=1, save_every=2)
        train(**same, steps=2)
        shutil.copy(TOKENS, os.path.join(folder, "other.bin"))
        job = train(**same, steps=3, resume=1, train=folder + "/other.bin")
        self.assertNotIn("another order", job.err)
        words = harness.golden_tokens()
        words[-1] ^= 1  # the order is that of other data
        job = train(**same, steps=4, resume=1, train=harness.shard(words))
        self.assertIn("other ones or in another order", job.err)

    def test_resume_command_is_for_a_shell(self):
        folder = scratch()
        out, odd = os.path.join(folder, "out"), shutil.copy(
            TOKENS, os.path.join(folder, 'it\'s `a` #1 $HOME; "file".bin')
        )
        for flags in (
            dict(train=odd, tokenizer=""),
            dict(val="~ ! # \t {a,b} [x] ? * | < > & ( )", tokenizer=""),
        ):
            os.makedirs(out, exist_ok=True)
            open(
                os.path.join(out, "stop"), "w"
            ).close()  # there already: the run stops after its first step
            changes = dict(flags, out=out, steps=3)
            job = train(ranks=2, **changes)
            command = re.search(r"(?m)^stopped at step 1\. To go on: (mpirun .*)$", job.out)[1]
            given = command_line(dict(changes, log=job.log_path))
            self.assertEqual(
                shlex.split(command), ["mpirun", "-np", "2", BINARY, *given, "--resume", "1"]
            )
        open(os.path.join(out, "stop"), "w").close()
        given = command_line(dict(out=out, tokenizer=""))
        again = Job(2, words=[*given, "--resume", "0", "--resume", "--steps", "3"]).done()
        command = re.search(r"(?m)^stopped at step 2\. To go on: (mpirun .*)$", again.out)[1]
        said = [*given, "--resume", "0", "--resume", "--steps", "3"]
        self.assertEqual(shlex.split(command)[4:], said, "it resumes already")

    def test_stop_of_a_run_that_saves_nothing(self):
        job = Job(2, steps=10**9)
        job.wait_until(job.logged, "a step")
        job.process.send_signal(signal.SIGUSR1)
        self.assertRegex(job.done().out, r"(?m)^stopped at step \d+\. Nothing is saved: ")

    def test_graceful_stops(self):
        """SIGUSR1 to mpirun, SIGTERM to another rank than 0, a file OUT/stop: a checkpoint, exit 0
        and a command that goes on, bit by bit."""
        folder = os.path.join(scratch(), "a folder")
        os.mkdir(folder)
        out, log = os.path.join(folder, "out"), os.path.join(folder, "log")
        same = dict(ranks=2, shuffle=1, seed=5)
        shutil.copy(TOKENS, folder)
        job = Job(**same, steps=10**9, out=out, train=os.path.join(folder, "*.bin"), log=log)
        stops = [
            lambda: job.process.send_signal(signal.SIGUSR1),
            lambda: os.kill(job.pids()[-1], signal.SIGTERM),
            lambda: open(os.path.join(out, "stop"), "w").close(),
        ]
        for stop in stops:
            seen = job.logged()
            job.wait_until(lambda: job.logged() > seen + 5, "a step")
            if seen == 0:
                second = train(**same, out=out, code=EXIT_INPUT)
                self.assertIn("another run is using", second.err)
            stop()
            job.done()
            last = job.of("step")[-1]["step"]
            self.assertEqual(checkpoints(out)[-1], last, "a checkpoint of the last step")
            self.assertEqual(
                job.events[-2], {"event": "checkpoint", "step": last, "path": checkpoint(out, last)}
            )
            command = re.search(rf"(?m)^stopped at step {last}\. To go on: (mpirun .*)$", job.out)
            self.assertTrue(command, job.out[-500:])
            if stop is not stops[-1]:
                job = Job(shell="exec " + command[1], log=log)
        self.assertFalse(os.path.exists(os.path.join(out, "stop")))
        self.assertEqual(
            [step for step, in job.steps("step")], list(range(1, last + 1)), "each step once"
        )
        self.assertEqual(
            job.steps("loss", "grad_norm"), train(**same, steps=last).steps("loss", "grad_norm")
        )


# --------------------------------------------------------------------------------------------------
class Kills(TestCase):
    EVERY = 2  # steps between checkpoints
    RUNS = [
        dict(ranks=2, shuffle=1, micro_batch=1),
        dict(ranks=3, zero=3, shuffle=1, micro_batch=1),
        dict(ranks=3, pipeline="3:2,2:1", zero=2, shuffle=1, micro_batch=2, batch_tokens=5 * T),
        # the noise of a step is the same again
        dict(ranks=2, zero=1, micro_batch=1, dp_noise=1, dp_key="ab" * 32, dp_show_private=1)
        | dict(grad_clip=0, dp_accountant="rdp", shuffle=None),
    ]
    KILLS = 300 if ALL else 4  # of a run

    def test_chains(self):
        """Of plain runs, and of others."""
        runs = [self.RUNS[0], *sample(self.RUNS[1:], 1)]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(self.chain, self.RUNS if ALL else runs, range(SEED, SEED + 4)))

    def chain(self, run, seed):
        """Run, kill at a random moment, resume; the final part runs to a step that nobody knew
        before."""
        draw, folder, kills = random.Random(seed), scratch(), self.KILLS
        out, log = os.path.join(folder, "out"), os.path.join(folder, "log")
        same = dict(run, seed=seed)
        for _ in range(kills):
            job = Job(
                **same, steps=10**9, out=out, log=log, save_every=self.EVERY, keep=3,
                resume=int(bool(checkpoints(out))),
            )
            job.wait_until(lambda: len(job.pids()) == run["ranks"], "all ranks")
            starting = draw.random() > 0.7
            if not starting:
                seen = job.logged()
                job.wait_until(lambda: job.logged() > seen, "a step")
            time.sleep(draw.uniform(0, 0.4))
            pids, one, stop = job.pids(), draw.random() < 0.3, draw.random() < 0.3
            victims = [draw.choice(pids)] if one else pids
            self.assertNotEqual(
                job.die(
                    victims, signal.SIGSTOP if one and stop and not starting else signal.SIGKILL
                ),
                EXIT_DONE,
            )
            found, text = (checkpoints(out) or [0])[-1], (
                get(log).decode() if os.path.exists(log) else ""
            )
            for event, lost in (("checkpoint", 0), ("step", self.EVERY)):
                reached = max(
                    map(int, re.findall(rf'"event":"{event}","step":(\d+)', text)), default=0
                )
                self.assertGreaterEqual(found, reached - lost, f"{event} {reached} is lost")
        last = (checkpoints(out) or [0])[-1] + 5
        job = Job(
            **same, steps=last, out=out, log=log, save_every=self.EVERY, keep=3,
            resume=int(bool(checkpoints(out))),
        ).wait()
        self.assertEqual(job.code, EXIT_DONE, job.err)
        self.assertEqual(len(checkpoints(out)), 3)
        self.check_log(get(log).decode(), train(**same, steps=last))

    def check_log(self, text, whole):
        expected = {e["step"]: (e["loss"], e["grad_norm"]) for e in whole.of("step")}
        reached = saved = 0
        lines = text.splitlines()
        for i, line in enumerate(lines):
            try:
                event = parse_log(line)[0]
            except ValueError:
                self.assertTrue(
                    lines[i + 1].startswith('{"event":"start"'), "only a kill tears a line"
                )
                continue
            if event["event"] == "start":
                first = True
            if event["event"] == "checkpoint":
                saved = event["step"]
            if event["event"] != "step":
                continue
            if first:
                self.assertGreater(event["step"], saved, "a checkpoint that was there is lost")
                self.assertGreaterEqual(
                    event["step"],
                    reached - self.EVERY,
                    "more is lost than since the last checkpoint",
                )
                first = False
            else:
                self.assertEqual(event["step"], reached + 1)
            reached = event["step"]
            self.assertEqual(
                (event["loss"], event["grad_norm"]), expected[reached], f"step {reached}"
            )
        self.assertEqual(event["event"], "end")
        self.assertEqual(reached, len(expected))


# --------------------------------------------------------------------------------------------------
KINDS = {"parameters", "gradients", "optimizer", "activations", "buffers", "device", "host"}
COLLECTIVES = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"}


class Log(TestCase):
    def check_memory(self, memory):
        self.assertEqual(set(memory), KINDS)
        self.assertEqual({type(bytes_) for bytes_ in memory.values()}, {int})
        self.assertEqual(memory["device"], sum(memory[k] for k in KINDS - {"device", "host"}))

    def check_traffic(self, traffic):
        self.assertEqual(set(traffic), {"intra", "inter", "total"})
        for link in ("intra", "inter"):
            self.assertEqual(set(traffic[link]), COLLECTIVES)
            self.assertEqual({type(bytes_) for bytes_ in traffic[link].values()}, {int})
            self.assertEqual(traffic["total"][link], sum(traffic[link].values()))

    def test_untimed(self):
        """Without measurements the same numbers; both runs say which peak they speak of."""
        for ranks in (1, 2):
            timed, untimed = train_all(
                [dict(ranks=ranks, environment={"TRAIN_GPT_UNTIMED": n}) for n in "01"]
            )
            self.assertEqual(untimed.steps("loss", "grad_norm"), timed.steps("loss", "grad_norm"))
            for job, word in ((timed, "measured"), (untimed, "assumed")):
                peak = float(job.events[0]["peak_flops"])
                self.assertEqual(peak == 1e11, word == "assumed")
                said = f" {peak / 1e9:.1f} GFLOP/s {word} peak a rank"
                self.assertIn(said, " ".join(job.out.split()))

    def test_events_and_keys(self):
        job = train(
            ranks=2,
            steps=2,
            val_every=2,
            save_every=2,
            out=os.path.join(scratch(), 'out "quoted\\ \n'),
        )
        self.assertEqual(
            [e["event"] for e in job.events],
            ["start", "val", "step", "step", "val", "checkpoint", "end"],
        )
        start, val, step, _, _, saved, end = job.events
        for event, keys in (
            (start, "parameters ranks compute flags predicted"),
            (step, "step loss grad_norm lr ms tokens_per_s mfu"),
            (val, "step loss bits_per_byte label_accuracy"),
            (saved, "step path"),
            (end, "memory traffic step_ms energy_j"),
        ):
            self.assertLessEqual(set(keys.split()), set(event))
        self.assertEqual((start["parameters"], start["ranks"]), (PARAMETERS, 2))
        self.assertTrue(os.path.isdir(saved["path"]))
        self.assertEqual(set(end["step_ms"]), {"predicted", "measured"})
        self.assertEqual(
            (start["predicted"]["memory"], start["predicted"]["traffic"]),
            (end["memory"]["predicted"], end["traffic"]["predicted"]),
        )
        for side in ("predicted", "measured"):
            self.check_memory(end["memory"][side])
            self.check_traffic(end["traffic"][side])
        self.assertEqual(start["flags"]["model"], MODEL)
        self.assertEqual(
            (start["flags"]["seq-len"], start["flags"]["dtype"], float(start["flags"]["lr"])),
            (T, "fp32", 1e-3),
        )
        documented = re.findall(r"(?m)^  --([a-z0-9-]+)", Job(words=["--help", "all"]).done().out)
        self.assertEqual(set(start["flags"]), set(documented))
        for e in job.of("step"):
            self.assertAlmostEqual(
                float(e["tokens_per_s"]) * float(e["ms"]) / 60000, 1, delta=1e-9
            )  # of doubles

    def test_time_of_a_step(self):
        """The mean of the steps that this run made, without the first, which fills caches."""
        out = os.path.join(scratch(), "out")
        same = dict(out=out, save_every=2, batch_tokens=2 * T)
        layouts = (dict(), dict(ranks=2, cyclic="v1", micro_batch=1), dict(resume=1, steps=7))
        for steps, changes in zip((1, 5, None), layouts):
            job = train(**{**same, "steps": steps, **changes})
            taken = [float(ms) for ms, in job.steps("ms")]
            counted = taken[1:] or taken
            mean = float(job.end()["step_ms"]["measured"])
            self.assertAlmostEqual(mean * len(counted) / sum(counted), 1, delta=1e-9)

    def peak(self, job):
        """The most that rank 0 had, until it ends."""
        job.wait_until(job.pids, "a rank")
        peak, path = 0, f"/proc/{job.pids()[0]}/status"
        while job.process.poll() is None:
            try:
                peak = max(peak, 1024 * int(re.search(rb"VmHWM:\s+(\d+)", get(path))[1]))
            except (OSError, TypeError):
                pass  # it ended meanwhile
            time.sleep(0.01)
        return peak

    def test_memory_of_the_process(self):
        """At a size that matters, the whole process needs what was predicted, by the program's and
        by our own reading."""
        tokens, model = (
            shard([i * 7 % 512 for i in range(20000)]),
            "layers=4,heads=4,channels=256,vocab=512",
        )
        cases = (
            dict(), dict(ranks=2), dict(dtype="bf16", recompute="block"),
            dict(optimizer="sgd", lr=0.01),
        )
        for changes in sample(cases, 1):
            job = Job(
                **dict(
                    dict(
                        model=model, train=tokens, seq_len=128, batch_tokens=1024, micro_batch=4,
                        steps=2,
                    ),
                    **changes,
                ),
                environment=harness.AS_USER,
            )
            peak = self.peak(job)
            memory = job.done().end()["memory"]
            predicted, measured = (
                memory[side]["device"] + memory[side]["host"] for side in ("predicted", "measured")
            )
            self.assertLess(abs(measured / predicted - 1), 0.05, (changes, memory))
            self.assertLess(abs(measured / peak - 1), 0.05, (changes, memory, peak))
            parameters = 512 * 256 + 128 * 256 + 4 * (12 * 256**2 + 13 * 256) + 2 * 256
            self.assertEqual(memory["measured"]["gradients"], 4 * parameters)

    def test_dry_run(self):
        """One JSON object and nothing else on stdout; nothing of the model is allocated: address
        space is limited to 64 GiB."""
        limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
        small = "layers=12,heads=2,channels=64,vocab=50257"  # is measured, too: it fits
        for model, layers, C, positions, ranks in (
            ("gpt3:175B", 96, 12288, 2048, 1),
            ("gpt:100B", 80, 10240, 2048, 2),
            (small, 12, 64, 1024, 4),
        ):
            job = Job(
                ranks,
                words=["--dry-run", "--json", "--model", model, "--seq-len", "1024"],
                limit=limit,
            ).done(EXIT_DONE if model == small else EXIT_RESOURCES)
            found = json.loads(job.out)
            self.assertEqual(found["predicted"]["fits"], model == small)
            parameters = (50304 + positions) * C + layers * (12 * C * C + 13 * C) + 2 * C
            self.assertEqual(
                (found["parameters"], found["ranks"], found["predicted"]["memory"]["gradients"]),
                (parameters, ranks, 4 * parameters),
            )
            self.check_memory(found["predicted"]["memory"])
            self.check_traffic(found["predicted"]["traffic"])
            self.assertGreater(found["predicted"]["step_ms"], 0)

    def test_dry_run_says_what_the_run_needs(self):
        words = command_line(dict(ranks_per_node=1, dtype="bf16", recompute="block"))
        dry = json.loads(Job(2, words=[*words, "--dry-run", "--json"]).done().out)["predicted"]
        real = train(2, ranks_per_node=1, dtype="bf16", recompute="block").of("start")[0][
            "predicted"
        ]
        self.assertEqual(dry["traffic"], real["traffic"])
        self.assertEqual(
            {k: dry["memory"][k] for k in KINDS - {"host"}},
            {k: real["memory"][k] for k in KINDS - {"host"}},
        )

    def test_what_is_only_printed(self):
        for words, found in (
            (["--help", "all"], "--grad-clip"),
            (["--help", "optimizer"], "examples"),
            (["--version"], "compiler"),
            (["-h"], "Exit codes: 0 done, 2 bad input"),
            (["--compat"], "--resume"),
            (command_line({}) + ["--dry-run"], "gradients"),
            (command_line({}) + ["--show-schedule"], "FORWARD"),
        ):
            job = Job(random.Random(SEED).choice((1, 2)), words=words).done()
            self.assertIn(found.lower(), job.out.lower())
            self.assertNotIn("step     1", job.out, "it trains")

    def test_lines_in_a_pipe_and_a_bar_on_a_terminal(self):
        job = train(steps=2, ranks=2, val_every=2)
        self.assertNotIn("\r", job.out)
        self.assertNotIn("\x1b", job.out)
        losses = re.findall(r"(?m)^step +(\d+)/2 \| loss ([0-9.]+)", job.out)
        self.assertEqual(
            losses, [(str(k + 1), f"{loss:.6f}") for k, loss in enumerate(job.losses())]
        )
        _, text = harness.train_on_terminal(steps=2)
        self.assertRegex(text, rb"\r\[#+\.*\] 2/2 ")


# --------------------------------------------------------------------------------------------------
def tokenizer_file(texts, eot):
    return header(20240328, 2, len(texts), eot) + b"".join(bytes([len(t)]) + t for t in texts)


def tokenizer_words(file):
    """Words 3 to 8 of a shard that says which tokenizer made it: docs/formats.md."""
    value = 14695981039346656037
    for byte in file[8:16] + file[1024:]:
        value = ((value ^ byte) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
    return (
        0,
        0,
        20240328,
        struct.unpack("<i", file[8:12])[0],
        *struct.unpack("<ii", value.to_bytes(8, "little")),
    )


class Tokenizers(TestCase):
    A, B = (
        tokenizer_file([bytes([33 + i % 90]) * (1 + i % n) for i in range(200)], 0) for n in (3, 4)
    )
    BYTES = tokenizer_file([bytes([i]) for i in range(256)], 0)
    GPT2 = tokenizer_file([b"%d" % i for i in range(50257)], 50256)

    @classmethod
    def setUpClass(cls):
        """Shards NAME_train_0.bin and NAME_val_0.bin: `told` say their tokenizer, others have its
        file beside them, or nothing."""
        cls.folder = scratch()
        draw = random.Random(1)
        some = lambda n, largest: [draw.randrange(largest) for _ in range(n)] + [largest]
        for name, told, beside, tokens in (
            ("a", cls.A, None, some(600, 199)),
            ("a2", cls.A, cls.A, some(600, 199)),
            ("a3", cls.A, cls.B, some(600, 199)),
            ("b", cls.B, None, some(600, 199)),
            ("old_a", None, cls.A, some(600, 199)),
            ("old_b", None, cls.B, some(600, 199)),
            ("nothing", None, None, some(600, 150)),
            ("large", None, None, some(600, 250)),
            ("false", cls.A, None, some(600, 250)),
            ("wrong", None, cls.A, some(600, 250)),
            ("bytes", cls.BYTES, None, some(1500, 126)),
            ("old_bytes", None, cls.BYTES, some(1500, 126)),
            ("bare_bytes", None, None, some(1500, 126)),
            ("few_bytes", None, None, some(500, 126)),
            ("llmc", None, None, some(1500, 50256)),
            ("gpt2", cls.GPT2, cls.GPT2, some(1500, 50256)),
        ):
            for part in ("train", "val"):
                cls.put(
                    f"{name}_{part}_0.bin",
                    header(20240520, 1, len(tokens), *(tokenizer_words(told) if told else ()))
                    + struct.pack(f"<{len(tokens)}H", *tokens),
                )
            if beside:
                cls.put(f"{name}_tokenizer.bin", beside)
        cls.put("B.bin", cls.B)
        cls.put("A.bin", cls.A)
        words = [65535, 2 * 16, 0, 1, 4, 2, 1, 210] + [1, 7] * 4
        cls.put("choices.bin", header(20240522, 1, 1, 32) + struct.pack("<16H", *words))

    @classmethod
    def put(cls, name, data):
        with open(os.path.join(cls.folder, name), "wb") as file:
            file.write(data)

    def case(self, train, val="", vocab=300, **changes):
        """A run on shards of these names; several in a list are one data set."""
        path = lambda name, part: os.path.join(
            self.folder, f"{{{name}}}_{part}_0.bin" if "," in name else f"{name}_{part}_0.bin"
        )
        val = dict(val=path(val, "val"), val_every=1) if val else dict(val_every=0)
        files = {
            name: os.path.join(self.folder, changes.pop(name))
            for name in ("tokenizer", "hellaswag")
            if name in changes
        }
        return (
            dict(
                model=f"layers=1,heads=1,channels=16,vocab={vocab}",
                train=path(train, "train"),
                val_batches=1,
                steps=1,
            )
            | files
            | val
            | changes
        )

    def test_what_does_not_belong_together(self):
        two = "expected the tokenizer that"
        cases = [
            (self.case("a", "b"), two, "b_val_0.bin", "a_train_0.bin"),
            (self.case("a,b"), "expected tokens of one tokenizer", "b_train_0.bin"),
            (self.case("old_a,b"), "expected tokens of one tokenizer"),
            (self.case("old_a,old_b"), "expected tokens of one tokenizer"),
            (self.case("a", tokenizer="B.bin"), two, "B.bin", "a_train_0.bin"),
            (self.case("old_a", tokenizer="B.bin"), two, "B.bin", "old_a_train_0.bin"),
            (self.case("a3"), two, "a3_tokenizer.bin"),
            (self.case("a", "old_b"), two, "old_b_tokenizer.bin", "a_train_0.bin"),
            (self.case("old_a", "old_b"), two, "old_b_val_0.bin"),
            (self.case("nothing", "b", tokenizer="A.bin", steps=0), two, "A.bin"),
            (self.case("a", "large"), "expected tokens below 200", "large_val_0.bin"),
            (self.case("wrong"), "expected tokens below 200", "wrong_train_0.bin"),
            (self.case("false"), "expected tokens below 200", "false_train_0.bin"),
            (self.case("nothing", "false"), "expected tokens below 200", "false_val_0.bin"),
            (
                self.case("a", "a", hellaswag="choices.bin"),
                "expected tokens below 200",
                "choices.bin",
            ),
            *(
                (self.case(name, vocab=v), "256 tokens, and a vocabulary of", name)
                for name in ("bytes", "old_bytes")
                for v in (1025, 50257)
            ),
            (self.case("bare_bytes", vocab=50257), "these are bytes", "bare_bytes"),
            (self.case("gpt2", "bare_bytes", vocab=50257), "these are bytes", "--val"),
            (self.case("a", vocab=1025), "200 tokens, and a vocabulary of 1025"),
            (self.case("gpt2", vocab=100515), "50257 tokens, and a vocabulary of 100515"),
        ]
        jobs = train_all(
            [dict(case, ranks=1 + i % 3, code=EXIT_INPUT) for i, (case, *_) in enumerate(cases)]
        )
        for (case, *words), job in zip(cases, jobs):
            for word in words:
                self.assertIn(word, job.err, case)
            self.assertEqual(job.err.count("train_gpt: rank"), 1, job.err)

    def test_what_belongs_together(self):
        cases = [
            self.case("a", "a"),
            self.case("a", "old_a"),
            self.case("old_a", "a2"),
            self.case("a,old_a,nothing", "a,nothing"),
            self.case("nothing", "a"),
            self.case("a", tokenizer="A.bin"),
            self.case("a", "nothing", vocab=1024),
            self.case("nothing", "large"),
            self.case("bytes", "bytes", vocab=1024),
            self.case("bare_bytes", vocab=256),
            self.case("few_bytes", "few_bytes", vocab=50257),
            self.case("llmc", "llmc", vocab=50257),
            self.case("gpt2", "gpt2", vocab=50304),
            self.case("gpt2", "llmc", vocab=65536),
            self.case("llmc", "gpt2", vocab=100514),
            self.case("a", "b", val_every=0),
            self.case("nothing", "large", hellaswag="choices.bin"),
        ]
        # Bits per byte are known where a tokenizer file lies beside shards of either kind.
        known = {1, 2, 12, 13, 14}
        some = sample(enumerate(cases), 8)
        for (i, case), job in zip(some, train_all([dict(c, ranks=1 + i % 2) for i, c in some])):
            for event in job.of("val"):
                self.assertEqual(event["bits_per_byte"] is not None, i in known, case)

    def test_path_with_the_word_in_a_folder(self):
        """The file beside the shards is found by their own names, wherever they lie."""
        folder = os.path.join(scratch(), "my_train_and_val")
        shutil.copytree(self.folder, folder)
        case = self.case("old_a", "old_a")
        case |= {name: case[name].replace(self.folder, folder) for name in ("train", "val")}
        self.assertIsNotNone(train(**case).of("val")[0]["bits_per_byte"])


class Validation(TestCase):
    SAID = "no validation"

    def setUp(self):
        """The default corpus, where the program looks for it."""
        self.default = os.path.join(TEMPORARY, "data")
        os.makedirs(self.default)
        self.addCleanup(shutil.rmtree, self.default)
        for part in ("train", "val"):
            shutil.copy(TOKENS, os.path.join(self.default, f"text_gpt2_{part}_000000.bin"))

    def test_on_training_data(self):
        """It is seen by whatever path, also as one of several shards."""
        folder = scratch()
        link, copy, hard = (os.path.join(folder, name) for name in ("link", "copy", "hard"))
        os.symlink(TOKENS, link)
        shutil.copy(TOKENS, copy)
        shutil.copy(TOKENS, os.path.join(folder, "other"))
        os.link(copy, hard)
        note = "note: --val has a file of --train"
        for train_, val, same in (
            (TOKENS, link, True),
            (os.path.join(folder, ".", "copy"), hard, True),
            (os.path.join(folder, "*"), hard, True),
            (TOKENS, copy, False),
        ):
            job = train(train=train_, val=val, steps=1, val_every=1, val_batches=1)
            self.assertEqual(note in job.out, same, (train_, val))

    def test_not_beside_other_training_data(self):
        cases = [
            dict(), dict(val_every=5), dict(val_every=1, ranks=2), dict(steps=0),
            dict(steps=0, val_every=1), dict(cyclic="v1", ranks=2, val_every=3),
        ]
        for case, job in zip(
            cases, train_all([dict(dict(val=None, val_every=None), **case) for case in cases])
        ):
            self.assertEqual(job.of("val"), [], case)
            self.assertEqual(job.out.count(self.SAID), 1, case)
            (start,) = job.of("start")
            self.assertEqual((start["flags"]["val"], start["flags"]["val-every"]), ("", 0))
            self.assertEqual(len(job.of("step")), case.get("steps", 10))

    def test_where_it_was_asked_for(self):
        """With --val, or with neither flag; where --val-every is 0 there is nothing to say."""
        cases = [
            (dict(val_every=5), [0, 5, 10]),
            (dict(train=None, val=None, val_every=5), [0, 5, 10]),
            (dict(train=None, val_every=5), [0, 5, 10]),
            (dict(train=None, steps=0, val_every=1), [0]),
            (dict(val=None), []),
            (dict(train=None, val=None, val_every=5, steps=0), [0]),
        ]
        for (case, steps), job in zip(cases, train_all([case for case, _ in cases])):
            self.assertEqual([e["step"] for e in job.of("val")], steps, case)
            self.assertNotIn(self.SAID, job.out)
            alone = case.get("train", "") is None and "val" not in case and "steps" not in case
            self.assertEqual(
                job.out.count("training on the default, data/text_gpt2_train_*.bin"),
                int(alone),
                case,
            )

    def test_what_to_do(self):
        """Which shards would do, or what writes them."""
        folder = os.path.join(scratch(), "train")  # the last "train" of the name counts
        os.mkdir(folder)
        for name in ("a_train_0.bin", "a_val_0.bin", "b_train_0.bin", "c.bin"):
            shutil.copy(TOKENS, os.path.join(folder, name))
        val = os.path.join(folder, "%s_val_*.bin")
        for name, said in (
            ("a_train_*.bin", f"--val '{val % 'a'}' would use the shards beside these"),
            ("b_train_*.bin", f"scripts/prepare_data.py writes {val % 'b'}, which is not there"),
            ("c.bin", "scripts/prepare_data.py writes"),
        ):
            job = train(train=os.path.join(folder, name), val=None, val_every=None, steps=1)
            self.assertIn(said, " ".join(job.out.split()))
            self.assertIn("--val-every 0 asks for none", " ".join(job.out.split()))

    def test_of_a_resumed_run(self):
        out = scratch()
        same = dict(out=out, val=None, val_every=2, save_every=2)
        self.assertEqual(train(**same, steps=4).of("val"), [])
        job = train(**same, steps=6, resume=1)
        self.assertEqual((job.of("val"), job.out.count(self.SAID), len(job.of("step"))), ([], 1, 2))
        self.assertEqual(
            [e["step"] for e in train(**dict(same, val=TOKENS), steps=8, resume=1).of("val")], [8]
        )

    def test_choices_are_scored_all_the_same(self):
        words = [65535, 32, 0, 1, 4, 2, 1, 90] + [1, 7] * 4
        choices = put("choices.bin", header(20240522, 1, 1, 32), struct.pack("<16H", *words))
        job = train(val=None, val_every=5, hellaswag=choices, ranks=2)
        self.assertEqual(
            ([e["step"] for e in job.of("hellaswag")], job.of("val")), ([0, 5, 10], [])
        )
        self.assertEqual(job.out.count("no validation but --hellaswag"), 1)

    def test_empty_is_no_name(self):
        self.assertIn("--val : expected shards", train(val="", val_every=1, code=EXIT_INPUT).err)


# --------------------------------------------------------------------------------------------------
def changed_model(at, word):
    path = put("model.bin", get(MODEL))
    change(path, 4 * at, word)
    return path


class Failures(TestCase):
    # What is wrong -> the changes of TRAIN (or words added), and what the message must name.
    FLAGS = [
        ("unknown flag", ["--bogus", "1"], "--bogus"),
        ("misspelled", ["--keeep", "1"], "nearest is --keep"),
        ("no flag", ["stray"], "stray"),
        ("no value", ["--beta1"], "--beta1 needs a value"),
        (
            "a bad number that does not count",
            ["--steps", "ten", "--steps=3"],
            "--steps takes a whole number",
        ),
        ("bad number", dict(steps="ten"), "--steps"),
        ("trailing letters", dict(lr="1e-3x"), "--lr"),
        ("fraction", dict(micro_batch=1.5), "--micro-batch"),
        ("not a number", dict(lr="nan"), "--lr"),
        ("overflow", dict(lr="1e999"), "--lr"),
        ("too small", dict(seq_len=0), "--seq-len"),
        ("too large", dict(beta2=1), "--beta2"),
        ("nothing to round", dict(stochastic_rounding=1), "--stochastic-rounding"),
        ("no such stage", dict(zero=4), "--zero must be from 0 to 3"),
        (
            "no such block",
            dict(zero=3, zero_quantized_weights=1, zero_quant_block=48),
            "--zero-quant-block",
        ),
        (
            "a partition of more ranks than there are",
            dict(zero=3, zero_hpz_partition_size=3),
            "--zero-hpz-partition-size 3 is more than the",
        ),
        ("no such choice", dict(dtype="fp16"), "--dtype takes one of fp32|bf16"),
        ("no such model", dict(model="gpt5"), "gpt5"),
        ("impossible model", dict(model="layers=2,heads=5,channels=48,vocab=101"), "heads=5"),
        ("unknown part of a model", dict(model="layer=2"), "layer=2"),
        ("no such shards", dict(train="nothing_*.bin"), "nothing_*.bin"),
        (
            "no such validation shards",
            dict(val="nothing_*.bin", val_every=1),
            "--val nothing_*.bin",
        ),
        ("an epoch of no step", dict(steps=-1, batch_tokens=29 * T), "--steps -1 is one epoch"),
        (
            "validation of no batch",
            dict(val_every=1, val_batches=0),
            "--val-batches 0: a validation of nothing has no loss",
        ),
        ("longer than the model's positions", dict(seq_len=25, batch_tokens=75), "--seq-len 25"),
        ("half a sample", dict(batch_tokens=50), "--batch-tokens 50"),
        ("log in no folder", dict(log="/nowhere/log"), "/nowhere/log"),
        ("nothing to resume", dict(resume=1, out="empty", steps=0), "no valid checkpoint in empty"),
        # Each pair of --compat is in test_options.c.
        ("flags that do not go together", dict(cyclic="v1", zero=1), "--cyclic with --zero"),
    ]

    def files(self):
        yield "wrong magic", dict(model=TOKENS), TOKENS
        yield "no model", dict(model=put("model.bin", b"no")), "model.bin"
        yield "a folder as model", dict(model=ROOT), ROOT
        yield "torn model", dict(model=put("model.bin", get(MODEL)[:-1])), "model.bin"
        for at, word in (
            (1, 4), (2, 0), (3, -5), (3, 129), (4, 1 << 30), (4, 0), (5, 0), (5, 5), (6, -48),
            (6, 1 << 30), (7, 0), (7, 1 << 30),
        ):
            yield (
                f"word {at} of the model is {word}",
                dict(model=changed_model(at, word)),
                "model.bin",
            )
        yield (
            "a token above the vocabulary",
            dict(train=shard(golden_tokens() + [101])),
            "tokens.bin",
        )
        yield (
            "validation of no whole window",
            dict(val=shard(golden_tokens()[:T]), val_every=1, val_batches=-1),
            f"one window of {T} tokens and one more for --val-batches -1, found {T} tokens",
        )
        yield "torn shard", dict(train=put("tokens.bin", get(TOKENS)[:-1])), "tokens.bin"
        yield "a model as shard", dict(train=MODEL), MODEL
        yield "a shard as tokenizer", dict(tokenizer=TOKENS), TOKENS
        yield (
            "torn tokenizer",
            dict(tokenizer=put("tokenizer.bin", header(20240328, 2, 101, 0), b"\5hi")),
            "tokenizer.bin",
        )

    def check(self, cases):
        """cases: (name, words, what the message names). Each with 1 and 2 ranks, or one of them by
        chance."""
        draw = random.Random(SEED)
        everything = [
            (*case, ranks)
            for case in cases
            for ranks in ((1, 2) if ALL else (draw.choice((1, 2)),))
        ]
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            jobs = list(pool.map(lambda case: Job(case[3], words=case[1]).wait(), everything))
        for (name, _, found, ranks), job in zip(everything, jobs):
            with self.subTest(name, ranks=ranks):
                self.assertEqual(job.code, EXIT_INPUT, job.err)
                self.assertEqual(job.err.count("train_gpt: rank"), 1, job.err)
                self.assertIn(found, job.err.replace("/./", "/"))
                self.assertRegex(
                    job.err, r"train_gpt: rank 0 on \S+, \w+\.[hc]:\d+: .", "rank, host and place"
                )
                self.assertNotIn("step     1", job.out)

    def test_flags(self):
        self.check(
            [
                (
                    name,
                    command_line(change) if isinstance(change, dict) else command_line({}) + change,
                    found,
                )
                for name, change, found in self.FLAGS
            ]
        )

    def test_files(self):
        cases = list(self.files())
        if not ALL:
            cases = random.Random(SEED).sample(cases, 10)
        self.check([(name, command_line(changes), found) for name, changes, found in cases])

    def test_mistakes_cost_nothing(self):
        """A mistake is found before anything is written, and before an earlier run's checkpoints
        are moved."""
        out = os.path.join(scratch(), "out")
        train(out=out, steps=1, save_every=1)
        before = sorted(os.listdir(out))
        for changes in (dict(model=TOKENS), dict(train="nothing"), dict(batch_tokens=50)):
            train(ranks=2, out=out, save_every=1, **changes, code=EXIT_INPUT)
        self.assertEqual(sorted(os.listdir(out)), before)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_disk_full_for_the_log(self):
        job = Job(2, words=command_line(dict(log="/dev/full"))).done(EXIT_RESOURCES)
        self.assertEqual(job.err.count("cannot write the log"), 1, "warned once")
        self.assertIn("step    10/10", job.out)

    def test_disk_full_for_checkpoints(self):
        disk = scratch()
        if (
            os.geteuid()
            or subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=1400k", "none", disk], capture_output=True
            ).returncode
        ):
            self.skipTest("cannot mount a small disk")
        try:
            out = os.path.join(disk, "out")  # one checkpoint of 1.1 MB fits, the next does not
            job = train(2, out=out, steps=6, save_every=2, code=EXIT_RESOURCES)
            self.assertEqual(
                len(re.findall("warning: checkpoint .* not saved: No space left", job.err)), 2
            )
            self.assertEqual(checkpoints(out), [2])
            self.assertEqual(len(job.steps()), 6, "training goes on")
            self.assertFalse(glob.glob(os.path.join(out, "*.tmp")), "halves are removed")
            again = train(2, out=out, steps=3, resume=1)
            self.assertEqual(again.steps(), job.steps()[2:3], "what was saved is whole")
            self.assertIn(
                "cannot write",
                train(export=os.path.join(disk, "model.bin"), steps=1, code=EXIT_RESOURCES).err,
            )
            self.assertFalse(glob.glob(os.path.join(disk, "model*")))
        finally:
            subprocess.run(["umount", "-l", disk], check=True)

    def test_watchdog(self):
        """A collective or a message that waits in vain ends the job with the code for a lost peer
        and says what it waited for."""
        if not os.path.exists("build/test_comm"):
            self.skipTest("build/test_comm is not built")
        for how, what in (
            ("stuck", "all_gather of block 3"),
            ("message", "activations of unit 3 from rank 1"),
            ("full", "activations of unit 3 from rank 1"),
        ):
            command = ["mpirun", "--oversubscribe", "-np", "2", "build/test_comm", how]
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL,
                env=harness.ENVIRONMENT,
            )
            self.assertEqual(run.returncode, EXIT_PEER, run.stderr)
            self.assertIn(f"in {what}, step 18", run.stderr)

    def test_export_where_no_file_can_be(self):
        """Found before anything is trained; and what is no file stays what it is."""
        folder = os.path.join(scratch(), "model.bin")
        pipe = os.path.join(scratch(), "pipe")
        os.mkdir(folder)
        os.mkfifo(pipe)
        for path in ("/nowhere/model.bin", "/nowhere/folder", folder, pipe):
            self.assertIn(path, train(2, steps=1, export=path, code=EXIT_INPUT).err)
        self.assertTrue(stat.S_ISFIFO(os.stat(pipe).st_mode))

    def test_out_where_no_folder_can_be(self):
        self.assertIn(
            "cannot make",
            train(2, steps=1, out=os.path.join(put("file", b""), "out"), code=EXIT_INPUT).err,
        )
        self.assertIn("cannot make", train(2, steps=1, out=put("file", b""), code=EXIT_INPUT).err)
        out = os.path.join(scratch(), "new a", "b", "c") + "/"  # the folders above are made too
        train(2, steps=1, out=out, save_every=1)
        self.assertEqual(checkpoints(out), [1])


if __name__ == "__main__":
    harness.main()
