// The trainer for its suites.
#pragma once
#define TRAIN_NO_MAIN
#include "../train_lora.cu"
