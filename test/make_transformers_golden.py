#!/usr/bin/env python3
"""Golden numbers of Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE and a mixture with shared experts
(GraniteMoeShared, whose multipliers are 1) by huggingface/transformers, and of nanochat's block by
plain PyTorch, in fp32 on a CPU.

    python3 test/make_transformers_golden.py    writes test/golden/modern_*.json; needs torch,
                                                transformers and numpy; NAME ...: these alone

A model begins with the weights of reference_modern.initial(config, seed), a formula, and makes ten
steps of AdamW on test/golden/gpt_tiny_tokens.bin: sample g is tokens (g T + 0 .. T) mod n, step k
takes samples S k .. S k + S - 1; T = 20, S = 3. lr 1e-3, betas 0.9 and 0.95, eps 1e-8, decay 0.1 on
matrices only, gradients clipped at norm 1. transformers reads each model from a folder that
reference_modern.write_folder wrote, and computes attention and experts by its "eager" path.
nanochat's block is written here, with the formulas of Nano's docstring. Its logits are compared
with those of transformers' model of nanochat, which differs in the factor 1.2 and in the sense of
rotation (check_nano).

A file has: versions; config (the fields of reference_modern.Config), seed, deviations;
losses and norms of the ten steps (before clipping); logits before the first step, at POSITIONS of
sample 0; greedy: GREEDY tokens after prompts, before the first step; gradients of the first step,
and weights after the last: of each tensor its norm and some elements, number i of them at index
i n / count. Tensors of experts, of which transformers' parameters have all in one, are those of its
files: each expert's. No choice of an expert is near another one (CLEAR_CHOICE).
"""

import json
import math
import os
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
import transformers

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import reference_modern as modern  # noqa: E402

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden")
T, S, STEPS, GREEDY = 20, 3, 10, 16
POSITIONS = 0, 7, 19
PROMPTS = [5], [17, 80, 3], [100, 0, 42, 42, 9, 61]
GRADIENT_ELEMENTS, WEIGHT_ELEMENTS = 16, 64
CLEAR = 2e-4  # a greedy choice is as far above the next one
CLEAR_CHOICE = 2e-5  # p of the last expert that is chosen, as a part of it, above the next one

# The norms' eps are larger than those of real models, so that they show. qwen2 has a small theta:
# where keys do not turn, the gradient of their bias is nothing but rounding, which AdamW enlarges.
CASES = {
    "llama": modern.Config(
        "llama", layers=2, heads=4, kv_heads=2, head_dim=16, channels=48, ffn=96, vocab=101,
        scaling=(8.0, 1.0, 4.0, 64),
    ),
    "llama_tied": modern.Config(
        "llama", layers=3, heads=6, kv_heads=3, head_dim=8, channels=48, ffn=80, vocab=101,
        theta=5e5, eps=1e-3, tie=True,
    ),
    "qwen2": modern.Config(
        "qwen2", layers=2, heads=6, kv_heads=2, head_dim=8, channels=48, ffn=112, vocab=101,
        theta=200, eps=1e-4, tie=True,
    ),
    "qwen3": modern.Config(
        "qwen3", layers=2, heads=6, kv_heads=2, head_dim=16, channels=48, ffn=96, vocab=101,
        theta=1e6, eps=4e-3,
    ),
    "qwen3_tied": modern.Config(
        "qwen3", layers=3, heads=4, kv_heads=1, head_dim=12, channels=40, ffn=72, vocab=101,
        theta=1e4, eps=1e-2, tie=True,
    ),
    "nano": modern.Config(
        "nano", layers=2, heads=4, kv_heads=2, head_dim=12, channels=48, ffn=192, vocab=101,
        theta=1e5, eps=1e-6,
    ),
    "mixtral": modern.Config(
        "llama", layers=2, heads=6, kv_heads=3, head_dim=8, channels=40, ffn=0, vocab=101,
        theta=1e6, eps=1e-3, experts=5, top_k=3, expert_ffn=27,
    ),
    "mixtral_tied": modern.Config(
        "llama", layers=2, heads=4, kv_heads=2, head_dim=10, channels=36, ffn=0, vocab=101,
        theta=1e4, eps=1e-4, tie=True, experts=3, top_k=1, expert_ffn=44,
    ),
    "qwen3_moe": modern.Config(
        "qwen3", layers=2, heads=4, kv_heads=1, head_dim=12, channels=40, ffn=0, vocab=101,
        theta=1e4, eps=4e-3, experts=6, top_k=2, expert_ffn=21,
    ),
    "shared": modern.Config(
        "llama", layers=2, heads=4, kv_heads=2, head_dim=10, channels=40, ffn=0, vocab=101,
        theta=1e4, eps=1e-3, experts=4, top_k=2, expert_ffn=19, shared_experts=2,
        shared_expert_ffn=13,
    ),
}
# Of AdamW, where it is not 1e-8. With one expert for a token its weight is 1, and the gradient of
# the router nothing but rounding.
EPS = {"mixtral_tied": 1e-5}
# GraniteMoeShared's parameters: their names in memory, and of modern.STACK_NAMES
INSIDE = {
    "block_sparse_moe.router.weight": "router",
    "block_sparse_moe.experts.gate_up_proj": "input",
    "block_sparse_moe.experts.down_proj": "output",
}
# So that the eps of the heads' norms and the soft cap show
DEVIATIONS = {"nano": {"q": 0.01, "k": 0.01, "head": 1.0}}


