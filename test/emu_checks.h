// emu_checks.h: what the emulation (emu.h) tells the checks of a program that is compiled with
// -DEMU_CHECKED -fsanitize=thread and linked with emu_checks.cc instead of the sanitizer's library.
// In any other program these calls are nothing.
//
// Accesses   The compiler calls __tsan_read4() and its like at each load and store. emu_checks.cc
//            has functions of these names, which look at the accesses of kernels: so kernels are
//            checked as they are written. Functions of the emulation that kernels call are left
//            out (EMU_APART), and say themselves what they touch.
#ifndef EMU_CHECKS_H
#define EMU_CHECKS_H

#include <stddef.h>
#include <stdint.h>

enum EmuAccess { EMU_READ, EMU_WRITE, EMU_ATOMIC, EMU_COPY_STARTS, EMU_COPY_ENDS };

#ifdef EMU_CHECKED
enum { EMU_CHECKS = 1 };
#define EMU_APART __attribute__((no_sanitize("thread"), noinline))
// arrays in shared memory: what is between belongs to none
#define EMU_PARTED __attribute__((aligned(4096)))

// --- a kernel that runs: its grid, a block, a thread ---------------------------------------------
// `arguments`: where the kernel's are. It may touch what one of them points into, and nothing else.
void emu_check_launch(const void *kernel, const unsigned *grid, const unsigned *block,
                      size_t shared_bytes, const void *arguments, size_t argument_bytes);
void emu_check_launch_ends();
void emu_check_block(const unsigned *index, const char *shared);
void emu_check_block_barrier();
// __syncwarp of all its lanes: shuffles order nothing
void emu_check_warp_barrier(unsigned warp);
void emu_check_enter(unsigned thread, const void *stack); // this one runs until it waits ...
void emu_check_leave();
void emu_check_begin();           // ... and is in its kernel from here
void emu_check_end();             // to here
void emu_check_turn();            // all lanes of a warp that could run have run
extern void (*emu_check_pause)(); // lets the other lanes run, and returns
void emu_check_access(const void *p, size_t bytes, EmuAccess kind, const void *caller);
uint64_t emu_check_path(); // of function calls from the kernel to here

// --- memory --------------------------------------------------------------------------------------
void emu_check_allocated(const void *p, size_t bytes, bool device);
void emu_check_freed(const void *p);
void emu_check_forget(const void *p, size_t bytes); // whatever it holds may not be read
void emu_check_copied(const void *to, size_t bytes);
// What a library does: all of it has to lie in one tensor.
void emu_check_library(const char *what, const void *p, size_t bytes, bool writes);
// A tensor in a larger allocation; returns how many bytes behind it belong to none. p: NULL where
// the sizes of tensors are only added up.
size_t emu_check_placed(const void *p, size_t bytes);
#define PLACED_APART(p, bytes) emu_check_placed(p, bytes)
#else
enum { EMU_CHECKS = 0 };
#define EMU_APART
#define EMU_PARTED
static void (*emu_check_pause)();
static inline void emu_check_launch(const void *, const unsigned *, const unsigned *, size_t,
                                    const void *, size_t) {}
static inline void emu_check_launch_ends() {}
static inline void emu_check_block(const unsigned *, const char *) {}
static inline void emu_check_block_barrier() {}
static inline void emu_check_warp_barrier(unsigned) {}
static inline void emu_check_enter(unsigned, const void *) {}
static inline void emu_check_leave() {}
static inline void emu_check_begin() {}
static inline void emu_check_end() {}
static inline void emu_check_turn() {}
static inline void emu_check_access(const void *, size_t, EmuAccess, const void *) {}
static inline uint64_t emu_check_path() { return 0; }
static inline void emu_check_allocated(const void *, size_t, bool) {}
static inline void emu_check_freed(const void *) {}
static inline void emu_check_forget(const void *, size_t) {}
static inline void emu_check_copied(const void *, size_t) {}
static inline void emu_check_library(const char *, const void *, size_t, bool) {}
#endif

#endif
