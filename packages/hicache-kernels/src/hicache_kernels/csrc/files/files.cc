// Files module, CPU only.
#include "entry.h"
