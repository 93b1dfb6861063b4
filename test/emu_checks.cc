// emu_checks.cc: looks at each access that kernels make in the emulation (emu.h). A file of its
// own, since it is compiled without the instrumentation that calls it; see emu_checks.h.
//
// Bounds     A kernel may touch the tensors that its arguments point into, the shared memory that
//            the launch asked for, arrays in shared memory, and its own stack. Between tensors that
//            were placed in one allocation lie bytes that belong to none.
// Alignment  An access of 2, 4, 8 or 16 bytes lies at a multiple of its size.
// Races      Of every two bytes: the last write, and the last two threads that have read them. Two
//            accesses of which one writes, by different threads, are a race unless a barrier is
//            between them: __syncthreads in a block, __syncwarp in a warp, none between blocks.
//            It does not matter in which order the emulation has run the two.
// Unwritten  Shared memory when a block begins, device memory as it was allocated, and a scratch
//            when an operation begins may not be read before something is written to it.
// Copies     What cp.async brings may not be touched before it was waited for.
// Host       Everything else is memory of the host, which no kernel may touch.
// Counts     EMU_SECTORS=FILE: a line of JSON for each kernel, see EmuCounter.
//
// Blocks run one after another, on one thread of the host.
#define EMU_CHECKED
#include "emu_checks.h"
#include "emu_symbols.h"

#include <map>
#include <signal.h>
#include <stdarg.h>

enum { GRANULE = 2, SECTOR = 32, GAP = 64, MOST_DEPTH = 64, MOST_THREADS = 1024 };
enum { STACK_BYTES = 64 << 10, TRACE_MOST = 1024, DYNAMIC_MOST = 232448 };
enum { SHARED_BANKS = 32, SHARED_WORD = 4 };

void (*emu_check_pause)();

// --- memory --------------------------------------------------------------------------------------
// An access: `when` counts the intervals between block barriers of all blocks that have run, so
// that it tells the launch, the block and the interval. 0: long ago.
struct Mark {
    uint32_t when;
    uint32_t thread : 10;
    uint32_t turn : 20; // __syncwarps of its warp since the block barrier
    uint32_t atomic : 1;
    uint32_t pending : 1; // a copy that was not waited for
    uint32_t pc;          // from the begin of the program
};
struct Cell {
    Mark wrote;
    Mark read[2];
};
struct Range {
    uintptr_t from;
    uintptr_t to;
    bool has(uintptr_t p) const { return p >= from && p < to; }
};
struct Memory {
    Range range;
    bool device;               // else the host writes it too
    std::vector<Range> placed; // tensors in it, in order; none: it is one
    Cell *cells;               // of GRANULE bytes
    uint8_t *unwritten;        // the same
    uint32_t *sectors[2];      // the last launch that has read, has written each
    size_t bytes() const { return range.to - range.from; }
};
struct Allowed {
    Range range;
    Memory *memory;
};
static std::map<uintptr_t, Memory> memories; // by their begin

template <class T> static T *zeros(size_t n) { // whose pages exist when they are touched
    void *p = mmap(NULL, n * sizeof(T), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("emu: memory for checks");
        abort();
    }
    return (T *)p;
}
static size_t granules(size_t bytes) { return bytes / GRANULE + 2; }
static size_t sectors(size_t bytes) { return bytes / SECTOR + 2; }
static Memory *memory_of(uintptr_t p) {
    auto m = memories.upper_bound(p);
    if (m == memories.begin()) { return NULL; }
    --m;
    return m->second.range.has(p) ? &m->second : NULL;
}
// The tensor that p lies in; empty: it lies between two.
static Range tensor_of(const Memory *m, uintptr_t p) {
    if (m->placed.empty()) { return m->range; }
    for (const Range &r : m->placed) {
        if (r.has(p)) { return r; }
    }
    return {p, p};
}

