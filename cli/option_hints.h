// option_hints.h: what to type instead of a flag that does not exist: by its meaning in another
// program (a table of their names), or by its spelling.
#ifndef OPTION_HINTS_H
#define OPTION_HINTS_H

#include "base/base.h"
#include "comm/mpi.h"
#include "options.h"

enum { OPTION_NAME_MAX = 63 };
// Names of nanoGPT, llm.c, Hugging Face, DeepSpeed, Megatron-LM, torchrun and Opacus, in lower case
// and with hyphens, then what takes their place here.
typedef struct {
    const char *names, *instead;
} OptionSynonym;
static const OptionSynonym option_synonyms[] = {
    {"learning-rate max-lr peak-lr base-lr", "--lr 3e-4"},
    {"min-lr lr-min final-lr lr-scheduler lr-scheduler-type lr-decay-style scheduler "
     "decay-lr warmup-steps warmup-iters lr-warmup-iters warmup-ratio lr-warmup-fraction "
     "lr-decay-iters lr-decay-steps",
     "--lr-schedule cosine, linear, constant, wsd or wsd-linear, which ends with --steps; "
     "--warmup STEPS; --final-lr-fraction 0.1, a share of --lr"},
    {"batch-size per-device-train-batch-size train-micro-batch-size-per-gpu device-batch-size "
     "bs micro-batch-size",
     "--micro-batch (sequences of a rank) or --batch-tokens (tokens of a step)"},
    {"global-batch-size train-batch-size total-batch-size gradient-accumulation-steps "
     "grad-accum grad-accum-steps accumulate-grad-batches accumulation-steps",
     "--batch-tokens TOKENS of a step: sequences x --seq-len; the micro-steps follow from "
     "it"},
    {"bf16 bfloat16 fp32 float32 fp16 float16 half amp mixed-precision fp8 precision "
     "torch-dtype",
     "--dtype bf16 or fp32; bf16 needs no loss scaling, fp16 and fp8 are not there"},
    {"tf32 f w use-master-weights",
     "build with make cuda TF32=1; with --dtype bf16 master weights are always kept"},
    {"gpus ngpu num-gpus n-gpus nproc nproc-per-node nprocs world-size num-processes ranks"
     " np pn workers devices nodes nnodes num-nodes hosts hostfile master-port master-addr"
     " local-rank rdzv-endpoint",
     "use mpirun -np N (with --hostfile FILE on several machines) before the program: N "
     "ranks, on GPUs one for each" ONE_RANK_HINT},
    {"epochs num-epochs num-train-epochs max-epochs max-steps max-iters num-steps num-iterations "
     "iterations iters train-iters n-steps training-steps total-steps",
     "--steps N; --steps -1 is one epoch"},
    {"n-layer n-layers num-layers num-hidden-layers depth n-head n-heads num-heads "
     "num-attention-heads "
     "n-embd n-embed d-model hidden-size embed-dim dim vocab-size vocab "
     "layers heads channels model-dim",
     "--model \"layers=6,heads=6,channels=384,vocab=256\""},
    {"model-name-or-path model-name model-type init-from pretrained config-name model-size"
     " arch",
     "--model gpt2:124M, a checkpoint's folder or a .bin file"},
    {"context-length block-size ctx-len n-ctx sequence-length seq-length seqlen max-seq-len "
     "max-length max-position-embeddings",
     "--seq-len TOKENS"},
    {"dropout bias attention-dropout resid-dropout label-smoothing compile torch-compile "
     "gelu-fusion ge backend use-flash-attn flash-attention flash device a",
     "leave it out: there is no such choice here"},
    {"deepspeed deepspeed-config zero-stage zero-optimization use-distributed-optimizer",
     "--zero 1, 2 or 3; the other settings are flags too (--help ZeRO)"},
    {"fsdp ddp sharding-strategy data-parallel distributed",
     "--zero 3, as FSDP does; --zero 0 is DDP"},
    {"tensor-parallel tensor-model-parallel-size tensor-parallel-size tp tp-size context-parallel "
     "context-parallel-size cp sequence-parallel",
     "--zero 3 or --pipeline N: no other way divides a model here"},
    {"pipeline-parallel pipeline-model-parallel-size pipeline-parallel-size pp pp-size "
     "stages num-stages",
     "--pipeline N"},
    {"num-microbatches n-microbatches chunks", "--micro-batches M"},
    {"cpu-offload offload-optimizer offload-param zero-offload",
     "--offload optimizer, params or all"},
    {"gradient-checkpointing activation-checkpointing recompute-activations checkpoint-activations "
     "r",
     "--recompute block"},
    {"output-dir out-dir save-dir checkpoint-dir save-path save run-dir", "--out FOLDER"},
    {"save-steps save-interval checkpoint-every checkpoint-interval save-total-limit "
     "max-checkpoints "
     "keep-last",
     "--save-every STEPS, and --keep N"},
    {"resume-from-checkpoint load checkpoint ckpt resume-from load-checkpoint",
     "--resume 1 with the same --out; --model FOLDER begins a new run with its weights"},
    {"eval-interval eval-every eval-steps val-interval validation-interval val-loss-every",
     "--val-every STEPS"},
    {"eval-iters eval-batches val-steps", "--val-batches N"},
    {"eval-only do-eval do-train",
     "--steps N trains; --steps 0 with --val and --model FOLDER only validates"},
    {"log-dir logging-dir log-file wandb wandb-log wandb-project report-to lg log-interval"
     " logging-steps",
     "--log FILE, drawn by scripts/plot.py, or --tensorboard FOLDER; --log-every STEPS"},
    {"dataset data data-path data-dir train-data train-file dataset-name input input-bin "
     "files val-data validation-file eval-file val-file input-val-bin test tokenizer-name "
     "tokenizer-path vocab-file merge-file",
     "--train 'data/NAME_train_*.bin' --val 'data/NAME_val_*.bin', made by "
     "scripts/prepare_data.py; --tokenizer FILE"},
    {"num-workers dataloader-num-workers num-threads n-threads omp-num-threads cpus",
     "--threads N; the shards are mapped into memory, so that no worker reads them"},
    {"optim adam-beta1 adam-beta2 adam-epsilon adam-eps epsilon wd",
     "--optimizer NAME --beta1 0.9 --beta2 0.95 --eps 1e-8 --weight-decay 0.1; --dp-epsilon "
     "is that of private runs"},
    {"max-grad-norm clip-grad gradient-clipping gradient-clip-val clip-grad-norm",
     "--grad-clip 1; of private runs --dp-clip"},
    {"noise-multiplier sigma target-epsilon max-epsilon delta target-delta "
     "max-per-sample-grad-norm "
     "per-sample-max-grad-norm",
     "--dp-noise S or --dp-epsilon E, with --dp-delta 1e-6 and --dp-clip R"},
    {"config-file config-path cfg conf", "--config FILE"},
};

