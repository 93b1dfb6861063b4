"""same_bits_cases.py: the command lines that same_bits.py runs.

A case is a command line of train_gpt: the flags of BASE, then its own (of a flag that is given
twice the last value counts). Most cases come from three tables: LAYOUTS x FEATURES, OFFLOADS, and
RUNS (single flags). CHAINS are runs that save, and runs that resume from what was saved. PRINTS
only print. REFUSED_FLAGS end with exit code 2 or 3. Each flag of --help makes one more case: the
flag with a nonsensical value.

The paths are relative to the folder that a run starts in; same_bits.py links its data there.
"""

import re
import shlex
from dataclasses import dataclass
from itertools import product

BASE = (
    "--train data/text_train_*.bin --val data/text_val_*.bin --seq-len 16 --micro-batch 2 "
    "--batch-tokens 128 --model layers=6,heads=2,channels=16,vocab=256 --steps 4 --lr 3e-3 "
    "--seed 3 --threads 1 --val-every 2 --val-batches 2 --log log --export export.bin "
)
# The emulated GPU is slower, so its runs are shorter.
BASE_EMULATED = BASE + "--batch-tokens 64 --val-batches 1 --steps 2 "
KEY = "--dp-key " + "5" * 64
CLUSTER = "--cluster 1x4,intra=5,tflops=1,half=100,memory=10,link=10,host=10,disk=1"
NODES = "--cluster 2x2,intra=5,inter=1,gather=0.5,latency=20,tflops=1,memory=10,overlap=0.5"
PROFILE = "--profile golden/dapple_profiles.json:bert-24 --batch-tokens 64 --seq-len 1"
GOLDEN = "--train golden/gpt_tiny_tokens.bin --val golden/gpt_tiny_tokens.bin --seq-len 20 "
GOLDEN += "--batch-tokens 60 --micro-batch 1 --val-batches -1"
ODD = "--model layers=3,heads=3,channels=33,vocab=257"
QUANTIZED = "--zero-quantized-weights 1 --zero-quantized-gradients 1"
DATA_V2 = "--cyclic v2 --cyclic-mode data"
EXPERTS = "arch=llama,layers=2,heads=2,channels=32,vocab=256,experts=4,top_k=2,expert_ffn=24"
SHARED_EXPERTS = EXPERTS + ",shared_experts=1,shared_expert_ffn=40"
# Their weights are in checkpoints: llm.c's files have no experts.
IN_CHECKPOINTS = " --export '' --out out"
EXPERTS, SHARED_EXPERTS = EXPERTS + IN_CHECKPOINTS, SHARED_EXPERTS + IN_CHECKPOINTS

# What cannot be compared. The key is a flag, or FLAG=CHOICE; a case must use all others.
EXEMPT = {
    "config": "a file says what other flags say; test_options.c reads such files",
    "log-every": "what is printed and logged, not what is computed; test_output.py looks at it",
    "tensorboard": "a copy of the log's numbers; test_output.py reads it",
    "pipeline=auto": "the choice depends on measured times; --plan makes it for a --cluster",
    "offload-update=auto": "the choice depends on measured times",
}


@dataclass(frozen=True)
class Case:
    name: str
    flags: str
    ranks: int = 1
    emulated: bool = False
    after: str = ""  # the case whose checkpoints are in the folder at the start ...
    until: int = 0  # ... without those of later steps; 0: all of them
    refused: bool = False  # the program ends with another exit code than 0
    from_help: bool = False  # made from --help, so it does not count as a use of the flag

    def words(self):
        base = BASE_EMULATED if self.emulated else BASE
        return shlex.split(base + self.flags)


