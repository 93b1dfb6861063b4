// prompt.h: texts that a run prints: samples between steps, and the continuations of --prompt, of
// one text or of each line of standard input. Every rank computes the same tokens; rank 0 reads and
// prints.
#ifndef PROMPT_H
#define PROMPT_H

#include "base/base.h"
#include "base/files.h"
#include "base/process.h"
#include "base/readable.h"
#include "comm/comm.h"
#include "options.h"
#include "privacy/privacy.h"
#include "report/log.h"
#include "run/generate.h"
#include "run/trainer.h"
#include "text/tokenizer.h"
#include "text/tokenizer_encode.h"
#include <poll.h> // waits for standard input

enum {
    PROMPT_CONTEXT = 1024,  // positions of --prompt where --seq-len does not say it, at most
    PROMPT_BYTES = 1 << 20, // of a line of standard input, at most
    PROMPT_WAIT_MS = 100    // between two signs of life while no line comes
};

// Returns how this run draws the tokens of a text: alike for equal texts at equal steps.
static inline Draws run_draws(const Run *r) {
    const Options *o = run_options(r);
    const Draws draws = {.temperature = o->temperature,
                         .top_p = o->top_p,
                         .top_k = o->top_k,
                         .seed = (uint64_t)o->seed ^ 0x67656e6572617465u,
                         .step = (uint64_t)r->progress.step};
    return draws;
}
// Returns the token with which a text begins that has no other.
static inline int32_t first_token(const Tokenizer *t) { return (int32_t)max_i64(t->eot, 0); }

// Prints a text of the model, between two steps. All ranks call it.
static inline void print_sample(Run *r) {
    const Options *o = run_options(r);
    const Tokenizer *tokenizer = &r->data->tokenizer;
    const int32_t begin = first_token(tokenizer);
    int32_t *text = new_array(int32_t, o->sample_tokens, "sample");
    GenerateSpeed speed = {};
    executor_generate(&r->executor, &r->plan->pipeline.placement, &begin, 1, -1, text,
                      o->sample_tokens, run_draws(r), (TokenReader){}, &speed);
    if (r->comm->rank == 0) {
        char *sample = NULL;
        size_t bytes;
        FILE *to = open_memstream(&sample, &bytes);
        for (int64_t i = 0; to && i < o->sample_tokens; i++) {
            tokenizer_print(tokenizer, text[i], to);
        }
        if (!to || fclose(to)) {
            die(EXIT_RESOURCES, "shorten it: --sample-tokens", "no memory for a sample of text");
        }
        report_sample(r->progress.step, sample, !privacy_hides(&r->privacy), &r->journal.log);
        free(sample);
    }
    free(text);
}

// -------------------------------------------------------------------------------------------------
// --prompt

// Keeps standard output for continuations: whatever the program prints goes to standard error from
// now on. Returns the stream for continuations.
static inline FILE *prompt_take_output(void) {
    fflush(stdout);
    const int output = dup(STDOUT_FILENO);
    FILE *answers = output < 0 ? NULL : fdopen(output, "w");
    if (!answers || dup2(STDERR_FILENO, STDOUT_FILENO) < 0) {
        die(EXIT_RESOURCES, "open standard output and standard error", "--prompt: cannot print: %s",
            strerror(errno));
    }
    return answers;
}

// Standard input, line by line.
typedef struct {
    char *bytes; // [PROMPT_BYTES]
    int64_t held, taken;
    int64_t number; // of the last line, from 1 on
    bool ended;
} Lines;
// Reads more of standard input. Other ranks wait meanwhile.
static inline void lines_fill(Lines *l) {
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    while (poll(&input, 1, PROMPT_WAIT_MS) == 0) { keep_alive(); }
    const ssize_t n = read(STDIN_FILENO, l->bytes + l->held, (size_t)(PROMPT_BYTES - l->held));
    if (n < 0 && errno == EINTR) { return; }
    if (n < 0) {
        die(EXIT_INPUT, "give --prompt a text, or standard input lines",
            "--prompt -: cannot read standard input: %s", strerror(errno));
    }
    l->held += n;
    l->ended = n == 0;
}
// Returns the next line, without its end, and sets its length; NULL after the last one.
static inline const char *lines_next(Lines *l, int64_t *bytes) {
    l->held -= l->taken;
    memmove(l->bytes, l->bytes + l->taken, (size_t)l->held);
    l->taken = 0;
    const char *end;
    while (!(end = (const char *)memchr(l->bytes, '\n', (size_t)l->held)) && !l->ended) {
        if (l->held == PROMPT_BYTES) {
            die(EXIT_INPUT, "cut it into shorter lines",
                "--prompt -: line %" PRId64 " of standard input has more than %d bytes",
                l->number + 1, PROMPT_BYTES - 1);
        }
        lines_fill(l);
    }
    *bytes = end ? end - l->bytes : l->held;
    l->taken = min_i64(l->held, *bytes + 1);
    l->number++;
    return end || l->held ? l->bytes : NULL;
}