// --- what runs -----------------------------------------------------------------------------------
struct Path { // of calls
    uint64_t hash[MOST_DEPTH];
    int depth;
    bool in_kernel;
};
struct Counter {
    uint64_t launches, threads;
    uint64_t requests[2], bytes[2], sectors[2], distinct[2]; // device memory: reads, writes
    uint64_t shared_requests, shared_bytes, wavefronts, least_wavefronts;
};
struct Traced {
    uint32_t pc;
    uint16_t bytes;
    bool writes, shared;
    uintptr_t at;
};
static struct {
    bool inside; // a thread of a kernel runs
    unsigned thread;
    uintptr_t stack;
    const void *kernel;
    unsigned grid[3], block[3], index[3];
    size_t shared_bytes;
    uintptr_t shared; // dynamic
    Range of_thread;  // of the host's thread: static shared memory is in it
    Range arguments;
    uint32_t launch;                         // number
    uint32_t now, block_began, launch_began; // intervals
    unsigned turn[32];                       // of warps
    std::vector<Allowed> allowed;
    std::vector<uint32_t> blocks_began;
    std::vector<std::string> block_names;
} run;
static Path paths[MOST_THREADS];
static Cell *shared_cells, *static_cells; // of dynamic and of static shared memory
enum { NO_ARRAY = -1, OF_EMULATION = -2 };
static std::vector<int> static_symbol; // which array each byte of a thread belongs to, or:
static std::map<const void *, Counter> counters;
static Counter *counter; // of the kernel that runs; NULL: nothing is counted
static std::vector<Traced> traces[32];

static uintptr_t program_begin() { return emu_symbols()->loaded_at; }
static const char *sectors_file() { return getenv("EMU_SECTORS"); }

// --- messages ------------------------------------------------------------------------------------
static std::string source_line(uint32_t pc) { // file:line
    char command[400], path[300], line[300] = "";
    const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    snprintf(command, sizeof command, "addr2line -e '%s' %x 2>/dev/null", path, pc - 1);
    FILE *f = popen(command, "r");
    if (f && !fgets(line, sizeof line, f)) { line[0] = 0; }
    if (f) { pclose(f); }
    line[strcspn(line, " \n")] = 0;
    const char *name = strrchr(line, '/');
    return line[0] && line[0] != '?' ? std::string(name ? name + 1 : line) : "no line is known";
}
static std::string three(const unsigned *x) {
    char text[64];
    snprintf(text, sizeof text, "(%u,%u,%u)", x[0], x[1], x[2]);
    return text;
}
static std::string thread_name(unsigned thread) {
    const unsigned x = run.block[0], y = run.block[1];
    const unsigned at[3] = {thread % x, thread / x % y, thread / x / y};
    return three(at);
}
__attribute__((noreturn)) static void stop(const std::string &said) {
    fprintf(stderr, "emu: %s\n", said.c_str());
    fflush(stderr);
    signal(SIGABRT, SIG_DFL); // a test's framework would go on
    abort();
}
__attribute__((noreturn, format(printf, 2, 3))) static void blame(uint32_t pc, const char *what,
                                                                  ...) {
    char said[1000];
    va_list arguments;
    va_start(arguments, what);
    vsnprintf(said, sizeof said, what, arguments);
    run.inside = false;
    stop(emu_function_name(run.kernel) + ", block " + three(run.index) + ", thread " +
         thread_name(run.thread) + ", " + source_line(pc) + ": " + said);
}
static std::string block_of(uint32_t when) { // of this launch
    size_t i = run.blocks_began.size();
    while (i > 1 && run.blocks_began[i - 1] > when) { i--; }
    return run.block_names[i - 1];
}
static const char *verb(bool writes) { return writes ? "writes" : "reads"; }

// What the access is to
static struct {
    uintptr_t at;
    size_t bytes;
    const Memory *memory;
    Range tensor;
    int symbol;
    uint32_t since; // the interval since when others have it too: of the launch, or of the block
} target;

