// emu_symbols.h: names of functions and of variables of a thread, from the symbol table of this
// program, so that messages of the emulation (emu.h) tell which kernel and which array they mean.
// A program without a symbol table gets numbers.
#ifndef EMU_SYMBOLS_H
#define EMU_SYMBOLS_H

#include <algorithm>
#include <cxxabi.h> // names as they are written
#include <elf.h>
#include <fcntl.h>
#include <link.h> // where the program was loaded
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

struct EmuSymbol {
    uintptr_t from; // function: as loaded; variable of a thread: from the begin of its block
    size_t bytes;
    std::string name;
};
struct EmuSymbols {
    std::vector<EmuSymbol> functions;
    std::vector<EmuSymbol> of_threads;
    uintptr_t loaded_at;
};

static inline int emu_note_program(struct dl_phdr_info *info, size_t, void *to) {
    *(uintptr_t *)to = info->dlpi_addr;
    return 1; // the first one is the program
}
// "void ns::kernel<float>(float*, int)" without its type and arguments
static inline std::string emu_readable(const char *symbol) {
    int status = 0;
    char *whole = abi::__cxa_demangle(symbol, NULL, NULL, &status);
    std::string name = whole ? whole : symbol;
    free(whole);
    int depth = 0;
    size_t begin = 0;
    for (size_t i = 0; i < name.size(); i++) {
        depth += (name[i] == '<') - (name[i] == '>');
        if (depth == 0 && name[i] == ' ') { begin = i + 1; }
        if (depth == 0 && name[i] == '(') { return name.substr(begin, i - begin); }
    }
    return name;
}
// "void ns::kernel<float>(float*)::part" without what stands between: kernel<float>::part
static inline std::string emu_readable_variable(const char *symbol) {
    int status = 0;
    char *whole = abi::__cxa_demangle(symbol, NULL, NULL, &status);
    const std::string name = whole ? whole : symbol;
    free(whole);
    const size_t end = name.rfind("::");
    return end == std::string::npos ? name : emu_readable(symbol) + name.substr(end);
}
static inline void emu_take_symbols(EmuSymbols *to, const char *file, const Elf64_Shdr *table,
                                    const Elf64_Shdr *names) {
    const Elf64_Sym *symbols = (const Elf64_Sym *)(const void *)(file + table->sh_offset);
    for (size_t i = 0; i < table->sh_size / sizeof *symbols; i++) {
        const Elf64_Sym *s = &symbols[i];
        const char *name = file + names->sh_offset + s->st_name;
        if (!s->st_shndx || !s->st_size) { continue; }
        if (ELF64_ST_TYPE(s->st_info) == STT_FUNC) {
            to->functions.push_back({to->loaded_at + s->st_value, s->st_size, name});
        } else if (ELF64_ST_TYPE(s->st_info) == STT_TLS) {
            to->of_threads.push_back({s->st_value, s->st_size, name});
        }
    }
}
static inline EmuSymbols *emu_read_symbols() {
    EmuSymbols *all = new EmuSymbols();
    dl_iterate_phdr(emu_note_program, &all->loaded_at);
    const int fd = open("/proc/self/exe", O_RDONLY);
    struct stat about;
    if (fd < 0 || fstat(fd, &about)) { return all; }
    const size_t bytes = (size_t)about.st_size;
    const char *file = (const char *)mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (file == MAP_FAILED) { return all; }
    const Elf64_Ehdr *head = (const Elf64_Ehdr *)(const void *)file;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(const void *)(file + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) { continue; }
        emu_take_symbols(all, file, &sections[i], &sections[sections[i].sh_link]);
    }
    munmap((void *)(uintptr_t)file, bytes);
    return all;
}
static inline const EmuSymbols *emu_symbols() {
    static const EmuSymbols *all = emu_read_symbols();
    return all;
}
static inline std::string emu_function_name(const void *function) {
    for (const EmuSymbol &s : emu_symbols()->functions) {
        if (s.from == (uintptr_t)function) { return emu_readable(s.name.c_str()); }
    }
    char number[32];
    snprintf(number, sizeof number, "%p", function);
    return number;
}

#endif
