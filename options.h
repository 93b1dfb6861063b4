// options.h: every flag, once. The option table below generates the struct, the parser, --help, the
// startup table and the log header, so these cannot drift apart. The pair table at the end lists
// the flags that do not combine.
//
// Forms: --name value, --name=value, -x value. A FLAG may stand alone (--dry-run) or take 0 or 1
// (--resume 0). The last value of a repeated flag counts, so flags appended to a command change it.
// Any mistake (unknown name, bad number, value out of range, impossible combination) ends the
// program with exit code 2 before anything is allocated. One message then says what to change.
#ifndef OPTIONS_H
#define OPTIONS_H

#include "pipeline.h"        // pipeline schedules
#include "ops/quantize.h"    // limits of quantization blocks; base.h
#include "state/optimizer.h" // choices of --optimizer

#include <ctype.h> // isdigit

// Paths built from an option then fit the buffers that hold them (1100 bytes or more).
enum { OPTION_TEXT_MAX = 900 };

// Kind of an option and the type of its value:
//   INT     int64_t
//   NUM     double
//   POWER   int64_t, a power of two
//   TEXT    const char *
//   PICK    int64_t, index into the choices "a|b|c"
//   FLAG    int64_t, 0 or 1
//   SECRET  const char *, never printed
#define OPTION_KIND_LIST                                                                           \
    OPTION_INT, OPTION_NUM, OPTION_POWER, OPTION_TEXT, OPTION_PICK, OPTION_FLAG, OPTION_SECRET
typedef enum { OPTION_KIND_LIST } OptionKind;
typedef int64_t OptionINT;
typedef double OptionNUM;
typedef int64_t OptionPOWER;
typedef const char *OptionTEXT;
typedef int64_t OptionPICK;
typedef int64_t OptionFLAG;
typedef const char *OptionSECRET;

#ifndef DEFAULT_DTYPE // train_gpt.cu defines another default
#define DEFAULT_DTYPE "fp32"
#endif
// The values of each PICK, in the order of its choices in the table.
enum { LR_COSINE, LR_LINEAR, LR_CONSTANT, LR_WSD }; // --lr-schedule
enum { RECOMPUTE_NONE, RECOMPUTE_BLOCK };           // --recompute
enum { GRADIENT_BITS_4, GRADIENT_BITS_8 };          // --zero-gradient-bits
enum { OFFLOAD_AUTO, OFFLOAD_NONE, OFFLOAD_OPTIMIZER, OFFLOAD_PARAMS, OFFLOAD_ALL }; // --offload
enum { UPDATE_HOST, UPDATE_DEVICE, UPDATE_AUTO }; // --offload-update
enum { DELINK_MEAN, DELINK_RESET };               // --delink-moments
enum { DP_FLAT, DP_UNIT, DP_STAGE }; // --dp-clip-style (--dp-clip-function: ClipFunction of ops.h)
enum { DP_SEQUENCE, DP_DOCUMENT };   // --dp-unit
enum { DP_RDP, DP_PRV };             // --dp-accountant
enum { DP_ADD_REMOVE, DP_REPLACE_ONE }; // --dp-neighbours