// --- one access ----------------------------------------------------------------------------------
static Mark mark_now(uint32_t pc, bool atomic) {
    Mark m = {};
    m.when = run.now;
    m.thread = run.thread & 1023;
    m.turn = run.turn[run.thread / 32] & 0xfffff;
    m.atomic = atomic;
    m.pc = pc;
    return m;
}
static bool collides(const Mark &before, const Mark &now) {
    if (before.when < target.since || (before.atomic && now.atomic)) { return false; }
    if (before.when < run.block_began) { return true; } // another block
    if (before.when != now.when || before.thread == now.thread) { return false; }
    return before.thread / 32 != now.thread / 32 || before.turn == now.turn;
}
__attribute__((noreturn)) static void blame_race(const Mark &before, const Mark &now, bool wrote,
                                                 bool writes, const std::string &where) {
    const std::string block =
        before.when < run.block_began ? " of block " + block_of(before.when) : "";
    const std::string at = source_line(before.pc), other = thread_name(before.thread) + block;
    blame(now.pc, "race: %s %s, which thread %s %s at %s, with no barrier between them",
          verb(writes), where.c_str(), other.c_str(), wrote ? "wrote" : "read", at.c_str());
}
static void look(Cell *c, EmuAccess kind, const Mark &now, const std::string &(*where)()) {
    const bool writes = kind != EMU_READ;
    const bool pending = c->wrote.pending && c->wrote.when >= run.block_began;
    if (pending && !(kind == EMU_COPY_ENDS && c->wrote.thread == now.thread)) {
        blame(now.pc,
              "%s %s, which an asynchronous copy of thread %s brings that was not waited for",
              verb(writes), where().c_str(), thread_name(c->wrote.thread).c_str());
    }
    if (collides(c->wrote, now)) { blame_race(c->wrote, now, true, writes, where()); }
    if (writes) {
        for (const Mark &read : c->read) {
            if (collides(read, now)) { blame_race(read, now, false, writes, where()); }
        }
        c->wrote = now;
        c->wrote.pending = kind == EMU_COPY_STARTS;
        return;
    }
    // Of the readers before, one of another block is kept, where there is one: no barrier parts it.
    const bool other = c->read[0].thread != now.thread || c->read[0].when < run.block_began;
    const bool kept = c->read[1].when >= target.since && c->read[1].when < run.block_began &&
                      c->read[0].when >= run.block_began;
    if (other && !kept) { c->read[1] = c->read[0]; }
    c->read[0] = now;
}
static const std::string &name_target() {
    static std::string name;
    char text[200];
    if (target.memory) {
        snprintf(text, sizeof text, "%zu bytes at byte %zu of a tensor of %zu", target.bytes,
                 target.at - target.tensor.from, target.tensor.to - target.tensor.from);
    } else if (target.symbol >= 0) {
        const EmuSymbol &s = emu_symbols()->of_threads[(size_t)target.symbol];
        const std::string array = emu_readable_variable(s.name.c_str());
        const size_t at = target.at - run.of_thread.from - s.from;
        snprintf(text, sizeof text, "%zu bytes at byte %zu of %s", target.bytes, at, array.c_str());
    } else {
        snprintf(text, sizeof text, "%zu bytes at byte %zu of the dynamic shared memory",
                 target.bytes, target.at - run.shared);
    }
    return name = text;
}