// Writes the tokens of a prompt to prompt(T), and returns how many: at least one, since end-of-text
// stands before an empty text. line: of standard input, from 1 on; 0: the text of the flag.
static inline int64_t prompt_tokens(const Run *r, const char *text, int64_t bytes, int64_t line,
                                    int32_t *prompt) {
    const Tokenizer *t = &r->data->tokenizer;
    const int64_t T = r->plan->shape.T, V = r->plan->model.config.vocab,
                  most = tokenizer_encode_most(bytes);
    int32_t *tokens = new_array(int32_t, (size_t)most, "the prompt");
    const int64_t n = tokenizer_encode(t, text, bytes, tokens, most);
    const Text of =
        line ? text_of("line %" PRId64 " of standard input", line) : text_of("--prompt");
    if (n > T) {
        die(EXIT_INPUT, "give a shorter text, or a larger --seq-len, up to the model's positions",
            "%s has %" PRId64 " tokens, and the context only %" PRId64, of.at, n, T);
    }
    for (int64_t i = 0; i < n; i++) {
        if (tokens[i] < V) { continue; }
        die(EXIT_INPUT, "give the tokenizer that the model was trained with",
            "%s has the token %d, and the model's vocabulary has %" PRId64, of.at, (int)tokens[i],
            V);
    }
    memcpy(prompt, tokens, (size_t)n * sizeof *prompt);
    free(tokens);
    if (n) { return n; }
    prompt[0] = first_token(t);
    return 1;
}

// Where a continuation is printed.
typedef struct {
    const Tokenizer *tokenizer;
    FILE *to;
    bool left; // nobody reads it any more
} Printer;
// Sends on what was printed, or ends the program, unless its reader has left.
static inline void printer_flush(Printer *p) {
    if (!ferror(p->to) && !fflush(p->to)) { return; }
    p->left = output_is_left(fileno(p->to));
    if (p->left) { return; }
    die(EXIT_RESOURCES, "does what reads it still run?",
        "--prompt: cannot write to standard output: %s", strerror(errno));
}
// Prints a token of a continuation at once, its bytes as they are: a reader sees the text grow. A
// token without a text is [number], and end-of-text is not printed.
static inline void print_token(void *printer, int32_t token) {
    Printer *p = (Printer *)printer;
    int length;
    const unsigned char *text = tokenizer_decode(p->tokenizer, token, &length);
    if (token == p->tokenizer->eot) { return; }
    if (text) {
        fwrite(text, 1, (size_t)length, p->to);
    } else {
        fprintf(p->to, "[%d]", (int)token);
    }
    printer_flush(p);
}

static inline void print_generate_speed(const GenerateSpeed *s) {
    printf("texts      %" PRId64 " tokens read, %s each; %" PRId64
           " tokens more, one at a time, %s each\n",
           s->tokens[SPEED_ALL],
           readable_step(s->seconds[SPEED_ALL] / max_i64(s->tokens[SPEED_ALL], 1)).at,
           s->tokens[SPEED_ONE],
           readable_step(s->seconds[SPEED_ONE] / max_i64(s->tokens[SPEED_ONE], 1)).at);
}
// Continues prompt(given), and prints the continuation and a newline: up to --sample-tokens tokens,
// or up to end-of-text, which is not printed. Returns false if nobody reads it any more. All ranks
// call it; rank 0 alone must know the prompt.
static inline bool answer_prompt(Run *r, int32_t *prompt, int64_t given, FILE *to,
                                 GenerateSpeed *speed) {
    const Tokenizer *t = &r->data->tokenizer;
    const int64_t most = run_options(r)->sample_tokens;
    const bool prints = r->comm->rank == 0;
    int32_t *answer = new_array(int32_t, (size_t)most, "the continuation");
    Printer printer = {.tokenizer = t, .to = to};
    const TokenReader reader = {prints ? print_token : NULL, &printer};
    comm_broadcast(r->comm, prompt, (size_t)given * sizeof *prompt, 0);
    executor_generate(&r->executor, &r->plan->pipeline.placement, prompt, given, t->eot, answer,
                      most, run_draws(r), reader, speed);
    if (prints) {
        fputc('\n', to);
        printer_flush(&printer);
    }
    free(answer);
    return !printer.left;
}
// Answers --prompt: the text, or each line of standard input. All ranks call it.
static inline void answer_prompts(Run *r, FILE *to) {
    const char *text = run_options(r)->prompt;
    const bool reads = !strcmp(text, "-"), first = r->comm->rank == 0;
    int32_t *prompt = new_array(int32_t, (size_t)r->plan->shape.T, "the prompt");
    GenerateSpeed speed = {};
    Lines lines = {};
    if (reads && first) { lines.bytes = new_array(char, PROMPT_BYTES, "standard input"); }
    int64_t given = 1;
    bool read = true;
    for (bool more = true; more && given; more = reads) {
        int64_t bytes = (int64_t)strlen(text);
        if (first) {
            const char *line = !read ? NULL : reads ? lines_next(&lines, &bytes) : text;
            given = line ? prompt_tokens(r, line, bytes, lines.number, prompt) : 0;
        }
        comm_broadcast(r->comm, &given, sizeof given, 0);
        if (given) { read = answer_prompt(r, prompt, given, to, &speed); }
    }
    if (first) { print_generate_speed(&speed); }
    free_all(prompt, lines.bytes);
}

#endif
