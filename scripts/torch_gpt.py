"""torch_gpt.py: GPT-2 in PyTorch with plain means, for bench_peers.py and gpu_peer.py."""

import torch.nn as nn
import torch.nn.functional as F

MAX_T, VOCAB = 1024, 50257


def padded(vocab):
    return -(-vocab // 128) * 128


class Block(nn.Module):
    def __init__(self, heads, channels):
        super().__init__()
        self.heads, self.channels = heads, channels
        self.ln1, self.ln2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.attproj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.fc, self.fcproj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        rows, t, _ = x.shape
        q, k, v = (
            part.view(rows, t, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).split(self.channels, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(mixed.transpose(1, 2).reshape(rows, t, -1))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers, heads, channels, vocab=VOCAB):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(padded(vocab), channels), nn.Embedding(MAX_T, channels)
        self.blocks, self.lnf = nn.Sequential(
            *(Block(heads, channels) for _ in range(layers))
        ), nn.LayerNorm(channels)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x, y):
        h = self.wte(x) + self.wpe.weight[: x.shape[1]]
        return self.loss(self.lnf(self.blocks(h)), y)

    def loss(self, h, y):
        return F.cross_entropy(F.linear(h, self.wte.weight).flatten(0, 1), y.flatten())
