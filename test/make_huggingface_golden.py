#!/usr/bin/env python3
"""What transformers and this program make of every key of config.json, and of folders whose tensors
lie elsewhere.

    python3 test/make_huggingface_golden.py [WORD ...]

needs torch, transformers and numpy, and ./train_gpt; takes 20 minutes. With words, only the cases
whose text has all of them are tried, and nothing is written.

The keys are those of LlamaConfig, Qwen2Config, Qwen3Config and GPT2Config with their other names,
those that transformers looks for while it loads and trains such a model, and those that it takes
out of config.json before. Each is given every value of PROBES and its own of VALUES, alone. The
program must print transformers' loss, or refuse the key by its name. What it did becomes
test/golden/huggingface.json for test_huggingface_keys.py: of a key that changes nothing one value,
in one folder with all others of its kind; of the others what was taken, and some that was not.
"""

import collections
import inspect
import json
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, configuration_utils, modeling_rope_utils

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import folders_of_huggingface as folders  # noqa: E402
import harness  # noqa: E402

GOLDEN = os.path.join(harness.ROOT, "test/golden/huggingface.json")
SAME = 1e-5
MEMORY = 4 << 30  # bytes of a case: a default size that is met by accident takes more
CLASSES = {
    "gpt2": transformers.GPT2Config, "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config,
}
PROBES = ["true", "false", "null", "3", '{"a": 1}']
LLAMA3 = '"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0'
ROPES = [
    '{"rope_type": "default", "rope_theta": 70.0}',
    '{"rope_type": "default", "factor": 4.0}',
    '{"type": "default"}',
    '{"rope_type": null}',
    '{"rope_theta": null, "rope_type": "default"}',
    '{"rope_type": "linear", "factor": 4.0}',
    '{"type": "linear", "factor": 4.0}',
    '{"rope_type": "dynamic", "factor": 4.0}',
    '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}',
    '{"rope_type": "llama3", "rope_theta": 70.0, "original_max_position_embeddings": 16, %s}'
    % LLAMA3,
    '{"rope_type": "llama3", "type": "linear", "original_max_position_embeddings": 16, %s}'
    % LLAMA3,
    '{"type": "llama3", "rope_type": "default", "original_max_position_embeddings": 16, %s}'
    % LLAMA3,
    '{"rope_type": "llama3", %s}' % LLAMA3,
    '{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}',
    '{"rope_type": "llama3", "partial_rotary_factor": 0.5, %s}' % LLAMA3,
    '{"rope_type": "default", "partial_rotary_factor": 0.5}',
    '{"full_attention": {"rope_type": "linear", "factor": 4.0}}',
    '{"rope_theta": "70.0", "rope_type": "default"}',
    '"linear"',
]
VALUES = {
    "activation_function": ['"%s"' % name for name in transformers.activations.ACT2FN],
    "hidden_act": ['"%s"' % name for name in transformers.activations.ACT2FN],
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
    "rope_theta": ["70.0", '"50.0"', "0"],
    "layer_norm_epsilon": ["1e-5", "1e-05", "0.00001", "1e-3", "0.001"],
    "rms_norm_eps": ["1e-3", "1e-6", '"1e-6"'],
    "layer_types": [
        '["full_attention", "full_attention"]',
        '["full_attention", "sliding_attention"]',
    ],
    "dtype": ['"float32"', '"bfloat16"'],
    "torch_dtype": ['"float32"', '"bfloat16"'],
    "partial_rotary_factor": ["1.0"],
    "per_layer_config": ['{"0": {"num_key_value_heads": 1}}', '{"0": {"intermediate_size": 24}}'],
    "transformers_weights": ['"other.safetensors"'],
    "quantization_config": ['{"quant_method": "bitsandbytes", "load_in_8bit": true}'],
    "attribute_map": ['{"hidden_size": "n_embd"}', '{"is_causal": "use_cache"}'],
    "is_causal": ["true", '""'],
    "eos_token_id": ["2", "[2, 3]"],
}
# More members in one config.json: of (type, what it is about): sizes, drop, set
SLIDING = '"sliding_window": 4, "max_window_layers": 0'
TOGETHER = [
    ("gpt2", {}, ["n_embd"], '"hidden_size": 24'),
    ("gpt2", {}, [], '"hidden_size": 24'),
    ("gpt2", {}, [], '"hidden_size": 48'),
    (
        "gpt2",
        {},
        ["n_embd", "n_head", "n_layer", "n_positions"],
        '"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2,'
        ' "max_position_embeddings": 24',
    ),
    ("gpt2", {}, ["n_head"], '"n_head": 2, "n_head": 3'),
    ("gpt2", {}, ["n_head"], r'"n_he\u0061d": 3'),
    ("gpt2", {}, [], '"n_inner": 96'),
    ("gpt2", {}, [], '"n_inner": 48'),
    ("gpt2", {"n_layer": 12}, ["n_layer"], ""),
    ("gpt2", {"n_head": 12}, ["n_head"], ""),
    ("gpt2", {"n_head": 2, "n_layer": 3}, [], ""),
    ("qwen2", {}, [], '"use_sliding_window": true, ' + SLIDING),
    ("qwen3", {}, [], '"use_sliding_window": true, ' + SLIDING),
    ("qwen2", {}, [], '"use_sliding_window": false, ' + SLIDING),
    ("llama", {}, [], '"use_sliding_window": true, ' + SLIDING),
    ("qwen3", {"head_dim": 128}, ["head_dim"], ""),
    ("llama", {}, ["head_dim"], ""),
    ("qwen2", {}, ["head_dim"], ""),
    ("llama", {"head_dim": 16}, [], ""),
    ("llama", {"num_key_value_heads": 4}, ["num_key_value_heads"], ""),
    ("qwen2", {"num_key_value_heads": 4}, ["num_key_value_heads"], ""),
    ("qwen3", {"num_attention_heads": 32, "num_key_value_heads": 32}, ["num_key_value_heads"], ""),
    ("llama", {"num_hidden_layers": 3, "intermediate_size": 24}, [], ""),
    ("llama", {}, ["rope_theta"], ""),
    ("llama", {}, ["rms_norm_eps"], ""),
    ("qwen2", {}, ["rope_theta", "rms_norm_eps", "hidden_act", "tie_word_embeddings"], ""),
    ("llama", {}, [], '"rope_parameters": {"rope_type": "default", "rope_theta": 70.0}'),
    (
        "llama",
        {},
        [],
        '"rope_parameters": {"rope_type": "default", "rope_theta": 70.0},'
        ' "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 16, %s}'
        % LLAMA3,
    ),
    (
        "llama",
        {},
        [],
        '"rope_parameters": {"rope_type": "default", "rope_theta": 70.0},'
        ' "rope_scaling": {"rope_type": "linear", "factor": 4.0}',
    ),
    (
        "llama",
        {},
        [],
        '"rope_parameters": {"rope_type": "default", "rope_theta": 70.0},' ' "rope_scaling": null',
    ),
    (
        "llama",
        {},
        [],
        '"rope_parameters": {"rope_type": "default", "rope_theta": 70.0},' ' "rope_scaling": {}',
    ),
    (
        "qwen3",
        {},
        [],
        '"original_max_position_embeddings": 32, "rope_scaling":'
        ' {"rope_type": "llama3", "original_max_position_embeddings": 16, %s}' % LLAMA3,
    ),
    (
        "llama",
        {},
        [],
        '"original_max_position_embeddings": 32, "rope_scaling":'
        ' {"rope_type": "llama3", %s}' % LLAMA3,
    ),
    (
        "llama",
        {},
        [],
        '"max_position_embeddings": 32, "rope_scaling": {"rope_type": "llama3", %s}' % LLAMA3,
    ),
    ("llama", {}, ["hidden_act"], r'"hidden_act": "s\u0069lu"'),
    ("llama", {}, ["rope_theta"], '"rope_theta": 70.0, "rope_theta": 50.0'),
    ("qwen2", {}, [], '"attention_bias": true, "mlp_bias": true'),
    ("llama", {}, [], '"n_embd": 7, "mlp_biases": true'),
]