// Returns the Levenshtein distance of two names, for the hint on unknown flags. Names are short.
static inline int option_distance(const char *a, const char *b) {
    int row[64], n = min_i64(strlen(b), 63);
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

// Writes a name as the tables have it: without hyphens at its begin, in lower case, with hyphens
// for underscores, dots and colons. A hyphen may be another dash, as text editors make them.
static inline void option_plain_name(const char *argument, char name[OPTION_NAME_MAX + 1]) {
    int n = 0;
    const char dash = '\xe2'; // the first of three bytes in UTF-8
    for (; *argument == '-' || (*argument == dash && argument[1] && argument[2]); argument++) {
        argument += *argument == dash ? 2 : 0;
    }
    for (; *argument && *argument != '=' && n < OPTION_NAME_MAX; argument++) {
        const bool joins = strchr("_.:", *argument) != NULL;
        name[n++] = joins ? '-' : (char)tolower((unsigned char)*argument);
    }
    name[n] = 0;
}
// Returns what takes the place of a flag of another program; NULL if none is known.
static inline const char *option_synonym(const char *name) {
    const size_t length = strlen(name);
    for (int i = 0; i < LENGTH_OF(option_synonyms); i++) {
        for (const char *at = option_synonyms[i].names; *at; at += *at == ' ') {
            const size_t n = strcspn(at, " ");
            if (n == length && !strncmp(at, name, n)) { return option_synonyms[i].instead; }
            at += n;
        }
    }
    return NULL;
}
static inline const char *option_nearest(const char *name) {
    const char *nearest = option_specs[0].name;
    for (int i = 1; i < OPTION_COUNT; i++) {
        if (option_distance(name, option_specs[i].name) < option_distance(name, nearest)) {
            nearest = option_specs[i].name;
        }
    }
    return nearest;
}
__attribute__((noreturn)) static inline void option_unknown(const char *argument) {
    char name[OPTION_NAME_MAX + 1], hint[240];
    option_plain_name(argument, name);
    const char *instead = option_synonym(name), *nearest = option_nearest(name);
    const int distance = option_distance(name, nearest);
    if (instead) {
        snprintf(hint, sizeof hint, "%s%s; --help all lists the flags",
                 *instead == '-' ? "use " : "", instead);
    } else if (2 * distance <= (int)strlen(nearest)) {
        snprintf(hint, sizeof hint, "%s --%s; --help all lists the flags",
                 distance ? "the nearest is" : "it is written", nearest);
    } else if (!access(argument, F_OK)) {
        snprintf(hint, sizeof hint,
                 "quote a pattern of files (--train 'data/*.bin'), so that the shell does not "
                 "replace it; --config FILE reads flags");
    } else {
        snprintf(hint, sizeof hint, "%s--help lists the topics, --help all the flags",
                 *argument == '-' ? "" : "flags begin with --, and --config FILE reads a file; ");
    }
    die(EXIT_INPUT, hint, "unknown flag %.80s", argument);
}

#endif
