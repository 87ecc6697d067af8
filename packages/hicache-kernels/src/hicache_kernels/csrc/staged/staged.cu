// Staged module, CUDA and ROCm builds.
#include "entry.h"
