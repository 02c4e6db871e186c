// cpu/instruction_set.h: the instruction sets that the CPU ops have code for, and which of them the process uses.
#pragma once

// Only product tiles and attention have code for each of them; all else is compiled for the build's own target.
enum InstructionSet { ISA_PLAIN, ISA_AVX2, ISA_AVX512, ISA_AVX512_BF16, ISA_AMX };
const char* instruction_set_name(int set);

// The best one of this CPU.
InstructionSet best_instruction_set();
extern InstructionSet instruction_set; // the process's: the best one; a test or --cpu may take a lesser one

// Older compilers lack the instructions for bf16 and AMX; they, and other processors, use the plain loops.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define HAVE_SIMD
#endif
