// encode_text.c: prints the tokens of standard input, one a line.
//
//   encode_text TOKENIZER VOCABULARY      TOKENIZER "" for none
#include "model/tokenizer_encode.h"

int main(int argc, char **argv) {
    if (argc != 3) { die(EXIT_INPUT, NULL, "usage: encode_text TOKENIZER VOCABULARY"); }
    int64_t bytes = 0, capacity = 0;
    char *text = NULL;
    for (int c; (c = getchar()) != EOF; bytes++) {
        text = grow_array(char, text, bytes, &capacity, "the text");
        text[bytes] = (char)c;
    }
    Tokenizer t = tokenizer_open(*argv[1] ? argv[1] : NULL, atoi(argv[2]));
    const int64_t most = tokenizer_encode_most(bytes);
    int32_t *tokens = new_array(int32_t, most, "the tokens");
    const int64_t count = tokenizer_encode(&t, text, bytes, tokens, most);
    for (int64_t i = 0; i < count; i++) { printf("%d\n", (int)tokens[i]); }
    free_all(text, tokens);
    tokenizer_close(&t);
    return EXIT_DONE;
}
