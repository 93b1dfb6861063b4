#!/usr/bin/env python3
"""bench_llama.py: tokens a second of a small Llama, beside GPT-2's block and transformers' Llama.

    .venv-peers/bin/python scripts/bench_llama.py [--rounds 3] [--dtype bf16] [--steps 8]

Needs torch and transformers in that environment, and ./train_gpt with its example data (make data).
The runs alternate; each row is the best of the rounds. Speeds come from a shared machine: compare
within one call only. "share" is the share of the peak that the program measures.
"""

import argparse
import json
import subprocess
import tempfile
import time

LAYERS, CHANNELS, HEADS, FFN, VOCAB = 8, 512, 8, 1536, 257
ROWS, T = 8, 256
OURS = {
    "GPT-2 block": f"layers={LAYERS},heads={HEADS},channels={CHANNELS},vocab={VOCAB}",
    "Llama block": f"arch=llama,layers={LAYERS},heads={HEADS},channels={CHANNELS},ffn={FFN},"
    f"vocab={VOCAB},tie=1",
    "Llama block, 2 heads of keys": f"arch=llama,layers={LAYERS},heads={HEADS},kv_heads=2,"
    f"channels={CHANNELS},ffn={FFN},vocab={VOCAB},tie=1",
}
PRIVATE = "--dp-noise 1 --dp-clip 1 --dp-show-private".split()


def ours(model, options, more=()):
    """Tokens a second and the share of the peak: medians over the steps but the first two."""
    with tempfile.NamedTemporaryFile("r") as log:
        subprocess.run(
            ["./train_gpt", "--model", model, "--dtype", options.dtype, "--log", log.name]
            + ["--train", "data/text_bytes_train_*.bin", "--val-every", "0", "--seq-len", str(T)]
            + ["--micro-batch", str(ROWS), "--steps", str(options.steps), *more],
            check=True, stdout=subprocess.DEVNULL,
        )
        steps = [event for event in map(json.loads, log) if event["event"] == "step"][2:]
    middle = sorted(steps, key=lambda event: event["ms"])[len(steps) // 2]
    return middle["tokens_per_s"], middle["mfu"]


def transformers_llama(options):
    """Tokens a second of transformers' LlamaForCausalLM with torch's AdamW, best of the steps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=CHANNELS, intermediate_size=FFN, num_hidden_layers=LAYERS,
                         num_attention_heads=HEADS, num_key_value_heads=HEADS, vocab_size=VOCAB,
                         tie_word_embeddings=True, max_position_embeddings=T)
    model = LlamaForCausalLM(config)
    model.to(torch.bfloat16 if options.dtype == "bf16" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(0, VOCAB, (ROWS, T))
    times = []
    for _ in range(options.steps):
        begin = time.monotonic()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.monotonic() - begin)
    return ROWS * T / sorted(times)[len(times) // 2], None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    options = parser.parse_args()
    best = {}
    for _ in range(options.rounds):
        runs = {name: ours(model, options) for name, model in OURS.items()}
        for name, model in list(OURS.items())[:2]:
            runs[name + ", private"] = ours(model, options, PRIVATE)
        runs["transformers' Llama"] = transformers_llama(options)
        for name, result in runs.items():
            best[name] = max(result, best.get(name, result))
    print(f"{'':34} tokens/s   share")
    for name, (rate, share) in best.items():
        print(f"{name:34} {rate:8.0f}   {'' if share is None else f'{share:.3f}'}")


if __name__ == "__main__":
    main()
