#!/usr/bin/env python3
"""test_mistakes.py: what people type who come from nanoGPT, llm.c, PyTorch, Hugging Face, DeepSpeed
or Megatron-LM, and what the program then says.

    python3 test/test_mistakes.py

Each mistake ends with its exit code, a line that says what is wrong and a line with the right hint.
They are the last two lines on the screen, also under mpirun: no notice of Open MPI follows, and no
other rank repeats them.
"""

import os
import re
import shlex
import shutil
import subprocess
import unittest

import harness
from harness import (
    EXIT_INPUT, EXIT_RESOURCES, apart, at_once, get, header, output_of, sample, scratch,
)

GIVEN = "--model model.bin --train tokens.bin --seq-len 20 --micro-batch 3 --steps 1 --val-every 0"
# What is typed behind GIVEN, the words of the message, those of the hint.
FLAGS = """
    --learning-rate 3e-4              | unknown flag --learning-rate     | use --lr
    --learning_rate=6e-4              | unknown flag --learning_rate     | use --lr
    --batch-size 8                    | unknown flag --batch-size        | -batch.*--batch-tokens
    --per_device_train_batch_size 8   | unknown flag --per_device        | --micro-batch
    --bf16                            | unknown flag --bf16              | use --dtype bf16
    --fp16 True                       | unknown flag --fp16              | use --dtype bf16
    --gpus 8                          | unknown flag --gpus              | mpirun -np N
    --nproc_per_node=8                | unknown flag --nproc_per_node    | mpirun -np N
    --nnodes 2                        | unknown flag --nnodes            | --hostfile
    --epochs 3                        | unknown flag --epochs            | use --steps N
    --num_train_epochs 3              | unknown flag --num_train_epochs  | --steps -1 is one epoch
    --max-steps 100                   | unknown flag --max-steps         | use --steps N
    --max_iters=5000                  | unknown flag --max_iters         | use --steps N
    --n-layer 6                       | unknown flag --n-layer           | layers=6,heads=6
    --d-model 384                     | unknown flag --d-model           | channels=384
    --hidden-size 384                 | unknown flag --hidden-size       | channels=384
    --context-length 1024             | unknown flag --context-length    | use --seq-len
    --block_size=256                  | unknown flag --block_size        | use --seq-len
    --gradient-accumulation-steps 4   | unknown flag --gradient-acc      | use --batch-tokens
    --deepspeed ds_config.json        | unknown flag --deepspeed         | --zero 1, 2 or 3
    --fsdp full_shard                 | unknown flag --fsdp              | use --zero 3
    --tensor-parallel 2               | unknown flag --tensor-parallel   | --zero 3 or --pipeline
    --pp 4                            | unknown flag --pp                | use --pipeline N
    --gradient_checkpointing          | unknown flag --gradient_check    | use --recompute block
    --output_dir out                  | unknown flag --output_dir        | use --out FOLDER
    --eval-interval 100               | unknown flag --eval-interval     | use --val-every
    --eval_iters 20                   | unknown flag --eval_iters        | use --val-batches
    --wandb                           | unknown flag --wandb             | use --log FILE
    --resume_from_checkpoint out      | unknown flag --resume_from       | use --resume 1
    --dropout 0.1                     | unknown flag --dropout           | no such choice
    --max-grad-norm 1                 | unknown flag --max-grad-norm     | use --grad-clip
    --noise-multiplier 1              | unknown flag --noise-multiplier  | use --dp-noise
    --config_file=x                   | unknown flag --config_file       | --config
    -lr 3e-4                          | unknown flag -lr                 | it is written --lr
    –lr 3e-4                          | unknown flag –lr                 | it is written --lr
    —lr=3e-4                          | unknown flag —lr=3e-4            | it is written --lr
    --Micro_Batch 4                   | unknown flag --Micro_Batch       | written --micro-batch
    lr=3e-4                           | unknown flag lr=3e-4             | it is written --lr
    config/train_shakespeare.py       | unknown flag config/train        | flags begin with --
    --train tokens.bin none.bin       | unknown flag none.bin            | quote a pattern of files
    -r 1                              | unknown flag -r                  | use --recompute block
    -pn 2                             | unknown flag -pn                 | mpirun -np N
    --frobnicate                      | unknown flag --frobnicate        | --help lists the topics
"""
VALUES = """
    --lr 3e-4,                        | --lr takes a number, found "3e-4," | digits alone.*3e-4
    --lr                              | --lr needs a value, found the end | peak learning rate
    --lr --steps 5                    | --lr needs a value, found --steps | peak learning rate
    --steps 10k                       | --steps takes a whole number     | such as 1000 or 1e3
    --batch-tokens 524,288            | takes a whole number             | digits alone
    --zero 4                          | --zero must be from 0 to 3       | 1 optimizer states
    --dp-epsilon -1                   | must be from 0 to 1000, found -1 | private run
    --dtype float16                   | takes one of fp32|bf16           | the default is
    --optimizer adam                  | takes one of adamw|sgd           | the default is adamw
    --resume true                     | --resume takes 0 or 1            | alone it means 1
    --resume                          | --resume with --out: needs the   | --compat
    --keep 2                          | --keep with --out: counts the    | --compat
    --json                            | --json with --dry-run: only      | --compat
    --zero-quantized-weights          | with --zero: .* give --zero 3    | --compat
    --device-memory 24GB              | takes a number of bytes          | such as 16G
    --device-memory 24                | a rank needs .* gives 24         | 24 is a number of bytes
    --device-memory 300K              | a rank needs .* gives 300K      | (?<=hint: )the smallest
    --moe-buffer 2 --expert-parallel 1 | --moe-buffer: the model has no  | experts=8
    --batch-tokens 70                 | 70 is not a multiple of         | --batch-tokens 80 is next
    --lr-head 2                       | no head of its own               | give --lr-embedding
    --lr-vectors 2 --model nano:d2    | no biases and no gains           | leave it out
    --seq-len 32                      | max_seq_len of --model model.bin | give --seq-len 24 or less
    --pipeline 2                      | 1 ranks are not 2 stages         | units:replicas
    --pipeline 9                      | 9 stages, but the model has 5    | units:replicas
    --cluster 8 --dry-run             | begins with nodes x ranks        | such as --cluster 2x8
    --cluster 8xH100 --dry-run        | begins with nodes x ranks        | 2x8,gpu=h100
    --cluster 1x8,gpu=rtx4090 --plan  | gpu=a100, b200, h100, h200       | 2x8,gpu=h100
    --log nowhere/log                 | cannot write --log nowhere/log   | a folder that exists
    -h 1                              | --help 1: there is no such topic | data, model, run
"""
FILES = """
    --model gpt2-124M                 | --model gpt2-124M: there is no   | the nearest is gpt2:124M
    --model gpt2_124m                 | there is no such name            | the nearest is gpt2:124M
    --model 124M                      | there is no such name            | the nearest is gpt2:124M
    --model gpt2                      | there is no such name            | the nearest is gpt2:124M
    --model openai-community/gpt2-xl  | there is no such name            | the nearest is gpt2:1558M
    --model llama                     | there is no such name            | names are d6 d12
    --model n_layer=6,n_head=6        | cannot read "n_layer=6           | layers=6,heads=6
    --model folder                    | folder: no checkpoint            | folder of a checkpoint
    --model tokens.bin                | expected magic 20240326          | --model takes
    --model gpt3:175B                 | need .* GiB more                 | no --micro-batch fits
    --train data/mine_*.bin           | found no such file               | scripts/prepare_data.py
    --val data/mine_*.bin --val-every 1 | --val .* found no such file    | --val-every 0 turns
    --train folder                    | found a directory .*DIR/\\*.bin  | scripts/prepare_data.py
    --train text.txt                  | expected a shard of tokens       | scripts/prepare_data.py
    --train book.txt                  | expected a shard of tokens       | scripts/prepare_data.py
    --train model.bin                 | expected a shard of tokens       | scripts/prepare_data.py
    --train none.bin                  | at least 2 tokens, found 0       | scripts/prepare_data.py
    --train empty.bin                 | found a file of 0 bytes          | scripts/prepare_data.py
    --train cut.bin                   | for 571 tokens, found 1100       | cut off or damaged
    --tokenizer text.txt              | expected a tokenizer             | prepare_data.py writes
    --config nothing.cfg              | --config nothing.cfg: cannot read | a flag on each line
    --config bad.cfg                  | bad.cfg:3: unknown flag --dropout | no such choice
    --resume 1 --steps 0 --out folder | no valid checkpoint in folder    | a new run starts
    --resume 1 --out other            | no valid checkpoint in other     | layers is 1 .*, 3 is
"""


