/* The CUDA runtime (libcudart) of the CUDA device in software: torch's build for CUDA runs on it without a GPU.

   Memory, streams, events, captures and graphs are kept on the books, with the rules and the errors of CUDA; kernels
   are counted and not run. Memory of the device is memory of the host that the operating system backs when it is
   touched, so that a device of 80 GB fits on a small machine.

   Two modes (EAGLE_KIT_DEVICE_MODE). "counting": copies between host and device are made, all else is only counted.
   "values": every copy and fill is made, and Python enqueues computations for what kernels would have done. In both,
   whatever a stream does is a `Work` that goes through `enqueue`, into the graph of a capture or into the queue of the
   stream. The queue is run at once; another order, as a real device may have, is a matter of `run_queue` alone.

   Sources of the rules: CUDA Runtime API (stream capture, `cudaStreamCaptureMode`, `cudaThreadExchangeStreamCaptureMode`)
   and the section "CUDA Graphs" of the CUDA C++ Programming Guide. */

#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "device.h"

/* ---- Configuration ---------------------------------------------------------------------------------------------- */

#define MAX_DEVICES 16
#define GRANULE (2ul << 20)        /* cudaMalloc hands out whole pages of 2 MiB */
#define MOST_COPIED (64ul << 20)   /* larger copies and fills of mode "counting" would only back memory: device_copy_up_to */
#define CUDA_VERSION_IN_SOFTWARE 13000

typedef struct Device {
    size_t total, used, peak;
    struct Stream *legacy; /* the default stream */
} Device;

static Device devices[MAX_DEVICES];
static int num_devices;
static int capability; /* 90 for 9.0 */
static bool has_values;
static size_t most_copied = MOST_COPIED;

static const char *setting(const char *name, const char *otherwise) {
    const char *given = getenv(name);
    return given && *given ? given : otherwise;
}

/* ---- Locks and what a thread has of its own ---------------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;     /* of all below but the log */
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queue_is_idle = PTHREAD_COND_INITIALIZER;

static __thread cudaError_t last_error;
static __thread int current_device;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static __thread int cover_depth; /* device_cover */

/* ---- Counters and log -------------------------------------------------------------------------------------------- */

static long counters[NUM_COUNTERS];
static const char *counter_names[] = {
#define X(name) #name,
    COUNTERS(X)
#undef X
};

void device_count(enum Counter counter, long number) { __atomic_fetch_add(&counters[counter], number, __ATOMIC_RELAXED); }
long device_counter(int counter) { return counters[counter]; }
const char *device_counter_name(int counter) { return counter < NUM_COUNTERS ? counter_names[counter] : NULL; }

static LogEntry *entries;
static long num_entries, room_for_entries;
static int watched;
static int trace_signal, trace_fd = -1;

void device_trace_by(int signal_number, int fd) {
    trace_signal = signal_number;
    trace_fd = fd;
}

void device_watch(int kinds) { watched = kinds; }
long device_log_length(void) { return num_entries; }

int device_log_entry(long number, LogEntry *entry) {
    pthread_mutex_lock(&log_lock);
    bool is_there = number >= 0 && number < num_entries;
    if (is_there) *entry = entries[number];
    pthread_mutex_unlock(&log_lock);
    return is_there;
}

/* Has Python's faulthandler write the stack of this thread, which needs no lock of Python's, and reads it. */
static void write_trace(char *trace, size_t size) {
    trace[0] = 0;
    if (trace_fd < 0) return;
    if (ftruncate(trace_fd, 0) || lseek(trace_fd, 0, SEEK_SET)) return;
    pthread_kill(pthread_self(), trace_signal);
    ssize_t length = pread(trace_fd, trace, size - 1, 0);
    trace[length > 0 ? length : 0] = 0;
}

static void add_entry(int kind, int error, const char *call, const char *detail) {
    pthread_mutex_lock(&log_lock);
    if (num_entries == room_for_entries) {
        room_for_entries = room_for_entries ? 2 * room_for_entries : 64;
        entries = realloc(entries, room_for_entries * sizeof *entries);
    }
    LogEntry *entry = &entries[num_entries++];
    entry->kind = kind;
    entry->error = error;
    snprintf(entry->call, sizeof entry->call, "%s", call);
    snprintf(entry->detail, sizeof entry->detail, "%s", detail);
    write_trace(entry->trace, sizeof entry->trace);
    pthread_mutex_unlock(&log_lock);
}

void device_note(int kind, const char *call, const char *detail) {
    if (watched & kind) add_entry(kind, 0, call, detail);
}

int device_fail(int error, const char *call, const char *detail) {
    last_error = error;
    device_count(COUNT_illegal_calls, 1);
    add_entry(LOG_ILLEGAL_CALL, error, call, detail);
    return error;
}

int device_absent(const char *call, int error) {
    return device_fail(error, call, "this function has no body in the device in software");
}

static cudaError_t fail(cudaError_t error, const char *call, const char *detail) { return device_fail(error, call, detail); }

/* Errors that programs ask for and live with: they are no fault, and not logged. */
static cudaError_t answer(cudaError_t error) {
    last_error = error;
    return error;
}

/* Messages of the errors that this device gives. */
static const struct { cudaError_t error; const char *name, *message; } messages[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof messages / sizeof *messages; i++)
        if (messages[i].error == error) return messages[i].message;
    return "unrecognized error code";
}

const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof messages / sizeof *messages; i++)
        if (messages[i].error == error) return messages[i].name;
    return "unrecognized error code";
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

/* ---- Works, graphs, streams, captures, events: the types ------------------------------------------------------------ */

enum WorkKind { LAUNCH, COPY, FILL, CALL_HOST, COMPUTE, REPLAY, POISON };

/* What a stream does at a time, or a node of a graph. */
typedef struct Work {
    enum WorkKind kind;
    struct Work *next;
    void *to;              /* COPY, FILL, POISON */
    const void *from;      /* COPY */
    size_t width, height;  /* COPY, FILL, POISON: bytes of a row, and rows */
    size_t to_pitch, from_pitch;
    int value;             /* FILL */
    cudaHostFn_t function; /* CALL_HOST, with `to` as its argument */
    long number;           /* COMPUTE: of Python's */
    struct Graph *graph;   /* REPLAY; POISON: whose node it is */
    bool copies_in_counting; /* COPY: one side is memory of the host */
    bool is_of_live_block;   /* POISON: the block was handed out in the capture and is not free; see "Poison" */
    struct Work *next_live;  /* POISON: another such node */
} Work;

