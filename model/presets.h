// presets.h: the models that --model knows by name.
#ifndef PRESETS_H
#define PRESETS_H

#include "base/base.h"
#include "base/files.h"
#include "model/architecture.h"
#include "model/config.h"

typedef struct {
    const char *name;
    const char *keys; // as --model has them
} GptDescriptor;

// M6-10T (arXiv 2110.03888): layers, channels, experts and their width as a published survey has
// them; positions and vocabulary are our own choice.
#define M6_10T                                                                                     \
    "layers=48,channels=1024,heads=16,experts=10240,prototypes=80,expert_ffn=9984,vocab=21128,"    \
    "positions=512"
// GPT-2 by depth (llm.c's dN) and by size, and GPT-3's sizes. Head counts divide the channels. The
// paper's 13B has 5140 channels, which 40 heads do not divide; here it has 5120. gpt:100B is our
// own geometry: 12 * 80 * 10240^2 = 100.7e9. Llama's and Qwen's sizes are those of their authors.
static const GptDescriptor gpt_descriptors[] = {
    {"d6", "layers=6,channels=384,heads=6,positions=1024"},
    {"d12", "layers=12,channels=768,heads=12,positions=1024"},
    {"d24", "layers=24,channels=1024,heads=16,positions=1024"},
    {"d36", "layers=36,channels=1280,heads=20,positions=1024"},
    {"d48", "layers=48,channels=1600,heads=25,positions=1024"},
    {"d60", "layers=60,channels=1920,heads=30,positions=1024"},
    {"d72", "layers=72,channels=2880,heads=30,positions=1024"},
    {"d84", "layers=84,channels=3456,heads=36,positions=1024"},
    {"gpt2:124M", "layers=12,channels=768,heads=12,positions=1024"},
    {"gpt2:350M", "layers=24,channels=1024,heads=16,positions=1024"},
    {"gpt2:355M", "layers=24,channels=1024,heads=16,positions=1024"},
    {"gpt2:774M", "layers=36,channels=1280,heads=20,positions=1024"},
    {"gpt2:1558M", "layers=48,channels=1600,heads=25,positions=1024"},
    {"gpt3:125M", "layers=12,channels=768,heads=12,positions=2048"},
    {"gpt3:350M", "layers=24,channels=1024,heads=16,positions=2048"},
    {"gpt3:760M", "layers=24,channels=1536,heads=16,positions=2048"},
    {"gpt3:1.3B", "layers=24,channels=2048,heads=16,positions=2048"},
    {"gpt3:2.7B", "layers=32,channels=2560,heads=32,positions=2048"},
    {"gpt3:6.7B", "layers=32,channels=4096,heads=32,positions=2048"},
    {"gpt3:13B", "layers=40,channels=5120,heads=40,positions=2048"},
    {"gpt3:175B", "layers=96,channels=12288,heads=96,positions=2048"},
    {"gpt:100B", "layers=80,channels=10240,heads=80,positions=2048"},
    {"llama3.2:1B", "arch=llama,layers=16,channels=2048,heads=32,kv_heads=8,head_dim=64,ffn=8192,"
                    "vocab=128256,tie=1,theta=5e5,positions=131072,rope_factor=32"},
    {"llama3.2:3B", "arch=llama,layers=28,channels=3072,heads=24,kv_heads=8,head_dim=128,ffn=8192,"
                    "vocab=128256,tie=1,theta=5e5,positions=131072,rope_factor=32"},
    {"llama3.1:8B", "arch=llama,layers=32,channels=4096,heads=32,kv_heads=8,head_dim=128,ffn=14336,"
                    "vocab=128256,tie=0,theta=5e5,positions=131072,rope_factor=8"},
    {"llama3:8B", "arch=llama,layers=32,channels=4096,heads=32,kv_heads=8,head_dim=128,ffn=14336,"
                  "vocab=128256,tie=0,theta=5e5,positions=8192"},
    {"llama3:70B", "arch=llama,layers=80,channels=8192,heads=64,kv_heads=8,head_dim=128,ffn=28672,"
                   "vocab=128256,tie=0,theta=5e5,positions=8192"},
    {"mixtral:8x7B",
     "arch=llama,layers=32,channels=4096,heads=32,kv_heads=8,head_dim=128,experts=8,"
     "top_k=2,expert_ffn=14336,vocab=32000,tie=0,theta=1e6,positions=32768"},
    {"qwen2.5:0.5B", "arch=qwen2,layers=24,channels=896,heads=14,kv_heads=2,head_dim=64,ffn=4864,"
                     "vocab=151936,tie=1,theta=1e6,positions=32768"},
    {"qwen2.5:1.5B", "arch=qwen2,layers=28,channels=1536,heads=12,kv_heads=2,head_dim=128,ffn=8960,"
                     "vocab=151936,tie=1,theta=1e6,positions=131072"},
    {"qwen2.5:7B", "arch=qwen2,layers=28,channels=3584,heads=28,kv_heads=4,head_dim=128,ffn=18944,"
                   "vocab=152064,tie=0,theta=1e6,positions=131072"},
    {"qwen3:0.6B", "arch=qwen3,layers=28,channels=1024,heads=16,kv_heads=8,head_dim=128,ffn=3072,"
                   "vocab=151936,tie=1,theta=1e6,positions=40960"},
    {"qwen3:1.7B", "arch=qwen3,layers=28,channels=2048,heads=16,kv_heads=8,head_dim=128,ffn=6144,"
                   "vocab=151936,tie=1,theta=1e6,positions=40960"},
    {"qwen3:4B", "arch=qwen3,layers=36,channels=2560,heads=32,kv_heads=8,head_dim=128,ffn=9728,"
                 "vocab=151936,tie=1,theta=1e6,positions=40960"},
    {"qwen3:30B-A3B", "arch=qwen3,layers=48,channels=2048,heads=32,kv_heads=4,head_dim=128,"
                      "experts=128,top_k=8,expert_ffn=768,vocab=151936,tie=0,theta=1e6,"
                      "positions=40960"},
    {"qwen3:8B", "arch=qwen3,layers=36,channels=4096,heads=32,kv_heads=8,head_dim=128,ffn=12288,"
                 "vocab=151936,tie=0,theta=1e6,positions=40960"},
    {"m6:10T", M6_10T},
};
enum { GPT_DESCRIPTORS = LENGTH_OF(gpt_descriptors) };