static void trace(uintptr_t at, size_t bytes, EmuAccess kind, uint32_t pc, bool shared) {
    if (!counter || kind == EMU_COPY_ENDS) { return; }
    std::vector<Traced> &t = traces[run.thread % 32];
    t.push_back({pc, (uint16_t)bytes, kind != EMU_READ, shared, at});
    if (t.size() >= TRACE_MOST) {
        run.inside = false;
        emu_check_pause();
    }
}
static void in_shared(Cell *cells, size_t offset, EmuAccess kind, uint32_t pc) {
    const Mark now = mark_now(pc, kind == EMU_ATOMIC);
    const size_t last = (offset + target.bytes - 1) / GRANULE;
    for (size_t g = offset / GRANULE; g <= last; g++) {
        if ((kind == EMU_READ || kind == EMU_ATOMIC) && cells[g].wrote.when < run.block_began) {
            blame(pc, "reads %s, which this block has not written", name_target().c_str());
        }
        look(&cells[g], kind, now, name_target);
    }
    trace(target.at, target.bytes, kind, pc, true);
}
static void in_dynamic(uintptr_t at, size_t bytes, EmuAccess kind, uint32_t pc) {
    target = {at, bytes, NULL, {}, -1, run.block_began};
    const size_t offset = at - run.shared;
    if (offset + bytes > run.shared_bytes) {
        blame(pc, "%s %s, of which the launch asked for %zu", verb(kind != EMU_READ),
              name_target().c_str(), run.shared_bytes);
    }
    in_shared(shared_cells, offset, kind, pc);
}
static void in_thread(uintptr_t at, size_t bytes, EmuAccess kind, uint32_t pc) {
    const size_t offset = at - run.of_thread.from;
    const int symbol = static_symbol[offset];
    if (symbol == OF_EMULATION) { return; }
    if (symbol == NO_ARRAY) {
        size_t before = offset;
        while (before && static_symbol[before] == NO_ARRAY) { before--; }
        target = {at, bytes, NULL, {}, static_symbol[before], 0};
        blame(pc, "%s %s, behind its end", verb(kind != EMU_READ),
              target.symbol >= 0 ? name_target().c_str() : "what is no array");
    }
    target = {at, bytes, NULL, {}, symbol, run.block_began};
    const EmuSymbol &s = emu_symbols()->of_threads[(size_t)symbol];
    if (at - run.of_thread.from + bytes > s.from + s.bytes) {
        blame(pc, "%s %s, which has %zu", verb(kind != EMU_READ), name_target().c_str(), s.bytes);
    }
    in_shared(static_cells, offset, kind, pc);
}
__attribute__((noreturn)) static void blame_place(uintptr_t at, size_t bytes, bool writes,
                                                  uint32_t pc) {
    const Memory *m = memory_of(at);
    const Allowed *nearest = NULL;
    for (const Allowed &a : run.allowed) {
        if (a.range.to <= at + bytes && (!nearest || a.range.to > nearest->range.to)) {
            nearest = &a;
        }
    }
    if (nearest && at - nearest->range.to < 1 << 20) {
        const size_t size = nearest->range.to - nearest->range.from;
        blame(pc, "%s %zu bytes that end %zu bytes behind a tensor of %zu bytes", verb(writes),
              bytes, at + bytes - nearest->range.to, size);
    }
    if (m) {
        blame(pc, "%s %zu bytes of device memory that no argument points into", verb(writes),
              bytes);
    }
    blame(pc, "%s %zu bytes of the host's memory", verb(writes), bytes);
}
static void touch_sectors(Memory *m, size_t offset, size_t bytes, bool writes) {
    for (size_t s = offset / SECTOR; s <= (offset + bytes - 1) / SECTOR; s++) {
        if (m->sectors[writes][s] != run.launch) { counter->distinct[writes]++; }
        m->sectors[writes][s] = run.launch;
    }
}
static void in_device(uintptr_t at, size_t bytes, EmuAccess kind, uint32_t pc) {
    for (size_t i = 0; i < run.allowed.size(); i++) {
        const Range r = run.allowed[i].range;
        Memory *m = run.allowed[i].memory;
        if (at < r.from || at + bytes > r.to) { continue; }
        if (i) { std::swap(run.allowed[i], run.allowed[i / 2]); } // often used ones come first
        const size_t offset = at - m->range.from, last = (offset + bytes - 1) / GRANULE;
        const Mark now = mark_now(pc, kind == EMU_ATOMIC);
        target = {at, bytes, m, r, -1, run.launch_began};
        for (size_t g = offset / GRANULE; g <= last; g++) {
            if (m->unwritten[g] && (kind == EMU_READ || kind == EMU_ATOMIC)) {
                blame(pc, "reads %s, which nobody has written", name_target().c_str());
            }
            look(&m->cells[g], kind, now, name_target);
            m->unwritten[g] = 0;
        }
        if (counter) { touch_sectors(m, offset, bytes, kind != EMU_READ); }
        trace(at, bytes, kind, pc, false);
        return;
    }
    if (kind == EMU_READ && run.arguments.has(at)) { return; }
    blame_place(at, bytes, kind != EMU_READ, pc);
}
static void access(const void *p, size_t bytes, EmuAccess kind, const void *caller,
                   size_t alignment) {
    const uintptr_t at = (uintptr_t)p;
    if (!run.inside || !bytes || (at ^ run.stack) / STACK_BYTES == 0) { return; }
    run.inside = false; // what is called here is not looked at
    const uint32_t pc = (uint32_t)((uintptr_t)caller - program_begin());
    if (at % alignment) {
        run.inside = false;
        blame(pc, "%s %zu bytes at an address that is not a multiple of %zu",
              verb(kind != EMU_READ), bytes, alignment);
    }
    if (at - run.shared < DYNAMIC_MOST) {
        in_dynamic(at, bytes, kind, pc);
    } else if (run.of_thread.has(at)) {
        in_thread(at, bytes, kind, pc);
    } else {
        in_device(at, bytes, kind, pc);
    }
    run.inside = true;
}
void emu_check_access(const void *p, size_t bytes, EmuAccess kind, const void *caller) {
    access(p, bytes, kind, caller, kind == EMU_READ ? 1 : bytes);
}