# ------------------------------------------------------------------------------------------------
# Which keys there are


def names_of_reads(cls, folder):
    """What transformers looks for in a configuration, also in vain, while it loads a model and
    trains."""
    found, plain = set(), configuration_utils.PreTrainedConfig.__getattribute__

    def get(self, name):
        found.add(name)
        return plain(self, name)

    configuration_utils.PreTrainedConfig.__getattribute__ = get
    try:
        x = torch.arange(folders.T)[None]
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        model(x, labels=x)
        model.train()
        model(x, labels=x).loss.backward()
    finally:
        configuration_utils.PreTrainedConfig.__getattribute__ = plain
    return {name for name in found if not callable(getattr(cls, name, None)) and name[:2] != "__"}


def names_of(kind, folder):
    """Methods would be hidden by a key of their name, and properties without a setter refuse it."""
    text = inspect.getsource(configuration_utils) + inspect.getsource(modeling_rope_utils)
    names = set(re.findall(r'kwargs\.(?:pop|get)\("(\w+)"', text))
    names |= set(re.findall(r'"(\w+)" in config_dict', text))
    for cls in CLASSES.values():
        names |= {*cls.__dataclass_fields__, *cls.attribute_map}
    names |= names_of_reads(CLASSES[kind], folder) | {*VALUES}
    names |= {"n_ctx", "task_specific_params", "is_decoder", "pruned_heads", "logits_soft_cap"}
    return sorted(names - {"model_type"})


