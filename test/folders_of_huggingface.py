"""folders_of_huggingface.py: small folders of Hugging Face whose weights are a formula, so that
make_huggingface_golden.py, which asks transformers for their losses, and test_huggingface_keys.py,
which compares the program's, write the same bytes.

A case is a dictionary: type, a key of BASE; drop, keys of BASE that config.json lacks; set, JSON
text of the members that it has besides; sizes, fields of the weights that differ from BASE's;
files, a key of FILES.
"""

import json
import os
import re
import struct

import numpy as np

import harness
import reference_modern as modern

T = 20  # tokens of a window
DEVIATIONS = (("wte", 0.3),)  # so that attention shows behind a tied head

ROTARY = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": harness.VOCAB,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 50.0,
    "tie_word_embeddings": False, "hidden_act": "silu",
}
BASE = {
    "gpt2": {
        "n_layer": 2, "n_head": 3, "n_embd": 24, "vocab_size": harness.VOCAB, "n_positions": 24,
    },
    "llama": ROTARY,
    "qwen2": ROTARY,
    "qwen3": ROTARY,
}
FIELDS = {  # of reference_modern.Config
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "channels": "hidden_size",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
}


def gpt2_tensors(sizes):
    """Names as in GPT2LMHeadModel, without the head."""
    C, V, P = sizes["n_embd"], sizes["vocab_size"], sizes["n_positions"]
    shapes = {"wte.weight": (V, C), "wpe.weight": (P, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    for layer in range(sizes["n_layer"]):
        for name, shape in {
            "ln_1": (C,), "attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "ln_2": (C,),
            "mlp.c_fc": (C, 4 * C), "mlp.c_proj": (4 * C, C),
        }.items():
            shapes[f"h.{layer}.{name}.weight"] = shape
            shapes[f"h.{layer}.{name}.bias"] = shape[-1:]
    found = {}
    for name, shape in shapes.items():
        gain = name.endswith("weight") and len(shape) == 1
        width = 0.2 if len(shape) == 1 else 0.3 if name[0] == "w" else shape[0] ** -0.5
        u = modern.uniform(f"gpt2 {name}", int(np.prod(shape))).reshape(shape)
        found["transformer." + name] = (gain + 3**0.5 * width * (2 * u - 1)).astype("<f4")
    return found


def tensors_of(case):
    """Name -> array in fp32."""
    base = {**BASE[case["type"]], **case.get("sizes", {})}
    if case["type"] == "gpt2":
        return gpt2_tensors(base)
    sizes = {field: base[key] for field, key in FIELDS.items()}
    config = modern.Config(case["type"], **sizes, tie=base["tie_word_embeddings"])
    values = modern.initial(config, case["type"], DEVIATIONS)
    return {modern.file_name(key, config): value.astype("<f4") for key, value in values.items()}


# ------------------------------------------------------------------------------------------------
# What a folder has besides config.json: of the tensors, name of a file -> its bytes


def noise(like):
    u = modern.uniform("another tensor", like.size).reshape(like.shape)
    return (u - 0.5).astype("<f4")


def embedding(tensors):
    return next(name for name in tensors if name.endswith(("wte.weight", "embed_tokens.weight")))


def plain(tensors):
    return {"model.safetensors": modern.safetensors_bytes(tensors)}


def with_head(name, same):
    def files(tensors):
        table = tensors[embedding(tensors)]
        return plain({**tensors, name: table if same else noise(table)})

    return files


def bare(tensors):
    return plain(
        {name.split(".", 1)[1] if name[0] != "l" else name: t for name, t in tensors.items()}
    )


def prefixed_head(tensors):
    return plain({"model." * (name[0] == "l") + name: t for name, t in tensors.items()})


def more(tensors):
    """Tensors that no model has: left out by transformers, too."""
    others = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, "<f4")}
    others["model.layers.7.mlp.up_proj.weight"] = np.ones((40, 32), "<f4")
    others["score.weight"] = np.ones((2, 32), "<f4")
    return plain({**tensors, **others})


def halves(tensors):
    """fp16: the values are rounded, once."""
    entries, data, at = {}, [], 0
    for name, value in tensors.items():
        data.append(value.astype("<f2").tobytes())
        entries[name] = {"dtype": "F16", "shape": list(value.shape)}
        entries[name]["data_offsets"] = [at, at + len(data[-1])]
        at += len(data[-1])
    text = json.dumps(entries).encode()
    return {"model.safetensors": struct.pack("<Q", len(text)) + text + b"".join(data)}


def index(mapped, files, doubled=""):
    """files: name -> tensors; mapped: tensor -> name of a file."""
    pairs = ", ".join(f"{json.dumps(name)}: {json.dumps(file)}" for name, file in mapped.items())
    text = '{"metadata": {}, "weight_map": {%s%s}}' % (doubled, pairs)
    found = {name: modern.safetensors_bytes(tensors) for name, tensors in files.items()}
    return {**found, "model.safetensors.index.json": text.encode()}


def two_files(stale, true, copy=noise, doubled=False):
    """One tensor is in two files, and the index names `true`."""

    def files(tensors):
        name = next(name for name in tensors if "mlp" in name and "weight" in name)
        first, second = "model-a.safetensors", "model-b.safetensors"
        mapped = {tensor: first for tensor in tensors}
        held = {first: dict(tensors), second: {}}
        held[second]["more.weight"] = np.ones(3, "<f4")
        mapped["more.weight"] = second
        held[stale][name], held[true][name] = copy(tensors[name]), tensors[name]
        mapped[name] = true
        again = f"{json.dumps(name)}: {json.dumps(stale)}, " if doubled else ""
        return index(mapped, held, again)

    return files


A, B = "model-a.safetensors", "model-b.safetensors"
FILES = {
    "plain": plain,
    "the head, the same": with_head("lm_head.weight", True),
    "the head, another one": with_head("lm_head.weight", False),
    "the head with a prefix, another one": with_head("model.lm_head.weight", False),
    "gpt2's head with a prefix, another one": with_head("transformer.lm_head.weight", False),
    "no prefixes": bare,
    "a prefix of the head": prefixed_head,
    "more tensors": more,
    "fp16": halves,
    "index, stale copy in front": two_files(A, B),
    "index, stale copy behind": two_files(B, A),
    "index, equal copies": two_files(B, A, copy=np.copy),
    "index, the last of two entries": two_files(A, B, doubled=True),
}


def members(case):
    base = {"model_type": case["type"], **BASE[case["type"]], **case.get("sizes", {})}
    for key in case.get("drop", ()):
        base.pop(key, None)
    text = json.dumps(base)[1:-1]
    return "{" + ", ".join(part for part in (text, case.get("set")) if part) + "}"


def write_folder(folder, case):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as file:
        file.write(members(case))
    for name, data in FILES[case.get("files", "plain")](tensors_of(case)).items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)
    return folder


def is_named(case, err):
    """Does a refusal say what it is about: a key, a tensor, or the fields that do not fit?"""
    names = re.findall(r'"(\w+)":', case.get("set", "")) + case.get("drop", [])
    words = *names, "tensor", "lm_head.weight", "is impossible: ", "positions (max_seq_len"
    return any(word in err for word in words)