# name: ranks, flags
LAYOUTS = {
    "1 rank": (1, ""),
    "2 ranks": (2, ""),
    "zero 1": (3, "--zero 1"),
    "zero 2": (2, "--zero 2"),
    "zero 3": (4, "--zero 3"),
    "hpz": (4, "--zero 3 --zero-hpz-partition-size 2 --ranks-per-node 2"),
    "pipeline 2": (2, "--pipeline 2"),
    "pipeline wide": (4, "--pipeline 4:1,4:3 --zero 1 --micro-batch 4"),
    "gpipe": (3, "--pipeline 2:1,2:1,4:1 --pipeline-schedule gpipe --zero 3"),
    "zero-bubble": (3, "--pipeline 3 --pipeline-schedule zero-bubble --zero 2"),
    "cyclic v1": (2, "--cyclic v1"),
    "cyclic v2": (3, "--cyclic v2 --cyclic-mode zero --batch-tokens 96 --cyclic-clip storage"),
    "cyclic model": (3, "--cyclic v1 --cyclic-mode model --cyclic-stages 2"),
}
FEATURES = {
    "": "",
    "bf16": "--dtype bf16",
    "bf16 stochastic": "--dtype bf16 --stochastic-rounding 1 --weight-decay 0.1",
    "sgd": "--optimizer sgd --lr 1e-2 --grad-clip 0.2",
    "muon": "--optimizer muon --dtype bf16",
    "recompute": "--recompute block --dtype bf16",
    "reduce bf16": "--reduce-dtype bf16 --micro-batch 1",
    "quantized gradients": "--zero-quantized-gradients 1 --zero-error-feedback 1",
    "share": "--share 2x3",
    "delink": "--share 3 --delink-at 2 --delink-moments reset --delink-warmup 2 --steps 4",
    "private unit": f"--dp-noise 1 {KEY} --dp-show-private 1",
    "private flat": f"--dp-noise 0.7 {KEY} --dp-show-private 1 --dp-clip-style flat --dtype bf16",
    "offload optimizer": "--offload optimizer --offload-update host",
    "offload params": "--offload params --offload-update device --dtype bf16",
    "offload all": "--offload all --offload-update host --dtype bf16",
    "delay": "--offload optimizer --offload-delay 1",
    "disk": "--offload optimizer --offload-update device --offload-dir disk",
    "skips": "--skip-loss-z 0.01 --skip-grad-z 0.5 --steps 132 --val-every 0",
}
# Features that a layout refuses by name; REFUSED has these messages.
NO_CYCLIC = ("reduce bf16", "quantized gradients", "delink", "private flat", "skips", "delay")
NO_CYCLIC += ("disk", "offload optimizer", "offload params", "offload all")
NOT_TOGETHER = {
    "zero-bubble": ("recompute", "private unit", "private flat", "offload all"),
    "cyclic v1": NO_CYCLIC + ("share",),
    "cyclic v2": NO_CYCLIC + ("share", "private unit"),
    "cyclic model": NO_CYCLIC + ("share", "private unit"),
}
EMULATED_LAYOUTS = {  # with all features; the others alone
    "1 rank": (1, ""),
    "zero 3": (2, "--zero 3"),
    "pipeline 2": (2, "--pipeline 2"),
}

