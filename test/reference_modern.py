"""reference_modern.py: Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE and nanochat's block, a second time:
numpy in fp64, slow and obvious.

The formulas are those of the papers and of huggingface/transformers, not of the program. What a run
does with them (samples, rates, clipping, optimizers, cyclic versions, sharing, private steps) is
reference.py's Run. test_modern.py compares both with the numbers of transformers
(make_transformers_golden.py), and the program with both.

Parameters are a dictionary: (storage, tensor) -> array, as in reference.py. A storage is "wte", the
number of a block, "lnf", or "head" where the classifier has a table of its own. Of experts each
matrix has its own: "gate.3" is that of expert 3, "gate.shared" that of those to which all tokens
go.
"""

import json
import math
import os
import struct
import typing
import zlib

import numpy as np

import reference
from reference import MASKED, softmax

# Of a block's tensors and of the others: the names in a file
BLOCK_NAMES = {
    "norm1": "input_layernorm.weight", "q": "self_attn.q_proj.weight",
    "qb": "self_attn.q_proj.bias", "k": "self_attn.k_proj.weight", "kb": "self_attn.k_proj.bias",
    "v": "self_attn.v_proj.weight", "vb": "self_attn.v_proj.bias",
    "qnorm": "self_attn.q_norm.weight", "knorm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight", "norm2": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
    "fc": "mlp.fc_proj.weight", "fcproj": "mlp.down_proj.weight",
}
# The same of blocks with experts; %s: the expert
EXPERT_NAMES = {
    "llama": {
        "router": "block_sparse_moe.gate.weight",
        "gate": "block_sparse_moe.experts.%s.w1.weight",
        "up": "block_sparse_moe.experts.%s.w3.weight",
        "down": "block_sparse_moe.experts.%s.w2.weight",
    },
    "qwen3": {
        "router": "mlp.gate.weight", "gate": "mlp.experts.%s.gate_proj.weight",
        "up": "mlp.experts.%s.up_proj.weight", "down": "mlp.experts.%s.down_proj.weight",
    },
}
# With shared experts, GraniteMoeShared's files have those of all experts together (together())
STACK_NAMES = {
    "router": "block_sparse_moe.router.layer.weight",
    "input": "block_sparse_moe.input_linear.weight",
    "output": "block_sparse_moe.output_linear.weight",
    "shared input": "shared_mlp.input_linear.weight",
    "shared output": "shared_mlp.output_linear.weight",
}
OTHER_NAMES = {
    "wte": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
}
# In config.json: model_type, architectures. nanochat's is this project's own.
TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "nano": ("train_gpt_nano", "NanoForCausalLM"),
}
TYPES_WITH_EXPERTS = {
    "llama": ("mixtral", "MixtralForCausalLM"),
    "qwen3": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
OF_EXPERTS = ("experts", "top_k", "expert_ffn", "prototypes", "shared_experts", "shared_expert_ffn")
NANO_QK_SCALE, NANO_SOFTCAP = 1.2, 15


class Config(typing.NamedTuple):
    arch: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    channels: int
    ffn: int
    vocab: int
    theta: float = 1e4
    eps: float = 1e-5
    tie: bool = False
    # (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings) or None
    scaling: typing.Optional[tuple] = None
    positions: int = 128
    # Experts in place of the MLP (0: none). A token goes to the top_k of all, or of each of so many
    # groups of equal size.
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    prototypes: int = 0
    # Beside them, to which all tokens go: how many, and the width of each
    shared_experts: int = 0
    shared_expert_ffn: int = 0

    @property
    def groups(self):
        return max(1, self.prototypes)

    @property
    def types(self):
        """In config.json: model_type, architectures. Experts in groups are this project's own."""
        model_type, name = (TYPES_WITH_EXPERTS if self.experts else TYPES)[self.arch]
        if self.shared_experts:
            model_type, name = "granitemoeshared", "GraniteMoeSharedForCausalLM"
        return ("train_gpt_" if self.prototypes > 1 else "") + model_type, name

    def given(self):
        """The fields, without those of experts where there are none."""
        return {k: v for k, v in self._asdict().items() if v or k not in OF_EXPERTS}

    def blocks(self):
        """Name -> shape of a block's tensors."""
        C, F, Q, K = (
            self.channels, self.ffn, self.heads * self.head_dim, self.kv_heads * self.head_dim,
        )
        matrices = {"q": (Q, C), "k": (K, C), "v": (K, C), "o": (C, Q)}
        if self.arch == "nano":
            return {**matrices, "fc": (F, C), "fcproj": (C, F)}
        shapes = {"norm1": (C,), **matrices, "norm2": (C,)}
        if not self.experts:
            shapes.update({"gate": (F, C), "up": (F, C), "down": (C, F)})
        else:
            F = self.expert_ffn
            shapes["router"] = self.experts, C
            for e in range(self.experts):
                shapes.update({f"gate.{e}": (F, C), f"up.{e}": (F, C), f"down.{e}": (C, F)})
        if self.shared_experts:
            F = self.shared_experts * self.shared_expert_ffn
            shapes.update({"gate.shared": (F, C), "up.shared": (F, C), "down.shared": (C, F)})
        if self.arch == "qwen2":
            shapes.update({"qb": (Q,), "kb": (K,), "vb": (K,)})
        if self.arch == "qwen3":
            shapes.update({"qnorm": (self.head_dim,), "knorm": (self.head_dim,)})
        return shapes

    def tensors(self):
        """((storage, tensor), shape)"""
        C = self.channels
        yield ("wte", "wte"), (self.vocab, C)
        for layer in range(self.layers):
            for name, shape in self.blocks().items():
                yield (layer, name), shape
        if self.arch != "nano":
            yield ("lnf", "norm"), (C,)
        if not self.tie:
            yield ("head", "head"), (self.vocab, C)

    @property
    def table(self):
        """The key of the classifier's table."""
        return ("wte", "wte") if self.tie else ("head", "head")

    def keys(self):
        """As --model has them: not those of a scaling."""
        names = "arch layers heads kv_heads head_dim channels ffn vocab theta eps".split()
        values = {name: getattr(self, name) for name in names}
        if self.experts:
            del values["ffn"]
            values.update({k: v for k, v in self._asdict().items() if k in OF_EXPERTS and v})
        return ",".join(f"{k}={v}" for k, v in {**values, "tie": int(self.tie)}.items())


# ------------------------------------------------------------------------------------------------
# Hugging Face folders


def file_name(key, config):
    storage, name = key
    if not isinstance(storage, int):
        return OTHER_NAMES[name]
    kind, _, expert = name.partition(".")
    own = EXPERT_NAMES[config.arch][kind] if expert or kind == "router" else BLOCK_NAMES[name]
    return f"model.layers.{storage}.{own % expert if expert else own}"


def config_json(config):
    """What config.json says."""
    model_type, name = config.types
    found = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": config.channels,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.positions,
        "rms_norm_eps": config.eps,
        "rope_theta": config.theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie,
        "hidden_act": "relu2" if config.arch == "nano" else "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }
    if config.experts and config.arch == "qwen3":
        found.update(num_experts=config.experts, num_experts_per_tok=config.top_k)
        found.update(moe_intermediate_size=config.expert_ffn, norm_topk_prob=True)
        found.update(decoder_sparse_step=1, mlp_only_layers=[])
    elif config.experts:
        found.update(num_local_experts=config.experts, num_experts_per_tok=config.top_k)
        found.update(intermediate_size=config.expert_ffn, sliding_window=None)
    if config.shared_experts:
        found.update(shared_intermediate_size=config.shared_experts * config.shared_expert_ffn)
        found.update(embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0)
        found.update(attention_multiplier=config.head_dim**-0.5)
    if config.prototypes > 1:
        found["prototypes"] = config.prototypes
    if config.scaling:
        names = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        found["rope_scaling"] = {"rope_type": "llama3", **dict(zip(names, config.scaling))}
    return found


def together(tensors, config):
    """Tensors by the names of file_name, as files have them: with shared experts each of
    STACK_NAMES, the gate above the up matrix."""
    if not config.shared_experts:
        return tensors
    names = EXPERT_NAMES[config.arch]
    found = {name: value for name, value in tensors.items() if "block_sparse_moe" not in name}
    for l in range(config.layers):
        block = f"model.layers.{l}."
        of = lambda kind, e: tensors[block + names[kind] % e]
        inputs = lambda e: np.concatenate([of("gate", e), of("up", e)])
        experts = range(config.experts)
        values = {
            "router": tensors[block + names["router"]],
            "input": np.stack([inputs(e) for e in experts]),
            "output": np.stack([of("down", e) for e in experts]),
            "shared input": inputs("shared"),
            "shared output": of("down", "shared"),
        }
        found.update({block + STACK_NAMES[kind]: value for kind, value in values.items()})
    return found


def apart(tensors, config):
    """The other way, also of torch's tensors."""
    if not config.shared_experts:
        return tensors
    names, kinds = EXPERT_NAMES[config.arch], {name: kind for kind, name in STACK_NAMES.items()}
    found = {}
    for name, value in tensors.items():
        block = ".".join(name.split(".")[:3]) + "."
        kind = kinds.get(name[len(block) :])
        each = [value] if "shared" in (kind or "") else value
        if kind == "router":
            found[block + names["router"]] = value
        elif kind is None:
            found[name] = value
        for e, matrix in enumerate(each if kind and kind != "router" else []):
            e = "shared" if "shared" in kind else e
            half = len(matrix) // 2
            parts = {"gate": matrix[:half], "up": matrix[half:]}
            parts = parts if kind.endswith("input") else {"down": matrix}
            found.update({block + names[part] % e: value for part, value in parts.items()})
    return found


def safetensors_bytes(tensors):
    """Of name -> array: a file in fp32."""
    entries, data, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, value in tensors.items():
        data.append(np.asarray(value, "<f4").tobytes())
        entries[name] = {
            "dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + len(data[-1])],
        }
        at += len(data[-1])
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data)


