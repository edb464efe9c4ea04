/* cuBLAS and cuBLASLt of the CUDA device in software: a routine is one launch in the stream of its handle.

   Built twice, as libcublas and as libcublasLt (IS_CUBLAS_LT). Routines such as cublasSgemm_v2 are in a table that is
   made when these libraries are built (table.c): each is a launch, whatever its arguments. torch computes with the
   routines inside of operations of its own, so mode "values" computes those operations and not the routines. */

#include <stdlib.h>
#include <string.h>

#include "device.h"

enum { STATUS_SUCCESS = 0, STATUS_NOT_INITIALIZED = 1, STATUS_EXECUTION_FAILED = 13 };

static int launched(void *stream, const char *routine) {
    return device_launch(stream, COUNT_library_launches, routine, routine) ? STATUS_EXECUTION_FAILED : STATUS_SUCCESS;
}

#ifndef IS_CUBLAS_LT

typedef struct Handle {
    void *stream;
    int pointer_mode; /* where the scalars of a routine are: 0 on the host, 1 on the device */
    int math_mode;
} Handle;

/* On hardware a new handle takes memory of the device. */
int cublasCreate_v2(Handle **handle) {
    if (device_unsafe_call("cublasCreate")) return STATUS_NOT_INITIALIZED;
    *handle = calloc(1, sizeof **handle);
    return STATUS_SUCCESS;
}

int cublasDestroy_v2(Handle *handle) {
    free(handle);
    return STATUS_SUCCESS;
}

int cublasSetStream_v2(Handle *handle, void *stream) {
    handle->stream = stream;
    return STATUS_SUCCESS;
}

int cublasGetStream_v2(Handle *handle, void **stream) {
    *stream = handle->stream;
    return STATUS_SUCCESS;
}

/* The workspace is torch's: one for each pair of a handle and a stream, from its caching allocator. */
int cublasSetWorkspace_v2(Handle *handle, void *workspace, size_t size) { return STATUS_SUCCESS; }

int cublasSetPointerMode_v2(Handle *handle, int mode) {
    handle->pointer_mode = mode;
    return STATUS_SUCCESS;
}

int cublasGetPointerMode_v2(Handle *handle, int *mode) {
    *mode = handle->pointer_mode;
    return STATUS_SUCCESS;
}

int cublasSetMathMode(Handle *handle, int mode) {
    handle->math_mode = mode;
    return STATUS_SUCCESS;
}

int cublasGetMathMode(Handle *handle, int *mode) {
    *mode = handle->math_mode;
    return STATUS_SUCCESS;
}

int cublasSetSmCountTarget(Handle *handle, int multiprocessors) { return STATUS_SUCCESS; }

/* For the table. */
int cublas_routine(Handle *handle, const char *name) { return launched(handle->stream, name); }

#else

size_t cublasLtGetVersion(void) { return 130000; }

/* Descriptions of a product are not read. */
static int describe(void **description) {
    *description = calloc(1, 1);
    return STATUS_SUCCESS;
}

static int forget(void *description) {
    free(description);
    return STATUS_SUCCESS;
}

int cublasLtMatmulDescCreate(void **description, int compute_type, int scale_type) { return describe(description); }
int cublasLtMatmulDescDestroy(void *description) { return forget(description); }
int cublasLtMatmulDescSetAttribute(void *description, int attribute, const void *value, size_t size) {
    return STATUS_SUCCESS;
}
int cublasLtMatrixLayoutCreate(void **layout, int type, unsigned long rows, unsigned long columns, long leading) {
    return describe(layout);
}
int cublasLtMatrixLayoutDestroy(void *layout) { return forget(layout); }
int cublasLtMatrixLayoutSetAttribute(void *layout, int attribute, const void *value, size_t size) {
    return STATUS_SUCCESS;
}
int cublasLtMatmulPreferenceCreate(void **preference) { return describe(preference); }
int cublasLtMatmulPreferenceDestroy(void *preference) { return forget(preference); }
int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, size_t size) {
    return STATUS_SUCCESS;
}

/* cublasLtMatmulHeuristicResult_t. */
typedef struct HeuristicResult {
    unsigned long algorithm[8];
    size_t workspace_size;
    int status;
    float waves;
    int reserved[4];
} HeuristicResult;

/* One algorithm, which needs no workspace. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, HeuristicResult *results, int *num_results) {
    memset(results, 0, sizeof *results);
    results->waves = 1.0f;
    *num_results = 1;
    return STATUS_SUCCESS;
}

int cublasLtMatmul(void *handle, void *description, const void *alpha, const void *a, void *a_layout, const void *b,
                   void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
                   const void *algorithm, void *workspace, size_t workspace_size, void *stream) {
    return launched(stream, "cublasLtMatmul");
}

#endif