RUNS = {  # name: ranks, flags
    "no clipping": (1, "--grad-clip 0"),
    "one micro-batch": (1, "--micro-batch 8"),
    "2 threads": (1, "--threads 2"),
    "other seed": (2, "--seed 4"),
    "in order": (1, "--shuffle 0"),
    "short letters": (1, "-l 1e-3 -t 8 -b 4 -d 64 -x 3 -v 1 -m 1 -c 0.1 -u 1 -k linear -z 0"),
    "no steps": (1, "--steps 0 --val-every 1"),
    "golden model": (1, f"--model golden/gpt_tiny_model.bin {GOLDEN}"),
    "golden model zero 3": (3, f"--model golden/gpt_tiny_model.bin {GOLDEN} --zero 3 --dtype bf16"),
    "golden model exported": (1, f"--model golden/gpt_tiny_model.bin {GOLDEN} --steps 0"),
    "model d1": (1, "--model layers=1,heads=1,channels=8,vocab=300"),
    "odd shape": (3, f"{ODD} --seq-len 13 --batch-tokens 91"),
    "odd shape zero 3": (4, f"{ODD} --zero 3 --dtype bf16"),
    "continuous": (1, "--windows continuous --seq-len 7 --batch-tokens 21 --micro-batch 3"),
    "documents": (2, "--windows document"),
    "documents zero 2": (3, "--windows document --zero 2 --micro-batch 1"),
    "labels": (1, "--train data/images_train_*.bin --val data/images_val_*.bin --val-batches -1"),
    "labels 3 ranks": (3, "--train data/images_train_*.bin --val data/images_val_*.bin"),
    "hellaswag": (1, "--hellaswag data/choices.bin"),
    "hellaswag pipeline": (2, "--hellaswag data/choices.bin --pipeline 2"),
    "samples": (1, "--sample-every 2 --sample-tokens 12"),
    "samples zero 3": (3, "--sample-every 2 --sample-tokens 9 --zero 3 --temperature 0.7"),
    "samples likeliest": (2, "--sample-every 2 --sample-tokens 9 --top-k 9 --top-p 0.8"),
    "samples greedy": (2, "--sample-every 2 --sample-tokens 9 --pipeline 2 --temperature 0"),
    "prompt": (2, "--zero 3 --prompt abcd --sample-tokens 20 --temperature 0.7"),
    "tokenizer": (1, "--sample-every 4 --sample-tokens 20 --tokenizer data/text_tokenizer.bin"),
    "end of text": (1, "--sample-every 4 --tokenizer data/text_tokenizer.bin --end-of-text x"),
    "cosine": (1, "--lr-schedule cosine --warmup 2 --final-lr-fraction 0.1 --steps 7"),
    "linear": (1, "--lr-schedule linear --warmup 2 --final-lr-fraction 0.1 --steps 7"),
    "constant": (1, "--lr-schedule constant --warmup 3"),
    "wsd": (2, "--lr-schedule wsd --warmup 2 --final-lr-fraction 0.1 --steps 12"),
    "wsd straight": (2, "--lr-schedule wsd-linear --lr-last-part 0.5 --warmup 2 --steps 8"),
    "rates": (2, "--lr-embedding 2 --lr-vectors 0.5 --zero 2"),
    "rate of a head": (
        2,
        "--model arch=nano,layers=2,heads=2,channels=16,vocab=256 --lr-head 0.5 --export exported",
    ),
    "nesterov": (1, "--optimizer sgd --nesterov 1 --weight-decay 0.1"),
    "muon": (1, "--optimizer muon --muon-lr 0.01 --muon-weight-decay 0.2 --weight-decay 0.1"),
    "muon momentum": (
        2,
        "--optimizer muon --muon-momentum 0.9 --muon-momentum-warmup 3 --muon-steps 3 --steps 5",
    ),
    "muon rates": (
        3,
        "--optimizer muon --zero 3 --lr-embedding 2 --lr-vectors 0.5 --lr-schedule wsd-linear",
    ),
    "muon quantized": (2, f"--optimizer muon --zero 3 {QUANTIZED}"),
    "muon private": (2, f"--optimizer muon --dp-noise 1 {KEY} --zero 1"),
    "muon odd shape": (3, f"{ODD} --optimizer muon --seq-len 13 --batch-tokens 91 --zero 2"),
    "muon share": (2, "--optimizer muon --share 2x3 --delink-at 2 --zero 2"),
    "muon offload": (2, "--optimizer muon --offload optimizer --zero 2"),
    "muon offload all": (1, "--optimizer muon --offload all --dtype bf16"),
    "adamw": (1, "--optimizer adamw --beta1 0.8 --beta2 0.99 --eps 1e-6 --weight-decay 0.2"),
    "momentum": (1, "--optimizer sgd --momentum 0.5 --weight-decay 0.1"),
    "profiled": (2, "--profile-steps 2:3 --trace trace"),
    "watchdog": (2, "--watchdog 0"),
    "autotune": (2, "--autotune 0"),
    "nodes": (4, "--ranks-per-node 2 --zero 2 --dtype bf16"),
    "dtype fp32, none recomputed": (1, "--dtype fp32 --recompute none --reduce-dtype fp32"),
    "warm-up b": (3, "--pipeline 3 --pipeline-warmup b --micro-batches 4"),
    "warm-up a": (2, "--pipeline 5:1,3:1 --pipeline-warmup a --pipeline-schedule dapple"),
    "pipeline 4 zero-bubble": (4, "--pipeline 4 --pipeline-schedule zero-bubble --dtype bf16"),
    "hpz pipeline": (
        4,
        "--pipeline 2 --zero 3 --zero-hpz-partition-size 2 --ranks-per-node 2 --micro-batch 4",
    ),
    "quantized weights": (2, "--zero 3 --zero-quantized-weights 1"),
    "quantized all": (
        4,
        (
            "--zero 3 --zero-quantized-weights 1 --zero-quantized-gradients 1 --ranks-per-node 2 "
            "--zero-hpz-partition-size 2 --zero-gradient-bits 8 --zero-quant-block 64 --dtype bf16"
        ),
    ),
    "quantized 4 bits": (2, "--zero-quantized-gradients 1 --zero-gradient-bits 4 --zero 1"),
    "quantized pipeline": (4, "--zero-quantized-gradients 1 --pipeline 4:2,4:2 --zero 2"),
    "cyclic single v1": (1, "--cyclic v1 --cyclic-mode single --cyclic-stages 4"),
    "cyclic single v2": (1, "--cyclic v2 --cyclic-mode single --cyclic-stages 2 --grad-clip 0"),
    "cyclic auto": (2, "--cyclic v2 --cyclic-mode auto --cyclic-clip none"),
    "cyclic slack": (2, f"{DATA_V2} --cyclic-slack 1 --grad-clip 0"),
    "cyclic cut": (3, f"{DATA_V2} --cyclic-cut 1,2,5 --batch-tokens 96 --grad-clip 0"),
    "cyclic zero": (4, "--cyclic v1 --cyclic-mode zero"),
    "cyclic model v2": (3, "--cyclic v2 --cyclic-mode model --batch-tokens 96 --grad-clip 0"),
    "cyclic shared": (2, "--cyclic v1 --cyclic-mode data --share all"),
    "cyclic shared 2x3": (2, "--cyclic v1 --share 2x3 --micro-batch 4"),
    "cyclic shared 3": (2, f"{DATA_V2} --share 3 --cyclic-clip storage --dtype bf16"),
    "cyclic off": (2, "--cyclic off"),
    "cyclic private": (2, f"{DATA_V2} --dp-noise 1 {KEY} --grad-clip 0"),
    "experts bias": (2, f"--model {EXPERTS} --moe-balance bias --zero 3"),
    "experts aux": (2, f"--model {EXPERTS} --moe-balance aux --moe-aux-coefficient 0.1"),
    "experts apart": (4, f"--model {EXPERTS} --expert-parallel 2 --moe-buffer 1 --zero 1"),
    "experts in pieces": (
        4,
        f"--model {EXPERTS} --expert-parallel 4 --moe-buffer 0.5 --zero 3 --recompute block",
    ),
    "experts shared": (
        4,
        f"--model {SHARED_EXPERTS} --expert-parallel 2 --zero 3 --recompute block",
    ),
    "experts aux, micro-steps": (
        2,
        f"--model {EXPERTS} --moe-balance aux --micro-batch 1 --zero 2",
    ),
    "experts none": (2, f"--model {EXPERTS} --moe-balance none --zero 1"),
    "experts z": (2, f"--model {EXPERTS} --moe-z-coefficient 0.01 --pipeline 2 --micro-batch 4"),
    "share all": (1, "--share all"),
    "share 2": (1, "--share 2"),
    "share 4": (1, "--share 4"),
    "share 3x2": (1, "--share 3x2"),
    "share 6x1": (1, "--share 6x1"),
    "share none": (1, "--share none"),
    "share lr": (2, "--share all --zero 2 --dtype bf16 --share-lr 1e-3"),
    "share quantized": (2, f"--share 3x2 --zero 3 {QUANTIZED}"),
    "share sgd": (1, "--share 2 --optimizer sgd --recompute block"),
    "share wide pipeline": (4, "--share 2x3 --pipeline 3:2,5:2 --zero 2 --micro-batch 4"),
    "delink never": (1, "--share all --delink-at 9 --steps 6"),
    "delink mean": (1, "--share all --delink-at 3 --delink-moments mean --steps 6"),
    "delink zero 3": (3, "--share 4 --delink-at 2 --zero 3 --delink-warmup 2 --steps 5"),
    "delink bf16": (2, "--share 2x3 --delink-at 2 --zero 1 --dtype bf16 --stochastic-rounding 1"),
    "delink sgd": (2, "--share 3 --delink-at 2 --optimizer sgd --zero 2 --share-lr 1e-2"),
    "delink feedback": (
        2,
        "--share all --delink-at 2 --zero 2 --zero-quantized-gradients 1 --zero-error-feedback 1",
    ),
    "delink skips": (1, "--share all --delink-at 100 --skip-loss-z 0.5 --steps 140 --val-every 0"),
    "private epsilon": (2, f"--dp-epsilon 8 {KEY} --zero 1"),
    "private shown epsilon": (1, f"--dp-epsilon 20 --dp-delta 1e-4 {KEY} --dp-show-private 1"),
    "private rdp": (1, f"--dp-noise 1 --dp-accountant rdp {KEY}"),
    "private replace-one": (1, f"--dp-noise 2 --dp-neighbours replace-one {KEY}"),
    "private prv": (1, f"--dp-noise 2 --dp-neighbours add-remove --dp-accountant prv {KEY}"),
    "private clip": (3, f"--dp-noise 1 --dp-clip 0.1 --dp-clip-function automatic {KEY} --zero 3"),
    "private abadi": (2, f"--dp-noise 1 --dp-clip 3 --dp-clip-function abadi {KEY} --zero 2"),
    "private stage": (2, f"--dp-noise 1 --dp-clip-style stage --pipeline 2 {KEY}"),
    "private unit bf16": (2, f"--dp-noise 1 --dp-clip-style unit --dtype bf16 {KEY}"),
    "private recompute": (1, f"--dp-noise 1 --recompute block --dp-unit sequence {KEY}"),
    "private no noise": (1, f"--dp-noise 0 {KEY} --dp-show-private 1"),
    "private documents": (
        2,
        f"--dp-noise 1 --windows document --dp-unit document --dp-windows-per-document 2 {KEY}",
    ),
    "offload none": (1, "--offload none --device-memory 1G"),
    "offload bf16 stochastic": (
        1,
        "--offload optimizer --offload-update host --dtype bf16 --stochastic-rounding 1",
    ),
    "offload delay bf16": (2, "--offload optimizer --offload-delay 1 --dtype bf16 --zero 2"),
    "offload delay sgd": (1, "--offload optimizer --offload-delay 1 --optimizer sgd"),
    "offload private": (2, f"--offload params --offload-update host --dp-noise 1 {KEY} --zero 1"),
    "offload quantized": (
        2,
        (
            "--offload optimizer --offload-update device --zero 3 --zero-quantized-weights 1 "
            "--zero-quantized-gradients 1"
        ),
    ),
    "offload share delay": (2, "--share all --offload optimizer --offload-delay 1 --zero 2"),
    "offload disk params": (
        1,
        "--share 2x3 --delink-at 2 --offload params --offload-update host --offload-dir disk",
    ),
}
# What is moved at the switch from shared blocks: the flags of --offload x who updates.
OFFLOAD_LAYOUTS = {
    "bf16 stochastic": (1, "--dtype bf16 --stochastic-rounding 1"),
    "sgd": (1, "--optimizer sgd --dtype bf16"),
    "zero 2 bf16": (3, "--zero 2 --dtype bf16"),
    "zero 3": (3, "--zero 3"),
    "delink": (2, "--share all --delink-at 2 --zero 2 --dtype bf16 --steps 4"),
}
BUDGETS_REFUSED = {  # the message says what the smallest budget is
    "least": (1, "--device-memory 1"),
    "least bf16": (1, "--device-memory 1 --dtype bf16"),
    "least zero 2": (3, "--device-memory 1 --zero 2 --dtype bf16"),
    "least pipeline": (2, "--device-memory 1 --pipeline 2"),
}
BUDGETS = {  # with --offload auto
    "500K": (1, "--device-memory 500K"),
    "400K auto": (1, "--device-memory 400K --offload auto"),
    "2400K zero 3": (2, "--device-memory 2400K --zero 3 --dtype bf16"),
    "2400K delink": (2, "--device-memory 2400K --share all --delink-at 2 --zero 2 --dtype bf16"),
    "of the host too": (2, "--device-memory 2400K --host-memory 1G --zero 2 --dtype bf16"),
}

