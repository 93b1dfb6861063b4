#!/usr/bin/env python3
"""to_huggingface.py: turns a model file into a folder that Hugging Face's transformers loads as
GPT2LMHeadModel.

    to_huggingface.py MODEL.bin FOLDER [--tokenizer NAME_tokenizer.bin]

    AutoModelForCausalLM.from_pretrained("FOLDER")      in Python, then
    AutoTokenizer.from_pretrained("FOLDER")             with --tokenizer: the text tokenizer of
                                                        prepare_data.py

MODEL.bin is what --export writes, fp32 or bf16. A checkpoint is exported first, by the command that
trained it with --resume 1 --steps 0 --export MODEL.bin added (the newest in --out is taken). Writes
model.safetensors, config.json and generation_config.json; the padding of the vocabulary is left
out, and no value changes: from_huggingface.py gives the same MODEL.bin back. Needs numpy.

Exit status: 0 done, 2 bad input, 3 resources (disk, memory, numpy).
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from model_files import (
    EXIT_INPUT,
    HEADER_BYTES,
    Failure,
    main_of,
    map_file,
    read_model,
    replacing,
    write_safetensors,
)

TOKENIZER_MAGIC = 20240328
GPT2_EOT, END_OF_TEXT = 50256, "<|endoftext|>"


# --------------------------------------------------------------------------------------------------
# Tokenizers


def read_tokenizer(path):
    """Returns (tokens, id of end-of-text)."""
    data = bytes(map_file(path, HEADER_BYTES))
    magic, version, vocab, end = (
        int.from_bytes(data[i : i + 4], "little", signed=True) for i in (0, 4, 8, 12)
    )
    if magic != TOKENIZER_MAGIC or version != 2 or not 0 <= end < vocab <= 1 << 24:
        raise Failure(
            EXIT_INPUT,
            f"{path}: expected a tokenizer (magic {TOKENIZER_MAGIC}, version 2), found {magic},"
            f" {version}, {vocab} tokens, end {end}",
        )
    tokens, at = [], HEADER_BYTES
    while len(tokens) < vocab and at < len(data):
        tokens.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    if len({*tokens} - {b""}) < vocab or at != len(data):
        raise Failure(
            EXIT_INPUT,
            f"{path}: expected {vocab} different tokens to fill it exactly: cut off or damaged",
        )
    return tokens, end


def merges(tokens):
    """The pairs that byte-pair encoding joins, in order: a token's pair is what the tokens before
    it make of its bytes."""
    rank, found = {}, []
    for token in tokens:
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            best = min(
                range(len(parts) - 1), key=lambda i: rank.get(parts[i] + parts[i + 1], len(tokens))
            )
            if parts[best] + parts[best + 1] not in rank:
                raise Failure(
                    EXIT_INPUT,
                    f"--tokenizer: {token!r:.100} is no pair of earlier tokens: not a byte-pair"
                    " vocabulary",
                )
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        rank[token] = len(rank)
        found += [parts] if len(parts) == 2 else []
    return found


def printable():
    """GPT-2's alphabet: a character for each byte, the byte's own where that can be seen."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {
        byte: chr(256 + i) for i, byte in enumerate(unseen)
    }


def tokenizer_json(tokens, end):
    alphabet = printable()
    spell = lambda token: "".join(alphabet[byte] for byte in token)
    ordinary = [token for i, token in enumerate(tokens) if i != end]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    special = {
        "id": end,
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    ids = {spell(token): i for i, token in enumerate(tokens) if i != end} | {END_OF_TEXT: end}
    model = {
        "type": "BPE",
        "vocab": ids,
        "merges": [[spell(a), spell(b)] for a, b in merges(ordinary)],
    }
    whole = {
        "version": "1.0",
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    return whole, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
    }


# --------------------------------------------------------------------------------------------------


def end_of_text(vocab):
    """Where no tokenizer is given, as the program has it: bytes end with 0, GPT-2's texts with
    50256."""
    return 0 if vocab <= 256 else GPT2_EOT if vocab > GPT2_EOT else None


def config_json(config, dtype, end):
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab,
        "n_positions": config.positions,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.channels,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
    }


def write_folder(folder, views, texts):
    """All files are written before the first appears under its name."""
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as files:
        if not folder.exists():
            folder.mkdir(parents=True)
            undo.callback(folder.rmdir)
        write_safetensors(
            files.enter_context(replacing(folder / "model.safetensors")),
            {f"transformer.{name}": view for name, view in views.items()},
        )
        for name, content in texts.items():
            files.enter_context(replacing(folder / name)).write(
                json.dumps(content, indent=2).encode()
            )
        undo.pop_all()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL.bin")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer of prepare_data.py or llm.c, to go with the model",
    )
    options = parser.parse_args()
    if options.model.is_dir():
        raise Failure(
            EXIT_INPUT,
            f"{options.model}: a folder; a checkpoint is exported first: --resume 1 --steps 0"
            " --export MODEL.bin",
        )
    config, views = read_model(options.model)
    end, texts = end_of_text(config.vocab), {}
    if options.tokenizer:
        tokens, end = read_tokenizer(options.tokenizer)
        if len(tokens) > config.vocab:
            raise Failure(
                EXIT_INPUT,
                f"{options.tokenizer}: {len(tokens)} tokens are more than the model's vocabulary of"
                f" {config.vocab}",
            )
        texts["tokenizer.json"], texts["tokenizer_config.json"] = tokenizer_json(tokens, end)
    dtype = {2: "bfloat16", 4: "float32"}[views["wte.weight"].itemsize]
    texts |= {
        "config.json": config_json(config, dtype, end),
        "generation_config.json": {"bos_token_id": end, "eos_token_id": end},
    }
    write_folder(options.folder, views, texts)
    print(
        f"{options.folder}: {config.layers} layers, {config.heads} heads, {config.channels}"
        f" channels, vocabulary {config.vocab}, {dtype}"
    )


if __name__ == "__main__":
    sys.exit(main_of("to_huggingface", main))