typedef struct WorkList {
    Work *first, *last;
    long length; /* poison is not counted */
} WorkList;

/* A captured list of works. It is shared by cudaGraph_t and cudaGraphExec_t, which are both pointers to it. */
typedef struct Graph {
    WorkList works;
    int references;
} Graph;

typedef struct Capture {
    unsigned long long id;
    int device;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;       /* that began it */
    struct Stream *origin;  /* in which it began */
    Graph *graph;
    bool is_invalid;
    struct Capture *next;
} Capture;

typedef struct Stream {
    int device;
    bool is_legacy;
    bool is_blocking;       /* ordered with the legacy stream */
    int priority;
    WorkList queue;
    bool is_running;        /* some thread runs works of the queue */
    Capture *capture;
    long captured;          /* works that this stream added to the capture */
    long joined;            /* how many of these the origin, or a stream on the way to it, has waited for */
    struct Stream *next;
} Stream;

typedef struct Event {
    bool is_recorded;
    double milliseconds;               /* when it was recorded */
    unsigned long long capture_id;     /* of the capture in which it was last recorded; 0 outside of captures */
    Stream *stream;
    long captured;                     /* `captured` of the stream then */
} Event;

static Stream *streams;
static Capture *captures; /* that have begun and not ended */
static unsigned long long next_capture_id = 1;
static void (*compute)(long);
static void (*forget)(long);

void device_compute_by(void (*compute_function)(long), void (*forget_function)(long)) {
    compute = compute_function;
    forget = forget_function;
}

void device_cover(int delta) { cover_depth += delta; }

static Stream *stream_on(int device, cudaStream_t handle) {
    bool is_default = !handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
    return is_default ? devices[device].legacy : (Stream *)handle;
}

static Stream *stream_of(cudaStream_t handle) {
    return stream_on(current_device, handle);
}

static Stream *new_stream(int device, unsigned flags, int priority) {
    Stream *stream = calloc(1, sizeof *stream);
    stream->device = device;
    stream->is_blocking = !(flags & cudaStreamNonBlocking);
    stream->priority = priority;
    pthread_mutex_lock(&lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    return stream;
}

static double now_in_milliseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec * 1e-6;
}

__attribute__((constructor)) static void start(void) {
    num_devices = atoi(setting("EAGLE_KIT_DEVICE_COUNT", "1"));
    if (num_devices > MAX_DEVICES) num_devices = MAX_DEVICES;
    double gigabytes = atof(setting("EAGLE_KIT_DEVICE_MEMORY_GB", "80"));
    capability = (int)(10 * atof(setting("EAGLE_KIT_DEVICE_CAPABILITY", "9.0")) + 0.5);
    has_values = !strcmp(setting("EAGLE_KIT_DEVICE_MODE", "counting"), "values");
    for (int i = 0; i < num_devices; i++) {
        devices[i].total = (size_t)(gigabytes * 1e9);
        devices[i].legacy = new_stream(i, cudaStreamDefault, 0);
        devices[i].legacy->is_legacy = true;
    }
}

/* ---- Captures: what is allowed -------------------------------------------------------------------------------------- */

/* A call that CUDA calls "potentially unsafe" during a capture, such as cudaMalloc. Whether it is refused depends on the
   mode of this thread and on the modes of the captures that are going on; a refused call ends the capture, too. */
static cudaError_t check_unsafe(const char *call) {
    if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    bool is_refused = false;
    pthread_mutex_lock(&lock);
    for (Capture *capture = captures; capture; capture = capture->next) {
        if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
        bool is_own = pthread_equal(capture->thread, pthread_self());
        bool is_global = capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
        if (is_own || is_global) {
            capture->is_invalid = true;
            is_refused = true;
        }
    }
    pthread_mutex_unlock(&lock);
    return is_refused ? fail(cudaErrorStreamCaptureUnsupported, call, "during a capture") : cudaSuccess;
}

int device_unsafe_call(const char *call) { return check_unsafe(call); }

/* A call that waits for all streams of a device, or asks them: not while one of them is captured, whatever its mode. */
static cudaError_t check_no_capture(int device, const char *call) {
    bool is_refused = false;
    pthread_mutex_lock(&lock);
    for (Capture *capture = captures; capture; capture = capture->next) {
        if (capture->device != device) continue;
        capture->is_invalid = true;
        is_refused = true;
    }
    pthread_mutex_unlock(&lock);
    return is_refused ? fail(cudaErrorStreamCaptureUnsupported, call, "a stream of the device is captured") : cudaSuccess;
}

/* A call that waits for a stream, or asks it, which a captured stream cannot answer. */
static cudaError_t check_not_captured(Stream *stream, const char *call) {
    if (!stream->capture) return cudaSuccess;
    stream->capture->is_invalid = true;
    return fail(cudaErrorStreamCaptureUnsupported, call, "the stream is captured");
}

/* The legacy stream waits for all blocking streams, of which none may be captured then. */
static cudaError_t check_legacy_order(Stream *stream, const char *call) {
    if (!stream->is_legacy) return cudaSuccess;
    bool is_refused = false;
    pthread_mutex_lock(&lock);
    for (Capture *capture = captures; capture; capture = capture->next) {
        if (capture->device != stream->device || !capture->origin->is_blocking) continue;
        capture->is_invalid = true;
        is_refused = true;
    }
    pthread_mutex_unlock(&lock);
    return is_refused ? fail(cudaErrorStreamCaptureImplicit, call, "") : cudaSuccess;
}

/* ---- Works: run, enqueued, kept in graphs ---------------------------------------------------------------------------- */

static Work *append(WorkList *list, Work work) {
    Work *kept = malloc(sizeof *kept);
    *kept = work;
    kept->next = NULL;
    if (list->last) list->last->next = kept;
    else list->first = kept;
    list->last = kept;
    if (work.kind != POISON) list->length++;
    return kept;
}

static void release_graph(Graph *graph);

static Work *live_blocks; /* nodes POISON of blocks that a capture handed out and that are not free yet */