// clang-format off
// kind, group, field, name, llm.c's letter, default, lowest, highest, choices or unit, help
#define OPTION_TABLE(X)                                                                            \
    X(TEXT, "data", train, "train", "i", "data/text_gpt2_train_*.bin", 0, 0, "glob",               \
      "training shards (llm.c format)")                                                            \
    X(TEXT, "data", val, "val", "j", "data/text_gpt2_val_*.bin", 0, 0, "glob",                     \
      "validation shards; left out where --train is given: no validation")                         \
    X(TEXT, "data", tokenizer, "tokenizer", "", "", 0, 0, "file",                                  \
      "tokenizer .bin, to print samples; empty: found beside the shards")                          \
    X(FLAG, "data", shuffle, "shuffle", "", "1", 0, 1, "",                                         \
      "a new permutation of the windows each epoch; 0: in order")                                  \
    X(PICK, "data", windows, "windows", "", "continuous", 0, 0, "continuous|document",             \
      "cut the training stream anywhere, or at documents; labelled shards: always there; "         \
      "validation: anywhere")                                                                      \
    X(INT, "data", seq_len, "seq-len", "t", "256", 1, 1048576, "tokens", "sequence length T")      \
    X(INT, "data", micro_batch, "micro-batch", "b", "4", 1, 1048576, "sequences",                  \
      "per rank and micro-step; in a pipeline, of the whole micro-batch")                          \
    X(INT, "data", batch_tokens, "batch-tokens", "d", "0", 0, 1e12, "tokens",                      \
      "per optimizer step, all ranks; 0: micro-batch x T x ranks")                                 \
    X(TEXT, "model", model, "model", "e", "d12", 0, 0, "",                                         \
      "d12, gpt2:124M, gpt3:1.3B, \"layers=6,heads=6,channels=384,vocab=256\", or a .bin file")    \
    X(INT, "run", steps, "steps", "x", "-1", -1, 1e12, "steps", "optimizer steps; -1: one epoch")  \
    X(TEXT, "run", out, "out", "o", "", 0, 0, "folder",                                            \
      "where checkpoints go; empty: none are written")                                             \
    X(TEXT, "run", log, "log", "", "", 0, 0, "file", "JSON lines")                                 \
    X(FLAG, "run", json, "json", "", "0", 0, 1, "",                                                \
      "--dry-run, --plan or --dp-account as one JSON object on stdout")                            \
    X(TEXT, "run", export_file, "export", "", "", 0, 0, "file",                                    \
      "write the model in llm.c's format after the last step")                                     \
    X(FLAG, "run", dry_run, "dry-run", "", "0", 0, 1, "",                                          \
      "print the prediction of memory, traffic and time, and stop")                                \
    X(FLAG, "run", compat, "compat", "", "0", 0, 1, "",                                            \
      "print which flags do not combine, and stop")                                                \
    X(FLAG, "run", show_schedule, "show-schedule", "", "0", 0, 1, "",                              \
      "print the timeline and the action list of one step, and stop")                              \
    X(INT, "run", val_every, "val-every", "v", "20", 0, 1e12, "steps",                             \
      "validate every N steps and at the end; 0: never")                                           \
    X(INT, "run", val_batches, "val-batches", "m", "20", -1, 1e6, "batches",                       \
      "per validation; -1: all of it once")                                                        \
    X(TEXT, "run", hellaswag, "hellaswag", "", "", 0, 0, "file",                                   \
      "score multiple choices (llm.c's hellaswag_val.bin) with each validation")                   \
    X(INT, "run", sample_every, "sample-every", "s", "0", 0, 1e12, "steps",                        \
      "print generated text every N steps and at the end; 0: never")                               \
    X(INT, "run", sample_tokens, "sample-tokens", "g", "64", 1, 1048576, "tokens", "to generate")  \
    X(NUM, "run", temperature, "temperature", "", "1.0", 0, 100, "",                               \
      "of generated text; 0: the likeliest token")                                                 \
    X(INT, "run", save_every, "save-every", "n", "0", 0, 1e12, "steps",                            \
      "checkpoint every N steps and at the end; 0: only when stopped")                             \
    X(INT, "run", keep, "keep", "nk", "0", 0, 1e6, "checkpoints", "newest to keep; 0: all")        \
    X(FLAG, "run", resume, "resume", "y", "0", 0, 1, "",                                           \
      "go on from the newest valid checkpoint in --out")                                           \
    X(INT, "run", seed, "seed", "", "42", 0, 9e15, "",                                             \
      "of initial weights, shuffling and sampling")                                                \
    X(INT, "run", threads, "threads", "", "0", 0, 1024, "threads",                                 \
      "per rank; 0: cores / ranks on the node")                                                    \
    X(TEXT, "run", profile_steps, "profile-steps", "", "", 0, 0, "A:B",                            \
      "tell where the time of steps A to B goes; on a GPU nsys can capture them")                  \
    X(TEXT, "run", trace, "trace", "", "", 0, 0, "file",                                           \
      "when each action of a step runs, for chrome://tracing: planned with --show-schedule, "      \
      "measured with --profile-steps")                                                             \
    X(PICK, "optimizer", optimizer, "optimizer", "", "adamw", 0, 0, OPTIMIZER_CHOICES, "")         \
    X(NUM, "optimizer", momentum, "momentum", "", "0.9", 0, 0.999999, "", "of sgd")                \
    X(NUM, "optimizer", lr, "lr", "l", "3e-4", 0, 1e6, "", "peak learning rate")                   \
    X(PICK, "optimizer", lr_schedule, "lr-schedule", "k", "cosine", 0, 0,                          \
      "cosine|linear|constant|wsd",                                                                \
      "wsd: the last 20 % decay by 1 - sqrt")                                                      \
    X(INT, "optimizer", warmup, "warmup", "u", "0", 0, 1e12, "steps",                              \
      "linear warm-up; a shorter run ends within it")                                              \
    X(NUM, "optimizer", final_lr_fraction, "final-lr-fraction", "q", "1.0", 0, 1, "",              \
      "of the peak, at the last step")                                                             \
    X(NUM, "optimizer", weight_decay, "weight-decay", "c", "0.0", 0, 100, "", "on 2-D tensors")    \
    X(NUM, "optimizer", beta1, "beta1", "", "0.9", 0, 0.999999, "", "of adamw")                    \
    X(NUM, "optimizer", beta2, "beta2", "", "0.95", 0, 0.99999999, "", "of adamw")                 \
    X(NUM, "optimizer", eps, "eps", "", "1e-8", 1e-30, 1, "", "of adamw")                          \
    X(NUM, "optimizer", grad_clip, "grad-clip", "", "1.0", 0, 1e30, "",                            \
      "largest global gradient norm; 0: off")                                                      \
    X(NUM, "optimizer", skip_loss_z, "skip-loss-z", "sl", "0", 0, 1e6, "sigma",                    \
      "skip an update whose loss is an outlier by more; 0: off")                                   \
    X(NUM, "optimizer", skip_grad_z, "skip-grad-z", "sg", "0", 0, 1e6, "sigma",                    \
      "the same for the gradient norm; 0: off")                                                    \
    X(PICK, "precision", dtype, "dtype", "", DEFAULT_DTYPE, 0, 0, "fp32|bf16",                     \
      "of working parameters, stage boundaries and messages")                                      \
    X(PICK, "precision", reduce_dtype, "reduce-dtype", "", "fp32", 0, 0, "fp32|bf16",              \
      "of gradient messages; sums are fp32 in any case")                                           \
    X(PICK, "precision", recompute, "recompute", "", "none", 0, 0, "none|block",                   \
      "block: keep only each block's input, compute the rest again")                               \
    X(FLAG, "precision", stochastic_rounding, "stochastic-rounding", "", "0", 0, 1, "",            \
      "bf16 parameters are rounded by chance, right on average; 0: to nearest even")               \
    X(PICK, "precision", offload, "offload", "", "auto", 0, 0, "auto|none|optimizer|params|all",   \
      "what lies on the host: the optimizer's states, and blocks' parameters, and their "          \
      "activations; none; or, with --device-memory, that do not fit the device")                   \
    X(PICK, "precision", offload_update, "offload-update", "", "auto", 0, 0, "host|device|auto",   \
      "who updates what lies on the host; auto: who is faster here")                               \
    X(FLAG, "precision", offload_delay, "offload-delay", "", "0", 0, 1, "",                        \
      "the host updates by the gradient of the step before, while the next one computes (with "    \
      "--offload optimizer)")                                                                      \
    X(TEXT, "precision", device_memory, "device-memory", "", "", 0, 0, "16G",                      \
      "bytes that a rank may take of its device, with K, M, G or T; empty: any")                   \
    X(TEXT, "precision", host_memory, "host-memory", "", "", 0, 0, "64G",                          \
      "bytes that a rank may take of the host, with the states that lie there; empty: any")        \
    X(TEXT, "precision", offload_dir, "offload-dir", "", "", 0, 0, "folder",                       \
      "on a disk, for what leaves the device and does not fit --host-memory; without that, "       \
      "for all of it")                                                                             \
    X(INT, "ZeRO", zero, "zero", "z", "0", 0, 3, "stage",                                          \
      "what the ranks divide: 1 optimizer states, 2 and gradients, 3 and parameters")              \
    X(FLAG, "ZeRO", zero_quantized_weights, "zero-quantized-weights", "", "0", 0, 1, "",           \
      "qwZ: gathers carry INT8 (stage 3)")                                                         \
    X(INT, "ZeRO", zero_hpz_partition_size, "zero-hpz-partition-size", "", "1", 1, 1e6, "ranks",   \
      "hpZ: so many ranks, those of a node, keep a copy of the parameters for the backward pass "  \
      "(stage 3); 1: off")                                                                         \
    X(FLAG, "ZeRO", zero_quantized_gradients, "zero-quantized-gradients", "", "0", 0, 1, "",       \
      "qgZ: gradients are reduced by two exchanges of INT4 or INT8")                               \
    X(POWER, "ZeRO", zero_quant_block, "zero-quant-block", "", "256", QUANT_LEAST_BLOCK,           \
      QUANT_MOST_BLOCK, "elements",                                                                \
      "that share a scale, a power of two")                                                        \
    X(PICK, "ZeRO", zero_gradient_bits, "zero-gradient-bits", "", "4", 0, 0, "4|8",                \
      "of quantized gradients")                                                                    \
    X(FLAG, "ZeRO", zero_error_feedback, "zero-error-feedback", "", "0", 0, 1, "",                 \
      "what quantizing a gradient loses is added to the next one; begins anew with each "          \
      "checkpoint")                                                                                \
    X(TEXT, "pipeline", pipeline, "pipeline", "", "1", 0, 0, "N|auto|SPEC",                        \
      "N even stages, or units:replicas of each, such as 5:3,3:1 (blocks + 2 units, all ranks); "  \
      "auto: the planner chooses")                                                                 \
    X(PICK, "pipeline", pipeline_schedule, "pipeline-schedule", "", "dapple", 0, 0,                \
      "gpipe|dapple|zero-bubble",                                                                  \
      "order of forwards and backwards on a stage")                                                \
    X(PICK, "pipeline", pipeline_warmup, "pipeline-warmup", "", "a", 0, 0, "a|b",                  \
      "forwards before the first backward of dapple: of stage i from 0 of S, S - i, or, for "      \
      "slow messages, 2 (S - i) - 1")                                                              \
    X(INT, "pipeline", micro_batches, "micro-batches", "", "0", 0, 1e6, "micro-batches",           \
      "of --micro-batch samples in a step, over all ranks of a stage; 0: as --batch-tokens says")  \
    X(FLAG, "pipeline", plan, "plan", "", "0", 0, 1, "",                                           \
      "print the best pipeline for this model (or --profile) on these ranks (or --cluster), "      \
      "beside what others would choose, and stop")                                                 \
    X(TEXT, "pipeline", profile, "profile", "", "", 0, 0, "file[:model]",                          \
      "what --plan plans for: times and bytes of each unit (docs/formats.md)")                     \
    X(PICK, "cyclic", cyclic, "cyclic", "", "off", 0, 0, "off|v1|v2",                              \
      "cyclic data parallelism: micro-batches are delayed against each other, by parameters one "  \
      "step old (v1) or where there are no newer ones yet (v2)")                                   \
    X(PICK, "cyclic", cyclic_mode, "cyclic-mode", "", "auto", 0, 0, "auto|single|data|zero|model", \
      "who runs a step's micro-batches: one rank, a rank each (zero: which has a stage's states "  \
      "only), a rank for each stage; auto: what fits the ranks")                                   \
    X(INT, "cyclic", cyclic_slack, "cyclic-slack", "", "0", 0, 4096, "",                           \
      "of v2: micro-batch i uses new parameters of stage j of N if i + j >= N + 1 + this; "        \
      "messages then have time")                                                                   \
    X(INT, "cyclic", cyclic_stages, "cyclic-stages", "", "0", 0, 4096, "stages",                   \
      "N, and the micro-batches of a step; 0: as many as ranks, on one rank as --batch-tokens "    \
      "has micro-batches; mode model also runs on N (N + 1) / 2 ranks")                            \
    X(TEXT, "cyclic", cyclic_cut, "cyclic-cut", "", "", 0, 0, "5,3,3,3",                           \
      "units of each stage (blocks + 2 in all); empty: as even as possible, the first ones take "  \
      "the rest")                                                                                  \
    X(PICK, "cyclic", cyclic_clip, "cyclic-clip", "", "none", 0, 0, "none|storage",                \
      "of v2, whose last stage is updated before the first one has a gradient; storage: the "      \
      "gradient of each embedding, block and layernorm to --grad-clip / sqrt(their number)")       \
    X(TEXT, "pseudo", share, "share", "", "none", 0, 0, "none|all|N|AxB",                          \
      "blocks that share one storage: all, N that follow each other, or A distinct blocks "        \
      "repeated B times")                                                                          \
    X(NUM, "pseudo", share_lr, "share-lr", "", "0", 0, 1e6, "",                                    \
      "learning rate while blocks share, on the same schedule; 0: --lr")                           \
    X(INT, "pseudo", delink_at, "delink-at", "", "0", 0, 1e12, "steps",                            \
      "after so many steps each block gets a copy of what it shared, and trains on with it; 0: "   \
      "never")                                                                                     \
    X(FLAG, "pseudo", delink, "delink", "", "0", 0, 1, "",                                         \
      "begin so with --model FOLDER, a checkpoint whose blocks share")                             \
    X(PICK, "pseudo", delink_moments, "delink-moments", "", "mean", 0, 0, "mean|reset",            \
      "what copies begin with: the moments of the mean gradient; none")                            \
    X(INT, "pseudo", delink_warmup, "delink-warmup", "", "0", 0, 1e12, "steps",                    \
      "the learning rate rises again from 0 after the switch")                                     \
    X(NUM, "privacy", dp_epsilon, "dp-epsilon", "", "0", 0, 1000, "",                              \
      "a private run, which stops before it gives away more; the noise is found for --steps "      \
      "where --dp-noise is not given; 0: off")                                                     \
    X(NUM, "privacy", dp_noise, "dp-noise", "", "0", 0, 1e4, "thresholds",                         \
      "a private run with noise of this standard deviation; 0, where it is given: clips, but "     \
      "nothing is private")                                                                        \
    X(NUM, "privacy", dp_delta, "dp-delta", "", "0", 0, 0.999999, "",                              \
      "chance that epsilon may not hold; 0: 0.1 / windows of the training data")                   \
    X(NUM, "privacy", dp_clip, "dp-clip", "", "1", 1e-9, 1e9, "norm",                              \
      "threshold R of a sample's gradient")                                                        \
    X(PICK, "privacy", dp_clip_style, "dp-clip-style", "", "unit", 0, 0, "flat|unit|stage",        \
      "what has a norm of its own: the whole gradient, each block and the embedding (R / "         \
      "sqrt(layers + 2) each), each pipeline stage")                                               \
    X(PICK, "privacy", dp_clip_function, "dp-clip-function", "", "abadi", 0, 0, "abadi|automatic", \
      "abadi: longer gradients are cut to R, as in Opacus; automatic: all become about R long, "   \
      "as in fastDP")                                                                              \
    X(PICK, "privacy", dp_unit, "dp-unit", "", "sequence", 0, 0, "sequence|document",              \
      "what is protected: a window, or all windows of a document")                                 \
    X(INT, "privacy", dp_windows_per_document, "dp-windows-per-document", "", "1", 1, 1024,        \
      "windows",                                                                                   \
      "a longer document loses the rest")                                                          \
    X(PICK, "privacy", dp_neighbours, "dp-neighbours", "", "add-remove", 0, 0,                     \
      "add-remove|replace-one",                                                                    \
      "data sets that must be hard to distinguish differ by a sample that is there or not, or "    \
      "by another in its place")                                                                   \
    X(PICK, "privacy", dp_accountant, "dp-accountant", "", "prv", 0, 0, "rdp|prv",                 \
      "prv: an interval around the exact value; rdp: the older upper bound")                       \
    X(SECRET, "privacy", dp_key, "dp-key", "", "", 0, 0, "64 hex digits",                          \
      "secret of noise and sampling, for tests only: who knows it knows the noise; empty: from "   \
      "the operating system, kept in OUT/dp_key")                                                  \
    X(FLAG, "privacy", dp_show_private, "dp-show-private", "", "0", 0, 1, "",                      \
      "print and log losses, norms and samples of private steps: epsilon does not hold for who "   \
      "sees them")                                                                                 \
    X(TEXT, "privacy", dp_account, "dp-account", "", "", 0, 0, "q=,sigma=,steps=,delta=",          \
      "print epsilon of so many private steps, and stop")                                          \
    X(NUM, "cluster", watchdog, "watchdog", "", "20", 0, 1e9, "seconds",                           \
      "a rank that others wait for and that is silent so long ends the job; 0: never")             \
    X(INT, "cluster", ranks_per_node, "ranks-per-node", "", "0", 0, 1e6, "ranks",                  \
      "pretend nodes of this many ranks; 0: as the hosts are")                                     \
    X(TEXT, "cluster", cluster, "cluster", "", "", 0, 0, "2x8,intra=25,inter=3",                   \
      "--dry-run and --plan predict for this cluster: nodes x ranks of a node, then its rates")
