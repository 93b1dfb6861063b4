// options.h: every flag, once. The option table below generates the struct, the parser and --help
// (cli/option_parser.h), the startup table and the log header, so these cannot drift apart.
// plan/option_pairs.h lists the flags that do not combine.
#ifndef OPTIONS_H
#define OPTIONS_H

#include "base/base.h"
#include "ops/quantize.h"
#include "state/optimizer.h"

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
enum { LR_COSINE, LR_LINEAR, LR_CONSTANT, LR_WSD, LR_WSD_LINEAR }; // --lr-schedule
enum { RECOMPUTE_NONE, RECOMPUTE_BLOCK };                          // --recompute
enum { BALANCE_NONE, BALANCE_BIAS, BALANCE_AUX };                  // --moe-balance
enum { GRADIENT_BITS_4, GRADIENT_BITS_8 };                         // --zero-gradient-bits
enum { OFFLOAD_AUTO, OFFLOAD_NONE, OFFLOAD_OPTIMIZER, OFFLOAD_PARAMS, OFFLOAD_ALL }; // --offload
enum { UPDATE_HOST, UPDATE_DEVICE, UPDATE_AUTO }; // --offload-update
enum { DELINK_MEAN, DELINK_RESET };               // --delink-moments
enum { DP_FLAT, DP_UNIT, DP_STAGE }; // --dp-clip-style (--dp-clip-function: ClipFunction of ops.h)
enum { DP_SEQUENCE, DP_DOCUMENT };   // --dp-unit
enum { DP_RDP, DP_PRV };             // --dp-accountant
enum { DP_ADD_REMOVE, DP_REPLACE_ONE }; // --dp-neighbours

// clang-format off
// A row has the kind, group, field, name, llm.c's letter, default, what the kind has of lowest,
// highest, and choices or unit, and the help. OPTION, with all of these, is what is made of it.
#define FLAG(group, field, name, letter, fallback, help)                                           \
    OPTION(FLAG, group, field, name, letter, fallback, 0, 1, "", help)
#define WORDS(kind, group, field, name, letter, fallback, choices, help)                           \
    OPTION(kind, group, field, name, letter, fallback, 0, 0, choices, help)
