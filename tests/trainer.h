// The trainer for its suites (or by common.h, if TRAIN_NO_MAIN is there before).
#pragma once
#ifndef TRAIN_NO_MAIN
#ifdef SUITES_ARE_PROGRAMS
#include "programs.h"
#define main train_main
#include "../train_lora.cu"
#undef main
static const bool is_train_lora = add_program("train_lora", train_main);
#else
#define TRAIN_NO_MAIN
#include "../train_lora.cu"
#endif
#endif
