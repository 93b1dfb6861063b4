#!/usr/bin/env python3
"""test_huggingface_keys.py: every key of config.json, and every place of a tensor, against what
transformers makes of it.

    python3 test/test_huggingface_keys.py

Keys      a folder gives transformers' loss, or is refused by the name of the key or tensor: the
          cases of golden/huggingface.json, which make_huggingface_golden.py asked transformers for
Exports   what --export keeps of the folder that a model came from
"""

import json
import os
import unittest

import harness

harness.need_numpy()
from harness import ALL, EXIT_DONE, EXIT_INPUT, at_once, sample, scratch  # noqa: E402

import folders_of_huggingface as folders  # noqa: E402

SAME = 1e-5
with open(os.path.join(harness.ROOT, "test/golden/huggingface.json")) as golden:
    CASES = json.load(golden)["cases"]


def run(*flags):
    return harness.output_of(harness.BINARY, *flags, text=True, env=harness.ENVIRONMENT)


def answer(case):
    """The program's, and its loss."""
    folder = folders.write_folder(os.path.join(scratch(), "model"), case)
    flags = f"--steps 0 --val-every 1 --val-batches -1 --seq-len {folders.T} --micro-batch 7"
    log = os.path.join(folder, "log")
    words = *flags.split(), "--threads", 1, "--val", harness.TOKENS, "--log", log
    done = run("--model", folder, *words)
    events = harness.parse_log(harness.get(log).decode()) if done.returncode == EXIT_DONE else []
    return done, [float(event["loss"]) for event in events if event["event"] == "val"]


class Keys(harness.TestCase):
    def test_each(self):
        chosen = CASES if ALL else sample(CASES, 150)
        for case, (done, losses) in zip(chosen, at_once(answer, chosen)):
            with self.subTest(**{key: value for key, value in case.items() if key != "loss"}):
                if "loss" not in case:
                    self.assertEqual(done.returncode, EXIT_INPUT, done.stderr)
                    self.assertTrue(folders.is_named(case, done.stderr), done.stderr)
                    continue
                self.assertEqual(done.returncode, EXIT_DONE, done.stderr)
                if case["loss"] is not None:  # transformers refuses it, but it means the same
                    self.assertLess(abs(losses[0] / case["loss"] - 1), SAME)

    def test_cases_mean_something(self):
        """Of the losses of a type there are many, and each key that must be refused would show."""
        for kind in folders.BASE:
            losses = {
                round(case["loss"], 4)
                for case in CASES
                if case["type"] == kind and case.get("loss")
            }
            self.assertGreaterEqual(len(losses), 5, kind)

    def test_unknown_keys_are_said(self):
        case = {"type": "llama", "set": '"n_foo": 1, "use_cache": true, "\\u001b[2J": 2'}
        done, losses = answer(case)
        self.assertEqual(done.returncode, EXIT_DONE, done.stderr)
        (line,) = done.stderr.splitlines()
        self.assertRegex(line, r"^warning: .*config.json has keys .*: n_foo \\u001b\[2J$")


class Exports(harness.TestCase):
    def export(self, members, generation=None, kind="llama"):
        folder = folders.write_folder(
            os.path.join(scratch(), "model"), {"type": kind, "set": members}
        )
        if generation is not None:
            with open(os.path.join(folder, "generation_config.json"), "wb") as file:
                file.write(generation)
        out = os.path.join(scratch(), "out")
        flags = "--steps 0 --val-every 0 --seq-len 8 --export".split()
        return run("--model", folder, *flags, out), out

    def test_tokens_that_end_texts(self):
        for members, expected in (
            ('"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0', (1, 2, 0)),
            (
                '"bos_token_id": null, "eos_token_id": [2, 3], "pad_token_id": null',
                (None, [2, 3], None),
            ),
            ('"eos_token_id": 7, "eos_token_id": 8', ("none", 8, "none")),
            ("", ("none", "none", "none")),
        ):
            for kind in ("llama", "gpt2", "qwen3"):
                with self.subTest(members, kind=kind):
                    done, out = self.export(members, kind=kind)
                    self.assertEqual(done.returncode, EXIT_DONE, done.stderr)
                    config = json.loads(harness.get(os.path.join(out, "config.json")))
                    found = [
                        config.get(f"{name}_token_id", "none") for name in ("bos", "eos", "pad")
                    ]
                    self.assertEqual(found, [*expected])
                    self.assertEqual(sorted(os.listdir(out)), ["config.json", "model.safetensors"])

    def test_generation_config(self):
        text = b'{"eos_token_id": [2], "temperature": 0.5,\n "\xc3\xa9": 1}\n'
        done, out = self.export("", text)
        self.assertEqual(done.returncode, EXIT_DONE, done.stderr)
        self.assertEqual(harness.get(os.path.join(out, "generation_config.json")), text)

    def test_no_number(self):
        for value in ('"2"', "true", "{}", "[[2]]"):
            done, _ = self.export(f'"eos_token_id": {value}')
            self.assertEqual(done.returncode, EXIT_INPUT, done.stderr)
            self.assertIn("eos_token_id", done.stderr)

    def test_other_models(self):
        """Nothing is known of their ends of texts."""
        out = os.path.join(scratch(), "out")
        flags = "--steps 0 --val-every 0 --seq-len 8 --export".split()
        done = run("--model", "arch=llama,layers=1,heads=2,channels=16,vocab=64", *flags, out)
        self.assertEqual(done.returncode, EXIT_DONE, done.stderr)
        config = json.loads(harness.get(os.path.join(out, "config.json")))
        self.assertEqual([config["bos_token_id"], config["eos_token_id"]], [None, None])


if __name__ == "__main__":
    harness.main()