/* Takes the node of the live block at `address` off the list; NULL where there is none. Under `lock`. */
static Work *take_live_block(const void *address) {
    Work **at = &live_blocks;
    while (*at && (*at)->to != address) at = &(*at)->next_live;
    Work *taken = *at;
    if (taken) *at = taken->next_live;
    return taken;
}

static void free_work(Work *work) {
    if (work->kind == REPLAY) release_graph(work->graph);
    if (work->kind == COMPUTE && forget) forget(work->number);
    pthread_mutex_lock(&lock);
    if (work->is_of_live_block) take_live_block(work->to);
    pthread_mutex_unlock(&lock);
    free(work);
}

static void release_graph(Graph *graph) {
    if (__atomic_sub_fetch(&graph->references, 1, __ATOMIC_ACQ_REL)) return;
    for (Work *work = graph->works.first, *next; work; work = next) {
        next = work->next;
        free_work(work);
    }
    free(graph);
}

static bool moves_bytes(const Work *work) {
    if (has_values) return true;
    bool is_small = work->width * work->height <= most_copied;
    return is_small && (work->kind == FILL || work->copies_in_counting);
}

static void run_works(const WorkList *list);

static void run_work(const Work *work) {
    switch (work->kind) {
    case LAUNCH:
        return; /* no kernel is run */
    case COPY:
        if (!moves_bytes(work)) return;
        for (size_t row = 0; row < work->height; row++)
            memmove((char *)work->to + row * work->to_pitch, (const char *)work->from + row * work->from_pitch, work->width);
        return;
    case FILL:
        if (moves_bytes(work)) memset(work->to, work->value, work->width);
        return;
    case CALL_HOST:
        work->function(work->to);
        return;
    case COMPUTE:
        device_count(COUNT_computations, 1);
        compute(work->number);
        return;
    case REPLAY:
        run_works(&work->graph->works);
        return;
    case POISON:
        if (!work->is_of_live_block && device_is_allocated(work->to)) memset(work->to, 0xFF, work->width);
        return;
    }
}

static void run_works(const WorkList *list) {
    for (const Work *work = list->first; work; work = work->next) run_work(work);
}

/* Runs what is in the queue of a stream, in its order; returns when it is empty, and no thread is running its works. */
static void run_queue(Stream *stream) {
    pthread_mutex_lock(&lock);
    while (stream->is_running) pthread_cond_wait(&queue_is_idle, &lock);
    while (stream->queue.first) {
        Work *work = stream->queue.first;
        stream->queue.first = work->next;
        if (!work->next) stream->queue.last = NULL;
        if (work->kind != POISON) stream->queue.length--;
        stream->is_running = true;
        pthread_mutex_unlock(&lock);
        run_work(work);
        free_work(work);
        pthread_mutex_lock(&lock);
        stream->is_running = false;
        pthread_cond_broadcast(&queue_is_idle);
    }
    pthread_mutex_unlock(&lock);
}

static void run_all_queues(int device) {
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->device == device) run_queue(stream);
}

static bool holds;

/* While streams are held, works of streams other than the legacy one wait until somebody waits for their stream. */
void device_hold_streams(bool held) {
    holds = held;
    if (held) return;
    for (int device = 0; device < MAX_DEVICES; device++) run_all_queues(device);
}

/* The one way of a work into a stream: a node of the graph that the stream captures, or an entry of its queue. */
static cudaError_t enqueue(Stream *stream, Work work, const char *call) {
    cudaError_t error = check_legacy_order(stream, call);
    if (error) return error;
    Capture *capture = stream->capture;
    if (capture && capture->is_invalid) return fail(cudaErrorStreamCaptureInvalidated, call, "");
    /* A launch by itself does nothing, so it needs no turn. A thread that launches from within a computation's cover may hold
       Python's lock, and must not wait for another thread's computations. */
    if (work.kind == LAUNCH && !capture) return cudaSuccess;

    pthread_mutex_lock(&lock);
    append(capture ? &capture->graph->works : &stream->queue, work);
    if (capture) stream->captured++;
    pthread_mutex_unlock(&lock);
    if (!capture && (stream->is_legacy || !holds)) run_queue(stream);
    return cudaSuccess;
}

static cudaError_t launch(Stream *stream, enum Counter counter, const char *call, const char *kernel) {
    Work work = {.kind = LAUNCH};
    cudaError_t error = enqueue(stream, work, call);
    if (error) return error;
    device_count(counter, 1);
    if (has_values && !cover_depth) {
        device_count(COUNT_uncomputed_launches, 1);
        add_entry(LOG_UNCOMPUTED, 0, call, kernel);
    }
    return cudaSuccess;
}

int device_launch(void *stream, enum Counter counter, const char *call, const char *kernel) {
    return launch(stream_of(stream), counter, call, kernel);
}

int device_enqueue_computation(void *handle, long number) {
    Stream *stream = stream_of(handle);
    bool is_captured = stream->capture != NULL;
    Work work = {.kind = COMPUTE, .number = number};
    cudaError_t error = enqueue(stream, work, "computation");
    return error ? -(int)error : is_captured;
}

/* ---- Poison (mode "values") ------------------------------------------------------------------------------------------

   Bytes without a value are 0xFF: NaN in every float, -1 in every integer. torch's caching allocator says, through
   poison.cpp, which blocks it hands out and which are free again. Both are filled, in the order of the block's stream.

   Within a capture the fill of a block of the graph's pool is a node, so each replay begins and ends the block's life
   with it. Two cases keep it off bytes that are in use:
   * A block that is not free at the end of the capture may be written from outside between replays, so replays leave it
     alone. It was filled once, as it was handed out. When it is freed, the node wakes up.
   * A block that is freed in a capture, and was handed out before it, may be in use again at a replay. It is filled once,
     outside of the graph. */

#define LEAST_BLOCK 512ul /* sizes of torch's blocks are multiples of it */

static Work poison(void *address, size_t size) {
    Work work = {.kind = POISON, .to = address, .width = (size + LEAST_BLOCK - 1) / LEAST_BLOCK * LEAST_BLOCK, .height = 1};
    return work;
}

/* Fills in the order of a stream without waiting: the caller holds locks of the allocator's and perhaps Python's. Where
   the queue is not empty, the thread that runs it comes to the fill. */