// clang-format on

typedef struct {
#define FIELD(kind, group, field, ...) Option##kind field;
    OPTION_TABLE(FIELD)
#undef FIELD
} Options;

enum {
#define INDEX(kind, group, field, ...) OPTION_INDEX_##field,
    OPTION_TABLE(INDEX)
#undef INDEX
        OPTION_COUNT
};

typedef struct {
    OptionKind kind;
    size_t offset; // in Options
    const char *group, *name, *letter, *fallback;
    double low, high;
    const char *choices, *help; // choices: of a PICK; for other kinds the unit
} OptionSpec;

static const OptionSpec option_specs[OPTION_COUNT] = {
#define SPEC(kind, group, field, name, letter, fallback, low, high, choices, help)                 \
    {OPTION_##kind, offsetof(Options, field), group, name, letter, fallback, low, high, choices,   \
     help},
    OPTION_TABLE(SPEC)
#undef SPEC
};

// Which options the user gave. The others have their defaults.
typedef struct {
    bool at[OPTION_COUNT];
} OptionsGiven;

// Returns the address of an option's value.
static inline void *option_slot(const Options *options, const OptionSpec *spec) {
    return (char *)(uintptr_t)options + spec->offset;
}

// -------------------------------------------------------------------------------------------------
// --cluster "2x8,intra=25,inter=3,gather=1,latency=20": nodes x ranks per node, then keys in any
// order
typedef struct {
    // ranks: per node; 0 x 0: no --cluster
    int nodes, ranks;
    // in the units of the keys; tflops, memory, link, host and disk are 0 where measured instead
    double intra, inter, gather, latency, tflops, half, memory, overlap;
    double link, host, disk;
} Cluster;
enum {
    CLUSTER_INTRA,
    CLUSTER_INTER,
    CLUSTER_GATHER,
    CLUSTER_LATENCY,
    CLUSTER_TFLOPS,
    CLUSTER_HALF,
    CLUSTER_MEMORY,
    CLUSTER_OVERLAP,
    CLUSTER_LINK,
    CLUSTER_HOST,
    CLUSTER_DISK,
    CLUSTER_KEYS
};
// A key of --cluster: `fallback` is its value if it is not given.
typedef struct {
    const char *name;
    size_t offset; // of a double in Cluster
    double low, high, fallback;
    const char *help;
} ClusterKey;
static const ClusterKey cluster_keys[CLUSTER_KEYS] = {
    {"intra", offsetof(Cluster, intra), 1e-6, 1e6, INFINITY,
     "GB/s that a rank sends inside its node"},
    {"inter", offsetof(Cluster, inter), 1e-6, 1e6, INFINITY,
     "GB/s of a node's link, in each direction"},
    {"gather", offsetof(Cluster, gather), 1e-6, 1e6, 0,
     "GB/s into a node that many send single messages to (inter)"},
    {"latency", offsetof(Cluster, latency), 0, 1e9, 0, "microseconds of a message (0)"},
    {"tflops", offsetof(Cluster, tflops), 1e-6, 1e6, 0,
     "of a rank's large matrix products (as measured here)"},
    {"half", offsetof(Cluster, half), 0, 1e9, 0,
     "tokens in a micro-step at which products reach half of that (0)"},
    {"memory", offsetof(Cluster, memory), 1e-6, 1e6, 0,
     "GB/s of a rank's memory (as measured here)"},
    {"overlap", offsetof(Cluster, overlap), 0, 1, 1,
     "share of the time of messages in which a rank computes undisturbed (1)"},
    {"link", offsetof(Cluster, link), 1e-6, 1e6, 0,
     "GB/s between a rank's device and its host, each way (as measured here)"},
    {"host", offsetof(Cluster, host), 1e-6, 1e6, 0,
     "GB/s of a rank's part of the host's memory (as measured here)"},
    {"disk", offsetof(Cluster, disk), 1e-6, 1e6, 0,
     "GB/s that a rank reads and writes at once, together (as measured here)"},
};
enum { CLUSTER_RANKS = 16384 };

