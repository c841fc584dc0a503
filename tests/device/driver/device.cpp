// The simulated device: its model, its properties, and the last error.
#include "device.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace device {

constexpr size_t MIB = 1 << 20;
// Results have a device's name in their header: none may be taken for a real one's.
const Model MODELS[] = {
    {"h100", "NVIDIA H100 80GB HBM3 (simulated)", 9, 0, 132, 233472, 232448, 2048, 52428800, 1980000, 2619000, 5120,
        81079 * MIB},
    {"a100", "NVIDIA A100-SXM4-80GB (simulated)", 8, 0, 108, 167936, 166912, 2048, 41943040, 1410000, 1593000, 5120,
        81154 * MIB},
    {"rtx4090", "NVIDIA GeForce RTX 4090 (simulated)", 8, 9, 128, 102400, 101376, 1536, 75497472, 2520000, 10501000, 384,
     24209 * MIB},
};

thread_local int current = 0;
static thread_local cudaError_t last_error = cudaSuccess;

std::recursive_mutex &books() {
  static auto *mutex = new std::recursive_mutex;  // never destroyed: libraries call in while the process ends
  return *mutex;
}

void log_line(const char *format, ...) {
  va_list given;
  va_start(given, format);
  fputs("simulated device: ", stderr);
  vfprintf(stderr, format, given);
  fputc('\n', stderr);
  va_end(given);
}

cudaError_t fail(cudaError_t error, const char *) { return last_error = error; }

const Model &model() {
  static const Model *chosen = [] {
    const char *key = getenv("SIMULATED_DEVICE");
    for (const Model &known : MODELS)
      if (!key || !strcmp(key, known.key)) return &known;
    log_line("unknown device %s: known are h100, a100 and rtx4090", key);
    exit(2);
  }();
  return *chosen;
}

static int count() {
  static const int devices = getenv("SIMULATED_DEVICES") ? atoi(getenv("SIMULATED_DEVICES")) : 1;
  return devices;
}

int attribute(int which) {
  const Model &m = model();
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return MOST_THREADS;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return REGISTERS;
    case cudaDevAttrClockRate: return m.clock_khz;
    case cudaDevAttrMemoryClockRate: return m.memory_clock_khz;
    case cudaDevAttrGlobalMemoryBusWidth: return m.memory_bits;
    case cudaDevAttrMultiProcessorCount: return m.processors;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return m.shared_per_processor;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return m.shared_per_block;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrComputeCapabilityMajor: return m.major;
    case cudaDevAttrComputeCapabilityMinor: return m.minor;
    default: return 0;  // what a device need not have: virtual memory management and the like
  }
}
}  // namespace device

using namespace device;

EXPORTED cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
// The text is that of CUDA's runtime, which needs no device for it; the driver's errors have the same numbers.
EXPORTED CUresult cuGetErrorString(CUresult error, const char **text) {
  return give<CUresult>(text, cudaGetErrorString((cudaError_t)error));
}

// ---- the runtime's questions
EXPORTED cudaError_t cudaGetDeviceCount(int *devices) { return give(devices, count()); }
EXPORTED cudaError_t cudaGetDevice(int *which) { return give(which, current); }
EXPORTED cudaError_t cudaSetDevice(int which) {
  if (which < 0 || which >= count()) FAIL(cudaErrorInvalidDevice);
  current = which;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDriverGetVersion(int *version) { return give(version, CUDA_VERSION); }
EXPORTED cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int device) {
  if (device >= count()) FAIL(cudaErrorInvalidDevice);
  return give(value, attribute(which));
}
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int which) {
  if (which >= count()) FAIL(cudaErrorInvalidDevice);
  const Model &m = model();
  memset(p, 0, sizeof *p);
  strcpy(p->name, m.name);
  memset(&p->uuid, 7 + which, 16);
  p->totalGlobalMem = m.memory;
  p->major = m.major;
  p->minor = m.minor;
  p->multiProcessorCount = m.processors;
  p->sharedMemPerBlock = SHARED_WITHOUT_OPT_IN;
  p->sharedMemPerBlockOptin = m.shared_per_block;
  p->sharedMemPerMultiprocessor = m.shared_per_processor;
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = REGISTERS;
  p->warpSize = 32;
  p->maxThreadsPerBlock = MOST_THREADS;
  p->maxThreadsPerMultiProcessor = m.threads_per_processor;
  p->l2CacheSize = m.l2_bytes;
  p->memoryBusWidth = m.memory_bits;
  p->pciBusID = 1 + which;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

// ---- the driver's
static CUcontext context_of(int which) { return (CUcontext)(uintptr_t)(256 + which); }
EXPORTED CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORTED CUresult cuDeviceGet(CUdevice *device, int which) {
  return which < count() ? give<CUresult>(device, which) : CUDA_ERROR_INVALID_DEVICE;
}
EXPORTED CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice) {
  return give<CUresult>(value, attribute(which));
}
EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  return give<CUresult>(active, 1);
}
EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice which) {
  return give<CUresult>(context, context_of(which));
}
EXPORTED CUresult cuCtxGetCurrent(CUcontext *context) { return give<CUresult>(context, context_of(current)); }
EXPORTED CUresult cuCtxSetCurrent(CUcontext context) {
  for (int which = 0; which < count(); which++)
    if (context == context_of(which)) current = which;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetLimit(size_t *value, CUlimit) { return give<CUresult>(value, MIB); }
EXPORTED CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
