#!/usr/bin/env python3
"""test_generate.py: --prompt: generated text against numpy, which keeps nothing from token to token
but computes every token anew (reference_modern.py, reference.py).

    python3 test/test_generate.py       TEST_ALL=1: every layout of every architecture;
                                        TEST_SEED=N: the random choices, printed

    Greedy   the likeliest tokens: any architecture, layout, and source of the model; texts longer
             than the context
    Chosen   --top-k, --top-p, --temperature: each token is one that they allow; the seed counts
    Input    prompts of standard input, empty ones, bytes that are no text, and what is refused

Standard library and numpy; the tests run themselves in .venv's Python where this one has none.
"""

import itertools
import os
import re
import subprocess

import harness

harness.need_numpy()
import numpy as np  # noqa: E402
from harness import EXIT_INPUT, SEED, TIMEOUT, sample, scratch, train

import reference
import reference_modern as modern

T = 24  # context
END_OF_TEXT = 0  # of a model of bytes
TIE = 1e-5  # of the range of all logits: what sums of some hundred products of fp32 may be off
LAYOUTS = {
    "one rank": dict(),
    "threads": dict(threads=2),
    "stage 3": dict(ranks=3, zero=3),
    "pipeline": dict(ranks=3, pipeline=3),
    "replicas": dict(ranks=3, pipeline="2:2,3:1", zero=1),
    "zero bubble": dict(ranks=2, pipeline=2, pipeline_schedule="zero-bubble"),
    "offload": dict(ranks=2, zero=3, offload="params"),
    "all offloaded": dict(ranks=2, offload="all"),
    "bf16 messages": dict(ranks=2, zero=2, reduce_dtype="bf16"),
    "muon": dict(ranks=2, zero=3, optimizer="muon"),
    "cyclic": dict(ranks=2, cyclic="v2", grad_clip=0),
}
ARCHITECTURES = "gpt2", "llama", "qwen2", "qwen3", "nano"


class Model:
    """A random model of bytes: files of it, and its logits."""

    def __init__(self, arch, seed=SEED):
        self.arch, self.folder = arch, scratch()
        self.config = modern.Config(arch, 3, 4, 2, 6, 20, 24, 256, tie=arch == "qwen3", positions=T)
        if arch == "gpt2":
            self.config = reference.Config(3, 4, 20, 256, T)
            draw = np.random.default_rng(seed)
            self.parameters = {
                key: (draw.normal(0, 0.3, shape) + key[1].startswith("ln")).astype("<f4")
                for key, shape in self.config.tensors()
            }
            self.source = os.path.join(self.folder, "model.bin")
            with open(self.source, "wb") as file:
                file.write(reference.model_bytes(self.config, self.parameters))
        else:
            self.parameters = modern.initial(self.config, seed, [("wte", 1), ("head", 0.5)])
            self.source = modern.write_folder(self.folder, self.config, self.parameters)
        if arch == "nano":  # Hugging Face has no such folder
            self.source = self.checkpoint()

    def checkpoint(self):
        """The folder of a checkpoint: initial weights of the program, which an export tells us. Any
        optimizer may have trained it: the command that continues a text does not say which."""
        optimizer = sample([dict(), dict(optimizer="sgd"), dict(optimizer="muon", muon_lr=0)], 1)[0]
        out, export = os.path.join(self.folder, "out"), os.path.join(self.folder, "export")
        train(
            model=self.config.keys(),
            seq_len=T,
            batch_tokens=3 * T,
            steps=1,
            lr=0,
            save_every=1,
            out=out,
            export=export,
            train=harness.shard(modern.token_stream(self.config, SEED, 200)),
            val=None,
            **optimizer,
        )
        self.parameters = modern.read_folder(export, self.config)
        return os.path.join(out, "step_00000001")

    def logits(self, tokens):
        """Of the token that follows."""
        inputs = np.array([tokens])
        if self.arch == "gpt2":
            return np.log(reference.forward(self.config, self.parameters, inputs)[0][0, -1])
        return modern.logits_of(self.config, self.parameters, inputs)[0][0, -1]

    def greedy(self, prompt, count, found):
        """When T tokens are full, the newer half of them goes on. Ends before end-of-text. Where
        two tokens are equally likely but for rounding, that of `found` goes on."""
        tokens, made = list(prompt), []
        while len(made) < count:
            logits = self.logits(tokens)
            token = int(logits.argmax())
            other = [*found, END_OF_TEXT][min(len(made), len(found))]
            if logits.max() - logits[other] < TIE * np.ptp(logits):
                token = other
            if token == END_OF_TEXT:
                break
            made.append(token)
            tokens = tokens[T // 2 :] if len(tokens) == T else tokens
            tokens.append(made[-1])
        return made


def continued(model, prompt, count, code=0, **changes):
    """The tokens that the program prints after a prompt; of a refusal, the message."""
    flags = dict(temperature=0, sample_tokens=count, train=None, val=None, steps=None, seq_len=None)
    flags.update(micro_batch=None, batch_tokens=None, **changes)
    job = train(model=model.source, prompt=prompt, code=code, **flags)
    if code:
        return job.err
    kinds = "parameters|activations|buffers|device"
    memory = re.findall(rf"(?m)^  (?:{kinds}) +([0-9.]+) MiB +([0-9.]+) MiB$", job.err)
    assert len(memory) == 4 and all(predicted == found for predicted, found in memory), job.err
    with open(job.out_path, "rb") as file:
        text = file.read()
    assert text.endswith(b"\n"), text
    return list(text[:-1])


# --------------------------------------------------------------------------------------------------
class Greedy(harness.TestCase):
    def test_layouts(self):
        cases = list(itertools.product(ARCHITECTURES, LAYOUTS))
        chosen = [(arch, "one rank") for arch in ARCHITECTURES] + sample(cases, 6)
        models = {arch: Model(arch) for arch in ARCHITECTURES}
        for arch, layout in chosen:
            with self.subTest(arch=arch, layout=layout):
                prompt = b"To be or"
                found = continued(models[arch], prompt.decode(), 14, **LAYOUTS[layout])
                self.assertEqual(found, models[arch].greedy(prompt, 14, found))

    def test_longer_than_the_context(self):
        model = Model("llama", SEED + 1)
        for length in (1, T - 1, T):
            prompt = [33 + i for i in range(length)]
            found = continued(model, bytes(prompt).decode(), T + 8)
            self.assertEqual(found, model.greedy(prompt, T + 8, found), length)

    def test_shorter_context(self):
        """--seq-len is the context; the memory for keys and values is as predicted (Job)."""
        model = Model("qwen2")
        found = continued(model, "abc", 5, seq_len=8)
        self.assertEqual(found, model.greedy(b"abc", 5, found))


# --------------------------------------------------------------------------------------------------
class Chosen(harness.TestCase):
    def test_one_choice_is_greedy(self):
        model = Model("llama")
        for only in (dict(top_k=1), dict(top_p=1e-9)):
            found = continued(model, "x", 10, temperature=1, **only)
            self.assertEqual(found, model.greedy(b"x", 10, found))

    def test_allowed(self):
        """Each token is one of the k likeliest, and of the fewest that reach the probability p."""
        model, k, p = Model("qwen3"), 7, 0.8
        # A random model may be so sure of one token that every seed draws it. At a temperature like
        # the range of all logits no token is much likelier than another.
        logits = model.logits([ord("x")])
        temperature = round(float(logits.max() - logits.min()), 3)
        texts = [
            continued(model, "x", T - 1, temperature=temperature, top_k=k, top_p=p, seed=seed)
            for seed in (1, 1, 2)
        ]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2], "the seed does not matter")
        ranks = []
        for text in texts[1:]:
            tokens = [ord("x")]
            for token in text:
                likely = np.exp(model.logits(tokens) / temperature)
                order = np.argsort(-likely)[:k]
                sums = np.cumsum(likely[order]) / likely[order].sum()
                allowed = order[: 1 + np.searchsorted(sums, p - 1e-4)]
                self.assertIn(token, allowed)
                ranks.append(list(order).index(token))
                tokens.append(token)
        self.assertGreater(len(set(ranks)), 2, "drawn from few")


