// pseudo.h: Pseudo-to-Real training (Lin et al., M6-10T, arXiv 2110.03888) by sharing weights (Yang et al., SWE, arXiv 2110.03848).
//
// Shared     --share says which blocks use one storage (gpt.h: GptShare): all of them, N that follow each other, or AxB: A distinct blocks, the whole
//            row of them B times. Nothing else changes: a block computes what it would with its own copy, and its gradient is added to that of the
//            others, in fp32, wherever they are: one rank, several stages of a pipeline (layout.h: tied), slices. The gradient of the storage is
//            the mean of its layers' (zero.h: store_mean), and it counts once in the norm; states, traffic and checkpoints are as much smaller.
#ifndef PSEUDO_H
#define PSEUDO_H

#include "gpt.h" // which blocks share

// What --share says for a model of so many layers. Ends the program where that is no such text, or does not fit.
static inline GptShare share_parse(const char *text, int64_t layers) {
    const char *hint = "none, all, N (blocks that follow each other) or AxB (A distinct blocks, repeated B times), such as 4 or 2x6";
    GptShare share = GPT_SHARE_NONE;
    long long a = 0, b = 0;
    int used = 0;
    if (!strcmp(text, "none")) { return share; }
    share.run = layers;
    if (!strcmp(text, "all")) { return share; }
    if (sscanf(text, "%9lld%n", &a, &used) == 1 && !text[used] && isdigit((unsigned char)*text)) {
        if (a < 1 || a > layers) { die(EXIT_INPUT, hint, "--share %.40s: the model has %" PRId64 " blocks", text, layers); }
        share.run = a;
        return share;
    }
    if (sscanf(text, "%9lldx%9lld%n", &a, &b, &used) != 2 || text[used] || !isdigit((unsigned char)*text) || !isdigit((unsigned char)strchr(text, 'x')[1])) {
        die(EXIT_INPUT, hint, "--share takes none, all, N or AxB, found \"%.40s\"", text);
    }
    if (a < 1 || b < 1 || a * b != layers) {
        die(EXIT_INPUT, hint, "--share %.40s: %lld times %lld is not the model's %" PRId64 " blocks", text, a, b, layers);
    }
    if (a > 1) { share.run = 1, share.cycle = b > 1 ? a : 0; }
    return share;
}

#endif