def write_folder(folder, config, parameters):
    """A model as Hugging Face has it: config.json, model.safetensors."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config_json(config), file)
    tensors = {file_name(key, config): parameters[key] for key, _ in config.tensors()}
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(safetensors_bytes(together(tensors, config)))
    return str(folder)


def read_safetensors(path):
    """Name -> array of a file in fp32, which must have no holes."""
    with open(path, "rb") as file:
        data = file.read()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    entries, found, end = json.loads(data[8:begin]), {}, 0
    entries.pop("__metadata__", None)
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        assert (entry["dtype"], first) == ("F32", end), (name, entry, end)
        values = np.frombuffer(data[begin + first : begin + last], "<f4").astype(float)
        found[name], end = values.reshape(entry["shape"]), last
    assert begin + end == len(data), path
    return found


def read_folder(folder, config):
    """The parameters of a folder, which may have several files. No tensor may be missing, foreign
    or of another shape."""
    index, tensors = os.path.join(folder, "model.safetensors.index.json"), {}
    files = ["model.safetensors"]
    if os.path.exists(index):
        with open(index) as file:
            files = sorted(set(json.load(file)["weight_map"].values()))
    for name in files:
        tensors.update(read_safetensors(os.path.join(folder, name)))
    tensors = apart(tensors, config)
    names = {file_name(key, config): (key, shape) for key, shape in config.tensors()}
    assert sorted(names) == sorted(tensors), sorted(set(names) ^ set(tensors))
    for name, (_, shape) in names.items():
        assert tensors[name].shape == shape, (name, tensors[name].shape, shape)
    return {key: tensors[name] for name, (key, _) in names.items()}


# ------------------------------------------------------------------------------------------------
# Weights and tokens by a formula, so that no file has to hold them


def mixed(counters):
    """splitmix64: the output for each counter (uint64)."""
    with np.errstate(over="ignore"):
        z = (np.asarray(counters, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def uniform(text, n):
    """n numbers of [0, 1): number i is the upper 24 bits of splitmix64's output for the counter
    crc32(text) 2^32 + i, divided by 2^24."""
    counters = (np.uint64(zlib.crc32(text.encode())) << np.uint64(32)) + np.arange(
        n, dtype=np.uint64
    )
    return (mixed(counters) >> np.uint64(40)).astype(float) / 2**24


def initial(config, seed, deviations=()):
    """Parameters, rounded to fp32: element i of a tensor (row-major) is
    mean + sqrt(3) deviation (2 u - 1), u = uniform("seed storage tensor")[i], with the names that
    Config.tensors has. Mean and deviation are 1 and 0.2 for gains, 0 and 0.2 for biases, 0 and 0.05
    for the embedding, 0 and 1 / sqrt(columns) for other matrices. deviations: (name, other
    deviation) of some."""
    found, other = {}, dict(deviations)
    for key, shape in config.tensors():
        mean, deviation = 0, 0.2
        if len(shape) == 2:
            deviation = 0.05 if key[1] == "wte" else 1 / math.sqrt(shape[1])
        elif not key[1].endswith("b"):
            mean = 1
        deviation = other.get(key[1], deviation)
        u = uniform(f"{seed} {key[0]} {key[1]}", math.prod(shape))
        value = mean + math.sqrt(3) * deviation * (2 * u - 1)
        found[key] = value.astype("<f4").astype(float).reshape(shape)
    return found


def token_stream(config, seed, n):
    """n tokens: floor(vocab uniform("seed tokens")[i])."""
    return [int(u * config.vocab) for u in uniform(f"{seed} tokens", n)]


# ------------------------------------------------------------------------------------------------
# Operations. What a forward part keeps is the last argument of its backward part.


def rmsnorm(x, gain, eps):
    r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return x * r * (1 if gain is None else gain), (x, r)


def rmsnorm_backward(dy, gain, kept):
    """dx, dgain (of all rows: everything but the last axis)"""
    x, r = kept
    d = dy * (1 if gain is None else gain)
    dx = r * d - x * r**3 * (d * x).mean(-1, keepdims=True)
    return dx, (dy * x * r).reshape(-1, x.shape[-1]).sum(0)


def frequencies(config):
    """Of each pair: theta^(-2 i / D), scaled by wavelength as Llama 3.1 does."""
    f = config.theta ** (-2 * np.arange(config.head_dim // 2) / config.head_dim)
    if not config.scaling:
        return f
    factor, low, high, original = config.scaling
    turns = original * f / (2 * math.pi)  # L0 / w
    t = (turns - low) / (high - low)
    between = (1 - t) * f / factor + t * f
    return np.where(turns > high, f, np.where(turns < low, f / factor, between))


def rotate(x, config, back=False):
    """(B,heads,T,D): the pair (i, i + D/2) of position t turns by t frequencies[i]."""
    half = config.head_dim // 2
    angle = np.arange(x.shape[2])[:, None] * frequencies(config)
    cos, sin = np.cos(angle), np.sin(angle) * (-1 if back else 1)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def heads_of(x, count):
    """(B,T,count D) -> (B,count,T,D)"""
    return x.reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3)


def joined(x):
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def group_of(head, config):
    """The head of keys and values that a head of queries reads."""
    return head * config.kv_heads // config.heads


def attention(q, k, v, config):
    """Of heads (B,heads,T,D), causal."""
    T, groups = q.shape[2], [group_of(h, config) for h in range(config.heads)]
    scale = 1 / math.sqrt(config.head_dim)
    k, v = k[:, groups], v[:, groups]
    scores = np.where(np.tri(T, dtype=bool), q @ k.transpose(0, 1, 3, 2) * scale, -np.inf)
    share = softmax(scores)
    return share @ v, (q, k, v, share, scale, groups)


def attention_backward(dy, kept, config):
    """dq, dk, dv: heads of keys and values sum over their group."""
    q, k, v, share, scale, groups = kept
    dshare = dy @ v.transpose(0, 1, 3, 2)
    dscores = share * (dshare - (dshare * share).sum(-1, keepdims=True)) * scale
    each_dk, each_dv = dscores.transpose(0, 1, 3, 2) @ q, share.transpose(0, 1, 3, 2) @ dy
    shape = (q.shape[0], config.kv_heads, *q.shape[2:])
    dk, dv = np.zeros(shape), np.zeros(shape)
    for head, group in enumerate(groups):
        dk[:, group] += each_dk[:, head]
        dv[:, group] += each_dv[:, head]
    return dscores @ k, dk, dv


def linear_backward(dy, x, weight):
    """dx, dweight of y = x weight^T"""
    return dy @ weight, np.einsum("bto,bti->oi", dy, x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# ------------------------------------------------------------------------------------------------
# Queries and keys: from the projection to what attention reads


def turned(x, gain, config):
    """Qwen3: normed, then turned. nanochat: turned, then normed and multiplied by 1.2."""
    if config.arch == "qwen3":
        x, kept = rmsnorm(x, gain, config.eps)
        return rotate(x, config), kept
    x = rotate(x, config)
    if config.arch == "nano":
        x, kept = rmsnorm(x, None, config.eps)
        return NANO_QK_SCALE * x, kept
    return x, None


def turned_backward(dy, gain, kept, config):
    """dx, dgain"""
    if config.arch == "nano":
        dy, _ = rmsnorm_backward(NANO_QK_SCALE * dy, None, kept)
    dx = rotate(dy, config, back=True)
    if config.arch == "qwen3":
        return rmsnorm_backward(dx, gain, kept)
    return dx, None


# ------------------------------------------------------------------------------------------------
# The units


def mixer_forward(p, l, n, config):
    """attention(n) Wo^T"""
    q, k, v = (n @ p[l, name].T + p.get((l, name + "b"), 0) for name in "qkv")
    q, k, v = heads_of(q, config.heads), heads_of(k, config.kv_heads), heads_of(v, config.kv_heads)
    q, kept_q = turned(q, p.get((l, "qnorm")), config)
    k, kept_k = turned(k, p.get((l, "knorm")), config)
    mixed_heads, kept = attention(q, k, v, config)
    mixed_heads = joined(mixed_heads)
    return mixed_heads @ p[l, "o"].T, (n, kept_q, kept_k, kept, mixed_heads)


def mixer_backward(p, l, dy, all_kept, g, config):
    n, kept_q, kept_k, kept, mixed_heads = all_kept
    d, g[l, "o"] = linear_backward(dy, mixed_heads, p[l, "o"])
    dq, dk, dv = attention_backward(heads_of(d, config.heads), kept, config)
    dq, dq_gain = turned_backward(dq, p.get((l, "qnorm")), kept_q, config)
    dk, dk_gain = turned_backward(dk, p.get((l, "knorm")), kept_k, config)
    if (l, "qnorm") in p:
        g[l, "qnorm"], g[l, "knorm"] = dq_gain, dk_gain
    dn = 0
    for name, d in ("q", dq), ("k", dk), ("v", dv):
        d = joined(d)
        part, g[l, name] = linear_backward(d, n, p[l, name])
        dn = dn + part
        if (l, name + "b") in p:
            g[l, name + "b"] = d.sum((0, 1))
    return dn


def gated_forward(p, l, n, expert=""):
    gate, up = n @ p[l, "gate" + expert].T, n @ p[l, "up" + expert].T
    active = gate * sigmoid(gate) * up
    return active @ p[l, "down" + expert].T, (n, gate, up, active)


def gated_backward(p, l, dy, kept, g, expert=""):
    n, gate, up, active = kept
    d, g[l, "down" + expert] = linear_backward(dy, active, p[l, "down" + expert])
    s = sigmoid(gate)
    dgate = d * up * s * (1 + gate * (1 - s))
    dgate, g[l, "gate" + expert] = linear_backward(dgate, n, p[l, "gate" + expert])
    dup, g[l, "up" + expert] = linear_backward(d * gate * s, n, p[l, "up" + expert])
    return dgate + dup


def mlp_forward(p, l, n, config):
    if config.arch == "nano":
        hidden = n @ p[l, "fc"].T
        active = np.maximum(hidden, 0) ** 2
        return active @ p[l, "fcproj"].T, (n, hidden, active)
    return experts_forward(p, l, n, config) if config.experts else gated_forward(p, l, n)


def mlp_backward(p, l, dy, kept, g, config):
    if config.experts:
        return experts_backward(p, l, dy, kept, g, config)
    if config.arch == "nano":
        n, hidden, active = kept
        d, g[l, "fcproj"] = linear_backward(dy, active, p[l, "fcproj"])
        dn, g[l, "fc"] = linear_backward(d * 2 * np.maximum(hidden, 0), n, p[l, "fc"])
        return dn
    return gated_backward(p, l, dy, kept, g)


# ------------------------------------------------------------------------------------------------
# Experts


class Unclear(Exception):
    """An expert that was chosen is hardly likelier than one that was not: rounding decides."""


UNCLEAR = 3e-6  # between two such p, as a part of them


def choose(share, k):
    """(..., experts of a group): the k likeliest, the likeliest first; of equal ones the first."""
    order = np.argsort(-share, axis=-1, kind="stable")
    if k < share.shape[-1]:
        last, after = (np.take_along_axis(share, order[..., i : i + 1], -1) for i in (k - 1, k))
        if (last - after < UNCLEAR * last).any():
            raise Unclear
    return order[..., :k]


def weights_of(share, chosen, config):
    """Of each group (..., groups, experts): what its chosen experts count, 0 for the others.
    Without prototypes they add up to 1."""
    mask = np.zeros_like(share)
    np.put_along_axis(mask, chosen, 1, -1)
    total = 1 if config.prototypes > 1 else (share * mask).sum(-1, keepdims=True)
    return share * mask / total, mask, total


def weights_backward(dweights, kept, config):
    """dshare"""
    weights, mask, total = kept
    if config.prototypes <= 1:
        dweights = dweights - (dweights * weights).sum(-1, keepdims=True)
    return dweights * mask / total


def in_groups(x, config):
    return x.reshape(*x.shape[:2], config.groups, -1)


def expert_of(e, config):
    """Whose matrices expert e has."""
    return f".{e}"


def shared_forward(p, l, n):
    """Of the experts to which all tokens go: (what they make, what is kept)."""
    return gated_forward(p, l, n, ".shared") if (l, "gate.shared") in p else (0, None)


def experts_forward(p, l, n, config):
    """Every expert works on all tokens, and counts where it was chosen."""
    share = softmax(in_groups(n @ p[l, "router"].T, config))
    kept = weights_of(share, choose(share, config.top_k), config)
    weights = kept[0].reshape(*n.shape[:2], -1)
    made = [gated_forward(p, l, n, expert_of(e, config)) for e in range(config.experts)]
    y = sum(weights[..., e, None] * out for e, (out, _) in enumerate(made))
    more, kept_shared = shared_forward(p, l, n)
    return y + more, (n, share, kept, made, kept_shared)


def experts_backward(p, l, dy, all_kept, g, config):
    n, share, kept, made, kept_shared = all_kept
    weights, dn, dweights = kept[0].reshape(*n.shape[:2], -1), 0, []
    if kept_shared:
        dn = gated_backward(p, l, dy, kept_shared, g, ".shared")
    for e, (out, kept_expert) in enumerate(made):
        dweights.append((dy * out).sum(-1))
        d = weights[..., e, None] * dy
        dn = dn + gated_backward(p, l, d, kept_expert, g, expert_of(e, config))
    dshare = weights_backward(in_groups(np.stack(dweights, -1), config), kept, config)
    dlogits = share * (dshare - (dshare * share).sum(-1, keepdims=True))
    d, g[l, "router"] = linear_backward(dlogits.reshape(weights.shape), n, p[l, "router"])
    return dn + d


def block_forward(p, l, x, config):
    n1, kept1 = rmsnorm(x, p.get((l, "norm1")), config.eps)
    y, kept_mixer = mixer_forward(p, l, n1, config)
    x = x + y
    n2, kept2 = rmsnorm(x, p.get((l, "norm2")), config.eps)
    y, kept_mlp = mlp_forward(p, l, n2, config)
    return x + y, (kept1, kept_mixer, kept2, kept_mlp)


def norm_backward(p, key, dy, kept, g):
    dx, dgain = rmsnorm_backward(dy, p.get(key), kept)
    if key in p:
        g[key] = dgain
    return dx


def block_backward(p, l, dx, kept, g, config):
    kept1, kept_mixer, kept2, kept_mlp = kept
    d = mlp_backward(p, l, dx, kept_mlp, g, config)
    dx = dx + norm_backward(p, (l, "norm2"), d, kept2, g)
    d = mixer_backward(p, l, dx, kept_mixer, g, config)
    return dx + norm_backward(p, (l, "norm1"), d, kept1, g)


def logits_of(config, p, inputs):
    """(B,T,vocab), and what the backward pass needs."""
    x, kept_embedding, blocks = p["wte", "wte"][inputs], None, []
    if config.arch == "nano":
        x, kept_embedding = rmsnorm(x, None, config.eps)
    for layer in range(config.layers):
        x, kept = block_forward(p, layer, x, config)
        blocks.append(kept)
    last, kept_last = rmsnorm(x, p.get(("lnf", "norm")), config.eps)
    logits = last @ p[config.table].T
    if config.arch == "nano":
        logits = NANO_SOFTCAP * np.tanh(logits / NANO_SOFTCAP)
    return logits, (kept_embedding, blocks, last, kept_last)


def forward(config, p, inputs):
    """Probabilities of the next tokens (B,T,vocab), and what the backward pass needs."""
    logits, kept = logits_of(config, p, inputs)
    return softmax(logits), (logits, kept)


def loss_and_gradient(config, p, inputs, targets, scale, precision=reference.EXACT):
    """As reference.loss_and_gradient: the sum of all targets' losses, and the gradient of `scale`
    times it."""
    assert precision is reference.EXACT
    probabilities, (logits, kept) = forward(config, p, inputs)
    kept_embedding, blocks, last, kept_last = kept
    counts, g = targets != MASKED, {}
    right = np.eye(config.vocab)[np.where(counts, targets, 0)]
    d = (probabilities - right) * scale * counts[..., None]
    if config.arch == "nano":
        d = d * (1 - (logits / NANO_SOFTCAP) ** 2)
    d, table = linear_backward(d, last, p[config.table])
    dx = norm_backward(p, ("lnf", "norm"), d, kept_last, g)
    for layer in reversed(range(config.layers)):
        dx = block_backward(p, layer, dx, blocks[layer], g, config)
    if config.arch == "nano":
        dx, _ = rmsnorm_backward(dx, None, kept_embedding)
    g["wte", "wte"] = np.zeros_like(p["wte", "wte"])
    g[config.table] = table
    np.add.at(g["wte", "wte"], inputs, dx)  # where it is the classifier's table, too: the sum
    return reference.losses_of(probabilities, targets).sum(), g


def greedy(config, p, prompt, count):
    """The next tokens, each the likeliest, of equal ones the smallest."""
    tokens = list(prompt)
    for _ in range(count):
        logits, _ = logits_of(config, p, np.array([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


class Run(reference.Run):
    """A training run of one of these architectures."""

    forward = staticmethod(forward)
    loss_and_gradient = staticmethod(loss_and_gradient)
