#!/usr/bin/env python3
"""test_evaluations.py: scores beside the validation loss, by the real program under mpirun.

python3 test/test_evaluations.py    TEST_ALL=1, TEST_SEED=N, TRAIN_GPT=FILE: as for test_train.py,
                                    whose helpers are used

HellaSwag   which completions win, from losses that do not know of them: those of plain documents in
            training steps of
            learning rate 0; for any number of ranks, samples a step and length; the log; what is
            refused
Labels      the accuracy on labelled shards, from the same kind of losses; labelled shards are cut
            at documents;
            images prepared by scripts/prepare_data.py are learnt
"""

import os
import random
import struct
import subprocess
import sys

import harness
from harness import (
    ALL, EXIT_INPUT, ROOT, SAME, SEED, T, TestCase, VOCAB, header, put, shard, train, train_all,
)

END = 0  # the end-of-text token of a vocabulary below 256
LAYOUTS = [
    dict(ranks=r, micro_batch=b, batch_tokens=s * T, zero=r - 1)
    for r, b, s in ((1, 3, 3), (2, 1, 5), (3, 8, 8), (4, 2, 1))
]
LAYOUTS += (
    [
        dict(ranks=r, micro_batch=b, batch_tokens=s * T)
        for r in (1, 2, 3, 4)
        for b in (1, 4, 5)
        for s in (1, 4, 6, 32)
    ]
    if ALL
    else []
)


def losses_of(documents):
    """The sum of -log p over all tokens but the first, END, of each document of at most T + 1
    tokens."""
    stream = shard([token for document in documents for token in document])
    steps = train(
        train=stream, windows="document", lr=0, batch_tokens=T, micro_batch=1, steps=len(documents)
    ).losses()
    return [loss * (len(document) - 1) for loss, document in zip(steps, documents)]