#define TEXT(...) WORDS(TEXT, __VA_ARGS__)
#define PICK(...) WORDS(PICK, __VA_ARGS__)
#define SECRET(...) WORDS(SECRET, __VA_ARGS__)
#define INT(...) OPTION(INT, __VA_ARGS__)
#define NUM(...) OPTION(NUM, __VA_ARGS__)
#define POWER(...) OPTION(POWER, __VA_ARGS__)
#define OPTION_TABLE                                                                               \
    TEXT("data", train, "train", "i", "data/text_gpt2_train_*.bin", "glob",                        \
      "training shards (llm.c format)")                                                            \
    TEXT("data", val, "val", "j", "data/text_gpt2_val_*.bin", "glob",                              \
      "validation shards; left out where --train is given: no validation")                         \
    TEXT("data", tokenizer, "tokenizer", "", "", "file",                                           \
      "tokenizer .bin or .json, to print samples; empty: found beside the shards")                 \
    TEXT("data", end_of_text, "end-of-text", "", "", "token",                                      \
      "the token that ends texts, of a tokenizer .json; empty: eos_token of tokenizer_config.json "\
      "beside tokenizer.json, else <|endoftext|>, </s> or another known one")                      \
    FLAG("data", shuffle, "shuffle", "", "1",                                                      \
      "a new permutation of the windows each epoch; 0: in order")                                  \
    PICK("data", windows, "windows", "", "continuous", "continuous|document",                      \
      "cut the training stream anywhere, or at documents; labelled shards: always there; "         \
      "validation: anywhere")                                                                      \
    INT("data", seq_len, "seq-len", "t", "256", 1, 1048576, "tokens", "sequence length T")         \
    INT("data", micro_batch, "micro-batch", "b", "4", 1, 1048576, "sequences",                     \
      "per rank and micro-step; in a pipeline, of the whole micro-batch")                          \
    INT("data", batch_tokens, "batch-tokens", "d", "0", 0, 1e12, "tokens",                         \
      "per optimizer step, all ranks; 0: micro-batch x T x ranks")                                 \
    TEXT("model", model, "model", "e", "d12", "",                                                  \
      "d12, gpt2:124M, gpt3:1.3B, llama3.2:1B, qwen3:0.6B, nano:d12, "                             \
      "\"layers=6,heads=6,channels=384,vocab=256\" (more keys: arch, kv_heads, head_dim, ffn, "    \
      "theta, eps, tie, positions, rope_factor), a .bin file, or a folder: a checkpoint's, or of " \
      "Hugging Face")                                                                              \
    INT("run", steps, "steps", "x", "-1", -1, 1e12, "steps", "optimizer steps; -1: one epoch")     \
    TEXT("run", out, "out", "o", "", "folder", "where checkpoints go; empty: none are written")    \
    TEXT("run", log, "log", "", "", "file", "JSON lines")                                          \
    INT("run", log_every, "log-every", "", "0", 0, 1e12, "steps",                                  \
      "print and log the first, each N-th and the last; 0: log all, print one a second")           \
    TEXT("run", tensorboard, "tensorboard", "", "", "folder",                                      \
      "write what is logged as event files for TensorBoard, too")                                  \
    TEXT("run", config, "config", "", "", "file",                                                  \
      "flags, one on a line, such as: lr 3e-4; # begins a comment; the command line counts more")  \
    FLAG("run", json, "json", "", "0",                                                             \
      "--dry-run, --plan or --dp-account as one JSON object on stdout")                            \
    TEXT("run", export_file, "export", "", "", "path",                                             \
      "write the model after the last step: NAME.bin in llm.c's format (GPT-2), else a folder "    \
      "that Hugging Face's transformers reads")                                     \
    FLAG("run", dry_run, "dry-run", "", "0",                                                       \
      "print the prediction of memory, traffic and time, and stop")                                \
    FLAG("run", fit, "fit", "", "0",                                                               \
      "choose the fastest ZeRO stage, ZeRO++, pipeline, micro-batch, recomputation and offload "   \
      "that fit; flags that are given stay; --dry-run prints the best ten and stops")              \
    FLAG("run", compat, "compat", "", "0", "print which flags do not combine, and stop")           \
    FLAG("run", show_schedule, "show-schedule", "", "0",                                           \
      "print the timeline and the action list of one step, and stop")                              \
    INT("run", val_every, "val-every", "v", "20", 0, 1e12, "steps",                                \
      "validate every N steps and at the end; 0: never")                                           \
    INT("run", val_batches, "val-batches", "m", "20", -1, 1e6, "batches",                          \
      "per validation; -1: all of it once")                                                        \
    TEXT("run", hellaswag, "hellaswag", "", "", "file",                                            \
      "score multiple choices (llm.c's hellaswag_val.bin) with each validation")                   \
    INT("run", sample_every, "sample-every", "s", "0", 0, 1e12, "steps",                           \
      "print generated text every N steps and at the end; 0: never")                               \
    TEXT("run", prompt, "prompt", "", "", "text",                                                  \
      "print what the model goes on with, alone on standard output, and stop; -: for each line of "\
      "standard input; trains and saves nothing")                                                  \
    INT("run", sample_tokens, "sample-tokens", "g", "64", 1, 1048576, "tokens", "to generate")     \
    NUM("run", temperature, "temperature", "", "1.0", 0, 100, "",                                  \
      "of generated text; 0: the likeliest token")                                                 \
    INT("run", top_k, "top-k", "", "0", 0, 1e9, "tokens",                                          \
      "generated text takes one of the K likeliest tokens; 0: of all")                             \
    NUM("run", top_p, "top-p", "", "1.0", 1e-9, 1, "",                                             \
      "generated text takes one of the fewest tokens, of the K likeliest, that have this "         \
      "probability together; 1: of all")                                                           \
    INT("run", save_every, "save-every", "n", "0", 0, 1e12, "steps",                               \
      "checkpoint every N steps and at the end; 0: only when stopped")                             \
    INT("run", keep, "keep", "nk", "0", 0, 1e6, "checkpoints",                                     \
      "newest to keep, and the last good one: its next loss is finite; 0: all")                    \
    INT("run", max_skipped, "max-skipped", "", "100", 0, 1e12, "updates",                          \
      "a run that skips so many in a row has diverged: it ends with exit code 3; 0: never")        \
    FLAG("run", resume, "resume", "y", "0",                                                        \
      "go on from the newest valid checkpoint in --out, if there is one yet")                      \
    INT("run", seed, "seed", "", "42", 0, 9e15, "", "of initial weights, shuffling and sampling")  \
    INT("run", threads, "threads", "", "0", 0, 1024, "threads",                                    \
      "per rank; 0: cores / ranks on the node")                                                    \
    TEXT("run", profile_steps, "profile-steps", "", "", "A:B",                                     \
      "tell where the time of steps A to B goes; on a GPU nsys can capture them")                  \
    TEXT("run", trace, "trace", "", "", "file",                                                    \
      "when each action of a step runs, for chrome://tracing: planned with --show-schedule, "      \
      "measured with --profile-steps")                                                             \
    PICK("optimizer", optimizer, "optimizer", "", "adamw", OPTIMIZER_CHOICES, "")                  \
    NUM("optimizer", momentum, "momentum", "", "0.9", 0, 0.999999, "",                             \
      "decay of the sum of gradients")                                                             \
    FLAG("optimizer", nesterov, "nesterov", "", "0",                                               \
      "updates look one step ahead, which makes up for much of --cyclic's delay")                  \
    NUM("optimizer", muon_lr, "muon-lr", "", "0.02", 0, 1e6, "",                                   \
      "peak learning rate of the matrices, on the schedule of --lr")                               \
    NUM("optimizer", muon_momentum, "muon-momentum", "", "0.95", 0, 0.999999, "",                  \
      "decay of the mean of gradients of the matrices")                                            \
    INT("optimizer", muon_momentum_warmup, "muon-momentum-warmup", "", "0", 0, 1e12, "steps",      \
      "--muon-momentum rises from 0.85 over so many steps")                                        \
    INT("optimizer", muon_steps, "muon-steps", "", "5", 1, 100, "iterations",                      \
      "iterations of Newton-Schulz, which make a matrix orthogonal")                               \
    NUM("optimizer", muon_weight_decay, "muon-weight-decay", "", "0.1", 0, 100, "",                \
      "on the matrices, times their learning rate")                                                \
    NUM("optimizer", lr, "lr", "l", "3e-4", 0, 1e6, "", "peak learning rate")                      \
    PICK("optimizer", lr_schedule, "lr-schedule", "k", "cosine",                                   \
      "cosine|linear|constant|wsd|wsd-linear",                                                     \
      "wsd: constant, then the last part decays by 1 - sqrt, or linearly")                         \
    NUM("optimizer", lr_last_part, "lr-last-part", "", "0.2", 1e-9, 1, "of the steps",             \
      "the part in which wsd and wsd-linear decay to --final-lr-fraction")                         \
    NUM("optimizer", lr_embedding, "lr-embedding", "", "1", 0, 1e6, "times --lr",                  \
      "learning rate of the embeddings, also where the head uses them")                            \
    NUM("optimizer", lr_head, "lr-head", "", "1", 0, 1e6, "times --lr",                            \
      "learning rate of the head, where it has a table of its own")                                \
    NUM("optimizer", lr_vectors, "lr-vectors", "", "1", 0, 1e6, "times --lr",                      \
      "learning rate of biases and gains")                                                         \
    INT("optimizer", warmup, "warmup", "u", "0", 0, 1e12, "steps",                                 \
      "linear warm-up; a shorter run ends within it")                                              \
    NUM("optimizer", final_lr_fraction, "final-lr-fraction", "q", "1.0", 0, 1, "",                 \
      "of the peak, at the last step; 0.1 where --lr-schedule cosine is given")                    \
    NUM("optimizer", weight_decay, "weight-decay", "c", "0.0", 0, 100, "", "on 2-D tensors")       \
    NUM("optimizer", beta1, "beta1", "", "0.9", 0, 0.999999, "", "decay of the first moment")      \
    NUM("optimizer", beta2, "beta2", "", "0.95", 0, 0.99999999, "", "decay of the second moment")  \
    NUM("optimizer", eps, "eps", "", "1e-8", 1e-30, 1, "", "added to the second moment's root")    \
    NUM("optimizer", grad_clip, "grad-clip", "", "1.0", 0, 1e30, "",                               \
      "largest global gradient norm; 0: off")                                                      \
    NUM("optimizer", skip_loss_z, "skip-loss-z", "sl", "0", 0, 1e6, "sigma",                       \
      "skip an update whose loss is an outlier by more; 0: off")                                   \
    NUM("optimizer", skip_grad_z, "skip-grad-z", "sg", "0", 0, 1e6, "sigma",                       \
      "skip an update whose gradient norm is an outlier by more; 0: off")                          \
    PICK("precision", dtype, "dtype", "", DEFAULT_DTYPE, "fp32|bf16",                              \
      "of parameters, activations and messages, and of products where the CPU has such")           \
    PICK("precision", reduce_dtype, "reduce-dtype", "", "fp32", "fp32|bf16",                       \
      "of gradient messages; sums are fp32 in any case")                                           \
    PICK("precision", recompute, "recompute", "", "none", "none|block",                            \
      "block: keep only each block's input, compute the rest again")                               \
    FLAG("precision", stochastic_rounding, "stochastic-rounding", "", "0",                         \
      "bf16 parameters are rounded by chance, right on average; 0: to nearest even")               \
    FLAG("precision", autotune, "autotune", "", "1",                                               \
      "on a GPU, time the library's algorithms for each matrix product, and use the fastest; 0: "  \
      "its first suggestion, so that another run gives the same bits. A resumed run keeps the "    \
      "choices of its checkpoint, with 0 too")                                                     \
    PICK("precision", offload, "offload", "", "auto", "auto|none|optimizer|params|all",            \
      "what lies on the host. optimizer: its states; params: blocks' parameters, too; all: "       \
      "their activations, too; none: nothing; auto: what --device-memory requires")                \
    PICK("precision", offload_update, "offload-update", "", "auto", "host|device|auto",            \
      "who updates what lies on the host; auto: who is faster here")                               \
    FLAG("precision", offload_delay, "offload-delay", "", "0",                                     \
      "the host updates by the gradient of the step before, while the next one computes (with "    \
      "--offload optimizer)")                                                                      \
    TEXT("precision", device_memory, "device-memory", "", "", "16G",                               \
      "bytes that a rank may take of its device, with K, M, G or T; empty: any")                   \
    TEXT("precision", host_memory, "host-memory", "", "", "64G",                                   \
      "bytes that a rank may take of the host, with the states that lie there; empty: any")        \
    TEXT("precision", offload_dir, "offload-dir", "", "", "folder",                                \
      "on a disk, for what leaves the device and does not fit --host-memory; without that, for "   \
      "all of it")                                                                                 \
    INT("ZeRO", zero, "zero", "z", "0", 0, 3, "stage",                                             \
      "what the ranks divide: 1 optimizer states, 2 and gradients, 3 and parameters")              \
    FLAG("ZeRO", zero_quantized_weights, "zero-quantized-weights", "", "0",                        \
      "qwZ: gathers carry INT8 (stage 3)")                                                         \
    INT("ZeRO", zero_hpz_partition_size, "zero-hpz-partition-size", "", "1", 1, 1e6, "ranks",      \
      "hpZ: number of ranks, those of a node, that share one secondary copy of the parameters, "   \
      "for the backward pass (stage 3); 1: off")                                                   \
    FLAG("ZeRO", zero_quantized_gradients, "zero-quantized-gradients", "", "0",                    \
      "qgZ: gradients are reduced by two exchanges of INT4 or INT8")                               \
    POWER("ZeRO", zero_quant_block, "zero-quant-block", "", "256", QUANT_LEAST_BLOCK,              \
      QUANT_MOST_BLOCK, "elements", "that share a scale, a power of two")                          \
    PICK("ZeRO", zero_gradient_bits, "zero-gradient-bits", "", "4", "4|8",                         \
      "of quantized gradients")                                                                    \
    FLAG("ZeRO", zero_error_feedback, "zero-error-feedback", "", "0",                              \
      "what quantizing a gradient loses is added to the next one; begins anew with each "          \
      "checkpoint")                                                                                \
    TEXT("pipeline", pipeline, "pipeline", "", "1", "N|auto|SPEC",                                 \
      "N even stages, or units:replicas of each, such as 5:3,3:1 (blocks + 2 units, all "          \
      "ranks); auto: the planner chooses")                                                         \
    PICK("pipeline", pipeline_schedule, "pipeline-schedule", "", "dapple",                         \
      "gpipe|dapple|zero-bubble", "order of forwards and backwards on a stage")                    \
    PICK("pipeline", pipeline_warmup, "pipeline-warmup", "", "a", "a|b",                           \
      "forwards before the first backward of dapple: of stage i from 0 of S, S - i, or, for "      \
      "slow messages, 2 (S - i) - 1")                                                              \
    INT("pipeline", micro_batches, "micro-batches", "", "0", 0, 1e6, "micro-batches",              \
      "of --micro-batch samples in a step, over all ranks of a stage; 0: as --batch-tokens says")  \
    FLAG("pipeline", plan, "plan", "", "0",                                                        \
      "print the best pipeline for this model (or --profile) on these ranks (or --cluster), "      \
      "beside what others would choose, and stop")                                                 \
    TEXT("pipeline", profile, "profile", "", "", "file[:model]",                                   \
      "what --plan plans for: times and bytes of each unit (docs/formats.md)")                     \
    PICK("cyclic", cyclic, "cyclic", "", "off", "off|v1|v2",                                       \
      "cyclic data parallelism: micro-batches are delayed against each other, by parameters "      \
      "one step old (v1) or where there are no newer ones yet (v2)")                               \
    PICK("cyclic", cyclic_mode, "cyclic-mode", "", "auto", "auto|single|data|zero|model",          \
      "who runs a step's micro-batches: one rank, a rank each (zero: which has a stage's "         \
      "states only), a rank for each stage; auto: what fits the ranks")                            \
    INT("cyclic", cyclic_slack, "cyclic-slack", "", "0", 0, 4096, "",                              \
      "of v2: micro-batch i uses new parameters of stage j of N if i + j >= N + 1 + this; "        \
      "messages then have time")                                                                   \
    INT("cyclic", cyclic_stages, "cyclic-stages", "", "0", 0, 4096, "stages",                      \
      "N, and the micro-batches of a step; 0: as many as ranks, on one rank as --batch-tokens "    \
      "has micro-batches; mode model also runs on N (N + 1) / 2 ranks")                            \
    TEXT("cyclic", cyclic_cut, "cyclic-cut", "", "", "5,3,3,3",                                    \
      "units of each stage (blocks + 2 in all); empty: as even as possible, the first ones "       \
      "take the rest")                                                                             \
    PICK("cyclic", cyclic_clip, "cyclic-clip", "", "none", "none|storage",                         \
      "of v2, whose last stage is updated before the first one has a gradient. storage: clips "    \
      "the gradient of each embedding, block and layernorm to --grad-clip / sqrt(their number)")   \
    TEXT("pseudo", share, "share", "", "none", "none|all|N|AxB",                                   \
      "blocks that share one storage: all, N that follow each other, or A distinct blocks "        \
      "repeated B times")                                                                          \
    NUM("pseudo", share_lr, "share-lr", "", "0", 0, 1e6, "",                                       \
      "learning rate while blocks share, on the same schedule; 0: --lr")                           \
    INT("pseudo", delink_at, "delink-at", "", "0", 0, 1e12, "steps",                               \
      "after so many steps each block gets a copy of what it shared, and trains on with it; 0: "   \
      "never")                                                                                     \
    FLAG("pseudo", delink, "delink", "", "0",                                                      \
      "give each block its copy at the start, with --model FOLDER, a checkpoint whose blocks "     \
      "share")                                                                                     \
    PICK("pseudo", delink_moments, "delink-moments", "", "mean", "mean|reset",                     \
      "what copies begin with. mean: the moments of the mean gradient; reset: none")               \
    INT("pseudo", delink_warmup, "delink-warmup", "", "0", 0, 1e12, "steps",                       \
      "the learning rate rises again from 0 after the switch")                                     \
    PICK("experts", moe_balance, "moe-balance", "", "none", "none|bias|aux",                       \
      "how tokens are spread over experts: bias changes the choice alone, after each step; aux "   \
      "adds Switch's loss, over the tokens of the whole step")                                     \
    NUM("experts", moe_aux_coefficient, "moe-aux-coefficient", "", "0.01", 0, 1e6, "",             \
      "factor of Switch's loss of each layer (with --moe-balance aux)")                            \
    NUM("experts", moe_z_coefficient, "moe-z-coefficient", "", "0", 0, 1e6, "",                    \
      "factor of the mean square of the log of the sum of e^logit of each layer's router; 0: "     \
      "off")                                                                                       \
    INT("experts", expert_parallel, "expert-parallel", "", "1", 1, 1e6, "ranks",                   \
      "that a layer's experts are divided over")                                                   \
    NUM("experts", moe_buffer, "moe-buffer", "", "0", 0, 1e6, "mean loads",                        \
      "rows that a rank's experts have memory for at once (with --expert-parallel); more go to "   \
      "them in pieces, with the same result; 0: memory for the most that there can be")            \
    NUM("privacy", dp_epsilon, "dp-epsilon", "", "0", 0, 1000, "",                                 \
      "a private run, which stops before it gives away more; the noise is found for --steps "      \
      "where --dp-noise is not given; 0: off")                                                     \
    NUM("privacy", dp_noise, "dp-noise", "", "0", 0, 1e4, "thresholds",                            \
      "a private run with noise of this standard deviation; 0, where it is given: clips, but "     \
      "nothing is private")                                                                        \
    NUM("privacy", dp_delta, "dp-delta", "", "0", 0, 0.999999, "",                                 \
      "chance that epsilon may not hold; 0: 0.1 / windows of the training data")                   \
    NUM("privacy", dp_clip, "dp-clip", "", "1", 1e-9, 1e9, "norm",                                 \
      "threshold R of a sample's gradient")                                                        \
    PICK("privacy", dp_clip_style, "dp-clip-style", "", "unit", "flat|unit|stage",                 \
      "what has a norm of its own: the whole gradient, each block and the embedding (R / "         \
      "sqrt(layers + 2) each), each pipeline stage")                                               \
    PICK("privacy", dp_clip_function, "dp-clip-function", "", "abadi", "abadi|automatic",          \
      "abadi: longer gradients are cut to R, as in Opacus; automatic: all become about R long, "   \
      "as in fastDP")                                                                              \
    PICK("privacy", dp_unit, "dp-unit", "", "sequence", "sequence|document",                       \
      "what is protected: a window, or all windows of a document")                                 \
    INT("privacy", dp_windows_per_document, "dp-windows-per-document", "", "1", 1, 1024,           \
      "windows", "a longer document loses the rest")                                               \
    PICK("privacy", dp_neighbours, "dp-neighbours", "", "add-remove", "add-remove|replace-one",    \
      "data sets that must be hard to distinguish differ by a sample that is there or not, or "    \
      "by another in its place")                                                                   \
    PICK("privacy", dp_accountant, "dp-accountant", "", "prv", "rdp|prv",                          \
      "prv: an interval around the exact value; rdp: the older upper bound")                       \
    SECRET("privacy", dp_key, "dp-key", "", "", "64 hex digits",                                   \
      "secret of noise and sampling, for tests only: anyone who has it can remove the noise; "     \
      "empty: from the operating system, kept in OUT/dp_key")                                      \
    FLAG("privacy", dp_show_private, "dp-show-private", "", "0",                                   \
      "print and log losses, norms and samples of private steps: epsilon does not hold for "       \
      "anyone who sees them")                                                                      \
    TEXT("privacy", dp_account, "dp-account", "", "", "q=,sigma=,steps=,delta=",                   \
      "print epsilon of so many private steps, and stop")                                          \
    NUM("cluster", watchdog, "watchdog", "", "20", 0, 1e9, "seconds",                              \
      "a rank that others wait for and that is silent so long ends the job; 0: never")             \
    INT("cluster", ranks_per_node, "ranks-per-node", "", "0", 0, 1e6, "ranks",                     \
      "pretend nodes of this many ranks; 0: as the hosts are")                                     \
    TEXT("cluster", cluster, "cluster", "", "", "8x8,gpu=h100",                            \
      "--dry-run, --plan and --fit predict for this cluster: nodes x ranks of a node, 2x8+1x4 "    \
      "where nodes differ, 1x8*0.5 where one is slower, then gpu= or its rates; --seq-len and "    \
      "--batch-tokens, where not given, are those that such models are trained with")