// nano:dN has N layers of 64 N channels (rounded up to heads of 128), as nanochat's --depth N.
static inline bool gpt_nano_preset(GptConfig *config, const char *text) {
    int used = 0;
    int64_t depth = 0;
    if (sscanf(text, "nano:d%" SCNd64 "%n", &depth, &used) != 1 || text[used] || depth < 1 ||
        depth > 256) {
        return false;
    }
    const int64_t heads = ceil_div(64 * depth, 128);
    const Text keys = text_of("arch=nano,layers=%" PRId64 ",channels=%" PRId64 ",heads=%" PRId64
                              ",vocab=32768,positions=2048",
                              depth, 128 * heads, heads);
    *config = gpt_config_from_pairs(keys.at, 0);
    return true;
}
// Reads a --model that is keys or a name. Returns false if it is neither. Then it is the name of a
// file.
static inline bool gpt_config_from_descriptor(GptConfig *config, const char *text,
                                              int64_t seq_len) {
    if (strchr(text, '=')) {
        *config = gpt_config_from_pairs(text, seq_len);
        return true;
    }
    const char *name = !strncmp(text, "gpt2:d", 6) ? text + 5 : text; // llm.c's other spelling
    for (int i = 0; i < GPT_DESCRIPTORS; i++) {
        if (strcmp(name, gpt_descriptors[i].name)) { continue; }
        *config = gpt_config_from_pairs(gpt_descriptors[i].keys, seq_len);
        return true;
    }
    return gpt_nano_preset(config, text);
}

#endif
