/* Functions of a library that others import or look up and that have no body in this device.

   TABLE is a file that build.py writes, a line each: ABSENT(name) logs the name and answers ERROR, "not supported";
   ROUTINE(name) is a routine of cuBLAS, a launch in the stream of its handle. Arguments are not read. */

#include "device.h"

int cublas_routine(void *handle, const char *name);

#define ABSENT(name) \
    int name(void) { return device_absent(#name, ERROR); }
#define ROUTINE(name) \
    int name(void *handle) { return cublas_routine(handle, #name); }

#include TABLE