class HellaSwag(TestCase):
    @classmethod
    def setUpClass(cls):
        """Examples with all lengths in them, each row at most T inputs; the scores of their
        completions."""
        draw = random.Random(1)
        words = lambda n: [draw.randrange(1, VOCAB) for _ in range(n)]
        cls.examples = []
        for _ in range(25):
            context = [END] + words(draw.randrange(1, 9))
            cls.examples.append(
                (context, [words(draw.randrange(1, T + 2 - len(context))) for _ in range(4)])
            )
        rows = [
            context + completion
            for context, completions in cls.examples
            for completion in completions
        ]
        losses = iter(losses_of(rows + [context for context, _ in cls.examples]))
        whole = [[next(losses) for _ in completions] for _, completions in cls.examples]
        cls.scores = [
            [(w - loss) / len(words) for w, words in zip(row, completions)]
            for row, loss, (_, completions) in zip(whole, losses, cls.examples)
        ]
        cls.best = [row.index(min(row)) for row in cls.scores]
        cls.by_sum = [
            min(range(4), key=lambda c: row[c] * len(words[c]))
            for row, (_, words) in zip(cls.scores, cls.examples)
        ]
        cls.by_row = [
            min(range(4), key=lambda c: row[c] / (len(context) + len(words[c])))
            for row, (context, words) in zip(whole, cls.examples)
        ]

    def file(self, labels, examples=None):
        body, longest = [], 0
        for i, ((context, completions), label) in enumerate(zip(examples or self.examples, labels)):
            words = [65535, 0, i, label, 4, len(context), *context]
            for completion in completions:
                words += [len(completion), *completion]
            words[1] = 2 * len(words)
            longest = max(longest, words[1])
            body.append(struct.pack(f"<{len(words)}H", *words))
        return put("hellaswag_val.bin", header(20240522, 1, len(body), longest), *body)

    def test_the_oracle_tells_rules_apart(self):
        gaps = [sorted(row)[1] - min(row) for row in self.scores]
        self.assertGreater(
            min(gaps), 100 * SAME * max(map(max, self.scores)), "rounding could decide"
        )
        self.assertEqual(set(self.best), {0, 1, 2, 3})
        self.assertNotEqual(self.best, self.by_sum, "by the mean, not the sum")
        self.assertNotEqual(self.best, self.by_row, "of the completion, not of the row")

    def test_tables_larger_than_a_block(self):
        """In bf16, with tables larger than a block: wte stays from the head of a micro-batch to the
        embedding of the next one."""
        shape = harness.any_model(random.Random(SEED), layers=1, channels=8, vocab=800)
        many = shard([i * i % 797 for i in range(600)])
        for layout in (
            dict(),
            dict(ranks=2, zero=3),
            dict(ranks=2, pipeline="2"),
            dict(ranks=2, cyclic="v1"),
            dict(cyclic="v2", grad_clip=None, cyclic_stages=2),
        ):
            one, four = (
                train(
                    **dict(
                        model=shape, train=many, val=many, dtype="bf16", steps=1, val_every=1,
                        val_batches=2, batch_tokens=8 * T, micro_batch=b, **layout,
                    )
                )
                for b in (8, 1)
            )
            self.assert_close(
                [float(e["loss"]) for e in four.of("val")],
                [float(e["loss"]) for e in one.of("val")],
                SAME,
                layout,
            )

    def test_every_layout(self):
        """Every third label is not what the oracle chooses; test_other_settings has only those that
        are."""
        n = len(self.best)
        file, correct = self.file(
            [(b + (i % 3 == 1)) % 4 for i, b in enumerate(self.best)]
        ), n - len(range(1, n, 3))
        cases = [
            dict(layout, hellaswag=file, steps=0, val_every=1, train="no such file")
            for layout in LAYOUTS
        ]
        for case, job in zip(cases, train_all(cases)):
            self.assertEqual([e["event"] for e in job.events], ["start", "val", "hellaswag", "end"])
            (event,) = job.of("hellaswag")
            self.assertEqual(
                {k: event[k] for k in ("step", "correct", "examples")},
                dict(step=0, correct=correct, examples=n),
                case,
            )
            self.assertAlmostEqual(float(event["accuracy"]), correct / n, delta=1e-12)
            self.assertIn(
                f"hellaswag accuracy {correct / n:.4f} | {correct} of {n} examples", job.out
            )

    def test_other_settings(self):
        file, n = self.file(self.best), len(self.best)
        cases = [
            dict(seq_len=harness.POSITIONS, batch_tokens=None),
            dict(recompute="block"),
            dict(dtype="bf16"),
            dict(ranks=2, val_batches=-1),
        ]
        for case, job in zip(
            cases, train_all([dict(case, hellaswag=file, steps=0, val_every=1) for case in cases])
        ):
            self.assertGreaterEqual(
                job.of("hellaswag")[0]["correct"], n - 2 if "dtype" in case else n, case
            )  # bf16 may decide otherwise where it is close

    def test_between_steps(self):
        """With each validation, and without a trace in the training."""
        same = dict(ranks=2, steps=5, val_every=2, lr=0.01)
        plain, scored = train_all([same, dict(same, hellaswag=self.file(self.best))])
        self.assertEqual(scored.steps("loss", "grad_norm"), plain.steps("loss", "grad_norm"))
        self.assertEqual(
            [(e["step"], e["loss"]) for e in scored.of("val")],
            [(e["step"], e["loss"]) for e in plain.of("val")],
        )
        self.assertEqual([e["step"] for e in scored.of("hellaswag")], [0, 2, 4, 5])
        self.assertEqual({e["label_accuracy"] for e in scored.of("val")}, {None})

    def test_refusals(self):
        """The program's words; test_dataloader.c has every kind of damage."""
        longest = max(len(c) + len(w) - 1 for c, completions in self.examples for w in completions)
        torn = put("torn.bin", harness.get(self.file(self.best))[:-1])
        cases = [
            (
                dict(hellaswag=self.file(self.best), seq_len=longest - 1, batch_tokens=None),
                ("hellaswag_val.bin", f"--seq-len {longest} at least"),
            ),
            (dict(hellaswag=torn), ("torn.bin: example 24: expected ",)),
            (dict(hellaswag="nothing.bin"), ("nothing.bin: cannot open",)),
            (dict(hellaswag=harness.TOKENS), (f"{harness.TOKENS}: expected multiple choices",)),
            (
                dict(hellaswag=self.file([0], [([1, VOCAB], [[1]] * 4)])),
                ("hellaswag_val.bin: example 0: expected a token (0 to 100) at byte 1038",),
            ),
        ]
        for (_, words), job in zip(
            cases,
            train_all(
                [dict(changes, ranks=2, val_every=1, code=EXIT_INPUT) for changes, _ in cases]
            ),
        ):
            self.assertEqual(job.err.count("train_gpt: rank"), 1, job.err)
            for found in words:
                self.assertIn(found, job.err)