__attribute__((noreturn, format(printf, 1, 2))) static inline void
cluster_refuse(const char *format, ...) {
    char what[160];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    die(EXIT_INPUT,
        "such as --cluster 2x8,intra=25,inter=3,gather=1,latency=20; --help lists the keys",
        "--cluster %s", what);
}
// Parses one "name=number" at the begin of the text. Returns where it ends.
static inline const char *cluster_take(Cluster *c, const char *text, bool seen[CLUSTER_KEYS]) {
    int k = 0;
    size_t length = strcspn(text, "=,");
    while (k < CLUSTER_KEYS && (strlen(cluster_keys[k].name) != length ||
                                strncmp(cluster_keys[k].name, text, length))) {
        k++;
    }
    if (k == CLUSTER_KEYS || text[length] != '=') {
        cluster_refuse("takes keys with a number, found \"%.40s\"", text);
    }
    const ClusterKey *key = &cluster_keys[k];
    const char *number = text + length + 1;
    char *end = NULL;
    double value = strtod(number, &end);
    bool bad = !isdigit((unsigned char)*number) || (*end && *end != ',');
    if (bad || !(value >= key->low && value <= key->high)) {
        cluster_refuse("takes %s from %g to %g, found \"%.40s\"", key->name, key->low, key->high,
                       number);
    }
    if (seen[k]) { cluster_refuse("has %s twice", key->name); }
    seen[k] = true;
    *(double *)(void *)((char *)c + key->offset) = value;
    return end;
}
// Returns the cluster that the text describes; 0 x 0 if the text is empty. Ends the program
// (EXIT_INPUT) if the text is malformed.
static inline Cluster cluster_parse(const char *text) {
    Cluster c;
    bool seen[CLUSTER_KEYS] = {false};
    const char *const digits = "0123456789";
    memset(&c, 0, sizeof c);
    if (!*text) { return c; }
    for (int k = 0; k < CLUSTER_KEYS; k++) {
        *(double *)(void *)((char *)&c + cluster_keys[k].offset) = cluster_keys[k].fallback;
    }
    size_t nodes = strspn(text, digits),
           ranks = text[nodes] == 'x' ? strspn(text + nodes + 1, digits) : 0;
    const char *rest = text + nodes + 1 + ranks;
    if (!nodes || nodes > 4 || !ranks || ranks > 4 || (*rest && *rest != ',')) {
        cluster_refuse("begins with nodes x ranks of a node, found \"%.40s\"", text);
    }
    c.nodes = atoi(text);
    c.ranks = atoi(text + nodes + 1);
    if (c.nodes * c.ranks < 1 || c.nodes * c.ranks > CLUSTER_RANKS) {
        cluster_refuse("takes from 1 to %d ranks, found %.9s", CLUSTER_RANKS, text);
    }
    while (*rest) { rest = cluster_take(&c, rest + 1, seen); }
    if (c.ranks > 1 && isinf(c.intra)) { cluster_refuse("needs intra=, the GB/s inside a node"); }
    if (c.nodes > 1 && isinf(c.inter)) { cluster_refuse("needs inter=, the GB/s between nodes"); }
    if (!seen[CLUSTER_GATHER]) { c.gather = c.inter; }
    return c;
}

// -------------------------------------------------------------------------------------------------
// Printing values. The startup table, the log header and --help all use these functions.
static inline void option_choice_text(const OptionSpec *spec, int64_t index, char *out,
                                      size_t bytes) {
    const char *choice = spec->choices;
    for (; index > 0; index--) { choice = strchr(choice, '|') + 1; }
    snprintf(out, bytes, "%.*s", (int)strcspn(choice, "|"), choice);
}
static inline void option_value_text(const Options *options, const OptionSpec *spec, char *out,
                                     size_t bytes) {
    const void *slot = option_slot(options, spec);
    if (spec->kind == OPTION_TEXT) {
        snprintf(out, bytes, "%s", *(const char *const *)slot);
        return;
    }
    if (spec->kind == OPTION_SECRET) {
        snprintf(out, bytes, "%s", **(const char *const *)slot ? "(secret)" : "");
        return;
    }
    if (spec->kind == OPTION_NUM) {
        snprintf(out, bytes, "%.10g", *(const double *)slot);
        return;
    }
    int64_t value = *(const int64_t *)slot;
    if (spec->kind != OPTION_PICK) {
        snprintf(out, bytes, "%" PRId64, value);
        return;
    }
    option_choice_text(spec, value, out, bytes);
}

static inline void options_print_help(FILE *to) {
    fprintf(to,
            "train_gpt: pretrains GPT models.   mpirun -np RANKS ./train_gpt [--flag value ...]\n");
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionSpec *spec = &option_specs[i];
        if (i == 0 || strcmp(spec->group, option_specs[i - 1].group)) {
            fprintf(to, "\n%s\n", spec->group);
        }
        char left[64];
        snprintf(left, sizeof left, "--%s%s%s", spec->name, *spec->letter ? ", -" : "",
                 spec->letter);
        fprintf(to, "  %-26s %s%s%s%s%s (default %s)\n", left, *spec->choices ? "<" : "",
                spec->choices, *spec->choices ? ">" : "", *spec->choices ? " " : "", spec->help,
                *spec->fallback ? spec->fallback : "none");
    }
    fprintf(to, "\nkeys of --cluster\n");
    for (int k = 0; k < CLUSTER_KEYS; k++) {
        fprintf(to, "  %-26s %s\n", cluster_keys[k].name, cluster_keys[k].help);
    }
    fprintf(to,
            "\nExit codes: 0 done, 2 bad input, 3 resources (memory, disk), 4 a peer was lost.\n");
}

// -------------------------------------------------------------------------------------------------
// Parsing
static inline const OptionSpec *option_find(const char *argument, size_t length) {
    for (int i = 0; i < OPTION_COUNT; i++) {
        const char *name = option_specs[i].name, *letter = option_specs[i].letter;
        if (length > 2 && !strncmp(argument, "--", 2) && strlen(name) == length - 2 &&
            !strncmp(argument + 2, name, length - 2)) {
            return &option_specs[i];
        }
        if (length > 1 && argument[1] != '-' && strlen(letter) == length - 1 &&
            !strncmp(argument + 1, letter, length - 1)) {
            return &option_specs[i];
        }
    }
    return NULL;
}

// Returns the Levenshtein distance of two names, for the hint on unknown flags. Names are short.
static inline int option_distance(const char *a, const char *b) {
    int row[64], n = (int)min_i64((int64_t)strlen(b), 63);
    for (int j = 0; j <= n; j++) { row[j] = j; }
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) { best = row[j] + 1; }
            if (row[j - 1] + 1 < best) { best = row[j - 1] + 1; }
            row[j] = best;
        }
    }
    return row[n];
}

__attribute__((noreturn)) static inline void option_unknown(const char *argument) {
    const char *near_name = option_specs[0].name;
    char bare[64], hint[160];
    snprintf(bare, sizeof bare, "%.*s", (int)strcspn(argument, "="), argument);
    const char *wanted = bare + strspn(bare, "-");
    for (int i = 1; i < OPTION_COUNT; i++) {
        if (option_distance(wanted, option_specs[i].name) < option_distance(wanted, near_name)) {
            near_name = option_specs[i].name;
        }
    }
    snprintf(hint, sizeof hint, "the nearest is --%s; --help lists all", near_name);
    die(EXIT_INPUT, hint, "unknown flag %.80s", argument);
}

static inline int64_t option_pick(const OptionSpec *spec, const char *text) {
    const char *choice = spec->choices;
    for (int64_t i = 0;; i++) {
        size_t n = strcspn(choice, "|");
        if (strlen(text) == n && !strncmp(choice, text, n)) { return i; }
        if (!choice[n]) { break; }
        choice += n + 1;
    }
    die(EXIT_INPUT, "--help lists all flags", "--%s takes one of %s, found \"%.80s\"", spec->name,
        spec->choices, text);
}