# Runs that save after 3 and 6 steps, and the same from step 3 to their end.
CHAINS = {
    "plain": (1, ""),
    "zero 3 bf16": (3, "--zero 3 --dtype bf16"),
    "hpz": (4, "--zero 3 --zero-hpz-partition-size 2 --ranks-per-node 2"),
    "pipeline": (2, "--pipeline 2"),
    "zero-bubble": (3, "--pipeline 3 --pipeline-schedule zero-bubble --zero 2"),
    "sgd": (1, "--optimizer sgd"),
    "muon": (2, "--optimizer muon --zero 2"),
    "stochastic": (2, "--dtype bf16 --stochastic-rounding 1"),
    "shared": (2, "--share 2x3 --zero 2"),
    "switch after": (1, "--share all --delink-at 5"),
    "switch at": (1, "--share 4 --delink-at 3 --delink-warmup 2"),
    "switch before": (2, "--share all --delink-at 2 --delink-moments reset --zero 1 --dtype bf16"),
    "offload": (2, "--offload optimizer --offload-update host --dtype bf16"),
    "delay": (2, "--offload optimizer --offload-delay 1 --zero 2"),
    "disk": (1, "--offload optimizer --offload-update device --offload-dir disk"),
    "cyclic v1": (2, "--cyclic v1"),
    "cyclic v2": (2, "--cyclic v2 --cyclic-clip storage --dtype bf16"),
    "cyclic model": (3, "--cyclic v1 --cyclic-mode model --cyclic-stages 2"),
    "quantized": (2, "--zero 2 --zero-quantized-gradients 1"),
    "private": (1, f"--dp-noise 1 {KEY} --dp-show-private 1"),
    "skips": (1, "--skip-loss-z 1 --skip-grad-z 1"),
    "diverges": (1, "--lr 1e9 --max-skipped 2"),
    "documents": (2, "--windows document --lr-schedule wsd"),
}
EMULATED_CHAINS = ("plain", "zero 3 bf16", "offload")
SAVES = "--out out --steps 6 --val-every 3 --save-every 3"
RESUMES = "--out out --steps 6 --val-every 3 --resume 1"
CHECKPOINTS = {  # name: after, until, ranks, flags: from the same checkpoints, in another way
    "other ranks": ("shared", 3, 3, f"{RESUMES} --share 2x3 --zero 3"),
    "delinks": ("shared", 3, 1, f"{RESUMES} --share 2x3 --delink-at 4"),
    "no offload": ("offload", 3, 1, f"{RESUMES} --dtype bf16"),
    "other stage": ("zero 3 bf16", 3, 2, f"{RESUMES} --dtype bf16 --zero 1"),
    "to a pipeline": ("plain", 3, 2, f"{RESUMES} --pipeline 2 --save-every 1 --keep 2"),
    "to no pipeline": ("zero-bubble", 3, 1, f"{RESUMES}"),
    "a longer run": ("plain", 0, 1, f"{RESUMES} --steps 9 --save-every 2 --keep 1"),
    "a new run": ("plain", 0, 1, "--out out --steps 2 --save-every 2"),
    "a model": ("pipeline", 0, 1, "--model out/step_00000006"),
    "delinked": ("shared", 0, 2, "--model out/step_00000006 --delink 1 --zero 1"),
    "delinked, reset": (
        "shared",
        0,
        1,
        (
            "--model out/step_00000003 --delink 1 --delink-moments reset --offload optimizer "
            "--offload-update host"
        ),
    ),
    "goes on sharing": ("shared", 0, 1, "--model out/step_00000006"),
}
CHECKPOINTS_REFUSED = {
    "another model": ("plain", 3, 1, f"{RESUMES} --model layers=5,heads=2,channels=16,vocab=256"),
    "another optimizer": ("plain", 3, 1, f"{RESUMES} --optimizer sgd"),
    "muon": ("plain", 3, 1, f"{RESUMES} --optimizer muon"),
    "adamw after muon": ("muon", 3, 1, f"{RESUMES}"),
    "made private": ("plain", 3, 1, f"{RESUMES} --dp-noise 1 {KEY}"),
    "not private": ("private", 3, 1, f"{RESUMES}"),
    "no such checkpoint": ("plain", 0, 1, "--model out/step_00000005"),
}

