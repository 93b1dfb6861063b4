// emu_checks.h: what the emulation (emu.h) tells the checks of a program that is compiled with
// -DEMU_CHECKED -fsanitize=thread and linked with emu_checks.cc instead of the sanitizer's library. In any other program
// these calls are nothing.
//
// Accesses   The compiler calls __tsan_read4() and its like at each load and store; emu_checks.cc has its own, which look
//            at those of kernels. So kernels are checked as they are.
#ifndef EMU_CHECKS_H
#define EMU_CHECKS_H

#include <stddef.h>
#include <stdint.h>

enum EmuAccess { EMU_READ, EMU_WRITE, EMU_ATOMIC, EMU_COPY_STARTS, EMU_COPY_ENDS };
struct EmuFiber;

#ifdef EMU_CHECKED
enum { EMU_CHECKS = 1 };
// of functions of the emulation that kernels call: they say themselves what they touch
#define EMU_APART __attribute__((no_sanitize("thread"), noinline))
#else
enum { EMU_CHECKS = 0 };
#define EMU_APART
static inline uint64_t emu_check_path() { return 0; }
static inline void emu_check_access(const void *, size_t, EmuAccess, const void *) {}
static inline void emu_check_enter(const EmuFiber *) {}
static inline void emu_check_leave() {}
static inline void emu_check_turn() {}
static inline void emu_check_warp_barrier(unsigned) {}
static inline void emu_check_block_barrier() {}
static inline void emu_check_block(size_t) {}
static inline void emu_check_launch_ends() {}
template <class... A> static inline void emu_check_launch(A...) {}
#endif

#endif
