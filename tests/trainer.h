// The trainer for its suites (or by common.h, if TRAIN_NO_MAIN is there before).
#pragma once
#ifndef TRAIN_NO_MAIN
#define TRAIN_NO_MAIN
#include "../train_lora.cu"
#endif
