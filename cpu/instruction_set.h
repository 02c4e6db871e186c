// cpu/instruction_set.h: the instruction sets that the CPU ops have code for, and which of them the process uses.
#pragma once

// Only product tiles and attention have code for each of them; all else is compiled for the build's own target.
// From ISA_BF16 on products take bf16.
#ifdef __aarch64__
enum InstructionSet { ISA_PLAIN, ISA_ARM_DOT, ISA_ARM_BF16, ISA_BF16 = ISA_ARM_BF16, ISA_LAST = ISA_ARM_BF16 };
#else
enum InstructionSet { ISA_PLAIN, ISA_AVX2, ISA_AVX512, ISA_AVX512_BF16, ISA_AMX,
                      ISA_BF16 = ISA_AVX512_BF16, ISA_LAST = ISA_AMX };
#endif
const char* instruction_set_name(int set);

// The best one of this CPU.
InstructionSet best_instruction_set();
extern InstructionSet instruction_set; // the process's: the best one; a test or --cpu may take a lesser one

// Older compilers lack the instructions for bf16 and AMX; they, and other processors, use the plain loops.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define HAVE_SIMD
#endif
#if defined(__aarch64__) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 10)
#define HAVE_ARM
#endif