// Parses a value and stores it. Ends the program (EXIT_INPUT) if it is malformed or out of range.
static inline void option_set(Options *options, const OptionSpec *spec, const char *text) {
    void *slot = option_slot(options, spec);
    if (strlen(text) > OPTION_TEXT_MAX) {
        die(EXIT_INPUT, "shorten it", "--%s takes at most %d characters, found %zu", spec->name,
            OPTION_TEXT_MAX, strlen(text));
    }
    if (spec->kind == OPTION_TEXT || spec->kind == OPTION_SECRET) {
        *(const char **)slot = text;
        return;
    }
    if (spec->kind == OPTION_PICK) {
        *(int64_t *)slot = option_pick(spec, text);
        return;
    }
    char *end = NULL;
    errno = 0;
    double value = strtod(text, &end);
    bool whole = spec->kind != OPTION_NUM;
    if (end == text || *end || errno == ERANGE || !isfinite(value) ||
        (whole && value != floor(value))) {
        die(EXIT_INPUT, spec->help, "--%s takes a %s, found \"%.80s\"", spec->name,
            whole ? "whole number" : "number", text);
    }
    if (value < spec->low || value > spec->high) {
        die(EXIT_INPUT, spec->help, "--%s must be from %.15g to %.15g, found %.80s", spec->name,
            spec->low, spec->high, text);
    }
    if (spec->kind == OPTION_POWER && ((int64_t)value & ((int64_t)value - 1))) {
        die(EXIT_INPUT, spec->help, "--%s takes a power of two, found %.80s", spec->name, text);
    }
    if (whole) {
        *(int64_t *)slot = (int64_t)value;
    } else {
        *(double *)slot = value;
    }
}

// Overwrites a secret with asterisks, in place.
static inline void option_mask(const char *secret) {
    memset((char *)(uintptr_t)secret, '*', strlen(secret));
}

// Parses the flag `argument`, whose value may be `next`. Returns how many arguments it used (1 or
// 2).
static inline int option_take(Options *options, OptionsGiven *given, const char *argument,
                              const char *next) {
    const char *equals = strchr(argument, '=');
    size_t length =
        equals && !strncmp(argument, "--", 2) ? (size_t)(equals - argument) : strlen(argument);
    const OptionSpec *spec = *argument == '-' ? option_find(argument, length) : NULL;
    if (!spec) { option_unknown(argument); }
    bool *again = &given->at[spec - option_specs];
    if (*again && spec->kind == OPTION_SECRET) {
        option_mask(*(const char **)option_slot(options, spec));
    }
    *again = true;
    if (argument[length] == '=') {
        option_set(options, spec, argument + length + 1);
        return 1;
    }
    if (spec->kind == OPTION_FLAG && next && *next != '-' && strcmp(next, "0") &&
        strcmp(next, "1")) {
        die(EXIT_INPUT, "alone it means 1", "--%s takes 0 or 1, found \"%.80s\"", spec->name, next);
    }
    bool bare = spec->kind == OPTION_FLAG && (!next || *next == '-');
    if (bare) {
        option_set(options, spec, "1");
        return 1;
    }
    if (!next || (*next == '-' && option_find(next, strlen(next)))) {
        die(EXIT_INPUT, spec->help, "--%s needs a value, found %s", spec->name,
            next ? next : "the end");
    }
    option_set(options, spec, next);
    return 2;
}

// -------------------------------------------------------------------------------------------------
// Pairs that do not combine. `why` completes the message "--a with --b: ...". Tests walk this
// table.
typedef struct {
    const char *a, *b, *why;
    bool (*clash)(const Options *o, const OptionsGiven *given);
} OptionPair;

static inline bool options_pipelined(const Options *o) { return strcmp(o->pipeline, "1") != 0; }
// the planner chooses the stages
static inline bool options_plans(const Options *o) { return !strcmp(o->pipeline, "auto"); }
static inline bool options_gives_stages(const Options *o) {
    return options_pipelined(o) && !options_plans(o);
}
static inline bool clash_resume_out(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->resume && !*o->out;
}
static inline bool clash_save_out(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->save_every && !*o->out;
}
static inline bool clash_hellaswag_val(const Options *o, const OptionsGiven *g) {
    (void)g;
    return *o->hellaswag && !o->val_every;
}
static inline bool clash_json_dry(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->json && !o->dry_run && !o->plan && !*o->dp_account;
}
static inline bool clash_cluster_dry(const Options *o, const OptionsGiven *g) {
    (void)g;
    return *o->cluster && !o->dry_run && !o->plan;
}
// Returns whether the program only prints something and trains nothing.
static inline bool options_only_prints(const Options *o) {
    return o->compat || *o->dp_account || o->dry_run || o->show_schedule || o->plan;
}
static inline bool clash_plan_dry(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->plan && o->dry_run;
}
static inline bool clash_profile_plan(const Options *o, const OptionsGiven *g) {
    (void)g;
    return *o->profile && !o->plan;
}
static inline bool clash_profile_cluster(const Options *o, const OptionsGiven *g) {
    (void)g;
    return *o->profile && !*o->cluster;
}
// Returns whether states may be offloaded. The planner chooses stages that fit without offloading.
static inline bool options_offloads(const Options *o) {
    return o->offload >= OFFLOAD_OPTIMIZER ||
           (o->offload == OFFLOAD_AUTO && *o->device_memory && !o->plan && !options_plans(o));
}
static inline bool clash_offload_budget(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_offload] && o->offload == OFFLOAD_AUTO && !*o->device_memory;
}
static inline bool clash_offload_auto(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_offload] && o->offload != OFFLOAD_NONE &&
           (o->plan || options_plans(o));
}
static inline bool clash_offload_quantized(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->offload >= OFFLOAD_PARAMS && o->zero_quantized_weights;
}
static inline bool options_private(const Options *o, const OptionsGiven *g) {
    return o->dp_epsilon > 0 || g->at[OPTION_INDEX_dp_noise];
}
static inline bool clash_offload_bubble(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->offload == OFFLOAD_ALL && o->pipeline_schedule == PIPELINE_ZERO_BUBBLE;
}
static inline bool clash_offload_private(const Options *o, const OptionsGiven *g) {
    return o->offload == OFFLOAD_ALL && options_private(o, g);
}
static inline bool clash_host_offload(const Options *o, const OptionsGiven *g) {
    (void)g;
    return *o->host_memory && !options_offloads(o);
}
static inline bool clash_dir_offload(const Options *o, const OptionsGiven *g) {
    (void)g;
    return *o->offload_dir && !options_offloads(o);
}
static inline bool clash_update_offload(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_offload_update] && !options_offloads(o);
}
// Delayed updates run on the host, with gradients that the host keeps until the next step.
static inline bool clash_delay_offload(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->offload_delay && o->offload != OFFLOAD_OPTIMIZER;
}
static inline bool clash_delay_update(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->offload_delay && o->offload_update == UPDATE_DEVICE;
}
static inline bool clash_delay_private(const Options *o, const OptionsGiven *g) {
    return o->offload_delay && (o->dp_epsilon > 0 || g->at[OPTION_INDEX_dp_noise]);
}
static inline bool clash_delay_quantized(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->offload_delay && o->zero_quantized_gradients;
}
static inline bool clash_delay_delink(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->offload_delay && o->delink_at;
}
static inline bool clash_delay_dir(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->offload_delay && *o->offload_dir;
}
static inline bool clash_cluster_nodes(const Options *o, const OptionsGiven *g) {
    return *o->cluster && g->at[OPTION_INDEX_ranks_per_node];
}
// Is a flag given that belongs to another optimizer?
static inline bool options_lack(const Options *o, const OptionsGiven *g, int index) {
    return g->at[index] && optimizer_lacks(&optimizers[o->optimizer], option_specs[index].name);
}
static inline bool clash_momentum_adamw(const Options *o, const OptionsGiven *g) {
    return options_lack(o, g, OPTION_INDEX_momentum);
}
static inline bool clash_beta_sgd(const Options *o, const OptionsGiven *g) {
    return options_lack(o, g, OPTION_INDEX_beta1) || options_lack(o, g, OPTION_INDEX_beta2) ||
           options_lack(o, g, OPTION_INDEX_eps);
}
// Parses --profile-steps A:B, steps counted from 1; 0 and 0 if it is not given. Returns false if
// the text is malformed.
static inline bool options_profile_steps(const Options *o, int64_t *first, int64_t *last) {
    int used = 0;
    *first = *last = 0;
    return !*o->profile_steps ||
           (sscanf(o->profile_steps, "%15" SCNd64 ":%15" SCNd64 "%n", first, last, &used) == 2 &&
            !o->profile_steps[used] && *first >= 1 && *first <= *last);
}
static inline bool clash_profile_steps(const Options *o, const OptionsGiven *g) {
    int64_t first, last;
    // a run of 0 steps profiles nothing
    (void)g;
    return options_profile_steps(o, &first, &last) && o->steps > 0 && last > o->steps;
}
static inline bool clash_trace_profile(const Options *o, const OptionsGiven *g) {
    (void)g;
    return *o->trace && !*o->profile_steps && !o->show_schedule;
}

