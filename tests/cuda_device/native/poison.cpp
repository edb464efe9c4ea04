/* Tells the runtime of the CUDA device in software (runtime.c) which blocks torch's caching allocator hands out and
   which are free again, so that bytes without a value are NaN in mode "values".

   The allocator is torch's own. It calls its trackers under its lock, for every block, with the stream that the block
   belongs to. A block that other streams use as well (record_stream) is reported as free when these are done with it. */

#include <c10/cuda/CUDACachingAllocator.h>

extern "C" {
#include "device.h"
}

using c10::CachingDeviceAllocator::TraceEntry;

static void report(const TraceEntry &entry) {
    void *address = reinterpret_cast<void *>(entry.addr_);
    bool is_of_private_pool = entry.mempool_ != c10::MempoolId_t{0, 0};
    if (entry.action_ == TraceEntry::ALLOC)
        device_block_handed_out(entry.device_, entry.stream_, address, entry.size_, is_of_private_pool);
    if (entry.action_ == TraceEntry::FREE_COMPLETED)
        device_block_freed(entry.device_, entry.stream_, address, entry.size_);
}

/* From now on; torch has to have initialised CUDA. */
extern "C" void poison_blocks() { c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(report); }
