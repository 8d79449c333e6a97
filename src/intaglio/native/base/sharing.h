// How threads share the work of a step: each begins with its own part, piece by piece, and then takes pieces from the
// end of the parts of threads that are behind. A core may be slower than others, or busy with another process.
//
// benchmarks/README.md, "Processors with AMX", has the times with a slow core and with equal ones.
#pragma once

#include <stdint.h>
#include <string.h>

// What a core does in a nanosecond, roughly: products of bytes, those of a depthwise convolution, products of floats,
// bytes of weights that it reads, elements of a loop.
#if defined(__AMX_INT8__)
enum { PRODUCTS_PER_NS = 1000 };
#elif defined(__AVX512VNNI__)
enum { PRODUCTS_PER_NS = 300 };
#else
enum { PRODUCTS_PER_NS = 100 };
#endif
#if defined(__AVX512VNNI__)
enum { DEPTHWISE_PRODUCTS_PER_NS = 150 };
#else
enum { DEPTHWISE_PRODUCTS_PER_NS = 50 };
#endif
enum { FLOAT_PRODUCTS_PER_NS = 16, WEIGHT_BYTES_PER_NS = 16, ELEMENTS_PER_NS = 4 };

enum {
    SHARERS = 64,       // threads that share steps, at most; with more, each computes its own part
    PIECES = 16,        // of a part, at most
    SHORTEST_NS = 8000  // nanoseconds of a piece, at least
};

// The part of one thread, in a cache line of its own. `word` is written by all threads: the number of a step in the
// high half, then the first piece that is not taken, and the end of these pieces, 16 bits each. `steps` counts the
// shared steps that the thread has entered; all threads enter the same ones, in the same order.
struct __attribute__((aligned(64))) Share {
    uint64_t word;
    uint64_t steps;
};

// A shared step as one thread sees it: `piece` of the part of thread `owner` is the one to compute. `visited` counts
// the parts that have no pieces left. Without `shares`, the piece is the thread's own part.
struct Sharing {
    struct Share* shares;
    uint64_t step;
    int thread, threads, pieces, visited, owner;
    int64_t piece;
};

// Prepare the parts of `threads` threads for a call of a program; return null if these share nothing.
static inline struct Share* clear_shares(struct Share* shares, int threads) {
    if (threads < 2 || threads > SHARERS) return 0;
    memset(shares, 0, (size_t)threads * sizeof *shares);
    return shares;
}

// Enter a step of which the part of each thread has this many pieces; all threads pass the same number. They share
// nothing if it is 1 or less, if `shares` is null, or if the thread runs the step alone.
static inline struct Sharing enter_pieces(struct Share* shares, int64_t pieces, int thread, int threads) {
    struct Sharing s = {0, 0, thread, threads, 1, 0, thread, -1};
    if (!shares || threads < 2 || pieces < 2) return s;
    s.shares = shares, s.pieces = (int)(pieces < PIECES ? pieces : PIECES);
    s.step = ++shares[thread].steps;
    return s;
}

// Enter a step that takes one core about `nanoseconds`; all threads pass the same number.
static inline struct Sharing enter_step(struct Share* shares, int64_t nanoseconds, int thread, int threads) {
    return enter_pieces(shares, nanoseconds / threads / SHORTEST_NS, thread, threads);
}

// Return how many pieces of a part are not taken.
static inline uint64_t left_pieces(uint64_t word) { return (word & 0xffff) - (word >> 16 & 0xffff); }

// Take a piece of the part of `owner`: the first one of its own, or the last one of another thread. Return 0 if there
// is none. A part whose word has an earlier step is whole, because threads leave a step when all its pieces are taken.
static inline int take_piece_of(struct Sharing* s, int owner) {
    struct Share* const share = s->shares + owner;
    const int own = owner == s->thread;
    uint64_t word = __atomic_load_n(&share->word, __ATOMIC_RELAXED);
    for (;;) {
        const uint64_t step = word >> 32;
        if (step > s->step) return 0;
        const uint64_t now = step == s->step ? word : s->step << 32 | (uint64_t)s->pieces;
        if (!left_pieces(now)) return 0;
        const uint64_t after = own ? now + (1 << 16) : now - 1;
        s->piece = (int64_t)(own ? now >> 16 & 0xffff : after & 0xffff);
        if (__atomic_compare_exchange_n(&share->word, &word, after, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return 1;
    }
}

static inline __attribute__((noinline)) int take_piece(struct Sharing* s) {
    for (; s->visited < s->threads; ++s->visited) {
        s->owner = (s->thread + s->visited) % s->threads;
        if (take_piece_of(s, s->owner)) return 1;
    }
    return 0;
}

// Move on to the next piece; return 0 if there is none left.
static inline int next_piece(struct Sharing* s) { return s->shares ? take_piece(s) : ++s->piece == 0; }

// Return where the piece begins in its part, which is from `first` to `last` (exclusive): at a multiple of `whole`,
// unless it is the first one.
static inline int64_t piece_begin(const struct Sharing* s, int64_t first, int64_t last, int64_t whole) {
    if (s->piece == 0) return first;
    const int64_t begin = (first + (last - first) * s->piece / s->pieces) / whole * whole;
    return begin < first ? first : begin;
}

// Return where it ends (exclusive).
static inline int64_t piece_end(const struct Sharing* s, int64_t first, int64_t last, int64_t whole) {
    struct Sharing next = *s;
    return ++next.piece == s->pieces ? last : piece_begin(&next, first, last, whole);
}

// Return the first item of the piece if the pieces of all threads divide `total` items evenly, or, for `next` 1, that
// of the piece behind it, where this one ends.
static inline int64_t first_item(const struct Sharing* s, int64_t total, int next) {
    return total * (s->owner * s->pieces + s->piece + next) / (s->threads * s->pieces);
}
