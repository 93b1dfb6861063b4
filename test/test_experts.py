#!/usr/bin/env python3
"""test_experts.py: blocks with experts in place of the MLP.

    python3 test/test_experts.py    TEST_ALL=1: more layouts; TEST_SEED=N: the random choices

    Layouts   one rank's losses: folders that ranks divide, Switch's loss
    Pieces    more rows than memory was planned for: the same bits, memory as planned, bytes counted
    Resume    a run that ends after a checkpoint goes on with another layout: the same losses
    Refusals  models, flags and folders that have no meaning end with exit status 2 and a name

What experts compute is in test_modern.py (against transformers and a reference in fp64), test_ops.c
(operations) and test_layouts.py (layouts and flags that are drawn).
"""

import json
import os
import random
import shutil

import harness

harness.need_numpy()
import numpy as np  # noqa: E402
from harness import ALL, EXIT_INPUT, SAME, SAME_NORM, SEED, Job  # noqa: E402
from harness import at_once, scratch, shard  # noqa: E402

import reference_modern as modern  # noqa: E402
from planted_faults import PIECES, numbered  # noqa: E402

SHAPE = "layers=3,heads=2,channels=16,vocab=101,experts=6,expert_ffn=10"
MODELS = (
    f"arch=llama,tie=1,{SHAPE},top_k=2",
    f"arch=qwen3,{SHAPE},top_k=3",
    f"arch=llama,{SHAPE},top_k=2,prototypes=3",
    f"arch=gpt2,{SHAPE},top_k=2",
    f"arch=llama,{SHAPE},top_k=2,shared_experts=2",
    f"arch=gpt2,{SHAPE},top_k=1,shared_experts=1,shared_expert_ffn=7",
)
T = 8


class Resume(harness.TestCase):
    FLAGS = dict(
        seq_len=T, batch_tokens=12 * T, micro_batch=1, steps=6, save_every=3, lr=1e-2, eps=1e-3,
        threads=1, val_every=0,
    )
    LAYOUTS = (
        dict(ranks=1, micro_batch=4), dict(ranks=2, zero=1),
        dict(ranks=3, zero=2, recompute="block"), dict(ranks=2, zero=3),
        dict(ranks=2, zero=2, expert_parallel=2), dict(ranks=4, zero=1, expert_parallel=2),
        dict(ranks=2, zero=2, offload="all"), dict(ranks=2, pipeline="2", micro_batch=3),
    )

    def test_other_layouts(self):
        draw, tokens = random.Random(f"{SEED} resume"), shard([i * i % 101 for i in range(300)])
        data = dict(train=tokens, val=tokens)

        def check(number):
            before, after = draw.sample(self.LAYOUTS, 2)
            model = MODELS[(number + SEED) % len(MODELS)]
            flags = {**self.FLAGS, "moe_balance": ("none", "bias", "aux")[(number + SEED) % 3]}
            flags.update(data, model=model, seed=number + 1)
            what = f"run {number} of seed {SEED}: {flags}, {before}, then {after}"
            with self.subTest(what):
                out = os.path.join(scratch(), "out")
                whole = Job(**{**flags, **before, "out": out}).done()
                shutil.rmtree(harness.checkpoint(out, 6))
                rest = Job(**{**flags, **after, "out": out}, resume=1).done()
                self.assertEqual(len(rest.losses()), 3, what)
                self.assert_close(rest.losses(), whole.losses()[3:], SAME, what)
                norms = [[norm for (norm,) in job.steps("grad_norm")] for job in (rest, whole)]
                self.assert_close(norms[0], norms[1][3:], SAME_NORM, what)

        for number in range(16 if ALL else 1):
            check(number)