# --plan without --profile or --cluster is not here: it times the model's units on this machine.
PRINTS = {  # name: ranks, flags
    "help": (1, "--help all"),
    "compat": (1, "--compat"),
    "account": (1, "--dp-account q=0.01,sigma=1,steps=100,delta=1e-5"),
    "account rdp": (1, "--dp-account q=0.01,sigma=1,steps=100,delta=1e-5 --dp-accountant rdp"),
    "account json": (1, "--dp-account q=0.01,epsilon=2,steps=100,delta=1e-5 --json 1"),
    "account replace-one": (
        1,
        "--dp-account q=0.01,sigma=2,steps=50,delta=1e-5 --dp-neighbours replace-one",
    ),
    "plan": (1, f"--plan {PROFILE} {NODES}"),
    "plan json": (1, f"--plan {PROFILE} {NODES} --json 1"),
    "plan memory": (1, f"--plan {PROFILE} {NODES} --json 1 --device-memory 4G"),
    "plan of a pipeline": (1, f"--plan {PROFILE} {NODES} --json 1 --pipeline 15:2,14:2"),
    "plan of a model": (1, "--plan --json 1 --model d6 --cluster 2x4,gpu=a100"),
    "fit": (1, "--fit 1 --dry-run 1 --json 1 --model d6 --cluster 2x4,gpu=h100"),
    "dry run": (1, "--dry-run 1 --json 1 " + CLUSTER),
    "dry run nodes": (1, "--dry-run 1 --json 1 --zero 3 --zero-quantized-weights 1 " + NODES),
    "dry run of here": (2, "--dry-run 1 --json 1 --zero 2"),
    "dry run gpt2": (
        1,
        "--dry-run 1 --json 1 --model gpt2:124M --seq-len 1024 --batch-tokens 65536 "
        "--dtype bf16 --zero 2 " + NODES,
    ),
    "dry run gpt3": (
        1,
        (
            "--dry-run 1 --json 1 --model gpt3:1.3B --seq-len 1024 --batch-tokens 65536 --dtype"
            " bf16 --zero 3 --cluster 24x16,intra=150,inter=12.5,tflops=50,memory=700"
        ),
    ),
}
PREDICTED = {  # printed by --dry-run on CLUSTER, and as actions by --show-schedule
    "offload all": (2, "--offload all --offload-update host"),
    "delay": (2, "--offload optimizer --offload-delay 1"),
    "shared zero 3": (3, "--share 2x3 --zero 3 --delink-at 2"),
    "pipeline offload": (4, "--pipeline 2 --offload params --offload-update device"),
    "disk": (2, "--offload optimizer --offload-dir disk --offload-update device"),
    "zero-bubble": (4, "--pipeline 2 --pipeline-schedule zero-bubble"),
    "gpipe": (4, "--pipeline 1:1,7:3 --pipeline-schedule gpipe"),
    "recompute": (2, "--recompute block --dtype bf16"),
    "private": (2, f"--dp-noise 1 {KEY} --dp-clip-style flat"),
    "quantized": (2, f"--zero 3 {QUANTIZED}"),
}
SCHEDULES = {
    "zero 1": (3, "--zero 1"),
    "hpz": (4, "--zero 3 --zero-hpz-partition-size 2 --ranks-per-node 2"),
    "warm-up b": (3, "--pipeline 3 --pipeline-warmup b"),
    "traced": (3, "--pipeline 3 --zero 2 --trace trace"),
    "cyclic v1": (2, "--cyclic v1"),
    "cyclic v2": (2, "--cyclic v2 --grad-clip 0"),
    "cyclic model": (3, "--cyclic v1 --cyclic-mode model --cyclic-stages 2"),
    "cyclic zero": (4, "--cyclic v1 --cyclic-mode zero"),
    "budget": (1, "--device-memory 400K --offload-update device"),
}

