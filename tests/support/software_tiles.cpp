// The tile registers of AMX in software, for kernels whose instructions are replaced by calls of these functions. The
// functions change no register. They stop the process where a processor would refuse an instruction.

#include <stdint.h>

#define TILES extern "C" __attribute__((no_caller_saved_registers, target("general-regs-only"), visibility("hidden")))

enum { REGISTERS = 8, MOST_ROWS = 16, ROW_BYTES = 64, MOST_THREADS = 64 };

// Volatile, so that no loop becomes a call of memset or memcpy, which change registers.
struct Tiles {
    volatile uint8_t rows[REGISTERS], row_bytes[REGISTERS], bytes[REGISTERS][MOST_ROWS][ROW_BYTES];
};

static struct Tiles tiles_of_threads[MOST_THREADS];
static int threads_seen;
static __thread __attribute__((tls_model("initial-exec"))) struct Tiles* own;

static inline __attribute__((target("general-regs-only"))) void require(int condition) {
    if (!condition) __builtin_trap();
}

// Return the registers of this thread.
static inline __attribute__((target("general-regs-only"))) struct Tiles* tiles(void) {
    if (own) return own;
    const int number = __atomic_fetch_add(&threads_seen, 1, __ATOMIC_RELAXED);
    require(number < MOST_THREADS);
    return own = &tiles_of_threads[number];
}

TILES void software_ldtilecfg(const uint8_t* configuration) {
    struct Tiles* t = tiles();
    require(configuration[0] == 1);
    for (int i = 0; i < REGISTERS; ++i) {
        t->row_bytes[i] = configuration[16 + 2 * i], t->rows[i] = configuration[48 + i];
        require(t->rows[i] <= MOST_ROWS && t->row_bytes[i] <= ROW_BYTES && t->row_bytes[i] % 4 == 0 &&
                !configuration[17 + 2 * i]);
        require(!t->rows[i] == !t->row_bytes[i]);
        for (int r = 0; r < MOST_ROWS; ++r)
            for (int b = 0; b < ROW_BYTES; ++b) t->bytes[i][r][b] = 0;
    }
}

TILES void software_tilerelease(void) {
    struct Tiles* t = tiles();
    for (int i = 0; i < REGISTERS; ++i) t->rows[i] = t->row_bytes[i] = 0;
}

TILES void software_tileloadd(const uint8_t* at, int64_t stride, int to) {
    struct Tiles* t = tiles();
    require(t->rows[to]);
    for (int r = 0; r < t->rows[to]; ++r)
        for (int b = 0; b < t->row_bytes[to]; ++b) t->bytes[to][r][b] = at[r * stride + b];
}

TILES void software_tilestored(uint8_t* at, int64_t stride, int from) {
    struct Tiles* t = tiles();
    require(t->rows[from]);
    for (int r = 0; r < t->rows[from]; ++r)
        for (int b = 0; b < t->row_bytes[from]; ++b) at[r * stride + b] = t->bytes[from][r][b];
}

TILES void software_tdpbusd(int to, int activations, int weights) {
    struct Tiles* t = tiles();
    require(t->rows[to] && t->rows[to] == t->rows[activations] && t->row_bytes[activations] == 4 * t->rows[weights]);
    require(t->row_bytes[to] == t->row_bytes[weights] && to != activations && to != weights && activations != weights);
    for (int r = 0; r < t->rows[to]; ++r)
        for (int c = 0; c < t->row_bytes[to]; c += 4) {
            volatile uint8_t* sum = &t->bytes[to][r][c];
            uint32_t total = sum[0] | (uint32_t)sum[1] << 8 | (uint32_t)sum[2] << 16 | (uint32_t)sum[3] << 24;
            for (int k = 0; k < t->row_bytes[activations]; ++k)
                total += (uint32_t)(t->bytes[activations][r][k] * (int8_t)t->bytes[weights][k / 4][c + k % 4]);
            for (int b = 0; b < 4; ++b) sum[b] = (uint8_t)(total >> (8 * b));
        }
}
