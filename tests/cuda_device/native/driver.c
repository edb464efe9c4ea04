/* The CUDA driver (libcuda) of the CUDA device in software: what Triton's launcher and torch's run-time compilation call.

   Devices, streams and memory are those of the runtime (runtime.c). A compiled kernel is loaded by name only, a launch
   is handed to the runtime. Functions without a body are in a table that is made when this library is built (table.c). */

#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

/* The errors of the runtime have the numbers of the driver's. */
static CUresult result_of(int error) { return (CUresult)error; }

/* ---- Devices and contexts -------------------------------------------------------------------------------------------- */

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return result_of(cudaDriverGetVersion(version)); }
CUresult cuDeviceGetCount(int *number) { return result_of(cudaGetDeviceCount(number)); }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

/* The attributes of the runtime have the numbers of the driver's. */
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return result_of(cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device));
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    memset(uuid->bytes, device + 1, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

/* A context is a place for each device: its number is told by the distance from the first. */
static char contexts[16];

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)&contexts[device];
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = 1;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    int device;
    cudaGetDevice(&device);
    return cuDevicePrimaryCtxRetain(context, device);
}

CUresult cuCtxSetCurrent(CUcontext context) { return result_of(cudaSetDevice((int)((char *)context - contexts))); }

/* ---- Compiled kernels ------------------------------------------------------------------------------------------------ */

/* A module is loaded by a call that synchronises on hardware, so captures refuse it. */
static CUresult load_module(CUmodule *module, const char *call) {
    int error = device_unsafe_call(call);
    if (error) return result_of(error);
    static char any_module;
    device_count(COUNT_modules_loaded, 1);
    device_note(LOG_MODULE, call, "");
    *module = (CUmodule)&any_module;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { return load_module(module, "cuModuleLoadData"); }

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned num_options, CUjit_option *options,
                            void **values) {
    return load_module(module, "cuModuleLoadDataEx");
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

/* A function is its name, which is never freed: handles of Triton's live as long as the process. */
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)strdup(name);
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = 0;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) *value = 1024;
    if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS) *value = 64;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache configuration) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int *number, CUfunction function, const CUlaunchConfig *configuration) {
    *number = 1;
    return CUDA_SUCCESS;
}

/* A descriptor of a tensor, which kernels of CUTLASS get as an argument. Only a kernel reads it, so it holds nothing here.
   Misaligned addresses are refused as on hardware. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
    if ((size_t)map % 64 || (size_t)address % 16)
        return result_of(device_fail(CUDA_ERROR_INVALID_VALUE, "cuTensorMapEncodeTiled", "a misaligned address"));
    memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}

/* ---- Launches -------------------------------------------------------------------------------------------------------- */

static CUresult launch(CUfunction function, CUstream stream, const char *call) {
    return result_of(device_launch(stream, COUNT_driver_launches, call, (const char *)function));
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
    return launch(function, stream, "cuLaunchKernel");
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *configuration, CUfunction function, void **arguments, void **extra) {
    for (unsigned i = 0; i < configuration->numAttrs; i++) {
        const CUlaunchAttribute *attribute = &configuration->attrs[i];
        bool is_programmatic = attribute->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        if (is_programmatic && attribute->value.programmaticStreamSerializationAllowed)
            device_count(COUNT_programmatic_launches, 1);
    }
    return launch(function, configuration->hStream, "cuLaunchKernelEx");
}

/* ---- Pointers and errors --------------------------------------------------------------------------------------------- */

/* Triton asks whether an argument can be read by the device. */
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    struct cudaPointerAttributes found;
    cudaPointerGetAttributes(&found, (const void *)address);
    if (found.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)value = address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = found.type == cudaMemoryTypeHost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = found.device;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        return cuDevicePrimaryCtxRetain((CUcontext *)value, found.device);
    default:
        return result_of(device_absent("cuPointerGetAttribute", CUDA_ERROR_NOT_SUPPORTED));
    }
}

CUresult cuGetErrorString(CUresult error, const char **message) {
    *message = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = cudaGetErrorName((cudaError_t)error);
    return CUDA_SUCCESS;
}

/* ---- Virtual memory (expandable segments of torch's allocator) --------------------------------------------------------- */

#define GRANULE (2ul << 20)

/* Memory of a device, which is in use until it was released and every mapping of it has ended. */
typedef struct Memory {
    int device;
    size_t size;
    int uses;
} Memory;

/* Where memory is mapped. */
typedef struct Mapping {
    char *start;
    Memory *memory;
    struct Mapping *next;
} Mapping;

static Mapping *mappings;
static pthread_mutex_t mappings_lock = PTHREAD_MUTEX_INITIALIZER;

static void end_use(Memory *memory) {
    if (__atomic_sub_fetch(&memory->uses, 1, __ATOMIC_SEQ_CST)) return;
    device_return_memory(memory->device, memory->size);
    free(memory);
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    *granularity = GRANULE;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    *address = (CUdeviceptr)device_reserve_addresses(size);
    return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    device_free_addresses((void *)address, size);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    if (size % GRANULE)
        return result_of(device_fail(CUDA_ERROR_INVALID_VALUE, "cuMemCreate", "a size between two granules"));
    int error = device_take_memory(properties->location.id, size, "cuMemCreate");
    if (error) return result_of(error);
    Memory *memory = calloc(1, sizeof *memory);
    *memory = (Memory){.device = properties->location.id, .size = size, .uses = 1};
    *handle = (CUmemGenericAllocationHandle)memory;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    end_use((Memory *)handle);
    return CUDA_SUCCESS;
}

/* The memory is mapped as a whole. Its bytes are there from now on, and not only from cuMemSetAccess on. */
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    Memory *memory = (Memory *)handle;
    if (offset || size != memory->size)
        return result_of(device_fail(CUDA_ERROR_INVALID_VALUE, "cuMemMap", "a part of a memory"));
    Mapping *mapping = malloc(sizeof *mapping);
    pthread_mutex_lock(&mappings_lock);
    *mapping = (Mapping){.start = (char *)address, .memory = memory, .next = mappings};
    mappings = mapping;
    __atomic_add_fetch(&memory->uses, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&mappings_lock);
    device_map_memory(memory->device, (void *)address, size);
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *descriptions, size_t count) {
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    Mapping *found = NULL;
    pthread_mutex_lock(&mappings_lock);
    for (Mapping **link = &mappings; *link; link = &(*link)->next) {
        if ((*link)->start != (char *)address) continue;
        found = *link;
        *link = found->next;
        break;
    }
    pthread_mutex_unlock(&mappings_lock);
    if (!found || found->memory->size != size)
        return result_of(device_fail(CUDA_ERROR_INVALID_VALUE, "cuMemUnmap", "nothing of this size is mapped there"));
    device_unmap_memory((void *)address);
    end_use(found->memory);
    free(found);
    return CUDA_SUCCESS;
}

/* ---- Look-ups by name ------------------------------------------------------------------------------------------------ */

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *result) {
    enum cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion(name, function, version, flags, &found);
    if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* Tables of functions that are not documented: there are none. NVRTC, which compiles some of torch's kernels, asks for one
   and does without it, but reads through a null pointer where this function is missing. */
CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