static inline bool clash_rounding_fp32(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_dtype] && o->stochastic_rounding && o->dtype == DTYPE_FP32;
}

static inline bool clash_weights_stage(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->zero_quantized_weights && o->zero < 3;
}
static inline bool clash_hpz_stage(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->zero_hpz_partition_size > 1 && o->zero < 3;
}
static inline bool clash_bits_gradients(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_zero_gradient_bits] && !o->zero_quantized_gradients;
}
static inline bool clash_feedback_gradients(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->zero_error_feedback && !o->zero_quantized_gradients;
}
static inline bool clash_block_unused(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_zero_quant_block] && !o->zero_quantized_weights &&
           !o->zero_quantized_gradients;
}

// A run is private if --dp-epsilon is positive or --dp-noise is given, even as 0.
#define NEEDS_PRIVACY(field)                                                                       \
    static inline bool clash_##field##_alone(const Options *o, const OptionsGiven *g) {            \
        return g->at[OPTION_INDEX_##field] && !options_private(o, g);                              \
    }
NEEDS_PRIVACY(dp_delta)
NEEDS_PRIVACY(dp_clip)
NEEDS_PRIVACY(dp_clip_style)
NEEDS_PRIVACY(dp_clip_function)
NEEDS_PRIVACY(dp_unit)
NEEDS_PRIVACY(dp_key)
NEEDS_PRIVACY(dp_show_private)
#undef NEEDS_PRIVACY
static inline bool clash_accountant_account(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_dp_accountant] && !*o->dp_account && !options_private(o, g);
}
static inline bool clash_neighbours_account(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_dp_neighbours] && !*o->dp_account && !options_private(o, g);
}
static inline bool clash_epsilon_noise(const Options *o, const OptionsGiven *g) {
    return o->dp_epsilon > 0 && g->at[OPTION_INDEX_dp_noise] && o->dp_noise == 0;
}
static inline bool clash_unit_windows(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->dp_unit == DP_DOCUMENT && o->windows == 0; // continuous
}
static inline bool clash_cap_unit(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_dp_windows_per_document] && o->dp_unit != DP_DOCUMENT;
}
static inline bool clash_cap_rdp(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->dp_windows_per_document > 1 && o->dp_accountant == DP_RDP;
}
static inline bool clash_style_recompute(const Options *o, const OptionsGiven *g) {
    return options_private(o, g) && o->dp_clip_style != DP_UNIT && o->recompute == RECOMPUTE_BLOCK;
}
static inline bool clash_quantized_private(const Options *o, const OptionsGiven *g) {
    return o->zero_quantized_gradients && options_private(o, g);
}
static inline bool clash_reduce_private(const Options *o, const OptionsGiven *g) {
    return o->reduce_dtype == DTYPE_BF16 && options_private(o, g);
}
static inline bool clash_auto_private(const Options *o, const OptionsGiven *g) {
    return options_plans(o) && options_private(o, g);
}
static inline bool clash_bubble_private(const Options *o, const OptionsGiven *g) {
    return o->pipeline_schedule == PIPELINE_ZERO_BUBBLE && options_private(o, g);
}
static inline bool clash_schedule_pipeline(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_pipeline_schedule] && !options_gives_stages(o);
}
static inline bool clash_warmup_pipeline(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_pipeline_warmup] && !options_gives_stages(o);
}
static inline bool clash_auto_recompute(const Options *o, const OptionsGiven *g) {
    return options_plans(o) && g->at[OPTION_INDEX_recompute];
}
static inline bool clash_plan_recompute(const Options *o, const OptionsGiven *g) {
    return o->plan && !options_pipelined(o) && g->at[OPTION_INDEX_recompute];
}
static inline bool clash_auto_hpz(const Options *o, const OptionsGiven *g) {
    (void)g;
    return options_plans(o) && o->zero_hpz_partition_size > 1;
}
static inline bool clash_warmup_schedule(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_pipeline_warmup] && o->pipeline_schedule != PIPELINE_DAPPLE;
}
static inline bool clash_bubble_recompute(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->pipeline_schedule == PIPELINE_ZERO_BUBBLE && o->recompute == RECOMPUTE_BLOCK;
}
static inline bool options_cyclic(const Options *o) { return o->cyclic != 0; }
static inline bool clash_mode_cyclic(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_cyclic_mode] && !options_cyclic(o);
}
static inline bool clash_slack_cyclic(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_cyclic_slack] && o->cyclic != 2;
}
static inline bool clash_stages_cyclic(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_cyclic_stages] && !options_cyclic(o);
}
static inline bool clash_cut_cyclic(const Options *o, const OptionsGiven *g) {
    (void)g;
    return *o->cyclic_cut && !options_cyclic(o);
}
static inline bool clash_cyclic_pipeline(const Options *o, const OptionsGiven *g) {
    (void)g;
    return options_cyclic(o) && options_pipelined(o);
}
static inline bool clash_cyclic_zero(const Options *o, const OptionsGiven *g) {
    (void)g;
    return options_cyclic(o) && o->zero;
}
static inline bool clash_cyclic_quantized(const Options *o, const OptionsGiven *g) {
    (void)g;
    return options_cyclic(o) && o->zero_quantized_gradients;
}
static inline bool clash_cyclic_reduce(const Options *o, const OptionsGiven *g) {
    (void)g;
    return options_cyclic(o) && o->reduce_dtype == DTYPE_BF16;
}
// Modes zero and model only.
static inline bool clash_cyclic_private(const Options *o, const OptionsGiven *g) {
    return o->cyclic_mode > 2 && options_private(o, g);
}
static inline bool clash_style_cyclic(const Options *o, const OptionsGiven *g) {
    return options_cyclic(o) && options_private(o, g) && o->dp_clip_style != DP_UNIT;
}
static inline bool clash_cyclic_clip(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_grad_clip] && o->cyclic == 2 && o->grad_clip > 0 && !o->cyclic_clip;
}
static inline bool clash_clip_cyclic(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_cyclic_clip] && o->cyclic != 2;
}
static inline bool clash_cyclic_loss_z(const Options *o, const OptionsGiven *g) {
    (void)g;
    return options_cyclic(o) && o->skip_loss_z > 0;
}
static inline bool clash_cyclic_grad_z(const Options *o, const OptionsGiven *g) {
    (void)g;
    return options_cyclic(o) && o->skip_grad_z > 0;
}
static inline bool clash_cyclic_cluster(const Options *o, const OptionsGiven *g) {
    (void)g;
    return options_cyclic(o) && *o->cluster;
}
static inline bool options_shares(const Options *o) { return strcmp(o->share, "none") != 0; }
// the blocks stop sharing within this run
static inline bool options_switches(const Options *o) { return o->delink_at; }
// the run ends before the blocks stop sharing: it is the first part of a longer run
static inline bool options_ends_shared(const Options *o) {
    return o->delink_at && o->steps >= 0 && o->delink_at >= o->steps;
}
static inline bool clash_delink_share(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->delink_at && !options_shares(o);
}
static inline bool clash_rate_share(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->share_lr > 0 && !options_shares(o);
}
static inline bool clash_delink_twice(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->delink_at && o->delink;
}
static inline bool clash_moments_delink(const Options *o, const OptionsGiven *g) {
    return g->at[OPTION_INDEX_delink_moments] && !options_switches(o) && !o->delink;
}
static inline bool clash_rise_delink(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->delink_warmup && !options_switches(o);
}
static inline bool clash_delink_profile(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->delink_at && *o->profile_steps;
}
static inline bool clash_share_auto(const Options *o, const OptionsGiven *g) {
    (void)g;
    return options_shares(o) && (options_plans(o) || o->plan);
}
static inline bool clash_share_private(const Options *o, const OptionsGiven *g) {
    return options_shares(o) && options_private(o, g);
}
static inline bool clash_delink_cyclic(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->delink_at && options_cyclic(o);
}
static inline bool clash_cyclic_offload(const Options *o, const OptionsGiven *g) {
    (void)g;
    return options_cyclic(o) && options_offloads(o);
}
static inline bool clash_skip_loss_private(const Options *o, const OptionsGiven *g) {
    return o->skip_loss_z > 0 && options_private(o, g);
}
static inline bool clash_skip_grad_private(const Options *o, const OptionsGiven *g) {
    return o->skip_grad_z > 0 && options_private(o, g);
}
static inline bool clash_profile_private(const Options *o, const OptionsGiven *g) {
    return *o->profile_steps && options_private(o, g) && !o->dp_show_private;
}
static inline bool clash_replace_rdp(const Options *o, const OptionsGiven *g) {
    (void)g;
    return o->dp_neighbours == DP_REPLACE_ONE && o->dp_accountant == DP_RDP;
}