// --- what the compiler calls ---------------------------------------------------------------------
#define CALLER __builtin_return_address(0)
#define OF_SIZE(n)                                                                                 \
    void __tsan_read##n(void *p) { access(p, n, EMU_READ, CALLER, n); }                            \
    void __tsan_write##n(void *p) { access(p, n, EMU_WRITE, CALLER, n); }                          \
    void __tsan_unaligned_read##n(void *p) { access(p, n, EMU_READ, CALLER, 1); }                  \
    void __tsan_unaligned_write##n(void *p) { access(p, n, EMU_WRITE, CALLER, 1); }                \
    void __tsan_volatile_read##n(void *p) { access(p, n, EMU_READ, CALLER, n); }                   \
    void __tsan_volatile_write##n(void *p) { access(p, n, EMU_WRITE, CALLER, n); }
extern "C" {
OF_SIZE(1)
OF_SIZE(2)
OF_SIZE(4)
OF_SIZE(8)
OF_SIZE(16)
void __tsan_read_range(void *p, size_t bytes) { access(p, bytes, EMU_READ, CALLER, 1); }
void __tsan_write_range(void *p, size_t bytes) { access(p, bytes, EMU_WRITE, CALLER, 1); }
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
void __tsan_init() {}
void __tsan_func_entry(void *caller) {
    if (!run.inside) { return; }
    Path *p = &paths[run.thread];
    if (++p->depth < MOST_DEPTH) {
        const uint64_t above = p->hash[p->depth - 1] ^ (uintptr_t)caller;
        p->hash[p->depth] = above * 0x9e3779b97f4a7c15u;
    }
}
void __tsan_func_exit() {
    if (run.inside) { paths[run.thread].depth--; }
}
// The host's own: of variables that are made once, and of shared pointers
char __tsan_atomic8_load(const volatile char *p, int) {
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
int __tsan_atomic32_load(const volatile int *p, int) {
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
int __tsan_atomic32_fetch_add(volatile int *p, int v, int) { return __sync_fetch_and_add(p, v); }
}

// --- a kernel that runs --------------------------------------------------------------------------
static int note_block_of_thread(struct dl_phdr_info *info, size_t, void *) {
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_TLS) { continue; }
        const uintptr_t from = (uintptr_t)info->dlpi_tls_data;
        run.of_thread = {from, from + info->dlpi_phdr[i].p_memsz};
    }
    return 1; // the first one is the program
}
// arrays in shared memory are the variables of threads that functions have
static void prepare_shared() {
    if (shared_cells) { return; }
    shared_cells = zeros<Cell>(granules(DYNAMIC_MOST));
    static_cells = zeros<Cell>(granules(run.of_thread.to - run.of_thread.from));
    static_symbol.assign(run.of_thread.to - run.of_thread.from, NO_ARRAY);
    const std::vector<EmuSymbol> &all = emu_symbols()->of_threads;
    for (size_t i = 0; i < all.size(); i++) {
        const int is = all[i].name.compare(0, 3, "_ZZ") ? OF_EMULATION : (int)i;
        for (size_t b = 0; b < all[i].bytes; b++) { static_symbol[all[i].from + b] = is; }
    }
}
static void next_interval() {
    run.now++;
    memset(run.turn, 0, sizeof run.turn);
}
static void allow(uintptr_t p) {
    Memory *m = memory_of(p);
    if (!m) { return; }
    const Range r = tensor_of(m, p);
    for (const Allowed &a : run.allowed) {
        if (a.range.from == r.from) { return; }
    }
    if (r.to > r.from) { run.allowed.push_back({r, m}); }
}
// Handlers of signals would run on the stack of a kernel's thread, as if they were a part of it.
static void hold_signals(bool hold) {
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGABRT);
    sigprocmask(hold ? SIG_BLOCK : SIG_UNBLOCK, &all, NULL);
}
void emu_check_launch(const void *kernel, const unsigned *grid, const unsigned *block,
                      size_t shared_bytes, const void *arguments, size_t argument_bytes) {
    dl_iterate_phdr(note_block_of_thread, NULL);
    prepare_shared();
    run.kernel = kernel;
    memcpy(run.grid, grid, sizeof run.grid);
    memcpy(run.block, block, sizeof run.block);
    run.shared_bytes = shared_bytes;
    hold_signals(true);
    run.launch++;
    run.arguments = {(uintptr_t)arguments, (uintptr_t)arguments + argument_bytes};
    next_interval();
    run.launch_began = run.now;
    run.blocks_began.clear();
    run.block_names.clear();
    run.allowed.clear();
    for (size_t i = 0; i + sizeof(void *) <= argument_bytes; i += sizeof(void *)) {
        uintptr_t p;
        memcpy(&p, (const char *)arguments + i, sizeof p);
        allow(p);
    }
    if (!sectors_file()) { return; }
    counter = &counters[kernel];
    counter->launches++;
    counter->threads += (uint64_t)grid[0] * grid[1] * grid[2] * block[0] * block[1] * block[2];
}
void emu_check_launch_ends() {
    next_interval();
    counter = NULL;
    hold_signals(false);
}
void emu_check_block(const unsigned *index, const char *shared) {
    memcpy(run.index, index, sizeof run.index);
    run.shared = (uintptr_t)shared;
    next_interval();
    run.block_began = run.now;
    run.blocks_began.push_back(run.now);
    run.block_names.push_back(three(run.index));
}
void emu_check_block_barrier() { next_interval(); }
void emu_check_warp_barrier(unsigned warp) { run.turn[warp]++; }
void emu_check_enter(unsigned thread, const void *stack) {
    run.thread = thread;
    run.stack = (uintptr_t)stack;
    run.inside = paths[thread].in_kernel;
}
void emu_check_begin() {
    paths[run.thread].depth = 0;
    run.inside = paths[run.thread].in_kernel = true;
}
void emu_check_end() { run.inside = paths[run.thread].in_kernel = false; }
void emu_check_leave() { run.inside = false; }
uint64_t emu_check_path() {
    const Path *p = &paths[run.thread];
    return p->depth < MOST_DEPTH ? p->hash[p->depth] : 0;
}