def cases():
    """(what is typed, exit code, words of the message, words of the hint)."""
    for line in filter(str.strip, (FLAGS + VALUES + FILES).splitlines()):
        typed, message, hint = (part.strip() for part in re.split(r" \| ", line))
        memory = "gpt3:175B" in typed or "--device-memory" in typed and "GB" not in typed
        yield typed, EXIT_RESOURCES if memory else EXIT_INPUT, message.replace("|", r"\|"), hint


class Completion(harness.TestCase):
    def completed(self, *words):
        """What bash offers for the last of these words."""
        script = (
            'source <("$0" --help completion); COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))'
            ' _train_gpt; echo "${COMPREPLY[@]}"'
        )
        shell = "bash", "-c", script, harness.BINARY
        done = output_of(*shell, *words, env=harness.ENVIRONMENT, text=True, check=True)
        self.assertEqual(done.stderr, "")
        return done.stdout.split()

    def test_bash(self):
        for words, offered in (
            (("./train_gpt", "--lr-s"), ["--lr-schedule"]),
            (("./train_gpt", "--dtype", ""), ["fp32", "bf16"]),
            (("./train_gpt", "--lr-schedule", "co"), ["cosine", "constant"]),
            (("./train_gpt", "--out", ""), []),
            (("./train_gpt", "--help", "pi"), ["pipeline"]),
            (("mpirun", "-np", "2", "./train_gpt", "--see"), ["--seed"]),
            (("mpirun", "--see"), []),
        ):
            with self.subTest(words):
                self.assertEqual(self.completed(*words), offered)