REFUSED_FLAGS = """
--resume
--save-every 5
--keep 3
--hellaswag file --val-every 0
--json
--json --dry-run --show-schedule
--dp-account x --plan
--dp-account x --dp-noise 2
--show-schedule --plan
--cluster 1x1
--plan --dry-run --profile x --cluster 1x1
--plan --profile x
--profile x
--offload auto
--offload optimizer --pipeline auto
--offload params --zero 3 --zero-quantized-weights
--offload all --pipeline 2 --pipeline-schedule zero-bubble
--offload all --dp-noise 1
--host-memory 1G
--offload-update auto
--offload-delay 1
--offload-delay 1 --offload optimizer --offload-update device
--offload-delay 1 --offload optimizer --dp-noise 1
--offload-delay 1 --offload optimizer --zero 2 --zero-quantized-gradients 1
--offload-delay 1 --offload optimizer --share all --delink-at 5
--offload-delay 1 --offload optimizer --offload-dir disk
--offload-dir disk
--lr-last-part 0.3
--optimizer muon --offload optimizer --offload-update host
--optimizer muon --offload optimizer --offload-delay 1
--optimizer muon --offload optimizer --offload-dir disk
--muon-steps 5
--cyclic v1 --offload optimizer
--pipeline auto --pipeline-warmup a
--pipeline auto --recompute none
--plan --recompute block
--pipeline auto --zero 3 --zero-hpz-partition-size 2
--cluster 1x1 --dry-run --ranks-per-node 0
--momentum 0.9
--beta1 0.9 --optimizer sgd
--profile-steps 5:6 --steps 5
--sample-tokens 9
--temperature 0.5
--top-k 5
--top-p 0.5
--trace file
--pipeline auto --dp-noise 1
--plan --dp-noise 1
--pipeline 2 --pipeline-schedule zero-bubble --dp-noise 0
--pipeline-schedule gpipe
--pipeline-warmup b
--pipeline 2 --pipeline-schedule gpipe --pipeline-warmup b
--cyclic-mode single
--cyclic v1 --cyclic-slack 1
--cyclic-stages 2
--cyclic v1 --cyclic-clip storage
--cyclic-cut 3,3
--cyclic v2 --pipeline 2
--cyclic v1 --plan
--cyclic v2 --zero 1
--cyclic v2 --zero-quantized-gradients
--cyclic v2 --reduce-dtype bf16
--cyclic v2 --cyclic-mode model --dp-noise 1
--cyclic v2 --dp-noise 1 --dp-clip-style flat
--cyclic v2 --grad-clip 1
--cyclic v1 --skip-loss-z 3
--cyclic v1 --skip-grad-z 3
--cyclic v1 --dry-run --cluster 1x1
--moe-aux-coefficient 0.1
--moe-buffer 2
--expert-parallel 2 --fit --pipeline 2
--expert-parallel 2 --plan
--moe-balance aux --plan
--expert-parallel 2
--share-lr 1e-3
--share-lr 1e-3 --share all --lr 0
--delink-at 5
--delink-at 5 --share all --delink
--delink-at 5 --share all --profile-steps 1:2
--delink-moments reset
--delink-warmup 5
--share 2 --pipeline auto
--share 2 --dp-epsilon 1
--share 2 --delink-at 5 --cyclic v1
--pipeline 2 --pipeline-schedule zero-bubble --recompute block
--profile-steps 3:4 --dp-noise 1
--dtype fp32 --stochastic-rounding 1
--zero-quantized-weights
--zero 1 --zero-hpz-partition-size 2
--zero 3 --zero-gradient-bits 4
--zero 3 --zero-error-feedback
--zero 3 --zero-quant-block 256
--dp-delta 0
--dp-clip 1
--dp-clip-style unit
--dp-clip-function abadi
--dp-unit sequence
--dp-key=
--dp-show-private 0
--dp-accountant rdp
--dp-neighbours add-remove
--dp-epsilon 8 --dp-noise 0
--dp-epsilon 8 --dp-unit document
--dp-epsilon 8 --dp-windows-per-document 1
--dp-epsilon 8 --dp-unit document --windows document --dp-windows-per-document 2 --dp-accountant rdp
--dp-noise 1 --dp-clip-style flat --recompute block
--dp-noise 1 --zero 3 --zero-quantized-gradients
--dp-epsilon 1 --reduce-dtype bf16
--dp-epsilon 1 --skip-loss-z 5
--dp-noise 1 --skip-grad-z 5
--dp-account x --dp-neighbours replace-one --dp-accountant rdp
--zero 4
--steps ten
--stesp 5
--steps
--micro-batch 0
--zero-quant-block 100
--model layers=2,heads=3,channels=16
--model no_such_file.bin
--train no_such_file.bin
--train data/text_tokenizer.bin
--seq-len 100000
--share 5x5
--share 9
--pipeline 3:1,3:1
--pipeline 9
--cyclic v1 --cyclic-stages 9
--dp-key 55 --dp-noise 1
--dp-noise 0.01 --dp-epsilon 1
--batch-tokens 100
--device-memory 12X
--log data/text_val_000000.bin
--out out --export out/step_00000003/state_00000
--device-memory 1K --offload none
--offload optimizer --offload-update host --host-memory 1M
--cluster 2x2 --dry-run
--profile-steps 3
"""