// --- memory --------------------------------------------------------------------------------------
void emu_check_allocated(const void *p, size_t bytes, bool device) {
    const uintptr_t from = (uintptr_t)p;
    Memory m = {{from, from + bytes}, device, {}, NULL, NULL, {NULL, NULL}};
    m.cells = zeros<Cell>(granules(bytes));
    m.unwritten = zeros<uint8_t>(granules(bytes));
    for (uint32_t *&s : m.sectors) { s = zeros<uint32_t>(sectors(bytes)); }
    memories[from] = m;
    if (device) { emu_check_forget(p, bytes); }
}
void emu_check_freed(const void *p) {
    auto at = memories.find((uintptr_t)p);
    if (at == memories.end()) { return; }
    Memory &m = at->second;
    munmap(m.cells, granules(m.bytes()) * sizeof(Cell));
    munmap(m.unwritten, granules(m.bytes()));
    for (uint32_t *s : m.sectors) { munmap(s, sectors(m.bytes()) * sizeof *s); }
    memories.erase(at);
}
static void set_unwritten(const void *p, size_t bytes, int value) {
    Memory *m = memory_of((uintptr_t)p);
    if (!m || !bytes) { return; }
    const size_t offset = (uintptr_t)p - m->range.from;
    const size_t first = offset / GRANULE, last = (offset + bytes - 1) / GRANULE;
    memset(m->unwritten + first, value, last + 1 - first);
}
void emu_check_forget(const void *p, size_t bytes) { set_unwritten(p, bytes, 1); }
void emu_check_copied(const void *to, size_t bytes) {
    const Memory *m = memory_of((uintptr_t)to);
    if (m && (uintptr_t)to + bytes > m->range.to) {
        stop("a copy or a memset goes " + std::to_string((uintptr_t)to + bytes - m->range.to) +
             " bytes beyond the end of its memory");
    }
    set_unwritten(to, bytes, 0);
}
void emu_check_library(const char *what, const void *p, size_t bytes, bool writes) {
    const uintptr_t at = (uintptr_t)p;
    const Memory *m = memory_of(at);
    if (!bytes) { return; }
    if (!m) { stop(std::string(what) + " is not in the device's memory"); }
    const Range r = tensor_of(m, at);
    if (at + bytes > r.to) {
        stop(std::string(what) + " ends " + std::to_string(at + bytes - r.to) +
             " bytes behind a tensor of " + std::to_string(r.to - r.from) + " bytes");
    }
    const uint8_t *unwritten = m->unwritten + (at - m->range.from) / GRANULE;
    if (!writes && memchr(unwritten, 1, bytes / GRANULE)) {
        stop(std::string(what) + " is read, and nobody has written all of it");
    }
    if (writes) { set_unwritten(p, bytes, 0); }
}
size_t emu_check_placed(const void *p, size_t bytes) {
    Memory *m = p ? memory_of((uintptr_t)p) : NULL;
    if (!m) { return GAP; }
    const Range r = {(uintptr_t)p, (uintptr_t)p + bytes};
    std::vector<Range> others;
    for (const Range &o : m->placed) {
        if (o.to <= r.from || o.from >= r.to) { others.push_back(o); } // else it was there before
    }
    others.push_back(r);
    m->placed = others;
    return GAP;
}