static void poison_in_order(Stream *stream, Work work) {
    pthread_mutex_lock(&lock);
    bool is_idle = !stream->is_running && !stream->queue.first;
    if (!is_idle) append(&stream->queue, work);
    pthread_mutex_unlock(&lock);
    if (is_idle) run_work(&work);
}

static Graph *graph_of(Stream *stream) {
    return stream->capture && !stream->capture->is_invalid ? stream->capture->graph : NULL;
}

void device_block_handed_out(int device, void *handle, void *address, size_t size, bool is_of_private_pool) {
    Stream *stream = stream_on(device, handle);
    Work work = poison(address, size);
    device_count(COUNT_poisoned_blocks, 1);
    pthread_mutex_lock(&lock);
    Graph *graph = is_of_private_pool ? graph_of(stream) : NULL;
    if (graph) {
        Work *node = append(&graph->works, work);
        node->graph = graph;
        node->is_of_live_block = true;
        node->next_live = live_blocks;
        live_blocks = node;
    }
    pthread_mutex_unlock(&lock);
    poison_in_order(stream, work);
}

void device_block_freed(int device, void *handle, void *address, size_t size) {
    Stream *stream = stream_on(device, handle);
    Work work = poison(address, size);
    device_count(COUNT_poisoned_blocks, 1);
    pthread_mutex_lock(&lock);
    Graph *graph = graph_of(stream);
    Work *node = take_live_block(address);
    if (node) node->is_of_live_block = false;
    bool is_of_capture = node && graph && node->graph == graph;
    if (is_of_capture) append(&graph->works, work);
    pthread_mutex_unlock(&lock);
    if (!is_of_capture) poison_in_order(stream, work);
}

/* ---- Memory --------------------------------------------------------------------------------------------------------- */

/* A range of addresses that this device knows. */
typedef struct Block {
    char *start;
    size_t size;
    int device; /* -1: pinned memory of the host */
    bool is_registered; /* memory of the program's that it pinned, and that is not ours to free */
} Block;

static Block *blocks; /* sorted by their starts */
static long num_blocks, room_for_blocks;