def cross():
    """Each layout with each feature."""
    for layout, (ranks, flags) in LAYOUTS.items():
        for feature, more in FEATURES.items():
            if feature not in NOT_TOGETHER.get(layout, ()):
                yield Case(f"{layout}, {feature}".rstrip(", "), f"{flags} {more}", ranks)


def offloads():
    for layout, (ranks, flags) in OFFLOAD_LAYOUTS.items():
        for what, who in product(("optimizer", "params", "all"), ("host", "device")):
            more = f"{flags} --offload {what} --offload-update {who}"
            yield Case(f"offload {what} by {who}: {layout}", more, ranks)
    for budget, (ranks, flags) in BUDGETS.items():
        for who in ("host", "device"):
            yield Case(f"budget {budget} by {who}", f"{flags} --offload-update {who}", ranks)
    for budget, (ranks, flags) in BUDGETS_REFUSED.items():
        yield Case(f"refused budget {budget}", flags, ranks, refused=True)


def emulated():
    for layout, (ranks, flags) in LAYOUTS.items():
        if layout not in EMULATED_LAYOUTS:
            yield Case(f"emulated {layout}", flags, ranks, emulated=True)
    for layout, (ranks, flags) in EMULATED_LAYOUTS.items():
        for feature, more in FEATURES.items():
            # The GPU program waits for ever in a pipeline with --share 2x3 and staged messages.
            if feature != "skips" and (layout, feature) != ("pipeline 2", "share"):
                name = f"emulated {layout}, {feature}".rstrip(", ")
                yield Case(name, f"{flags} {more}", ranks, emulated=True)
    for what, who in product(("optimizer", "params", "all"), ("host", "device")):
        flags = f"{OFFLOAD_LAYOUTS['delink'][1]} --offload {what} --offload-update {who}"
        yield Case(f"emulated delink, offload {what} by {who}", flags, 2, emulated=True)
    yield Case("emulated pipeline 2, share 3", "--pipeline 2 --share 3", 2, emulated=True)
    yield Case("emulated samples", "--sample-every 2 --sample-tokens 8", emulated=True)
    yield Case("emulated hellaswag", "--hellaswag data/choices.bin --steps 0", emulated=True)
    yield Case("emulated least budget", "--device-memory 1", emulated=True, refused=True)
    yield Case("emulated print schedule", "--show-schedule 1 --zero 3", 2, emulated=True)
    yield Case("emulated print help", "--help", emulated=True)