# --------------------------------------------------------------------------------------------------
class Input(harness.TestCase):
    def test_standard_input(self):
        """Line by line, with no new line after the last; each as if it were alone."""
        model, lines = Model("llama"), [b"first", b"", b"a second one", b"\xff\xfe", b"first"]
        command = f"mpirun --oversubscribe -np 2 {harness.BINARY} --model {model.source}"
        command += " --prompt - --temperature 0 --sample-tokens 6 --zero 3"
        done = subprocess.run(
            command.split(), input=b"\n".join(lines), capture_output=True, timeout=TIMEOUT,
            env=harness.ENVIRONMENT,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        found = list(done.stdout)
        for line in lines:
            text = model.greedy(line or [END_OF_TEXT], 6, found[:6])
            self.assertEqual(found[: len(text) + 1], [*text, 10], line)
            found = found[len(text) + 1 :]
        self.assertEqual(found, [])

    def test_refused(self):
        model, long = Model("llama"), "x" * (T + 1)
        self.assertRegex(
            continued(model, long, 4, code=EXIT_INPUT),
            rf"--prompt has {T + 1} tokens, and the context only {T}",
        )
        small = Model("llama")
        small.config = small.config._replace(vocab=100)
        small.parameters = modern.initial(small.config, SEED)
        modern.write_folder(small.source, small.config, small.parameters)
        self.assertRegex(continued(small, "x", 4, code=EXIT_INPUT), r"tokenizer")

    def test_behind_a_training_command(self):
        """Nothing is trained, validated or written but its log, which goes on."""
        model, folder = Model("llama"), scratch()
        names = "out", "export", "tensorboard", "trace"
        log = harness.put(os.path.join(folder, "log"), b'{"event":"start"}\n')
        more = {name: os.path.join(folder, name) for name in names}
        more.update(train=harness.TOKENS, steps=5, val_every=1, save_every=1, profile_steps="1:2")
        job = train(model=model.source, prompt="x", sample_tokens=4, temperature=0, log=log, **more)
        self.assertEqual(os.listdir(folder), ["log"])
        self.assertEqual(harness.get(log).count(b'{"event":"start"'), 2)
        self.assertEqual(job.losses(), [])
        with open(job.out_path, "rb") as file:
            found = list(file.read())
        self.assertEqual(found, [*model.greedy(b"x", 4, found[:-1]), ord("\n")])
        self.assertRegex(job.err, r"(?m)^texts +1 tokens read")


if __name__ == "__main__":
    harness.main()