#define ONLY_PRIVATE "needs it or --dp-epsilon: else no run is private"
static const OptionPair option_pairs[] = {
    {"resume", "out", "needs the folder with the checkpoints", clash_resume_out},
    {"save-every", "out", "needs a folder to save into", clash_save_out},
    {"hellaswag", "val-every", "it is scored with each validation: give --val-every steps",
     clash_hellaswag_val},
    {"json", "dry-run",
     "only this, --plan and --dp-account print an object; training writes JSON lines to --log FILE",
     clash_json_dry},
    {"cluster", "dry-run", "a real run is on the ranks that there are", clash_cluster_dry},
    {"plan", "dry-run", "both print and stop: give one", clash_plan_dry},
    {"profile", "plan", "only plans are made from it", clash_profile_plan},
    {"profile", "cluster", "needs it: which ranks there are, and how fast their links",
     clash_profile_cluster},
    {"offload", "device-memory", "auto fills the device up to this budget: give it",
     clash_offload_budget},
    {"offload", "pipeline",
     "the planner chooses stages that fit into --device-memory without it: give the stages",
     clash_offload_auto},
    {"offload", "zero-quantized-weights",
     "(of params, all) parameters travel as records, which stay on the device: give --offload "
     "optimizer",
     clash_offload_quantized},
    {"offload", "pipeline-schedule",
     "(of all) zero-bubble's weight parts wait for others, and their activations with them: give "
     "--offload params",
     clash_offload_bubble},
    {"offload", "dp-noise",
     "(of all; or --dp-epsilon) clipping may spoil activations, which do not go back: give "
     "--offload params",
     clash_offload_private},
    {"host-memory", "offload",
     "nothing lies on the host: give --device-memory, or --offload optimizer", clash_host_offload},
    {"offload-update", "offload",
     "nothing lies on the host: give --device-memory, or --offload optimizer",
     clash_update_offload},
    {"offload-delay", "offload",
     "the host keeps gradients and all states: give --offload optimizer", clash_delay_offload},
    {"offload-delay", "offload-update", "it is the host that updates while the device computes",
     clash_delay_update},
    {"offload-delay", "dp-noise",
     "(or --dp-epsilon) the gradient of a private step gets its noise on the device",
     clash_delay_private},
    {"offload-delay", "zero-quantized-gradients", "their sums stay on the device",
     clash_delay_quantized},
    {"offload-delay", "delink-at",
     "a gradient that waits is of a model that is gone: give --delink to a run that follows",
     clash_delay_delink},
    {"offload-delay", "offload-dir",
     "all states are updated on the host while the device computes, and none is on its way there",
     clash_delay_dir},
    {"offload-dir", "offload",
     "nothing leaves the device: give --device-memory, or --offload optimizer", clash_dir_offload},
    {"cluster", "ranks-per-node", "the cluster says how many there are", clash_cluster_nodes},
    {"momentum", "optimizer", "only sgd has momentum; adamw has --beta1", clash_momentum_adamw},
    {"beta1", "optimizer", "--beta1, --beta2 and --eps belong to adamw; sgd has --momentum",
     clash_beta_sgd},
    {"profile-steps", "steps", "the run ends before", clash_profile_steps},
    {"trace", "profile-steps",
     "only profiled steps are timed: give it, or --show-schedule for the plan",
     clash_trace_profile},
    {"stochastic-rounding", "dtype", "only bf16 parameters are rounded: give --dtype bf16",
     clash_rounding_fp32},
    {"zero-quantized-weights", "zero",
     "only stage 3 gathers parameters for each use: give --zero 3", clash_weights_stage},
    {"zero-hpz-partition-size", "zero",
     "only stage 3 gathers parameters for each use: give --zero 3", clash_hpz_stage},
    {"zero-gradient-bits", "zero-quantized-gradients", "needs it", clash_bits_gradients},
    {"zero-error-feedback", "zero-quantized-gradients", "needs it", clash_feedback_gradients},
    {"zero-quant-block", "zero-quantized-weights",
     "nothing is quantized: give this or --zero-quantized-gradients", clash_block_unused},
    {"dp-delta", "dp-noise", ONLY_PRIVATE, clash_dp_delta_alone},
    {"dp-clip", "dp-noise", ONLY_PRIVATE, clash_dp_clip_alone},
    {"dp-clip-style", "dp-noise", ONLY_PRIVATE, clash_dp_clip_style_alone},
    {"dp-clip-function", "dp-noise", ONLY_PRIVATE, clash_dp_clip_function_alone},
    {"dp-unit", "dp-noise", ONLY_PRIVATE, clash_dp_unit_alone},
    {"dp-key", "dp-noise", ONLY_PRIVATE, clash_dp_key_alone},
    {"dp-show-private", "dp-noise", ONLY_PRIVATE, clash_dp_show_private_alone},
    {"dp-accountant", "dp-account",
     "needs it or a private run (--dp-epsilon, --dp-noise): nothing else is accounted",
     clash_accountant_account},
    {"dp-neighbours", "dp-account",
     "needs it or a private run (--dp-epsilon, --dp-noise): nothing else is accounted",
     clash_neighbours_account},
    {"dp-epsilon", "dp-noise",
     "without noise no epsilon is kept: leave --dp-noise out, and it is found",
     clash_epsilon_noise},
    {"dp-unit", "windows",
     "the windows of a document are known where none holds two: give --windows document",
     clash_unit_windows},
    {"dp-windows-per-document", "dp-unit",
     "only there windows are counted by document: give --dp-unit document", clash_cap_unit},
    {"dp-windows-per-document", "dp-accountant", "more than one is accounted by prv",
     clash_cap_rdp},
    {"dp-clip-style", "recompute",
     "private: flat and stage keep what each block computed until the whole norm is known; "
     "--dp-clip-style unit does not",
     clash_style_recompute},
    {"zero-quantized-gradients", "dp-noise",
     "(or --dp-epsilon) a block's scale and rounding are made of gradients without noise, so one "
     "sample can move all of its elements: these travel in fp32",
     clash_quantized_private},
    {"reduce-dtype", "dp-noise",
     "(or --dp-epsilon) rounding before noise is added can move more than a sample may: private "
     "gradients travel in fp32",
     clash_reduce_private},
    {"skip-loss-z", "dp-noise",
     "(or --dp-epsilon) a step that is skipped reveals something of its samples, which no epsilon "
     "counts",
     clash_skip_loss_private},
    {"skip-grad-z", "dp-noise",
     "(or --dp-epsilon) a step that is skipped reveals something of its samples, which no epsilon "
     "counts",
     clash_skip_grad_private},
    {"profile-steps", "dp-noise",
     "(or --dp-epsilon) the times of a step tell how many samples it drew: give --dp-show-private "
     "too",
     clash_profile_private},
    {"dp-neighbours", "dp-accountant", "replace-one is accounted by prv", clash_replace_rdp},
    {"pipeline", "dp-noise",
     "(or --dp-epsilon) auto does not know what clipping takes: give the stages",
     clash_auto_private},
    {"pipeline-schedule", "dp-noise",
     "(or --dp-epsilon) zero-bubble does not know when factors come: choose dapple",
     clash_bubble_private},
    {"pipeline-schedule", "pipeline",
     "one stage, and auto, have nothing to order: give --pipeline N", clash_schedule_pipeline},
    {"pipeline-warmup", "pipeline", "one stage, and auto, have nothing to order: give --pipeline N",
     clash_warmup_pipeline},
    {"pipeline-warmup", "pipeline-schedule", "only dapple has policies", clash_warmup_schedule},
    {"pipeline", "recompute", "auto chooses it, for the memory that --device-memory gives",
     clash_auto_recompute},
    {"plan", "recompute", "the planner chooses it, but for stages that --pipeline gives",
     clash_plan_recompute},
    {"pipeline", "zero-hpz-partition-size",
     "auto may choose stages of fewer ranks: give the stages", clash_auto_hpz},
    {"pipeline-schedule", "recompute",
     "zero-bubble keeps activations until the weight parts run: leave --recompute out, or choose "
     "dapple",
     clash_bubble_recompute},
    {"cyclic-mode", "cyclic", "needs --cyclic v1 or v2", clash_mode_cyclic},
    {"cyclic-slack", "cyclic", "only --cyclic v2 has pairs that could wait", clash_slack_cyclic},
    {"cyclic-stages", "cyclic", "needs --cyclic v1 or v2", clash_stages_cyclic},
    {"cyclic-cut", "cyclic", "needs --cyclic v1 or v2", clash_cut_cyclic},
    {"cyclic", "pipeline", "both cut the model into stages, by rules of their own: give one",
     clash_cyclic_pipeline},
    {"cyclic", "zero", "states travel from rank to rank, not by collectives: leave --zero out",
     clash_cyclic_zero},
    {"cyclic", "zero-quantized-gradients",
     "sums go on from rank to rank: each would be quantized again", clash_cyclic_quantized},
    {"cyclic", "reduce-dtype",
     "sums go on from rank to rank: each would be rounded again; they travel in fp32",
     clash_cyclic_reduce},
    {"cyclic-mode", "dp-noise",
     "(or --dp-epsilon) a sample's gradient of the table of tokens has two parts, which zero and "
     "model have apart: choose single or data",
     clash_cyclic_private},
    {"dp-clip-style", "cyclic",
     "flat and stage know a sample's factor when its backward pass ends, and sums of the last "
     "stage do not wait for that: choose unit",
     clash_style_cyclic},
    {"cyclic", "grad-clip",
     "v2 updates the last stage before the first one has a gradient, so there is no norm of all: "
     "give --cyclic-clip storage, or leave it out",
     clash_cyclic_clip},
    {"cyclic-clip", "cyclic", "only v2 has no norm of the whole gradient in time",
     clash_clip_cyclic},
    {"cyclic", "skip-loss-z", "updates do not wait for the loss of the step", clash_cyclic_loss_z},
    {"cyclic", "skip-grad-z", "updates do not wait for the norm of the step", clash_cyclic_grad_z},
    {"cyclic", "cluster", "is not predicted for ranks that are not there", clash_cyclic_cluster},
    {"share-lr", "share", "no blocks share: give --share all, or --lr", clash_rate_share},
    {"delink-at", "share", "no blocks share: give --share all", clash_delink_share},
    {"delink-at", "delink", "one is for the begin of a run, one for later: give one",
     clash_delink_twice},
    {"delink-at", "profile-steps",
     "one schedule is profiled, and there are two: give it to the run after --resume",
     clash_delink_profile},
    {"delink-moments", "delink-at", "needs it or --delink: nothing is copied",
     clash_moments_delink},
    {"delink-warmup", "delink-at", "needs it; a run that begins with --delink has --warmup",
     clash_rise_delink},
    {"share", "pipeline",
     "auto and --plan do not know that blocks share their parameters: give the stages",
     clash_share_auto},
    {"share", "dp-noise",
     "(or --dp-epsilon) the norm of what a sample adds to a shared block is not known layer by "
     "layer",
     clash_share_private},
    {"delink-at", "cyclic",
     "micro-batches of two steps are under way at the switch: give --delink to a run that follows",
     clash_delink_cyclic},
    {"cyclic", "offload",
     "(or --device-memory) states go from rank to rank when their updates are made, and none lies "
     "on the host",
     clash_cyclic_offload},
};
#undef ONLY_PRIVATE
enum { OPTION_PAIRS = (int)(sizeof option_pairs / sizeof option_pairs[0]) };

