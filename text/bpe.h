// bpe.h: byte pair encoding. A word is a list of tokens, at first one for each byte. Of all pairs
// of neighbours that may be merged, the one of the lowest rank is (of equal ranks the first), until
// there is none.
//
// A word of n bytes takes O(n log n): pairs wait in a heap.
#ifndef BPE_H
#define BPE_H

#include "base/base.h"
#include "text/tokenizer.h"

// -------------------------------------------------------------------------------------------------
// Tokens by their text

// A hash table: slot -> token and 1; 0: free.
typedef struct {
    int32_t *token;
    int64_t slots; // a power of two, more than the tokens that are added
    int longest;   // bytes of the longest text
} TokenTable;

static inline TokenTable token_table(int64_t tokens) {
    TokenTable table = {.slots = 16};
    while (table.slots < 2 * tokens) { table.slots *= 2; }
    table.token = new_array(int32_t, table.slots, "the tokenizer");
    return table;
}
// Returns the slot of text[bytes], whose hash is that of its bytes, one after the other.
static inline int64_t token_slot(const TokenTable *table, const Tokenizer *t, uint64_t hash,
                                 const unsigned char *text, int bytes) {
    int64_t slot = (int64_t)(mix64(hash) & (uint64_t)(table->slots - 1));
    for (; table->token[slot]; slot = (slot + 1) & (table->slots - 1)) {
        int length;
        const unsigned char *other = tokenizer_decode(t, table->token[slot] - 1, &length);
        if (length == bytes && !memcmp(text, other, (size_t)bytes)) { break; }
    }
    return slot;
}
// Adds a token. It replaces one of the same text.
static inline void token_table_add(TokenTable *table, const Tokenizer *t, int32_t token) {
    int length;
    const unsigned char *text = tokenizer_decode(t, token, &length);
    const int64_t slot =
        token_slot(table, t, fnv1a(FNV1A_BEGIN, text, (size_t)length), text, length);
    table->token[slot] = token + 1;
    table->longest = length > table->longest ? length : table->longest;
}
// Returns the token with this text; -1 if there is none.
static inline int32_t token_find(const TokenTable *table, const Tokenizer *t, const void *text,
                                 int64_t bytes) {
    if (bytes > table->longest) { return -1; }
    const uint64_t hash = fnv1a(FNV1A_BEGIN, text, (size_t)bytes);
    return table->token[token_slot(table, t, hash, (const unsigned char *)text, (int)bytes)] - 1;
}

// -------------------------------------------------------------------------------------------------
// Pairs

// left and right, neighbours, become one token
typedef struct {
    int32_t left, right, rank, made; // made -1: a free slot
} BpeMerge;
// a token of a word, and the places of its neighbours; -1: none
typedef struct {
    int32_t token, before, after; // token -1: it has been merged into the one before it
} BpePart;
// a pair that may be merged, in the heap
typedef struct {
    int32_t rank, place, made;
} BpePair;

typedef struct {
    BpeMerge *merge; // hash table
    int64_t slots;
    // of the word that is being encoded
    BpePart *part;
    int64_t parts, part_capacity;
    BpePair *heap; // a pair does not come before its parent, at (index - 1) / 2
    int64_t pairs, heap_capacity;
} Bpe;

static inline Bpe bpe_open(int64_t merges) {
    Bpe b = {.slots = 16};
    while (b.slots < 2 * merges) { b.slots *= 2; }
    b.merge = new_array(BpeMerge, b.slots, "the tokenizer's merges");
    for (int64_t i = 0; i < b.slots; i++) { b.merge[i].made = -1; }
    return b;
}
static inline void bpe_close(Bpe *b) {
    free_all(b->merge, b->part, b->heap);
    memset(b, 0, sizeof *b);
}

// Returns the merge of a pair, or the free slot where it would be.
static inline BpeMerge *bpe_merge(const Bpe *b, int32_t left, int32_t right) {
    uint64_t slot = mix64((uint64_t)left << 32 | (uint32_t)right);
    for (;; slot++) {
        BpeMerge *merge = &b->merge[slot & (uint64_t)(b->slots - 1)];
        if (merge->made < 0 || (merge->left == left && merge->right == right)) { return merge; }
    }
}
// Adds a merge. It replaces one of the same pair.
static inline void bpe_add(Bpe *b, int32_t left, int32_t right, int32_t rank, int32_t made) {
    const BpeMerge merge = {.left = left, .right = right, .rank = rank, .made = made};
    *bpe_merge(b, left, right) = merge;
}

static inline bool pair_first(BpePair a, BpePair b) {
    return a.rank != b.rank ? a.rank < b.rank : a.place < b.place;
}
// Adds the pair of a part and the next one to the heap, if it may be merged.
static inline void bpe_push(Bpe *b, int32_t place) {
    const int32_t after = place < 0 ? -1 : b->part[place].after;
    if (after < 0) { return; }
    const BpeMerge *merge = bpe_merge(b, b->part[place].token, b->part[after].token);
    if (merge->made < 0) { return; }
    const BpePair pair = {.rank = merge->rank, .place = place, .made = merge->made};
    b->heap = grow_array(BpePair, b->heap, b->pairs, &b->heap_capacity, "the pairs of a word");
    int64_t at = b->pairs++;
    for (; at > 0 && pair_first(pair, b->heap[(at - 1) / 2]); at = (at - 1) / 2) {
        b->heap[at] = b->heap[(at - 1) / 2];
    }
    b->heap[at] = pair;
}
// Takes the first pair from the heap, which is not empty.
static inline BpePair bpe_pop(Bpe *b) {
    const BpePair top = b->heap[0], last = b->heap[--b->pairs];
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < b->pairs; at = child) {
        child += child + 1 < b->pairs && pair_first(b->heap[child + 1], b->heap[child]);
        if (!pair_first(b->heap[child], last)) { break; }
        b->heap[at] = b->heap[child];
    }
    b->heap[at] = last;
    return top;
}

// Adds a token to the word.
static inline void bpe_append(Bpe *b, int32_t token) {
    const int32_t at = (int32_t)b->parts;
    b->part = grow_array(BpePart, b->part, b->parts, &b->part_capacity, "a word");
    const BpePart part = {.token = token, .before = at - 1, .after = -1};
    b->part[b->parts++] = part;
    if (at) { b->part[at - 1].after = at; }
}
// Merges the pairs of the word. Its tokens are then part[0], and what follows by `after`.
static inline void bpe_join(Bpe *b) {
    b->pairs = 0;
    for (int64_t i = 0; i < b->parts; i++) { bpe_push(b, (int32_t)i); }
    while (b->pairs) {
        const BpePair pair = bpe_pop(b);
        BpePart *left = &b->part[pair.place];
        if (left->token < 0 || left->after < 0) { continue; }
        BpePart *right = &b->part[left->after];
        // the pair may have changed since it was found
        if (bpe_merge(b, left->token, right->token)->made != pair.made) { continue; }
        left->token = pair.made;
        left->after = right->after;
        right->token = -1;
        if (left->after >= 0) { b->part[left->after].before = pair.place; }
        bpe_push(b, left->before);
        bpe_push(b, pair.place);
    }
}

#endif