/* Number of the first block that begins behind `address`. Under `lock`. */
static long block_behind(const void *address) {
    long low = 0;
    long high = num_blocks;
    while (low < high) {
        long middle = (low + high) / 2;
        if (blocks[middle].start <= (const char *)address) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* The block that holds `address`; its size is 0 where none does. */
static Block find_block(const void *address) {
    Block found = {0};
    pthread_mutex_lock(&lock);
    long number = block_behind(address) - 1;
    if (number >= 0 && (const char *)address < blocks[number].start + blocks[number].size) found = blocks[number];
    pthread_mutex_unlock(&lock);
    return found;
}

bool device_is_allocated(const void *address) { return find_block(address).size > 0; }

static void add_block(Block block) {
    pthread_mutex_lock(&lock);
    if (num_blocks == room_for_blocks) {
        room_for_blocks = room_for_blocks ? 2 * room_for_blocks : 256;
        blocks = realloc(blocks, room_for_blocks * sizeof *blocks);
    }
    long number = block_behind(block.start);
    memmove(&blocks[number + 1], &blocks[number], (num_blocks - number) * sizeof *blocks);
    blocks[number] = block;
    num_blocks++;
    pthread_mutex_unlock(&lock);
}

/* Takes the block that starts at `address` off the books; its size is 0 where there is none. */
static Block take_block(const void *address) {
    Block taken = {0};
    pthread_mutex_lock(&lock);
    long number = block_behind(address) - 1;
    if (number >= 0 && blocks[number].start == address) {
        taken = blocks[number];
        num_blocks--;
        memmove(&blocks[number], &blocks[number + 1], (num_blocks - number) * sizeof *blocks);
    }
    pthread_mutex_unlock(&lock);
    return taken;
}

/* Memory that is backed when it is touched. */
static void *map_memory(size_t size) {
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

static size_t rounded_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

/* Synchronous allocation on the current device. Out of memory is no illegal call: torch frees what it has cached and
   asks again. */
static cudaError_t allocate(void **address, size_t size, const char *call) {
    Device *device = &devices[current_device];
    size_t taken = rounded_up(size ? size : 1, GRANULE);
    pthread_mutex_lock(&lock);
    size_t used = device->used;
    bool fits = taken <= device->total - used;
    if (fits) device->used += taken;
    if (device->used > device->peak) device->peak = device->used;
    pthread_mutex_unlock(&lock);

    char detail[sizeof((LogEntry *)0)->detail];
    snprintf(detail, sizeof detail, "%zu bytes, %zu of %zu in use", size, used, device->total);
    void *start = fits ? map_memory(taken) : NULL;
    if (!start) {
        device_count(COUNT_out_of_memory, 1);
        add_entry(LOG_OUT_OF_MEMORY, cudaErrorMemoryAllocation, call, detail);
        return answer(cudaErrorMemoryAllocation);
    }
    if (has_values) memset(start, 0xFF, size); /* what nobody wrote is NaN */
    Block block = {.start = start, .size = taken, .device = current_device};
    add_block(block);
    device_count(COUNT_device_allocations, 1);
    device_note(LOG_ALLOCATION, call, detail);
    *address = start;
    return cudaSuccess;
}

static cudaError_t give_back(void *address, const char *call) {
    if (!address) return cudaSuccess;
    Block block = take_block(address);
    if (!block.size || block.device < 0) return fail(cudaErrorInvalidValue, call, "this is no allocation of the device");
    pthread_mutex_lock(&lock);
    devices[block.device].used -= block.size;
    pthread_mutex_unlock(&lock);
    if (has_values) { /* who touches it from now on is shown the place: the addresses are not used again */
        madvise(block.start, block.size, MADV_DONTNEED);
        mprotect(block.start, block.size, PROT_NONE);
    } else {
        munmap(block.start, block.size);
    }
    return cudaSuccess;
}

/* Virtual memory: ranges of addresses, memory on the books, and what is mapped where (driver.c). */

void *device_reserve_addresses(size_t size) {
    void *start = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

void device_free_addresses(void *start, size_t size) { munmap(start, size); }

int device_take_memory(int number, size_t size, const char *call) {
    Device *device = &devices[number];
    pthread_mutex_lock(&lock);
    size_t used = device->used;
    bool fits = size <= device->total - used;
    if (fits) device->used += size;
    if (device->used > device->peak) device->peak = device->used;
    pthread_mutex_unlock(&lock);

    char detail[sizeof((LogEntry *)0)->detail];
    snprintf(detail, sizeof detail, "%zu bytes, %zu of %zu in use", size, used, device->total);
    if (!fits) {
        device_count(COUNT_out_of_memory, 1);
        add_entry(LOG_OUT_OF_MEMORY, cudaErrorMemoryAllocation, call, detail);
        return cudaErrorMemoryAllocation; /* the driver's errors are not the last one of the runtime */
    }
    device_count(COUNT_device_allocations, 1);
    device_note(LOG_ALLOCATION, call, detail);
    return cudaSuccess;
}

void device_return_memory(int number, size_t size) {
    pthread_mutex_lock(&lock);
    devices[number].used -= size;
    pthread_mutex_unlock(&lock);
}

void device_map_memory(int number, void *start, size_t size) {
    mprotect(start, size, PROT_READ | PROT_WRITE);
    if (has_values) memset(start, 0xFF, size);
    add_block((Block){.start = start, .size = size, .device = number});
}

bool device_unmap_memory(void *start) {
    Block block = take_block(start);
    if (!block.size) return false;
    madvise(block.start, block.size, MADV_DONTNEED);
    mprotect(block.start, block.size, PROT_NONE);
    return true;
}

cudaError_t cudaMalloc(void **address, size_t size) {
    cudaError_t error = check_unsafe("cudaMalloc");
    return error ? error : allocate(address, size, "cudaMalloc");
}

cudaError_t cudaFree(void *address) {
    if (!address) return cudaSuccess; /* programs call it to make the context */
    cudaError_t error = check_unsafe("cudaFree");
    if (error) return error;
    Block block = find_block(address); /* cudaFree waits for the device */
    if (block.size && block.device >= 0) run_all_queues(block.device);
    return give_back(address, "cudaFree");
}

/* Pools of the driver (the backend cudaMallocAsync of torch's allocator) are not kept: no installed part uses them
   unless it is asked to. */
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    Device *device = &devices[current_device];
    *total = device->total;
    *free_bytes = device->total - device->used;
    return cudaSuccess;
}

size_t device_bytes_used(int device) { return devices[device].used; }
size_t device_bytes_peak(int device) { return devices[device].peak; }
void device_reset_peak(int device) { devices[device].peak = devices[device].used; }
void device_set_memory(int device, size_t bytes) { devices[device].total = bytes; }

size_t device_copy_up_to(size_t bytes) {
    size_t before = most_copied;
    most_copied = bytes;
    return before;
}

/* Pinned memory: copies from and to it do not wait for the host. */
cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) {
    cudaError_t error = check_unsafe("cudaHostAlloc");
    if (error) return error;
    size_t taken = rounded_up(size ? size : 1, 4096);
    void *start = map_memory(taken);
    if (!start) return answer(cudaErrorMemoryAllocation);
    Block block = {.start = start, .size = taken, .device = -1};
    add_block(block);
    device_count(COUNT_pinned_allocations, 1);
    *address = start;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address) {
    if (!address) return cudaSuccess;
    cudaError_t error = check_unsafe("cudaFreeHost");
    if (error) return error;
    Block block = take_block(address);
    if (!block.size || block.device >= 0 || block.is_registered)
        return fail(cudaErrorInvalidValue, "cudaFreeHost", "this is no pinned allocation");
    munmap(block.start, block.size);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
    cudaError_t error = check_unsafe("cudaHostRegister");
    if (error) return error;
    if (find_block(address).size) return answer(cudaErrorHostMemoryAlreadyRegistered);
    Block block = {.start = address, .size = size, .device = -1, .is_registered = true};
    add_block(block);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address) {
    cudaError_t error = check_unsafe("cudaHostUnregister");
    if (error) return error;
    Block block = take_block(address);
    return block.size ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered, "cudaHostUnregister", "");
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    memset(attributes, 0, sizeof *attributes);
    Block block = find_block(address);
    if (!block.size) {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = -2;
        return cudaSuccess;
    }
    attributes->type = block.device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = block.device < 0 ? current_device : block.device;
    attributes->devicePointer = (void *)address;
    if (block.device < 0) attributes->hostPointer = (void *)address;
    return cudaSuccess;
}

/* ---- Copies and fills ------------------------------------------------------------------------------------------------- */

/* A copy that is no part of a computation of Python's. Memory of the host that is not pinned makes it wait for the host,
   which a capture cannot. */
static cudaError_t copy(Work work, Stream *stream, const char *call) {
    Block to = find_block(work.to);
    Block from = find_block(work.from);
    bool is_pageable = !to.size || !from.size;
    if (is_pageable && stream->capture) {
        stream->capture->is_invalid = true;
        return fail(cudaErrorStreamCaptureUnsupported, call, "a copy of memory that is not pinned, in a capture");
    }
    work.kind = COPY;
    work.copies_in_counting = !to.size || !from.size || to.device < 0 || from.device < 0;
    device_count(COUNT_copies, 1);
    Work counted = {.kind = LAUNCH};
    return enqueue(stream, cover_depth ? counted : work, call);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    Work work = {.to = to, .from = from, .width = size, .height = 1};
    return copy(work, stream_of(stream), "cudaMemcpyAsync");
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    Work work = {.to = to, .from = from, .width = width, .height = height, .to_pitch = to_pitch, .from_pitch = from_pitch};
    return copy(work, stream_of(stream), "cudaMemcpy2DAsync");
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                cudaStream_t stream) {
    Work work = {.to = to, .from = from, .width = size, .height = 1};
    return copy(work, stream_of(stream), "cudaMemcpyPeerAsync");
}

/* The synchronous forms go through the legacy stream, and wait for it. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    cudaError_t error = check_unsafe("cudaMemcpy");
    if (error) return error;
    device_count(COUNT_synchronisations, 1);
    device_note(LOG_SYNCHRONISATION, "cudaMemcpy", "");
    return cudaMemcpyAsync(to, from, size, kind, NULL);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    Work work = {.kind = FILL, .to = to, .value = value, .width = size, .height = 1};
    Work counted = {.kind = LAUNCH};
    device_count(COUNT_fills, 1);
    return enqueue(stream_of(stream), cover_depth ? counted : work, "cudaMemsetAsync");
}

cudaError_t cudaMemset(void *to, int value, size_t size) {
    cudaError_t error = check_unsafe("cudaMemset");
    return error ? error : cudaMemsetAsync(to, value, size, NULL);
}

/* Constants of kernels, which are not run. */
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, enum cudaMemcpyKind kind) {
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static char variables[1 << 20]; /* of kernels, all at one place: nothing reads them */
    *address = variables;
    return cudaSuccess;
}