class Mistakes(harness.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = scratch()
        tokens = get(harness.TOKENS)
        for name, content in (
            ("tokens.bin", tokens),
            ("cut.bin", tokens[:1100]),
            ("none.bin", header(20240520, 1, 0)),
            ("empty.bin", b""),
            ("text.txt", b"To be, or not to be\n"),
            ("book.txt", b"To be, or not to be\n" * 100),
            ("bad.cfg", b"# nanoGPT's\nlr = 3e-4\ndropout = 0.0\n"),
        ):
            with open(os.path.join(cls.folder, name), "wb") as file:
                file.write(content)
        shutil.copy(harness.MODEL, os.path.join(cls.folder, "model.bin"))
        os.mkdir(os.path.join(cls.folder, "folder"))
        cls.run_program("--model layers=1,heads=1,channels=8,vocab=101 --out other --save-every 1")

    @classmethod
    def run_program(cls, typed, ranks=0):
        """Without mpirun, or under it with so many ranks; everything comes into one pipe."""
        start = ["mpirun", "--oversubscribe", "-np", str(ranks)] if ranks else []
        return subprocess.run(
            [*start, harness.BINARY, *shlex.split(GIVEN), *shlex.split(typed)],
            cwd=cls.folder,
            env=apart(harness.ENVIRONMENT),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=harness.TIMEOUT,
        )

    def check(self, case, ranks=0):
        typed, code, message, hint = case
        done = self.run_program(typed, ranks)
        text = f"{typed}\n{done.stdout}"
        self.assertEqual(done.returncode, code, text)
        lines = done.stdout.splitlines()
        self.assertEqual(done.stdout.count("train_gpt: rank "), 1, text)
        self.assertRegex(lines[-2], r"^train_gpt: rank 0 on \S+, \w+\.\w+:\d+: .*" + message, text)
        self.assertRegex(lines[-1], "^  hint: .*" + hint, text)
        for words in ("MPI_ABORT", "mpirun noticed", "Primary job", "-----"):
            self.assertNotIn(words, done.stdout)

    def test_there_are_many(self):
        self.assertGreaterEqual(len(list(cases())), 40)

    def test_one_rank(self):
        at_once(self.check, cases())

    def test_two_ranks(self):
        two = [case for case in cases() if "1 ranks are" not in case[2]]
        at_once(lambda case: self.check(case, ranks=2), sample(two, 6))

    def test_a_log_that_cannot_be_written(self):
        """All ranks know it at the end; the run itself is done."""
        self.check(("--log /dev/full", EXIT_RESOURCES, "not all of its files", "a warning"), 2)

    def test_more_ranks_than_stages(self):
        self.check(("--pipeline 2", EXIT_INPUT, "3 ranks are not 2 stages", "units:replicas"), 3)


if __name__ == "__main__":
    harness.main()