// --- counts: what lanes of a warp touch by one instruction ---------------------------------------
static void count_device(const Traced *const *lanes, int n) {
    uintptr_t seen[64];
    int count = 0;
    const bool writes = lanes[0]->writes;
    for (int i = 0; i < n; i++) {
        counter->bytes[writes] += lanes[i]->bytes;
        const uintptr_t last = (lanes[i]->at + lanes[i]->bytes - 1) / SECTOR;
        for (uintptr_t s = lanes[i]->at / SECTOR; s <= last; s++) {
            if (count < 64) { seen[count++] = s; }
        }
    }
    std::sort(seen, seen + count);
    counter->sectors[writes] += (uint64_t)(std::unique(seen, seen + count) - seen);
    counter->requests[writes]++;
}
// Words of one bank come one after another. 8 and 16 bytes a lane: half and a quarter of a warp at
// a time.
static void count_shared(const Traced *const *lanes, int n) {
    const int bytes = lanes[0]->bytes, at_once = bytes >= 16 ? 8 : bytes == 8 ? 16 : 32;
    counter->shared_requests++;
    for (int first = 0; first < n; first += at_once) {
        uintptr_t words[32 * 4];
        int count = 0, of_bank[SHARED_BANKS] = {0}, most = 0;
        for (int i = first; i < n && i < first + at_once; i++) {
            counter->shared_bytes += lanes[i]->bytes;
            const uintptr_t end = lanes[i]->at + lanes[i]->bytes;
            for (uintptr_t b = lanes[i]->at / SHARED_WORD; b * SHARED_WORD < end && count < 128;
                 b++) {
                words[count++] = b;
            }
        }
        std::sort(words, words + count);
        count = (int)(std::unique(words, words + count) - words);
        for (int i = 0; i < count; i++) {
            most = std::max(most, ++of_bank[words[i] % SHARED_BANKS]);
        }
        counter->wavefronts += (uint64_t)most;
        counter->least_wavefronts += (uint64_t)(count + SHARED_BANKS - 1) / SHARED_BANKS;
    }
}
void emu_check_turn() {
    if (!counter) { return; }
    size_t at[32] = {0};
    for (;;) { // those at the lowest instruction go on: lanes that were apart meet again
        const Traced *lanes[32], *lowest = NULL;
        int n = 0;
        for (int i = 0; i < 32; i++) {
            if (at[i] >= traces[i].size()) { continue; }
            const Traced *t = &traces[i][at[i]];
            if (!lowest || t->pc < lowest->pc) { lowest = t; }
        }
        if (!lowest) { break; }
        for (int i = 0; i < 32; i++) {
            if (at[i] >= traces[i].size()) { continue; }
            const Traced *t = &traces[i][at[i]];
            if (t->pc != lowest->pc || t->shared != lowest->shared || t->writes != lowest->writes) {
                continue;
            }
            lanes[n++] = t;
            at[i]++;
        }
        (lowest->shared ? count_shared : count_device)(lanes, n);
    }
    for (std::vector<Traced> &t : traces) { t.clear(); }
}
static struct Report {
    ~Report() {
        FILE *f = sectors_file() ? fopen(sectors_file(), "a") : NULL; // ranks share it
        if (f) { setvbuf(f, NULL, _IOLBF, 1 << 16); } // whole lines, whoever else writes
        for (const auto &k : counters) {
            const Counter &c = k.second;
            if (!f) { return; }
            fprintf(f, "{\"kernel\":\"%s\",\"launches\":%lu,\"threads\":%lu",
                    emu_function_name(k.first).c_str(), c.launches, c.threads);
            const char *const names[2] = {"read", "write"};
            for (int w = 0; w < 2; w++) {
                fprintf(f,
                        ",\"%s_requests\":%lu,\"%s_bytes\":%lu,\"%s_sectors\":%lu,\"%s_distinct_"
                        "sectors\":%lu",
                        names[w], c.requests[w], names[w], c.bytes[w], names[w], c.sectors[w],
                        names[w], c.distinct[w]);
            }
            fprintf(f,
                    ",\"shared_requests\":%lu,\"shared_bytes\":%lu,\"wavefronts\":%lu,\"bank_"
                    "conflicts\":%lu}\n",
                    c.shared_requests, c.shared_bytes, c.wavefronts,
                    c.wavefronts - c.least_wavefronts);
        }
        if (f) { fclose(f); }
    }
} report;