def chains():
    for name, (ranks, flags) in CHAINS.items():
        for emulated in (False, True) if name in EMULATED_CHAINS else (False,):
            saved = f"{'emulated ' * emulated}saved {name}"
            yield Case(saved, f"{flags} {SAVES}", ranks, emulated)
            # A private run resumes under the same flags only, and from its end with more steps.
            until, more = (0, "--steps 9") if name == "private" else (3, "--save-every 3")
            words = f"{flags} {RESUMES} {more}"
            yield Case(saved.replace("saved", "resumed"), words, ranks, emulated, saved, until)
    for table, refused in ((CHECKPOINTS, False), (CHECKPOINTS_REFUSED, True)):
        for name, (after, until, ranks, flags) in table.items():
            after = f"saved {after}"
            yield Case(f"{after}: {name}", flags, ranks, after=after, until=until, refused=refused)


def prints():
    for name, (ranks, flags) in PRINTS.items():
        yield Case(f"print {name}", flags, ranks)
    for name, (ranks, flags) in PREDICTED.items():
        yield Case(f"print dry run {name}", f"{flags} --dry-run 1 --json 1 {CLUSTER}")
    for name, (ranks, flags) in {**PREDICTED, **SCHEDULES}.items():
        yield Case(f"print schedule {name}", f"{flags} --show-schedule 1", ranks)


def flags_of_help(text):
    """Each flag of --help with its choices, those that are words to give as they are."""
    flags = {}
    for name, choices in re.findall(r"(?m)^  --([\w-]+)[^<\n]*?(?:<([^>\n]*)>.*)?$", text):
        words = choices.split("|") if "|" in choices else []
        flags[name] = [word for word in words if re.fullmatch(r"[a-z0-9-]+", word)]
    return flags


def refusals(flags):
    for line in REFUSED_FLAGS.split("\n"):
        if line:
            yield Case(f"refused {line}", line, refused=True)
    for flag in flags:
        yield Case(f"nonsense for --{flag}", f"--steps 0 --{flag} nonsense", from_help=True)


def all_cases(flags):
    """The list. flags: those of --help, as of flags_of_help."""
    cases = [*cross()]
    for name, (ranks, words) in RUNS.items():
        cases.append(Case(name, words, ranks))
    cases += [*offloads(), *chains(), *prints(), *refusals(flags), *emulated()]
    names = [case.name for case in cases]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)
    return cases


def uncovered(cases, flags):
    """Flags, and choices of flags, that no case uses which the program accepts."""
    used = set()
    for case in cases:
        words = case.words()
        for word, value in zip(words, words[1:] + [""]):
            if not case.refused and not case.from_help and word.startswith("--"):
                used |= {word[2:], f"{word[2:]}={value}"}
    wanted = [name for name in flags if name not in EXEMPT]
    missing = [f"flag --{name} is used by no command line" for name in wanted if name not in used]
    for name in wanted:
        for choice in flags[name]:
            if name in used and not {f"{name}={choice}"} & (used | EXEMPT.keys()):
                missing.append(f"--{name} {choice} is used by no command line")
    return missing
