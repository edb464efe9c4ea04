/* NVIDIA's management library (libnvidia-ml) of the CUDA device in software: what torch's allocator asks it for expandable
   segments, which is whether memory can be shared over a fabric. It cannot.

   It lies in front where EAGLE_KIT_DEVICE_NVML is set. Elsewhere programs find no management library. */

#include <string.h>

#define NOT_SUPPORTED 3

int nvmlInit_v2(void) { return 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    static char any_device;
    *device = &any_device;
    return 0;
}

/* Behind the version are cluster, status, clique and state, which is 0 without a fabric. */
int nvmlDeviceGetGpuFabricInfoV(void *device, void *information) {
    memset((char *)information + 4, 0, 28);
    return 0;
}

/* Other processes, which an error of torch's about memory names: there are none. */
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    *count = 0;
    return 0;
}

/* Looked up with the others, and not called. */
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *information) { return NOT_SUPPORTED; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return NOT_SUPPORTED; }