/* ---- Streams ------------------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = (cudaStream_t)new_stream(current_device, flags, priority);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0); }

/* The stream stays on the list, as an event may name it. */
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    run_queue(stream_of(stream));
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Stream *stream = stream_of(handle);
    cudaError_t error = check_not_captured(stream, "cudaStreamQuery");
    if (!error) error = check_legacy_order(stream, "cudaStreamQuery");
    if (error) return error;
    return stream->queue.first ? answer(cudaErrorNotReady) : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Stream *stream = stream_of(handle);
    cudaError_t error = check_not_captured(stream, "cudaStreamSynchronize");
    if (!error) error = check_legacy_order(stream, "cudaStreamSynchronize");
    if (!error) error = check_unsafe("cudaStreamSynchronize");
    if (error) return error;
    device_count(COUNT_synchronisations, 1);
    device_note(LOG_SYNCHRONISATION, "cudaStreamSynchronize", "");
    run_queue(stream);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    cudaError_t error = check_no_capture(current_device, "cudaDeviceSynchronize");
    if (error) return error;
    device_count(COUNT_synchronisations, 1);
    device_note(LOG_SYNCHRONISATION, "cudaDeviceSynchronize", "");
    run_all_queues(current_device);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    Work work = {.kind = CALL_HOST, .function = function, .to = argument};
    return enqueue(stream_of(stream), work, "cudaLaunchHostFunc");
}

/* ---- Events -------------------------------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = (cudaEvent_t)calloc(1, sizeof(Event));
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
    Event *event = (Event *)handle;
    Stream *stream = stream_of(stream_handle);
    cudaError_t error = check_legacy_order(stream, "cudaEventRecord");
    if (error) return error;
    if (stream->capture && stream->capture->is_invalid)
        return fail(cudaErrorStreamCaptureInvalidated, "cudaEventRecord", "");
    event->is_recorded = true;
    event->milliseconds = now_in_milliseconds();
    event->capture_id = stream->capture ? stream->capture->id : 0;
    event->stream = stream;
    event->captured = stream->captured;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

/* An event of a capture stands for a node of a graph and is never reached by itself. */
static cudaError_t check_outside(Event *event, const char *call) {
    return event->capture_id ? fail(cudaErrorCapturedEvent, call, "") : cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    Event *event = (Event *)handle;
    cudaError_t error = check_outside(event, "cudaEventQuery");
    if (error) return error;
    bool is_pending = event->is_recorded && event->stream->queue.first;
    return is_pending ? answer(cudaErrorNotReady) : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    Event *event = (Event *)handle;
    cudaError_t error = check_outside(event, "cudaEventSynchronize");
    if (!error) error = check_unsafe("cudaEventSynchronize");
    if (error) return error;
    device_count(COUNT_synchronisations, 1);
    device_note(LOG_SYNCHRONISATION, "cudaEventSynchronize", "");
    if (event->is_recorded) run_queue(event->stream);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start_event, cudaEvent_t end_event) {
    cudaError_t error = check_outside((Event *)start_event, "cudaEventElapsedTime");
    if (!error) error = check_outside((Event *)end_event, "cudaEventElapsedTime");
    if (error) return error;
    double elapsed = ((Event *)end_event)->milliseconds - ((Event *)start_event)->milliseconds;
    *milliseconds = elapsed > 1e-3 ? (float)elapsed : 1e-3f; /* the host's time, in place of the device's */
    return cudaSuccess;
}

static Capture *capture_of(unsigned long long id) {
    for (Capture *capture = captures; capture; capture = capture->next)
        if (capture->id == id) return capture;
    return NULL;
}

/* A stream that waits for an event of a capture takes part in the capture from then on. */
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags) {
    const char *call = "cudaStreamWaitEvent";
    Stream *stream = stream_of(handle);
    Event *event = (Event *)event_handle;
    if (!event->is_recorded) return cudaSuccess;
    Capture *capture = stream->capture;

    /* The event was recorded outside of captures. */
    if (!event->capture_id) {
        if (!capture) {
            run_queue(event->stream);
            return cudaSuccess;
        }
        if (flags & cudaEventWaitExternal) return cudaSuccess;
        capture->is_invalid = true;
        return fail(cudaErrorStreamCaptureIsolation, call, "the event was recorded outside of the capture");
    }

    /* It was recorded in a capture. */
    Capture *of_event = capture_of(event->capture_id);
    if (!of_event) return fail(cudaErrorStreamCaptureIsolation, call, "the event is of a capture that has ended");
    if (capture && capture != of_event) {
        capture->is_invalid = true;
        of_event->is_invalid = true;
        return fail(cudaErrorStreamCaptureMerge, call, "");
    }
    if (of_event->is_invalid) return fail(cudaErrorStreamCaptureInvalidated, call, "");
    if (!capture) {
        stream->capture = of_event;
        stream->captured = 0;
        stream->joined = 0;
    }
    if (event->stream != stream && event->captured > event->stream->joined) event->stream->joined = event->captured;
    return cudaSuccess;
}

/* ---- Captures ------------------------------------------------------------------------------------------------------- */

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

static enum cudaStreamCaptureStatus status_of(Stream *stream) {
    if (!stream->capture) return cudaStreamCaptureStatusNone;
    return stream->capture->is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    Stream *stream = stream_of(handle);
    cudaError_t error = check_legacy_order(stream, "cudaStreamIsCapturing");
    if (error) return error;
    *status = status_of(stream);
    return cudaSuccess;
}