class Layouts(harness.TestCase):
    """What is common to the ranks of experts, and to the passes before a step."""

    FLAGS = dict(seq_len=T, batch_tokens=12 * T, steps=3, lr=1e-2, eps=1e-3, threads=1, val_every=0)

    def same(self, flags, cases, what):
        found = [Job(**{**self.FLAGS, **flags, **case}).done().losses() for case in cases]
        for case, losses in zip(cases[1:], found[1:]):
            self.assert_close(losses, found[0], SAME, (what, case))

    def test_folders_divided(self):
        """A rank reads its own experts, also one of each rank alone, and where all experts of a
        layer are one tensor."""
        tokens = shard([i * i % 31 for i in range(300)])
        shared = dict(shared_experts=1, shared_expert_ffn=5)
        for name, more in (("mixtral", {}), ("shared", shared)):
            config = modern.Config("llama", 2, 4, 2, 6, 12, 0, 31, experts=4, top_k=2, expert_ffn=7)
            config = config._replace(**more)
            start = modern.initial(config, name)
            model = modern.write_folder(os.path.join(scratch(), "model"), config, start)
            cases = [dict(ranks=1, micro_batch=4)]
            cases += [dict(ranks=n, micro_batch=1, expert_parallel=n) for n in (2, 4)]
            self.same(dict(train=tokens, model=model), cases, name)

    def test_stages_that_are_chosen(self):
        """--pipeline auto, with experts on a number of ranks that is chosen, too."""
        tokens = shard([i * i % 101 for i in range(300)])
        cases = [dict(ranks=1, micro_batch=4)]
        cases += [dict(ranks=n, pipeline="auto", moe_balance="bias") for n in (2, 4)]
        cases[0].update(moe_balance="bias")
        self.same(dict(train=tokens, model=MODELS[0]), cases, "auto")

    def test_a_single_token(self):
        """A rank with one token has rows of another one with two."""
        tokens = shard([i * i % 101 for i in range(300)])
        flags = dict(train=tokens, seq_len=1, batch_tokens=3, lr=0.1)
        cases = [dict(ranks=1, micro_batch=3), dict(ranks=2, micro_batch=2, expert_parallel=2)]
        for model in harness.sample(MODELS, 1):
            self.same(dict(flags, model=model), cases, model)

    def test_switch_loss(self):
        """With a pass before the step and without one, the traffic of which is counted
        (Job.check_end): where each rank has one micro-batch none is needed."""
        tokens = shard([i * i % 101 for i in range(300)])
        flags = dict(train=tokens, moe_balance="aux", moe_aux_coefficient=0.5)
        layouts = [
            dict(ranks=1, micro_batch=5),
            dict(ranks=2, micro_batch=6, zero=1),
            dict(ranks=2, micro_batch=2, zero=3),
            dict(ranks=4, micro_batch=3, zero=2, expert_parallel=2, recompute="block"),
            dict(ranks=3, micro_batch=1, zero=3, expert_parallel=3),
            dict(ranks=2, pipeline="2", micro_batch=12),
            dict(ranks=1, micro_batch=4, offload="all"),
        ]
        for model in harness.sample(MODELS[:1] + MODELS[-1:], 1):
            cases = [dict(ranks=1, micro_batch=12), *harness.sample(layouts, 3)]
            self.same(dict(flags, model=model), cases, model)


