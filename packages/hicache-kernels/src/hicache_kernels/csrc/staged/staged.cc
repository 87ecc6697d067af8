// Staged module, CPU build.
#include "entry.h"