/* Nodes and edges are not shown: what asks for them adds nodes by hand, which has no body here. */
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *num_dependencies) {
    Stream *stream = stream_of(handle);
    *status = status_of(stream);
    if (id) *id = stream->capture ? stream->capture->id : 0;
    if (graph) *graph = stream->capture ? (cudaGraph_t)stream->capture->graph : NULL;
    if (dependencies) *dependencies = NULL;
    if (edges) *edges = NULL;
    if (num_dependencies) *num_dependencies = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    const char *call = "cudaStreamBeginCapture";
    Stream *stream = stream_of(handle);
    if (stream->is_legacy) return fail(cudaErrorStreamCaptureUnsupported, call, "the legacy stream cannot be captured");
    if (stream->capture) return fail(cudaErrorIllegalState, call, "the stream is captured already");

    Capture *capture = calloc(1, sizeof *capture);
    capture->device = stream->device;
    capture->mode = mode;
    capture->thread = pthread_self();
    capture->origin = stream;
    capture->graph = calloc(1, sizeof *capture->graph);
    capture->graph->references = 1;
    pthread_mutex_lock(&lock);
    capture->id = next_capture_id++;
    capture->next = captures;
    captures = capture;
    stream->capture = capture;
    stream->captured = 0;
    stream->joined = 0;
    pthread_mutex_unlock(&lock);
    device_note(LOG_CAPTURE, call, "");
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    const char *call = "cudaStreamEndCapture";
    Stream *stream = stream_of(handle);
    Capture *capture = stream->capture;
    *graph = NULL;
    if (!capture) return fail(cudaErrorIllegalState, call, "the stream is not captured");
    if (capture->origin != stream) {
        capture->is_invalid = true;
        return fail(cudaErrorStreamCaptureUnmatched, call, "the capture began in another stream");
    }
    if (capture->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(capture->thread, pthread_self())) {
        capture->is_invalid = true;
        return fail(cudaErrorStreamCaptureWrongThread, call, "");
    }

    /* All streams that took part leave the capture; what they did has to be joined to its origin. */
    bool is_unjoined = false;
    pthread_mutex_lock(&lock);
    for (Stream *each = streams; each; each = each->next) {
        if (each->capture != capture) continue;
        if (each != stream && each->captured > each->joined) is_unjoined = true;
        each->capture = NULL;
    }
    Capture **at = &captures;
    while (*at != capture) at = &(*at)->next;
    *at = capture->next;
    pthread_mutex_unlock(&lock);

    Graph *captured = capture->graph;
    bool is_invalid = capture->is_invalid;
    free(capture);
    if (is_invalid || is_unjoined) {
        release_graph(captured);
        return is_invalid ? fail(cudaErrorStreamCaptureInvalidated, call, "")
                          : fail(cudaErrorStreamCaptureUnjoined, call, "");
    }
    device_count(COUNT_captures, 1);
    *graph = (cudaGraph_t)captured;
    return cudaSuccess;
}

/* ---- Graphs --------------------------------------------------------------------------------------------------------- */

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    cudaError_t error = check_unsafe("cudaGraphInstantiate"); /* it takes memory of the device */
    if (error) return error;
    __atomic_add_fetch(&((Graph *)graph)->references, 1, __ATOMIC_ACQ_REL);
    device_count(COUNT_live_graphs, 1);
    *executable = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    release_graph((Graph *)graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    device_count(COUNT_live_graphs, -1);
    release_graph((Graph *)executable);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    Graph *graph = (Graph *)executable;
    device_count(COUNT_graph_launches, 1);
    device_count(COUNT_replayed_nodes, graph->works.length);
    __atomic_add_fetch(&graph->references, 1, __ATOMIC_ACQ_REL);
    Work work = {.kind = REPLAY, .graph = graph};
    cudaError_t error = enqueue(stream_of(stream), work, "cudaGraphLaunch");
    if (error) release_graph(graph);
    return error;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *num_nodes) {
    if (nodes) return device_absent("cudaGraphGetNodes", cudaErrorNotSupported);
    *num_nodes = ((Graph *)graph)->works.length;
    return cudaSuccess;
}

/* ---- Kernels -------------------------------------------------------------------------------------------------------- */

/* A kernel of torch's is known by the address of its stub on the host. */
typedef struct Kernel {
    const void *function;
    const char *name;
} Kernel;

static Kernel *kernels; /* an open hash table by address */
static size_t num_kernels, room_for_kernels;

static Kernel *kernel_place(Kernel *table, size_t room, const void *function) {
    size_t place = ((size_t)function >> 4) * 0x9E3779B97F4A7C15ul % room;
    while (table[place].function && table[place].function != function) place = (place + 1) % room;
    return &table[place];
}

static const char *kernel_name(const void *function) {
    if (!room_for_kernels) return "an unknown kernel";
    Kernel *kernel = kernel_place(kernels, room_for_kernels, function);
    return kernel->function ? kernel->name : "an unknown kernel";
}

/* Called for every kernel of a library when the library is loaded. */
void __cudaRegisterFunction(void **binary, const char *function, char *device_function, const char *name, int thread_limit,
                            uint3 *thread_id, uint3 *block_id, dim3 *block_size, dim3 *grid_size, int *warp_size) {
    pthread_mutex_lock(&lock);
    if (2 * (num_kernels + 1) > room_for_kernels) {
        size_t room = room_for_kernels ? 2 * room_for_kernels : 1 << 16;
        Kernel *table = calloc(room, sizeof *table);
        for (size_t i = 0; i < room_for_kernels; i++)
            if (kernels[i].function) *kernel_place(table, room, kernels[i].function) = kernels[i];
        free(kernels);
        kernels = table;
        room_for_kernels = room;
    }
    Kernel *kernel = kernel_place(kernels, room_for_kernels, function);
    if (!kernel->function) num_kernels++;
    kernel->function = function;
    kernel->name = name;
    pthread_mutex_unlock(&lock);
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **binary) { (void)binary; }
void __cudaUnregisterFatBinary(void **binary) { (void)binary; }

void __cudaRegisterVar(void **binary, char *variable, char *address, const char *name, int is_external, size_t size,
                       int is_constant, int is_global) {
}

char __cudaInitModule(void **binary) {
    return 1;
}

/* kernel<<<grid, block, shared, stream>>>() pushes the four, calls the stub of the kernel, which takes them again. */
typedef struct Configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} Configuration;