# ------------------------------------------------------------------------------------------------
# What both make of a case


def in_child(compute):
    """The result of compute() in a process of its own, or None: a case may leave something behind
    in transformers' classes."""
    read, end = os.pipe()
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(end, json.dumps(compute()).encode())
        except Exception:
            pass
        os._exit(0)
    os.close(end)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return json.loads(data) if data else None


def their_loss(folder):
    with open(harness.TOKENS, "rb") as file:
        data = torch.frombuffer(bytearray(file.read()[1024:]), dtype=torch.int16)
    tokens = data.long()
    n = (len(tokens) - 1) // folders.T
    x, y = (tokens[i : i + n * folders.T].view(n, folders.T) for i in (0, 1))
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        output = model(x)
    logits = output[0] if isinstance(output, tuple) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()


def our_answer(folder):
    """Exit status, loss, standard error."""
    log = os.path.join(folder, "log")
    flags = f"--model {folder} --val {harness.TOKENS} --steps 0 --val-every 1 --val-batches -1"
    flags += f" --seq-len {folders.T} --micro-batch 7 --threads 1 --log {log}"
    done = subprocess.run(
        [harness.BINARY, *flags.split()],
        capture_output=True,
        text=True,
        env=harness.ENVIRONMENT,
        timeout=120,
    )
    loss = None
    if not done.returncode:
        with open(log) as file:
            loss = next(e["loss"] for e in map(json.loads, file) if e["event"] == "val")
    return done.returncode, loss, done.stderr


def cases_of(kind, folder):
    for name in names_of(kind, folder):
        for value in dict.fromkeys(PROBES + VALUES.get(name, [])):
            drop = [name] if name in folders.BASE[kind] else []
            yield {"type": kind, "key": name, "drop": drop, "set": f'"{name}": {value}'}


def all_cases(folder):
    for kind in CLASSES:
        yield {"type": kind}
        yield from cases_of(kind, folders.write_folder(os.path.join(folder, kind), {"type": kind}))
    for kind, sizes, drop, members in TOGETHER:
        yield {"type": kind, "sizes": sizes, "drop": drop, "set": members}
    for kind in CLASSES:
        for files in folders.FILES:
            for tied in (False, True)[kind == "gpt2" :]:
                sizes = {} if kind == "gpt2" else {"tie_word_embeddings": tied}
                yield {"type": kind, "sizes": sizes, "files": files}