class Labels(TestCase):
    FIRST, CLASSES, PIXELS = 90, 5, 11

    @classmethod
    def setUpClass(cls):
        """Images of random pixels; the label that the model finds likeliest after each."""
        draw, labels = random.Random(2), range(cls.FIRST, cls.FIRST + cls.CLASSES)
        cls.images = [
            [END] + [draw.randrange(1, cls.FIRST) for _ in range(cls.PIXELS)] for _ in range(26)
        ]
        losses = iter(losses_of([image + [label] for image in cls.images for label in labels]))
        cls.losses = [[next(losses) for _ in labels] for _ in cls.images]
        cls.best = [row.index(min(row)) for row in cls.losses]

    def shard(self, told, marked=True):
        """Labelled images, of which those in `told` have the label that the model finds
        likeliest."""
        labels = [
            best if i in told else (best + 1) % self.CLASSES for i, best in enumerate(self.best)
        ]
        tokens = [
            token
            for image, label in zip(self.images, labels)
            for token in [*image, self.FIRST + label]
        ]
        words = (20240520, 1, len(tokens)) + ((self.CLASSES, self.FIRST) if marked else ())
        return put("images.bin", header(*words), struct.pack(f"<{len(tokens)}H", *tokens)), labels

    def test_accuracy(self):
        told, n = set(range(0, 26, 3)) | {1, 2, 4}, 26
        self.assertGreater(len(set(self.best)), 1)
        val, labels = self.shard(told)
        loss = sum(row[label] for row, label in zip(self.losses, labels)) / (n * (self.PIXELS + 1))
        same = dict(val=val, steps=0, val_every=1, train="no such file")
        cases = [dict(same, **layout, val_batches=-1) for layout in LAYOUTS]
        cases += [
            dict(same),
            dict(same, val_batches=2, ranks=2),
            dict(same, seq_len=self.PIXELS + 1, batch_tokens=None),
        ]  # 26, 6, 26 images
        for case, job in zip(cases, train_all(cases)):
            (event,) = job.of("val")
            taken = set(range(6)) if case.get("val_batches") == 2 else set(range(n))
            self.assertAlmostEqual(
                float(event["label_accuracy"]), len(told & taken) / len(taken), delta=1e-12,
                msg=case,
            )
            self.assertIn(
                f" | label accuracy {len(told & taken) / len(taken):.4f} |"
                f" {len(taken) * (self.PIXELS + 1)} tokens",
                job.out,
            )
            if len(taken) == n:
                self.assert_close([event["loss"]], [loss], SAME, case)

    def test_training_is_cut_at_documents(self):
        marked, _ = self.shard(set())
        plain, _ = self.shard(set(), marked=False)
        same = dict(steps=4, shuffle=1, ranks=2)
        one, other = train_all(
            [dict(same, train=marked), dict(same, train=plain, windows="document")]
        )
        self.assertEqual(one.steps("loss", "grad_norm"), other.steps("loss", "grad_norm"))

    def test_refusals(self):
        val, _ = self.shard(set())
        cases = [
            dict(val=val, val_every=1, seq_len=self.PIXELS, batch_tokens=None),
            dict(train=val, seq_len=self.PIXELS, batch_tokens=None),
        ]
        for flag, job in zip(
            ("--val", "--train"),
            train_all([dict(case, ranks=2, code=EXIT_INPUT) for case in cases]),
        ):
            self.assertIn(f"{flag} {val}: expected --seq-len {self.PIXELS + 1} at least", job.err)

    def test_prepared_images_are_learnt(self):
        """4 x 4 images that are darker above or below, in noise: from files to all labels right."""
        draw, folder, out = random.Random(SEED), harness.scratch(), harness.scratch()
        for i in range(150):
            name = ("above", "below")[i % 2]
            pixels = bytes(
                (60 if (p < 8) == (name == "above") else 180) + draw.randrange(-20, 20)
                for p in range(16)
            )
            os.makedirs(os.path.join(folder, name), exist_ok=True)
            with open(os.path.join(folder, name, f"{i}.pgm"), "wb") as file:
                file.write(b"P5 4 4 255\n" + pixels)
        subprocess.run(
            [
                sys.executable,
                os.path.join(ROOT, "scripts/prepare_data.py"),
                "--images",
                folder,
                "--out",
                out,
                "--name",
                "t",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        job = train(
            ranks=2,
            model="layers=1,heads=2,channels=32,vocab=259",
            train=f"{out}/t_train_*.bin",
            val=f"{out}/t_val_*.bin",
            shuffle=1,
            seq_len=17,
            micro_batch=8,
            batch_tokens=16 * 17,
            steps=100,
            lr=0.01,
            warmup=10,
            val_every=100,
        )
        # of so few images new weights may have most right by chance, but never with such a loss
        first, last = job.of("val")
        self.assertLess(float(last["loss"]), float(first["loss"]) - 1)
        self.assertEqual(float(last["label_accuracy"]), 1)


if __name__ == "__main__":
    harness.main()