static __thread Configuration configurations[8];
static __thread int num_configurations;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    Configuration configuration = {grid, block, shared, stream};
    configurations[num_configurations++] = configuration;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    Configuration configuration = configurations[--num_configurations];
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

static cudaError_t launch_kernel(const void *function, cudaStream_t stream, const char *call) {
    return launch(stream_of(stream), COUNT_runtime_launches, call, kernel_name(function));
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    return launch_kernel(function, stream, "cudaLaunchKernel");
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return launch_kernel(kernel, stream, "cudaLaunchKernel");
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return launch_kernel(function, stream, "cudaLaunchCooperativeKernel");
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *function, void **arguments) {
    return launch_kernel(function, configuration->stream, "cudaLaunchKernelExC");
}

/* Sizes of a kernel that were not read from its code: what a usual one has. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = capability;
    attributes->ptxVersion = capability;
    attributes->maxDynamicSharedSizeBytes = 48 << 10;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    return cudaSuccess;
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value, int device) {
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *number, const void *function, int block_size,
                                                                   size_t shared, unsigned flags) {
    *number = block_size > 0 && block_size < 2048 ? 2048 / block_size : 1;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *number, const void *function, int block_size,
                                                          size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(number, function, block_size, shared, 0);
}

/* ---- Devices -------------------------------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *number) {
    *number = num_devices;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices) return fail(cudaErrorInvalidDevice, "cudaSetDevice", "");
    current_device = device;
    return cudaSuccess;
}

/* Sizes of a multiprocessor by compute capability, from the CUDA C++ Programming Guide and data sheets. */
typedef struct Facts {
    int capability, multiprocessors, threads, shared_opt_in, shared, l2_megabytes;
} Facts;

static Facts facts(void) {
    static const Facts known[] = {
        {80, 108, 2048, 163 << 10, 164 << 10, 40},  /* A100 */
        {89, 142, 1536, 99 << 10, 100 << 10, 96},   /* L40S */
        {90, 132, 2048, 227 << 10, 228 << 10, 50},  /* H100 */
        {100, 148, 2048, 227 << 10, 228 << 10, 126}, /* B200 */
    };
    Facts found = known[2];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].capability <= capability) found = known[i];
    return found;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    if (device < 0 || device >= num_devices) return fail(cudaErrorInvalidDevice, "cudaGetDeviceProperties", "");
    Facts of_device = facts();
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "CUDA device in software (%d.%d)", capability / 10, capability % 10);
    memset(properties->uuid.bytes, device + 1, sizeof properties->uuid.bytes);
    properties->major = capability / 10;
    properties->minor = capability % 10;
    properties->totalGlobalMem = devices[device].total;
    properties->multiProcessorCount = of_device.multiprocessors;
    properties->maxThreadsPerMultiProcessor = of_device.threads;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = of_device.shared_opt_in;
    properties->sharedMemPerMultiprocessor = of_device.shared;
    properties->l2CacheSize = of_device.l2_megabytes << 20;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsDim[0] = 1024;
    properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = 65535;
    properties->maxGridSize[2] = 65535;
    properties->regsPerBlock = 65536;
    properties->regsPerMultiprocessor = 65536;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->textureAlignment = 512;
    properties->memoryBusWidth = 5120;
    properties->pciBusID = device + 1;
    properties->asyncEngineCount = 3;
    properties->concurrentKernels = 1;
    properties->unifiedAddressing = 1;
    properties->canMapHostMemory = 1;
    properties->cooperativeLaunch = 1;
    properties->clusterLaunch = capability >= 90;
    return cudaSuccess;
}

/* An attribute that is not listed is refused: a number that is made up may keep a caller in a loop for ever. */
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, device);
    if (error) return error;
    switch ((int)attribute) {
    /* Sizes of a launch. */
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: *value = properties.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimY: *value = properties.maxThreadsDim[1]; break;
    case cudaDevAttrMaxBlockDimZ: *value = properties.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = properties.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = properties.maxGridSize[2]; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;

    /* Sizes of a multiprocessor. */
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = properties.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = properties.regsPerBlock; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = properties.regsPerMultiprocessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)properties.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)properties.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)properties.sharedMemPerMultiprocessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1 << 10; break;

    /* The device. */
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrClockRate: *value = 1980000; break;       /* kHz */
    case cudaDevAttrMemoryClockRate: *value = 2619000; break; /* kHz */
    case cudaDevAttrGlobalMemoryBusWidth: *value = properties.memoryBusWidth; break;
    case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; break;
    case cudaDevAttrTextureAlignment: *value = (int)properties.textureAlignment; break;
    case cudaDevAttrPciBusId: *value = properties.pciBusID; break;
    case cudaDevAttrPciDeviceId: *value = 0; break;
    case cudaDevAttrPciDomainId: *value = 0; break;
    case cudaDevAttrAsyncEngineCount: *value = properties.asyncEngineCount; break;

    /* What it can do. */
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrCanMapHostMemory: *value = 1; break;
    case cudaDevAttrConcurrentKernels: *value = 1; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case cudaDevAttrIntegrated: *value = 0; break;
    case cudaDevAttrManagedMemory: *value = 0; break;
    case cudaDevAttrConcurrentManagedAccess: *value = 0; break;
    case cudaDevAttrPageableMemoryAccess: *value = 0; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 0; break;
    case 102: *value = 0; break; /* CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    case 110: *value = 0; break; /* CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
    case 128: *value = 0; break; /* CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED */
    case 132: *value = 0; break; /* CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED */
    default: {
        char detail[64];
        snprintf(detail, sizeof detail, "the attribute %d is not kept", (int)attribute);
        *value = 0;
        return fail(cudaErrorInvalidValue, "cudaDeviceGetAttribute", detail);
    }
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) {
    snprintf(id, size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_VERSION_IN_SOFTWARE;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDA_VERSION_IN_SOFTWARE;
    return cudaSuccess;
}

/* A function of the driver, by name. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    char versioned[80];
    *function = NULL;
    for (int number = 4; number > 1 && !*function; number--) {
        snprintf(versioned, sizeof versioned, "%s_v%d", name, number);
        *function = dlsym(RTLD_DEFAULT, versioned);
    }
    if (!*function) *function = dlsym(RTLD_DEFAULT, name);
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess : answer(cudaErrorSymbolNotFound);
}

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
