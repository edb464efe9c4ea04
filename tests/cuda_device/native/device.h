/* Interface between the libraries of the CUDA device in software, and between them and Python (../device.py).

   The runtime (runtime.c) keeps all books: memory, streams, captures, counters, the log. The driver (driver.c) and
   cuBLAS (cublas.c) report to it. Errors are cudaError_t as int, so that no file needs the headers of another. */

#pragma once
#include <stdbool.h>
#include <stddef.h>

/* What is counted, from the start of the process. Python reads the names from here, by device_counter_name. */
#define COUNTERS(X)                                                                                                    \
    X(runtime_launches)      /* kernels that torch's own code launched, captured ones included */                      \
    X(driver_launches)       /* kernels that Triton launched, captured ones included */                                \
    X(library_launches)      /* products and other routines of cuBLAS, captured ones included */                       \
    X(programmatic_launches) /* launches, of these, that may begin before the kernel in front of them has ended */     \
    X(graph_launches)        /* replays */                                                                             \
    X(replayed_nodes)        /* works in the graphs that were replayed */                                              \
    X(copies)                /* copies that were enqueued, captured ones included */                                   \
    X(fills)                                                                                                           \
    X(captures)              /* captures that ended in a graph */                                                      \
    X(live_graphs)           /* instantiated graphs that were not destroyed */                                         \
    X(synchronisations)      /* calls in which the host waits for the device */                                        \
    X(device_allocations)    /* cudaMalloc and the like; torch's caching allocator calls it for a new segment */       \
    X(pinned_allocations)                                                                                              \
    X(modules_loaded)        /* compiled kernels that the driver loaded */                                             \
    X(illegal_calls)         /* calls that failed; out of memory is counted apart */                                   \
    X(out_of_memory)                                                                                                   \
    X(computations)          /* works of Python that ran (mode "values") */                                            \
    X(uncomputed_launches)   /* launches for which no computation stands (mode "values") */                            \
    X(poisoned_blocks)       /* blocks of torch's allocator that were filled, or enter graphs with a fill */

enum Counter {
#define X(name) COUNT_##name,
    COUNTERS(X)
#undef X
    NUM_COUNTERS
};

/* Kinds of entries of the log. Failures are always logged, the others while they are watched. */
enum LogKind {
    LOG_ILLEGAL_CALL = 1,
    LOG_OUT_OF_MEMORY = 2,
    LOG_SYNCHRONISATION = 4,
    LOG_ALLOCATION = 8,
    LOG_CAPTURE = 16,
    LOG_MODULE = 32,
    LOG_UNCOMPUTED = 64,
};

typedef struct LogEntry {
    int kind;
    int error;
    char call[64];      /* name of the function of CUDA */
    char detail[160];   /* numbers, for people */
    char trace[4096];   /* Python's stack, innermost frame first, as faulthandler writes it */
} LogEntry;

/* ---- For the driver and for cuBLAS ---- */

/* Counts, in `counter`, a launch of `kernel` and enqueues it in a stream: 0, or why it is refused. */
int device_launch(void *stream, enum Counter counter, const char *call, const char *kernel);

/* A call that may not happen during captures of other kinds than "relaxed": 0, or the error of such a call. */
int device_unsafe_call(const char *call);

/* A call of a function that has no body here: logs its name and returns `error`. */
int device_absent(const char *call, int error);

/* A call that failed: logs it, makes it the last error of this thread, and returns it. */
int device_fail(int error, const char *call, const char *detail);

/* Virtual memory. A range of addresses has no memory until some is mapped; NULL: there is none. */
void *device_reserve_addresses(size_t size);
void device_free_addresses(void *start, size_t size);
/* Bytes of a device that are in use from now on, mapped or not: 0, or out of memory. */
int device_take_memory(int device, size_t size, const char *call);
void device_return_memory(int device, size_t size);
/* Gives addresses bytes, and takes them away again: false where nothing was mapped at `start`. */
void device_map_memory(int device, void *start, size_t size);
bool device_unmap_memory(void *start);

void device_count(enum Counter counter, long number);
void device_note(int kind, const char *call, const char *detail);

/* ---- For torch's caching allocator (poison.cpp) ---- */

/* The allocator hands out a block of a stream, or has it back. It is filled with 0xFF in the order of that stream, at
   each replay if this is part of a capture. They do not wait, and take no lock of Python's. `is_of_private_pool`: the
   pool is that of graphs, or of a program's own. */
void device_block_handed_out(int device, void *stream, void *address, size_t size, bool is_of_private_pool);
void device_block_freed(int device, void *stream, void *address, size_t size);

/* ---- For Python ---- */

const char *device_counter_name(int counter); /* NULL behind the last one */
long device_counter(int counter);
size_t device_bytes_used(int device);
size_t device_bytes_peak(int device);
void device_reset_peak(int device);
void device_set_memory(int device, size_t bytes);
/* Memory of the device that an instantiated graph takes for each of its works. Returns the number of before. */
size_t device_set_bytes_of_node(size_t bytes);
/* Mode "counting": copies and fills of more bytes are counted only. Returns the number of before. */
size_t device_copy_up_to(size_t bytes);

/* While `held`, works of streams other than the legacy one run as late as may be: when somebody waits for their stream,
   or for an event that was recorded in it. */
void device_hold_streams(bool held);

/* Python's stack is written to `fd` by the handler of `signal` (faulthandler.register). */
void device_trace_by(int signal, int fd);
void device_watch(int kinds); /* kinds of LogKind that are logged besides the failures */
long device_log_length(void);
int device_log_entry(long number, LogEntry *entry);

/* Mode "values": Python computes. `compute` runs the computation of a number; `forget` says that no graph and no queue
   has it any more. */
void device_compute_by(void (*compute)(long), void (*forget)(long));
/* Enqueues a computation in a stream. 1: it was captured and runs at every replay; 0: it has run; < 0: an error. */
int device_enqueue_computation(void *stream, long number);
/* Within a pair of +1 and -1 launches, copies and fills of this thread are parts of a computation of Python's: they are
   counted and checked, and do nothing. */
void device_cover(int delta);
/* True if `address` lies in memory that was allocated and not given back. */
bool device_is_allocated(const void *address);
