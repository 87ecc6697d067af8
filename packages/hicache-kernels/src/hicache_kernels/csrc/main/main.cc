// Main module, CPU build.
#include "entry.h"
