// What an x86-64 processor has and the operating system saves, asked of the processor itself: some
// compilers' runtime libraries (Zig's) answer __builtin_cpu_supports with no, whatever it is.
#pragma once
#include <cpuid.h>
#include <stdint.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

struct Processor {
    bool avx2 = false, avx512 = false, vbmi = false, tiles = false;

    Processor() {
        uint32_t a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        const bool saved = c >> 27 & 1, avx = c >> 28 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1;
        if (!saved || !avx || !fma || !f16c || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        constexpr uint32_t YMM = 0x06, ZMM = 0xe6; // registers that are saved, with the masks
        constexpr uint32_t F = 1u << 16, DQ = 1u << 17, BW = 1u << 30, VL = 1u << 31;
        const uint32_t registers = enabled();
        avx2 = (registers & YMM) == YMM && b >> 5 & 1;
        const bool vnni = c >> 11 & 1;
        avx512 = avx2 && (registers & ZMM) == ZMM && (b & (F | DQ | BW | VL)) == (F | DQ | BW | VL) && vnni;
        vbmi = avx512 && c >> 1 & 1;
#if defined(__linux__)
        // AMX with bytes. Linux saves tiles for processes alone that ask.
        constexpr uint32_t TMM = 3u << 17, AMX = 3u << 24;
        constexpr int REQUEST = 0x1023, TILE_DATA = 18;
        tiles = vbmi && (registers & TMM) == TMM && (d & AMX) == AMX && !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
#endif
    }

  private:
    static uint32_t enabled() {
        uint32_t low, high;
        asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        return low;
    }
};