# ------------------------------------------------------------------------------------------------
class Nano(torch.nn.Module):
    """n(x) = x / sqrt(mean(x^2) + eps); x = n(wte[token]); each block x += Wo attention(q, k, v),
    with q, k, v from n(x), turned by positions (the pair (i, i + D/2) of position t by the angle
    t theta^(-2 i / D)), then q = 1.2 n(q), k = 1.2 n(k) in each head, scale 1 / sqrt(D); head h of
    q reads head floor(h K / H) of k and v; x += Wproj relu(Wfc n(x))^2;
    logits = 15 tanh(W n(x) / 15)."""

    def __init__(self, config, tensors):
        super().__init__()
        self.c, self.names = config, {}
        for name, value in tensors.items():
            self.names[name] = name.replace(".", "_")
            self.register_parameter(self.names[name], torch.nn.Parameter(value.clone()))

    def named_parameters(self):
        return [(name, getattr(self, attribute)) for name, attribute in self.names.items()]

    def norm(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.c.eps).rsqrt()

    def turn(self, x):
        """(B,T,heads,D)"""
        D, t = self.c.head_dim, torch.arange(x.shape[1], dtype=torch.float32)
        f = torch.tensor([self.c.theta ** (-2 * i / D) for i in range(D // 2)])
        pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :])
        turns = torch.polar(torch.ones(len(t), D // 2), torch.outer(t, f))
        pairs = pairs * turns[None, :, None, :]
        return torch.cat([pairs.real, pairs.imag], -1)

    def attention(self, x, w):
        c, (B, length, _) = self.c, x.shape
        q = (x @ w("self_attn.q_proj").T).view(B, length, c.heads, c.head_dim)
        k = (x @ w("self_attn.k_proj").T).view(B, length, c.kv_heads, c.head_dim)
        v = (x @ w("self_attn.v_proj").T).view(B, length, c.kv_heads, c.head_dim)
        q, k = 1.2 * self.norm(self.turn(q)), 1.2 * self.norm(self.turn(k))
        found = []
        for h in range(c.heads):
            j = h * c.kv_heads // c.heads
            scores = q[:, :, h] @ k[:, :, j].transpose(1, 2) / math.sqrt(c.head_dim)
            future = torch.ones(length, length).triu(1).bool()
            found.append(scores.masked_fill(future, -math.inf).softmax(2) @ v[:, :, j])
        return torch.cat(found, 2) @ w("self_attn.o_proj").T

    def logits(self, tokens):
        p = dict(self.named_parameters())
        x = self.norm(p["model.embed_tokens.weight"][tokens])
        for l in range(self.c.layers):
            w = lambda name: p[f"model.layers.{l}.{name}.weight"]
            x = x + self.attention(self.norm(x), w)
            x = x + (self.norm(x) @ w("mlp.fc_proj").T).relu().square() @ w("mlp.down_proj").T
        return 15 * torch.tanh(self.norm(x) @ p["lm_head.weight"].T / 15)


class Transformers(torch.nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", experts_implementation="eager",
            dtype=torch.float32, output_loading_info=True,
        )
        wrong = "missing_keys", "unexpected_keys", "mismatched_keys"
        assert not any(info[key] for key in wrong), info
        self.model.eval()

    def named_parameters(self):
        return list(self.model.named_parameters())

    def logits(self, tokens):
        return self.model(tokens, use_cache=False).logits


def check_nano(config, tensors, nano):
    """Logits of transformers' model of nanochat, which turns the other way: there the halves of
    each head of q and k change places."""
    values = modern.config_json(config)
    values.update(model_type="nanochat", architectures=None, attn_implementation="eager")
    assert values.pop("head_dim") * config.heads == config.channels  # it has no other
    model = transformers.NanoChatForCausalLM(transformers.NanoChatConfig(**values)).eval()
    assert model.config.rope_parameters["rope_theta"] == config.theta

    theirs = {}
    for name, value in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = value.view(-1, 2, config.head_dim // 2, config.channels)
            value = heads.flip(1).reshape(value.shape)
        theirs[name.replace("fc_proj", "fc1").replace("down_proj", "fc2")] = value
    model.load_state_dict(theirs)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.2**2
    tokens = torch.arange(T)[None] * 7 % config.vocab
    ours, theirs = nano.logits(tokens), model(tokens, use_cache=False).logits
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 2e-6, error


# ------------------------------------------------------------------------------------------------
def stream():
    with open(os.path.join(FOLDER, "gpt_tiny_tokens.bin"), "rb") as file:
        return torch.from_numpy(np.frombuffer(file.read()[1024:], "<u2").astype(np.int64))


def batch(tokens, k):
    rows = [[(g * T + i) % len(tokens) for i in range(T + 1)] for g in range(k * S, k * S + S)]
    samples = tokens[torch.tensor(rows)]
    return samples[:, :-1], samples[:, 1:]


def numbers(values):
    return [float(f"{float(x):.9g}") for x in torch.as_tensor(values).detach()]


def some(tensor, count):
    flat = tensor.detach().double().flatten()
    at = [i * len(flat) // count for i in range(min(count, len(flat)))]
    if len(flat) <= count:
        at = list(range(len(flat)))
    return {"norm": numbers([flat.norm()])[0], "elements": numbers(flat[at])}


def continuations(model):
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(GREEDY):
            last = model.logits(torch.tensor([tokens]))[0, -1]
            best = last.topk(2).values
            assert best[0] - best[1] > CLEAR, f"{prompt}: the choice is not clear: {best}"
            tokens.append(int(last.argmax()))
        found.append({"prompt": prompt, "tokens": tokens[len(prompt) :]})
    return found


def apart(tensors, config):
    """With a tensor for each matrix of each expert, named as in files."""
    if config.shared_experts:
        for inside, name in INSIDE.items():
            name = modern.STACK_NAMES[name]
            tensors = {key.replace(inside, name): value for key, value in tensors.items()}
        return modern.apart(tensors, config)
    found = {}
    for name, value in tensors.items():
        start, is_expert, kind = name.partition("mlp.experts.")
        if not config.experts or not is_expert:
            router = modern.EXPERT_NAMES.get(config.arch, {}).get("router")
            found[name.replace("mlp.gate.weight", router) if config.experts else name] = value
            continue
        names = modern.EXPERT_NAMES[config.arch]
        for e, matrix in enumerate(value):
            parts = {"down": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate", "up"), matrix.chunk(2)))
            found.update({start + names[part] % e: value for part, value in parts.items()})
    return found


def check_choices(model, config):
    """Stops where p of an expert that is chosen is hardly more than that of one that is not."""

    def check(module, inputs, outputs):
        p = outputs[0].double().softmax(-1).sort(-1, descending=True).values
        last, after = p[:, config.top_k - 1], p[:, config.top_k]
        gap = ((last - after) / last).min()
        assert gap > CLEAR_CHOICE, f"the choice of an expert is not clear: {gap}"

    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    assert len(routers) == (config.layers if config.experts else 0), routers
    for router in routers:
        router.register_forward_hook(check)


def train(model, config, tokens, eps):
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=eps)
    found = {"losses": [], "norms": []}
    for k in range(STEPS):
        x, y = batch(tokens, k)
        optimizer.zero_grad()
        loss = F.cross_entropy(model.logits(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in parameters.values()))
        found["losses"] += numbers([loss.item()])
        found["norms"] += numbers([norm])
        if k == 0:
            gradients = apart({name: p.grad for name, p in parameters.items()}, config)
            found["gradients"] = {
                name: some(value, GRADIENT_ELEMENTS) for name, value in gradients.items()
            }
        for p in parameters.values():  # clip_grad_norm_ would add 1e-6 to the norm
            p.grad *= min(1.0, 1.0 / norm)
        optimizer.step()
    found["weights"] = {
        name: some(p, WEIGHT_ELEMENTS) for name, p in apart(parameters, config).items()
    }
    return found


def make(name, config):
    deviations = DEVIATIONS.get(name, {})
    parameters = modern.initial(config, name, deviations.items())
    tensors = {
        modern.file_name(key, config): torch.from_numpy(value).float()
        for key, value in parameters.items()
    }
    tokens = stream()
    if config.arch == "nano":
        model = Nano(config, tensors)
        with torch.no_grad():
            check_nano(config, tensors, model)
    else:
        with tempfile.TemporaryDirectory() as folder:
            model = Transformers(modern.write_folder(folder, config, parameters))
        assert type(model.model).__name__ == config.types[1]
        check_choices(model, config)
    with torch.no_grad():
        logits = model.logits(batch(tokens, 0)[0])[0]
        found = {
            "logits": {str(t): numbers(logits[t]) for t in POSITIONS},
            "greedy": continuations(model),
        }
    found.update(train(model, config, tokens, EPS.get(name, 1e-8)))
    found = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": config.given(),
        "seed": name,
        "deviations": deviations,
        **({"eps": EPS[name]} if name in EPS else {}),
        **found,
    }
    norms = found["norms"]
    print(f"{name}: losses {found['losses'][0]:.6f} to {found['losses'][-1]:.6f}, norms", norms)
    with open(os.path.join(FOLDER, f"modern_{name}.json"), "w") as file:
        text = json.dumps(found, indent=1)
        file.write(compact(text) + "\n")


def compact(text):
    """Lists of numbers in as many lines as they need."""
    out, inside = [], False
    for line in text.split("\n"):
        word = line.strip()
        if inside and len(out[-1]) + len(word) < 98:
            out[-1] += (" " if not out[-1].endswith("[") else "") + word
        else:
            out.append(line)
        inside = word.endswith("[") or (inside and not word.startswith("]"))
    return "\n".join(out)


def main():
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # one order of summation, so the same bytes each time
    for name in sys.argv[1:] or CASES:
        make(name, CASES[name])


if __name__ == "__main__":
    main()
