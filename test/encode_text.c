// encode_text.c: prints the tokens of texts, each on a line.
//
//   encode_text TOKENIZER VOCABULARY [MOST]   TOKENIZER "": none; MOST: space for so many tokens
//
// Standard input has, for each text, its length as a decimal number, a newline, and the text. The
// first text is encoded by tokenizer_encode(), the others by an encoder that stays open.
#include "text/tokenizer_encode.h"

static void print_tokens(const Tokenizer *t, Encoder *e, const char *text, int64_t bytes,
                         int64_t most) {
    int32_t *tokens = new_array(int32_t, most, "the tokens");
    const int64_t count = e->tokenizer ? encoder_encode(e, text, bytes, tokens, most)
                                       : tokenizer_encode(t, text, bytes, tokens, most);
    for (int64_t i = 0; i < count; i++) { printf("%d ", (int)tokens[i]); }
    printf("\n");
    free(tokens);
}

int main(int argc, char **argv) {
    if (argc < 3) { die(EXIT_INPUT, NULL, "usage: encode_text TOKENIZER VOCABULARY [MOST]"); }
    Tokenizer t = tokenizer_open(*argv[1] ? argv[1] : NULL, atoi(argv[2]));
    Encoder e = {};
    for (long long bytes; scanf("%lld", &bytes) == 1;) {
        char *text = new_array(char, bytes, "the text");
        const bool whole =
            getchar() == '\n' && fread(text, 1, (size_t)bytes, stdin) == (size_t)bytes;
        if (!whole) { die(EXIT_INPUT, NULL, "the text is cut off"); }
        print_tokens(&t, &e, text, bytes, argc > 3 ? atoll(argv[3]) : tokenizer_encode_most(bytes));
        free(text);
        if (!e.tokenizer && !encode_has_bytes(&t)) { e = encode_open(&t); }
    }
    if (e.tokenizer) { encoder_close(&e); }
    tokenizer_close(&t);
    return EXIT_DONE;
}
