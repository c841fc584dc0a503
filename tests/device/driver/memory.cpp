// Memory: what is the device's, what of the host's is known to it, and copies between the two.
#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

namespace device {

constexpr size_t PAGE = 4096;
constexpr size_t POISONED = 256 << 20;     // of an allocation, at most: unwritten bytes are NaN, or -1
constexpr size_t DRIVERS_OWN = 500 << 20;  // what a context takes of a device's memory

using Ranges = std::map<uintptr_t, Range>;
static Ranges &ranges() {
  static auto *all = new Ranges;
  return *all;
}
static size_t used[MOST_DEVICES];
static long changes = 0;  // of the ranges, so that the Python side knows when to read them again

static size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }
static uintptr_t page_of(uintptr_t address) { return address / PAGE * PAGE; }

const Range *range_of(const void *pointer, uintptr_t *start) {
  auto behind = ranges().upper_bound((uintptr_t)pointer);
  if (behind == ranges().begin()) return nullptr;
  auto found = std::prev(behind);
  if ((uintptr_t)pointer >= found->first + found->second.size) return nullptr;
  if (start) *start = found->first;
  return &found->second;
}

static void *map_pages(size_t bytes) {
  void *mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return mapping == MAP_FAILED ? nullptr : mapping;
}

// Memory between two protected pages: an access slightly past its end faults.
static cudaError_t allocate(void **out, size_t bytes, Kind kind, const char *where) {
  Lock lock(books());
  *out = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (kind == DEVICE && used[current] + bytes + DRIVERS_OWN > model().memory)
    return fail(cudaErrorMemoryAllocation, where);
  size_t mapping_size = whole_pages(bytes) + 2 * PAGE;
  char *mapping = (char *)map_pages(mapping_size);
  if (!mapping) return fail(cudaErrorMemoryAllocation, where);
  mprotect(mapping, PAGE, PROT_NONE);
  mprotect(mapping + mapping_size - PAGE, PAGE, PROT_NONE);
  *out = mapping + PAGE;
  if (kind == DEVICE) {
    memset(*out, 0xff, std::min(bytes, POISONED));
    used[current] += bytes;
  }
  ranges()[(uintptr_t)*out] = Range{bytes, kind, current, mapping, mapping_size};
  changes++;
  return cudaSuccess;
}

static cudaError_t release(void *pointer, Kind kind, const char *where) {
  Lock lock(books());
  if (!pointer) return cudaSuccess;
  auto found = ranges().find((uintptr_t)pointer);
  if (found == ranges().end() || found->second.kind != kind) {
    log_line("%s: %p was not allocated as that", where, pointer);
    return fail(cudaErrorInvalidValue, where);
  }
  const Range &range = found->second;
  munmap(range.mapping, range.mapping_size);
  if (kind == DEVICE) used[range.device] -= range.size;
  ranges().erase(found);
  changes++;
  return cudaSuccess;
}

static cudaError_t register_range(void *pointer, size_t bytes, const char *where) {
  Lock lock(books());
  if (!pointer || !bytes) return fail(cudaErrorInvalidValue, where);
  uintptr_t first = page_of((uintptr_t)pointer), end = page_of((uintptr_t)pointer + bytes + PAGE - 1);
  for (const auto &[start, range] : ranges()) {
    bool apart = end <= page_of(start) || page_of(start + range.size + PAGE - 1) <= first;
    if (range.kind != DEVICE && !apart) return fail(cudaErrorHostMemoryAlreadyRegistered, where);
  }
  ranges()[(uintptr_t)pointer] = Range{bytes, REGISTERED, current, nullptr, 0};
  changes++;
  return cudaSuccess;
}

static cudaError_t unregister_range(void *pointer, const char *where) {
  Lock lock(books());
  auto found = ranges().find((uintptr_t)pointer);
  if (found == ranges().end() || found->second.kind != REGISTERED) return fail(cudaErrorHostMemoryNotRegistered, where);
  ranges().erase(found);
  changes++;
  return cudaSuccess;
}

// Whether a copy may touch these bytes as what its kind calls them, and stays in one allocation or registration.
static cudaError_t check_side(const void *pointer, size_t bytes, bool device_side, const char *where) {
  uintptr_t start = 0;
  const Range *range = range_of(pointer, &start);
  bool on_device = range && range->kind == DEVICE;
  if (bytes == 0) return cudaSuccess;
  if (on_device != device_side) {
    log_line("%s: %p is %s", where, pointer,
        on_device ? "memory of the device, not of the host" : "no memory of the device");
    return fail(cudaErrorInvalidValue, where);
  }
  if (range && (uintptr_t)pointer + bytes > start + range->size) {
    const char *owner = on_device ? "allocation" : "registration";
    log_line("%s: %zu bytes from %p on leave their %s", where, bytes, pointer, owner);
    return fail(cudaErrorInvalidValue, where);
  }
  return cudaSuccess;
}