static inline void options_print_compat(FILE *to) {
    fprintf(to, "Every combination of flags is accepted, but for these:\n");
    for (int i = 0; i < OPTION_PAIRS; i++) {
        fprintf(to, "  --%-12s with --%-12s %s\n", option_pairs[i].a, option_pairs[i].b,
                option_pairs[i].why);
    }
}

// Removes secrets from the command line, which others can see: in checkpoint manifests, in the
// printed resume command and in ps.
static inline void options_hide_secrets(Options *o) {
    for (int i = 0; i < OPTION_COUNT; i++) {
        const char **slot = (const char **)option_slot(o, &option_specs[i]);
        if (option_specs[i].kind != OPTION_SECRET || !**slot) { continue; }
        const char *shown = *slot;
        *slot = strdup(shown);
        if (!*slot) { die(EXIT_RESOURCES, NULL, "cannot hold --%s", option_specs[i].name); }
        option_mask(shown);
    }
}

// Returns the number of bytes that a text such as 16G or 500M means (K, M, G, T: powers of 1024);
// INFINITY if the text is empty. Ends the program (EXIT_INPUT) if the text is malformed.
static inline double option_size(const char *name, const char *text) {
    static const char units[] = "KMGT";
    char *end = NULL;
    double bytes = strtod(text, &end);
    if (!*text) { return INFINITY; }
    const char *unit = end != text && *end ? strchr(units, toupper((unsigned char)*end)) : NULL;
    for (const char *u = units; unit && u <= unit; u++) { bytes *= 1024; }
    if (!isdigit((unsigned char)*text) || (unit ? end[1] : *end) ||
        !(bytes >= 1 && bytes <= 1e18)) {
        die(EXIT_INPUT, "such as 16G; K, M, G, T are powers of 1024",
            "--%s takes a number of bytes, found \"%.80s\"", name, text);
    }
    return bytes;
}
static inline void options_check_privacy(const Options *o) {
    size_t digits = strspn(o->dp_key, "0123456789abcdefABCDEF"), length = strlen(o->dp_key);
    if (length && (digits != length || length != 64)) { // the message does not show the key
        die(EXIT_INPUT,
            "openssl rand -hex 32 makes one; without --dp-key the operating system gives one, and "
            "nobody knows it",
            digits == length
                ? "--dp-key takes 64 hexadecimal digits, found %zu characters"
                : "--dp-key takes 64 hexadecimal digits, found other characters among %zu",
            length);
    }
}

// The default validation shards belong to the default training shards. A run with --train but
// without --val validates on --hellaswag alone, or not at all; --val is then empty.
static inline void options_choose_validation(Options *o, const OptionsGiven *given) {
    if (!o->val_every || !given->at[OPTION_INDEX_train] || given->at[OPTION_INDEX_val]) { return; }
    o->val = "";
    if (!*o->hellaswag) { o->val_every = 0; }
}

// Fills the options from the command line. Ends the program on any mistake (EXIT_INPUT). All ranks
// call it with the same arguments.
static inline void options_parse(Options *options, OptionsGiven *given, int argc, char **argv) {
    memset(options, 0, sizeof *options);
    memset(given, 0, sizeof *given);
    for (int i = 0; i < OPTION_COUNT; i++) {
        option_set(options, &option_specs[i], option_specs[i].fallback);
    }
    for (int i = 1; i < argc;) {
        i += option_take(options, given, argv[i], i + 1 < argc ? argv[i + 1] : NULL);
    }
    int64_t steps[2];
    if (!options_profile_steps(options, &steps[0], &steps[1])) {
        die(EXIT_INPUT, "such as 3:5, both in it",
            "--profile-steps takes two steps A:B, the first at least 1, found \"%.80s\"",
            options->profile_steps);
    }
    cluster_parse(options->cluster);
    option_size("device-memory", options->device_memory);
    option_size("host-memory", options->host_memory);
    options_check_privacy(options);
    for (int i = 0; i < OPTION_PAIRS; i++) {
        const OptionPair *pair = &option_pairs[i];
        if (pair->clash(options, given)) {
            die(EXIT_INPUT, "--compat lists what does not combine", "--%s with --%s: %s", pair->a,
                pair->b, pair->why);
        }
    }
    options_choose_validation(options, given);
    options_hide_secrets(options);
}

// Returns the learning rate of a step (counted from 0) of a run of `steps` steps.
static inline double options_learning_rate(const Options *o, int64_t step, int64_t steps) {
    if (step < o->warmup) { return o->lr * (double)(step + 1) / (double)o->warmup; }
    double last = o->lr * o->final_lr_fraction,
           done = (double)(step - o->warmup) / (double)max_i64(steps - o->warmup, 1);
    double from = 0.8 * (double)steps;
    switch (o->lr_schedule) {
    case LR_COSINE: return last + (o->lr - last) * 0.5 * (1 + cos(3.141592653589793 * done));
    case LR_LINEAR: return o->lr + (last - o->lr) * done;
    case LR_WSD:
        return (double)step < from
                   ? o->lr
                   : last + (o->lr - last) *
                                (1 - sqrt(((double)step - from) / ((double)steps - from)));
    default: return o->lr;
    }
}

static inline bool options_ask_help(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) { return true; }
    }
    return false;
}

#endif
