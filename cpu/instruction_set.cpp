// cpu/instruction_set.cpp: asks the CPU for its instructions.
#include "cpu/instruction_set.h"
#ifdef HAVE_SIMD
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef HAVE_ARM
#include <sys/auxv.h>
#endif

#ifndef QWEN3_DOUBLE
const char* instruction_set_name(int set) {
#ifdef __aarch64__
    static const char* const names[] = {"plain", "dot", "bf16"};
#else
    static const char* const names[] = {"plain", "avx2", "avx512", "avx512bf16", "amx"};
#endif
    return names[set];
}

InstructionSet best_instruction_set() {
#ifdef HAVE_SIMD
    unsigned a, b, c, d, a1 = 0, b1, c1, d1;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return ISA_PLAIN;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) return ISA_AVX2;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) return ISA_AVX512;
    if (!(a1 >> 5 & 1) || !(c >> 11 & 1)) return ISA_AVX512; // AVX512_BF16, AVX512_VNNI
    const bool amx = (d >> 22 & 13) == 13 && (c >> 1 & 1); // AMX-BF16, AMX-TILE, AMX-INT8; AVX512_VBMI
    // Linux grants a process the tile registers on request: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
    return amx && syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? ISA_AMX : ISA_AVX512_BF16;
#elif defined(HAVE_ARM)
    if (!(getauxval(AT_HWCAP) >> 20 & 1)) return ISA_PLAIN; // HWCAP_ASIMDDP
    return getauxval(AT_HWCAP2) >> 14 & 1 ? ISA_ARM_BF16 : ISA_ARM_DOT; // HWCAP2_BF16, which old headers lack
#else
    return ISA_PLAIN;
#endif
}

InstructionSet instruction_set = best_instruction_set();
#endif