static bool to_device(cudaMemcpyKind kind) {
  return kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
}
static bool from_device(cudaMemcpyKind kind) {
  return kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
}

// Whether what a copy was given as known memory still is when its turn comes; a real device faults where it is not.
static bool still_there(const void *pointer, bool was_there) {
  Lock lock(books());
  if (!was_there || range_of(pointer)) return true;
  set_fault("a copy of memory that is unregistered, or freed");
  return false;
}

// A copy. The host waits for it if `wait` is set, or if it writes unpinned host memory. Reads of unpinned memory are
// staged immediately, as in CUDA, and cannot be captured, since the memory may be freed before a replay.
static cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t handle, bool wait,
                        const char *where) {
  {
    Lock lock(books());
    if (kind != cudaMemcpyDefault) {
      if (cudaError_t refused = check_side(to, bytes, to_device(kind), where)) return refused;
      if (cudaError_t refused = check_side(from, bytes, from_device(kind), where)) return refused;
    }
    Stream *stream = stream_of(handle);
    if (!stream) return fail(cudaErrorInvalidResourceHandle, where);
    bool writes_pageable = !range_of(to), reads_pageable = !range_of(from);
    if (stream->capture && (writes_pageable || reads_pageable)) {
      log_line("%s: a copy with memory that is not pinned is captured", where);
      return invalidate(stream->capture, cudaErrorStreamCaptureUnsupported, where);
    }
    wait = wait || writes_pageable;
    if (reads_pageable && scheduled()) {
      auto staged = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
      auto run = [=] {
        if (still_there(to, !writes_pageable)) memcpy(to, staged->data(), bytes);
      };
      if (cudaError_t refused = enqueue(handle, "copy of staged memory", run, where)) return refused;
    } else {
      auto run = [=] {
        if (still_there(to, !writes_pageable) && still_there(from, !reads_pageable)) memmove(to, from, bytes);
      };
      if (cudaError_t refused = enqueue(handle, "copy", run, where)) return refused;
    }
  }
  if (wait) return finish(handle, where);
  go_on();
  return cudaSuccess;
}
}  // namespace device

using namespace device;

EXPORTED cudaError_t cudaMalloc(void **out, size_t bytes) {
  UNSAFE_IN_CAPTURES();
  return allocate(out, bytes, DEVICE, __func__);
}
EXPORTED cudaError_t cudaFree(void *pointer) {  // waits for the device, as the real one does
  UNSAFE_IN_CAPTURES();
  cudaError_t failure = finish_all(__func__), released = release(pointer, DEVICE, __func__);
  return failure ? failure : released;
}
EXPORTED cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  Lock lock(books());
  *total = model().memory;
  return give(free_bytes, *total - used[current] - DRIVERS_OWN);
}
EXPORTED cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned) {
  UNSAFE_IN_CAPTURES();
  return allocate(out, bytes, PINNED, __func__);
}
EXPORTED cudaError_t cudaFreeHost(void *pointer) {
  UNSAFE_IN_CAPTURES();
  cudaError_t failure = finish_all(__func__), released = release(pointer, PINNED, __func__);
  return failure ? failure : released;
}
EXPORTED cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned) {
  UNSAFE_IN_CAPTURES();
  return register_range(pointer, bytes, __func__);
}
// It waits for nothing: what still reads the memory finds it unregistered.
EXPORTED cudaError_t cudaHostUnregister(void *pointer) {
  UNSAFE_IN_CAPTURES();
  return unregister_range(pointer, __func__);
}
EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *pointer) {
  Lock lock(books());
  memset(out, 0, sizeof *out);
  const Range *range = range_of(pointer);
  out->type = !range ? cudaMemoryTypeUnregistered : range->kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  out->device = range ? range->device : -2;
  if (range) out->devicePointer = (void *)pointer;
  if (range && range->kind != DEVICE) out->hostPointer = (void *)pointer;
  return cudaSuccess;
}
EXPORTED CUresult cuPointerGetAttribute(void *out, CUpointer_attribute which, CUdeviceptr pointer) {
  Lock lock(books());
  if (which != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
  if (!range_of((void *)pointer)) return CUDA_ERROR_INVALID_VALUE;
  return give<CUresult>((CUdeviceptr *)out, pointer);
}

EXPORTED cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
  UNSAFE_IN_CAPTURES();
  return copy(to, from, bytes, kind, nullptr, true, __func__);
}
EXPORTED cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
    cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream, false, __func__);
}
// ---- for the Python side: what a kernel may touch
EXPORTED long simulated_changes() {
  Lock lock(books());
  return changes;
}
// The first `room` ranges, in order of their addresses; how many there are.
EXPORTED long simulated_ranges(uint64_t *starts, uint64_t *ends, long room) {
  Lock lock(books());
  long place = 0;
  for (const auto &[start, range] : ranges()) {
    if (place < room) {
      starts[place] = start;
      ends[place] = start + range.size;
    }
    place++;
  }
  return place;
}