class Pieces(harness.TestCase):
    """Rows go to experts in pieces (--moe-buffer). That measured memory is the planned one is
    checked of every run (Job.check_end)."""

    FLAGS = dict(Resume.FLAGS, batch_tokens=16 * T, micro_batch=2, steps=3, val_every=3)
    DIVIDED = dict(ranks=2, expert_parallel=2)
    LAYOUTS = (
        dict(DIVIDED),
        dict(DIVIDED, zero=1, recompute="block"),
        dict(DIVIDED, zero=2, offload="all"),
        dict(DIVIDED, zero=3, moe_balance="aux"),
        dict(ranks=4, expert_parallel=4, zero=3, recompute="block", moe_balance="bias"),
        dict(ranks=4, expert_parallel=2, zero=2, micro_batch=1, offload="optimizer"),
        dict(ranks=4, expert_parallel=2, zero=1, pipeline="2", micro_batch=4),
        dict(
            ranks=4, expert_parallel=2, zero=2, pipeline="2", pipeline_schedule="zero-bubble",
            micro_batch=4, moe_balance="aux",
        ),
        dict(DIVIDED, zero=1, share="all", dtype="bf16"),
    )

    @staticmethod
    def uneven(layers=2):
        """A folder whose tokens all go to two experts of the second half of eight, in each block:
        two routers' rows are opposite, two half of these, the others 0."""
        config = modern.Config(
            "llama", layers, 2, 2, 8, 16, 0, 31, experts=8, top_k=2, expert_ffn=10
        )
        start = modern.initial(config, "uneven")
        for layer in range(layers):
            router = start[layer, "router"]
            router[:4] = 0
            router[4:] = [4 * factor * router[4] for factor in (1, -1, 0.5, -0.5)]
        return modern.write_folder(os.path.join(scratch(), "model"), config, start)

    def run_of(self, **flags):
        out = os.path.join(scratch(), "out")
        job = Job(**{**self.FLAGS, **flags, "out": out}).done()
        saved, ranks = harness.checkpoint(out, 3), {**self.FLAGS, **flags}["ranks"]
        job.files = [harness.get(f"{saved}/state_{rank:05}") for rank in range(ranks)]
        start, *_, end = harness.parse_log(harness.get(job.log_path).decode())
        job.predicted, job.sent = (
            found["intra"]["all_to_all"]
            for found in (start["predicted"]["traffic"], end["traffic"]["measured"])
        )
        return job

    def check(self, flags, buffers):
        """Each run with one of these buffers is, bit by bit, the run with memory for all rows; and
        to rounding that of one rank. Returns all runs."""
        whole = self.run_of(**flags)
        if "dtype" not in flags:
            other = "expert_parallel", "pipeline", "pipeline_schedule", "offload", "save_every"
            other = {**dict.fromkeys(other), "ranks": 1, "micro_batch": 4}
            one = Job(**{**self.FLAGS, **flags, **other}).done()
            self.assert_close(whole.losses(), one.losses(), SAME, flags)
        told = ("loss", "grad_norm", "expert_load_max", "expert_tokens_dropped")
        made = [whole]
        for buffer in buffers:
            job, what = self.run_of(**flags, moe_buffer=buffer), (flags, buffer)
            self.assertEqual(job.steps(*told), whole.steps(*told), what)
            self.assertEqual(
                [e["loss"] for e in job.of("val")], [e["loss"] for e in whole.of("val")], what
            )
            self.assertEqual(job.files == whole.files, True, what)
            made.append(job)
        memory = [job.end()["memory"]["measured"]["device"] for job in made]
        self.assertLess(min(memory[1:]), memory[0], flags)
        return made

    def test_bits(self):
        """Loads as uneven as they come (all tokens are the same one), or as they are drawn."""
        draw = random.Random(f"{SEED} pieces")
        tokens = {
            "equal": shard([7] * 300),
            "few": shard([draw.choice((3, 3, 3, 5, 90)) for _ in range(300)]),
            "drawn": shard([draw.randrange(101) for _ in range(300)]),
        }

        def check(layout):
            name, model = draw.choice(sorted(tokens)), draw.choice(MODELS)
            if layout["expert_parallel"] == 4:
                model = model.replace(",experts=6", ",experts=12")
            flags = dict(layout, train=tokens[name], val=tokens["few"], model=model)
            _, *pieces = self.check(flags, (1, 0.5))
            counts = [int(e["expert_pieces"]) for e in pieces[1].of("step")]
            self.assertGreater(min(counts), 1, (flags, counts))

        for layout in harness.sample(self.LAYOUTS, 1):
            check(layout)

    def test_all_to_one_rank(self):
        """Tokens all choose experts of the last rank. Rows of the first one leave once in a forward
        pass, and when their gradients leave; in pieces, a third time."""
        data = dict.fromkeys(("train", "val"), shard([i * i % 31 for i in range(300)]))
        layers, steps, width = 2, 3, 16 * 4
        rows = self.FLAGS["batch_tokens"] // 2 * 2 * layers  # of a rank in a step, to experts
        for recompute, times in harness.sample(((None, 2), ("block", 3)), 1):
            flags = dict(self.DIVIDED, **data, model=self.uneven(layers), recompute=recompute)
            runs = self.check(dict(flags, lr=1e-4), (1, 1.5))
            pieces = [[int(n) for (n,) in job.steps("expert_pieces")] for job in runs[1:]]
            self.assertEqual(pieces, [[2] * steps] * 2)
            for job, more in zip(runs, (0, 1, 1)):
                self.assertEqual(job.sent, rows * width * (times + more), job.command)

    def test_even_loads(self):
        """Predicted bytes are counted ones where loads are even: each prototype has a rank. With
        memory for half of the rows, these bytes have the messages of pieces."""
        tokens = shard([i * i % 101 for i in range(300)])
        for recompute in harness.sample((None, "block"), 1):
            flags = dict(self.DIVIDED, train=tokens, val=tokens, recompute=recompute)
            flags.update(model=f"arch=llama,{SHAPE},top_k=2,prototypes=2", val_every=0)
            sent = []
            for buffer in (None, 1, 0.5):
                job = self.run_of(**flags, moe_buffer=buffer)
                self.assertEqual(job.sent, job.predicted, job.command)
                sent.append(job.sent)
            messages = 6 if recompute else 4
            self.assertEqual(sent[1], sent[0])
            self.assertEqual(sent[2] * messages, sent[0] * (messages + 1))

    def test_faults(self):
        """They change a bit somewhere. Of two terms the order does not matter: four ranks."""
        tokens, planted = shard([i * i % 31 for i in range(300)]), dict(binary=harness.PLANTED)
        flags = dict(ranks=4, expert_parallel=4, zero=1, train=tokens, val=tokens)
        flags.update(planted, model=self.uneven(), micro_batch=1, batch_tokens=4 * T, val_every=0)
        whole = self.run_of(**flags)

        def differs(number=0):
            job = self.run_of(**flags, moe_buffer=1, environment={"FAULT": str(number)})
            return job.files != whole.files

        self.assertFalse(differs())
        for number, what, *_ in numbered(PIECES):
            self.assertTrue(differs(number), what)


