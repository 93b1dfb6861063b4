#!/usr/bin/env python3
"""from_huggingface.py: turns a GPT-2 of Hugging Face into a model file for --model.

    from_huggingface.py FOLDER MODEL.bin                with config.json and model.safetensors, or
                                                        several and their index
    from_huggingface.py FILE.safetensors MODEL.bin      config.json lies beside it

A folder is what `model.save_pretrained(FOLDER)` writes, or a clone of the model's page. fp32 and
bf16 stay what they are, fp16 becomes fp32: no value changes. What the program could not compute to
the letter (another activation, epsilon or scaling, untied classifier, further tensors) is refused.
docs/formats.md describes the result. Needs numpy.

Exit status: 0 done, 2 bad input, 3 resources (disk, memory, numpy).
"""

import argparse
import sys
from pathlib import Path

from model_files import (
    EXIT_INPUT,
    VOCAB_PADDING,
    Config,
    Failure,
    main_of,
    map_file,
    np,
    read_json,
    read_safetensors,
    replacing,
    tensors,
    write_model,
)

# What makes a GPT-2 ours: key of config.json -> accepted values; the first is the default of a key
# that is missing. checkpoint/huggingface_config.h has the same keys.
ACCEPTED = {
    "model_type": ("gpt2",),
    "activation_function": (
        *("gelu_new", "gelu_pytorch_tanh"),
        *("gelu_fast", "gelu_accurate", "gelu_python_tanh"),
    ),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "is_causal": (True,),
} | dict.fromkeys(
    "quantization_config per_layer_config fusion_config transformers_weights configuration_files"
    " text_config decoder generator attribute_map".split(),
    (None,),
)
# transformers' name of a size: (its other name, what it is where both are missing)
SIZES = {
    "n_positions": ("max_position_embeddings", 1024),
    "vocab_size": ("vocab_size", 50257),
    "n_layer": ("num_hidden_layers", 12),
    "n_head": ("num_attention_heads", 12),
    "n_embd": ("hidden_size", 768),
}
MASKS = ("attn.bias", "attn.masked_bias")  # older files hold the causal mask


def read_config(path):
    found = read_json(path, map_file(path, 1))
    for key, accepted in ACCEPTED.items():
        if found.get(key, accepted[0]) not in accepted:
            raise Failure(
                EXIT_INPUT,
                f"{path}: train_gpt computes {key} = {accepted[0]!r}, found {found[key]!r:.100}",
            )
    sizes = {key: found.get(key, found.get(*other)) for key, other in SIZES.items()}
    twice = [key for key, (other, _) in SIZES.items() if found.get(other, sizes[key]) != sizes[key]]
    if twice:
        raise Failure(EXIT_INPUT, f"{path}: {twice[0]} differs from {SIZES[twice[0]][0]}")
    if any(type(size) is not int for size in sizes.values()):
        raise Failure(EXIT_INPUT, f"{path}: expected whole numbers, found {sizes!r:.300}")
    padded_vocab = -(-sizes["vocab_size"] // VOCAB_PADDING) * VOCAB_PADDING
    config = Config(*sizes.values(), padded_vocab).check(path)
    if found.get("n_inner") not in (None, 4 * config.channels):
        raise Failure(
            EXIT_INPUT,
            f"{path}: train_gpt computes n_inner = {4 * config.channels}, found"
            f" {found['n_inner']!r:.100}",
        )
    return config


def read_folder(folder):
    """The tensors of model.safetensors, or of the files that the index lists."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return read_safetensors(folder / "model.safetensors")
    if not index.exists():
        raise Failure(
            EXIT_INPUT,
            f"{folder}: no model.safetensors in it; transformers writes one:"
            " model.save_pretrained(FOLDER)",
        )
    weight_map = read_json(index, map_file(index, 1)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and file == Path(file).name for file in weight_map.values()
    ):
        raise Failure(
            EXIT_INPUT, f"{index}: expected a weight_map of names to files in this folder"
        )
    files = {file: read_safetensors(folder / file) for file in sorted(set(weight_map.values()))}
    found = {}
    for tensors_of_file in files.values():
        found |= tensors_of_file  # of a tensor in several files transformers takes the last
    for name, file in weight_map.items():
        if name not in files[file]:
            raise Failure(EXIT_INPUT, f"{index}: {name!r:.100} is not in {file}")
        if found[name] is not files[file][name] and not same(found[name], files[file][name]):
            raise Failure(EXIT_INPUT, f"{index}: {name!r:.100} differs in a file behind {file}")
    return found


def same(a, b):
    return a.dtype == b.dtype and np.array_equal(a, b)


def chosen(path, config, found):
    """The model's tensors by GPT-2's names, each of the right shape, and none left over."""
    names = [name.removeprefix("transformer.") for name in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise Failure(EXIT_INPUT, f"{path}: {twice[0]} is there with and without transformer.")
    found = dict(zip(names, found.values()))
    expected = {
        name: tensor.their_shape(config)
        for tensor in tensors(config)
        for name in tensor.names(config)
    }
    for name, shape in expected.items():
        if name not in found or found[name].shape != shape or found[name].dtype == np.uint8:
            raise Failure(
                EXIT_INPUT,
                f"{path}: expected {name} of shape {shape} in fp32, bf16 or fp16, found "
                f"{found[name].shape if name in found else 'none'}",
            )
    head = found.pop("lm_head.weight", found["wte.weight"])
    if not same(head, found["wte.weight"]):
        raise Failure(
            EXIT_INPUT,
            f"{path}: lm_head.weight differs from wte.weight; train_gpt has one matrix for both",
        )
    more = [name for name in found if name not in expected and not name.endswith(MASKS)]
    if more:
        raise Failure(EXIT_INPUT, f"{path}: a GPT-2 has no tensor {more[0]!r:.100}")
    return {name: found[name] for name in expected}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="FOLDER_OR_SAFETENSORS")
    parser.add_argument("model", type=Path, metavar="MODEL.bin")
    options = parser.parse_args()
    source = options.source
    config = read_config((source if source.is_dir() else source.parent) / "config.json")
    found = read_folder(source) if source.is_dir() else read_safetensors(source)
    views = chosen(source, config, found)
    with replacing(options.model) as file:
        write_model(file, config, views)
    print(
        f"{options.model}: {config.layers} layers, {config.heads} heads, {config.channels}"
        f" channels, vocabulary {config.vocab}"
    )


if __name__ == "__main__":
    sys.exit(main_of("from_huggingface", main))