// clang-format on

typedef struct {
#define OPTION(kind, group, field, ...) Option##kind field;
    OPTION_TABLE
#undef OPTION
} Options;

enum {
#define OPTION(kind, group, field, ...) OPTION_INDEX_##field,
    OPTION_TABLE
#undef OPTION
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
#define OPTION(kind, group, field, name, letter, fallback, low, high, choices, help)               \
    {OPTION_##kind, offsetof(Options, field), group, name, letter, fallback, low, high, choices,   \
     help},
    OPTION_TABLE
#undef OPTION
#undef FLAG
#undef WORDS
#undef TEXT
#undef PICK
#undef SECRET
#undef INT
#undef NUM
#undef POWER
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
// Printing values. The startup table, the log header and --help use them.
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

// -------------------------------------------------------------------------------------------------
// What flags mean
static inline bool options_pipelined(const Options *o) { return strcmp(o->pipeline, "1") != 0; }
// the planner chooses the stages
static inline bool options_plans(const Options *o) { return !strcmp(o->pipeline, "auto"); }
static inline bool options_gives_stages(const Options *o) {
    return options_pipelined(o) && !options_plans(o);
}
// a search chooses stages, micro-batches and, of experts, on how many ranks they are
static inline bool options_searches(const Options *o) {
    return o->fit || o->plan || options_plans(o);
}
// Returns whether the program only prints something and trains nothing.
static inline bool options_only_prints(const Options *o) {
    return o->compat || *o->dp_account || o->dry_run || o->show_schedule || o->plan;
}
// Returns whether the program continues texts (--prompt), and trains nothing.
static inline bool options_prompts(const OptionsGiven *g) { return g->at[OPTION_INDEX_prompt]; }
static inline bool options_generates(const Options *o, const OptionsGiven *g) {
    return options_prompts(g) || o->sample_every > 0;
}
// Returns whether states may be offloaded. The planner chooses stages that fit without offloading.
static inline bool options_offloads(const Options *o) {
    return o->offload >= OFFLOAD_OPTIMIZER ||
           (o->offload == OFFLOAD_AUTO && *o->device_memory && !o->plan && !options_plans(o));
}
static inline bool options_private(const Options *o, const OptionsGiven *g) {
    return o->dp_epsilon > 0 || g->at[OPTION_INDEX_dp_noise];
}
static inline bool options_shares(const Options *o) { return strcmp(o->share, "none") != 0; }
// the blocks stop sharing within this run
static inline bool options_switches(const Options *o) { return o->delink_at; }
// the run ends before the blocks stop sharing: it is the first part of a longer run
static inline bool options_ends_shared(const Options *o) {
    return o->delink_at && o->steps >= 0 && o->delink_at >= o->steps;
}
// Is a flag given that belongs to another optimizer?
static inline bool options_lack(const Options *o, const OptionsGiven *g, int index) {
    return g->at[index] && optimizer_lacks(&optimizers[o->optimizer], option_specs[index].name);
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
// Ends the program (EXIT_INPUT) if --batch-tokens says other than --micro-batches of --micro-batch
// samples.
static inline void options_check_batch(const Options *o) {
    const int64_t tokens = o->micro_batches * o->micro_batch * o->seq_len;
    if (!o->batch_tokens || !o->micro_batches || o->batch_tokens == tokens) { return; }
    die(EXIT_INPUT, "leave one of them out",
        "--batch-tokens %" PRId64 " is not --micro-batches x --micro-batch x --seq-len, %" PRId64,
        o->batch_tokens, tokens);
}
// Returns whether --profile-steps reaches beyond the run's last step. A run of 0 steps profiles
// nothing.
static inline bool options_profiles_beyond(const Options *o) {
    int64_t first, last;
    return options_profile_steps(o, &first, &last) && o->steps > 0 && last > o->steps;
}

#endif