class Refusals(harness.TestCase):
    RUN = "--steps", 0, "--val-every", 0, "--seq-len", T

    def refused(self, words, *names):
        done = harness.output_of(
            harness.BINARY, *map(str, words), text=True, env=harness.ENVIRONMENT
        )
        self.assertEqual(done.returncode, EXIT_INPUT, (words, done.stderr))
        error = [line for line in done.stderr.splitlines() if not line.startswith("warning")]
        for name in names:
            self.assertIn(name, error[0], words)
        self.assertNotIn("a defect of train_gpt", done.stderr)

    def test_keys(self):
        llama, shape = "arch=llama,", "layers=1,heads=2,channels=16,vocab=64"
        rows = (
            (llama + "experts=0", "experts"),
            (llama + "experts=-1", "experts"),
            (llama + "experts=1.5", "experts"),
            (llama + "experts=4,top_k=0", "top_k"),
            (llama + "experts=4,top_k=5", "top_k=5"),
            (llama + "experts=4,top_k=2,prototypes=3", "prototypes=3"),
            (llama + "experts=4,top_k=3,prototypes=2", "top_k=3"),
            (llama + "experts=4,prototypes=8", "prototypes=8"),
            (llama + "experts=4,expert_ffn=0", "expert_ffn"),
            (llama + "experts=100000", "experts=100000"),
            (llama + "experts=4,ffn=8,expert_ffn=8", "ffn and expert_ffn"),
            (llama + "experts=4,shared_experts=0", "shared_experts"),
            (llama + "experts=4,shared_experts=2000", "shared_experts=2000"),
            (llama + "experts=4,shared_expert_ffn=8", "shared_expert_ffn"),
            (llama + "shared_experts=1", "shared_experts"),
            (llama + "shared_expert_ffn=8", "shared_expert_ffn"),
            (llama + "top_k=2", "top_k"),
            (llama + "expert_ffn=16", "expert_ffn"),
            (llama + "prototypes=2", "prototypes"),
            ("arch=qwen2,experts=4", "arch=qwen2"),
            ("arch=nano,experts=4", "arch=nano"),
        )
        cases = [(("--model", f"{keys},{shape}", *self.RUN), name) for keys, name in rows]
        at_once(lambda case: self.refused(*case), cases)

    def test_flags(self):
        """What is not done with experts, and what only they have."""
        data = shard([i * i % 101 for i in range(300)])
        run = *self.RUN[2:], "--steps", 1, "--train", data, "--batch-tokens", 8 * T
        experts, dense = MODELS[0], "arch=llama,layers=3,heads=2,channels=16,vocab=101"
        rows = (
            (experts, "--cyclic", "v1"),
            (experts, "--dp-noise", 0, "--dp-clip", 1, "--dp-delta", "1e-5"),
            (experts, "--optimizer", "muon"),
            (experts, "--zero-quantized-weights", 1, "--zero", 3),
            (experts, "--zero-quantized-gradients", 1, "--zero", 2),
            (dense, "--moe-balance", "bias"),
            (dense, "--moe-z-coefficient", "0.1"),
            (dense, "--expert-parallel", 2),
            (experts, "--moe-aux-coefficient", "0.1"),
            (f"{MODELS[1]},shared_experts=1", "--export", os.path.join(scratch(), "export")),
        )
        at_once(lambda row: self.refused(("--model", *row, *run), row[1]), rows)

    # -- folders

    CONFIGS = {
        arch: modern.Config(
            arch, 2, 4, 2, 6, 12, 0, 31, experts=3, top_k=2, expert_ffn=7, tie=arch == "qwen3"
        )
        for arch in ("llama", "qwen3")
    }
    CONFIGS["shared"] = CONFIGS["llama"]._replace(shared_experts=1, shared_expert_ffn=5)

    def folder(self, arch, values=(), tensors=lambda found: found):
        """A folder with these values in config.json, and of whose tensors some are changed."""
        config = self.CONFIGS[arch]
        folder = modern.write_folder(
            os.path.join(scratch(), "model"), config, modern.initial(config, "folder")
        )
        path = os.path.join(folder, "config.json")
        with open(path) as file:
            found = {**json.load(file), **dict(values)}
        with open(path, "w") as file:
            json.dump({k: v for k, v in found.items() if v != "left out"}, file)
        path = os.path.join(folder, "model.safetensors")
        found = tensors(modern.read_safetensors(path))
        with open(path, "wb") as file:
            file.write(modern.safetensors_bytes(found))
        return folder

    def test_folders_as_they_are(self):
        for arch in self.CONFIGS:
            done = harness.output_of(
                harness.BINARY,
                *map(str, ("--model", self.folder(arch), *self.RUN)),
                text=True,
                env=harness.ENVIRONMENT,
            )
            self.assertEqual((done.returncode, "warning" in done.stderr), (0, False), done.stderr)

    def test_config(self):
        rows = (
            ("llama", dict(sliding_window=4096), "sliding_window"),
            ("llama", dict(num_experts_per_tok=4), "top_k=4"),
            ("llama", dict(num_experts_per_tok=0), "num_experts_per_tok"),
            ("llama", dict(num_local_experts=0), "num_local_experts"),
            ("llama", dict(num_local_experts=2.5), "num_local_experts"),
            ("llama", dict(router_jitter_noise=0.1), "router_jitter_noise"),
            ("llama", dict(prototypes=3), "model_type"),
            ("qwen3", dict(norm_topk_prob=False), "norm_topk_prob"),
            ("qwen3", dict(norm_topk_prob="left out"), "norm_topk_prob"),
            ("qwen3", dict(mlp_only_layers=[1]), "mlp_only_layers"),
            ("qwen3", dict(decoder_sparse_step=2), "decoder_sparse_step"),
            ("qwen3", dict(num_experts=0), "num_experts"),
            ("shared", dict(shared_intermediate_size="left out"), "shared_intermediate_size"),
            ("shared", dict(shared_intermediate_size=0), "shared_intermediate_size"),
            ("shared", dict(embedding_multiplier=12), "embedding_multiplier"),
            ("shared", dict(residual_multiplier=0.22), "residual_multiplier"),
            ("shared", dict(logits_scaling=6), "logits_scaling"),
            ("shared", dict(attention_multiplier=1), "attention_multiplier"),
            ("shared", dict(attention_multiplier="left out"), "attention_multiplier"),
        )
        at_once(
            lambda row: self.refused(("--model", self.folder(*row[:2]), *self.RUN), row[2]), rows
        )

    def test_tensors(self):
        mixtral, qwen = "model.layers.%d.block_sparse_moe.", "model.layers.%d.mlp."
        stacked = mixtral % 1 + "%s_linear.weight"
        outside = "model.layers.0.shared_mlp.%s_linear.weight"
        one, two = mixtral % 1 + "experts.%d.w%d.weight", qwen % 0 + "experts.%d.%s_proj.weight"

        def without(name):
            return lambda found: {key: value for key, value in found.items() if key != name}

        def beside(name, like):
            return lambda found: {**found, name: found[like]}

        def turned(name):
            return lambda found: {**found, name: found[name].T}

        def shorter(name):
            return lambda found: {**found, name: found[name][:-1]}

        def flat(name):
            return lambda found: {**found, name: found[name].reshape(-1, found[name].shape[-1])}

        def together(found):
            """As transformers has experts in memory: all of a layer in one tensor."""
            names = [two % (e, "down") for e in range(3)]
            other = {name: value for name, value in found.items() if name not in names}
            whole = np.stack([found[name] for name in names])
            return {**other, qwen % 0 + "experts.down_proj": whole}

        def more(layer, expert):
            name = mixtral % layer + f"experts.{expert}.w1.weight"
            return "llama", beside(name, one % (2, 1)), name

        rows = (
            ("llama", without(one % (2, 3)), one % (2, 3)),
            ("llama", without(one % (0, 2)), one % (0, 2)),
            ("llama", without(mixtral % 1 + "gate.weight"), mixtral % 1 + "gate.weight"),
            more(0, 3),
            more(1, 3),
            more(2, 0),
            ("llama", turned(one % (1, 2)), one % (1, 2)),
            ("llama", shorter(mixtral % 1 + "gate.weight"), mixtral % 1 + "gate.weight"),
            ("qwen3", without(two % (1, "up")), two % (1, "up")),
            ("qwen3", turned(two % (1, "gate")), two % (1, "gate")),
            ("qwen3", beside(two % (3, "down"), two % (0, "down")), two % (3, "down")),
            ("qwen3", together, two % (0, "down")),
            ("shared", without(stacked % "input"), stacked % "input"),
            ("shared", without(outside % "output"), outside % "output"),
            ("shared", shorter(stacked % "output"), stacked % "output"),
            ("shared", flat(stacked % "output"), stacked % "output"),
        )
        at_once(
            lambda row: self.refused(
                ("--model", self.folder(row[0], tensors=row[1]), *self.RUN), row[2]
            ),
            rows,
        )


if __name__ == "__main__":
    harness.main()