def answer(case):
    with tempfile.TemporaryDirectory() as folder:
        folders.write_folder(folder, case)
        return in_child(lambda: their_loss(folder)), *our_answer(folder)


def verdict(case, theirs, status, ours, err):
    if status == harness.EXIT_INPUT:
        return "refused" if folders.is_named(case, err) else "REFUSED WITHOUT A NAME"
    if status:
        return f"ENDS WITH {status}"
    if theirs is None:
        return "taken, where transformers fails"
    return "equal" if abs(ours / theirs - 1) <= SAME else "ANOTHER MODEL"


# ------------------------------------------------------------------------------------------------
# The golden file


def kept(found):
    """Of all cases those that the file has: (case, transformers' loss, was it refused)."""
    groups = collections.defaultdict(list)
    for case, theirs, what, _ in found:
        groups[case["type"], case.get("key")].append((case, theirs, what == "refused"))
    harmless = collections.defaultdict(list)  # alone each has the loss of a plain folder
    plain = {case["type"]: theirs for case, theirs, _, _ in found if case.keys() == {"type"}}
    for (kind, key), group in groups.items():
        taken = [one for one in group if one[1] is not None and not one[2]]
        refused = [one for one in group if one[2]]
        if key is None:
            yield from group
        elif refused:
            refused.sort(key=lambda one: one[1] in (None, plain[kind]))  # what would show first
            yield from taken + refused[: 4 if "rope" in key else 2]
        elif taken:
            harmless[kind].append(taken[-1][0]["set"])
    for kind, members in harmless.items():
        yield {"type": kind, "set": ", ".join(members)}, plain[kind], False


def write(found):
    bad = [what for _, _, what, _ in found if what.isupper() or "WITHOUT" in what]
    assert not bad, bad
    cases = []
    for case, theirs, refused in kept(found):
        entry = {name: value for name, value in case.items() if value and name != "key"}
        cases.append(entry | ({} if refused else {"loss": theirs}))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    lines = ",\n".join(json.dumps(case) for case in cases)
    with open(GOLDEN, "w") as file:
        file.write(f'{{"versions": {json.dumps(versions)},\n"cases": [\n{lines}\n]}}\n')


def check_exports():
    """What --export writes has the same loss in transformers."""
    scaled = '"rope_scaling": {"rope_type": "llama3", %s}' % LLAMA3
    for kind in CLASSES:
        for sizes in ({}, {} if kind == "gpt2" else {"tie_word_embeddings": True}):
            case = {"type": kind, "sizes": sizes, "set": "" if kind == "gpt2" else scaled}
            with tempfile.TemporaryDirectory() as folder:
                source, out = (os.path.join(folder, name) for name in ("source", "out"))
                folders.write_folder(source, case)
                flags = f"--model {source} --steps 0 --val-every 0 --seq-len 8 --export {out}"
                done = subprocess.run(
                    [harness.BINARY, *flags.split()], capture_output=True, env=harness.ENVIRONMENT
                )
                assert not done.returncode, done.stderr
                theirs = [in_child(lambda at=at: their_loss(at)) for at in (source, out)]
            print("export", case, theirs)
            assert theirs[0] == theirs[1], case


def main():
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    words, found = sys.argv[1:], []
    with tempfile.TemporaryDirectory() as folder:
        cases = [case for case in all_cases(folder) if all(w in json.dumps(case) for w in words)]
    with multiprocessing.get_context("fork").Pool(3) as pool:
        for case, (theirs, status, ours, err) in zip(cases, pool.imap(answer, cases, 4)):
            what = verdict(case, theirs, status, ours, err)
            found.append((case, theirs, what, err))
            shown = {key: value for key, value in case.items() if value}
            print(
                f"{what} | {theirs} {ours} {json.dumps(shown)} {err.splitlines()[:1]}", flush=True
            )
    print(collections.Counter(what for _, _, what, _ in found))
    if not words:
        check_exports()
        write(found)


if __name__ == "__main__":
    main()
