// Launches: what a device of this model would refuse is refused, with its reason on stderr. Nothing is computed here: a
// Triton kernel is interpreted by the Python side behind its launch, and aten's kernels by its aten.py.
#include "device.h"

#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <unordered_map>

namespace device {

// ---- images: ELF files for one architecture. Triton launches a kernel with the threads that it was compiled for, whose
// registers the compiler has fitted, and with dynamic shared memory alone.
struct Kernel {
  std::string name;
  int most_dynamic_shared = SHARED_WITHOUT_OPT_IN;
};
using Module = std::map<std::string, Kernel>;  // those that were looked up

// 90 for sm_90: in the lowest byte of the flags, from version 8 of the format on in the next one.
static int architecture_of(const Elf64_Ehdr *header) {
  return header->e_ident[EI_ABIVERSION] < 8 ? header->e_flags & 0xff : header->e_flags >> 8 & 0xff;
}

static CUresult load(CUmodule *out, const char *image) {
  if (memcmp(image, ELFMAG, SELFMAG)) {
    log_line("an image is no ELF file: PTX is not compiled here");
    return CUDA_ERROR_INVALID_IMAGE;
  }
  int architecture = architecture_of((const Elf64_Ehdr *)image);
  // An image of sm_XY runs on a device X.Z with Z at least Y.
  if (architecture / 10 != model().major || architecture % 10 > model().minor) {
    log_line("an image for sm_%d does not run on a device of compute capability %d.%d", architecture, model().major,
        model().minor);
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  return give<CUresult>(out, new Module);
}

// ---- limits of a launch
struct Shape {
  dim3 grid, block;
  size_t dynamic_shared;
};

static bool fits_any_device(const Shape &shape, const char *name) {
  const dim3 &grid = shape.grid, &block = shape.block;
  size_t threads = (size_t)block.x * block.y * block.z;
  bool grid_fits = grid.x && grid.y && grid.z && grid.x <= INT32_MAX && grid.y <= MOST_BLOCKS_YZ &&
      grid.z <= MOST_BLOCKS_YZ;
  if (grid_fits && threads && threads <= MOST_THREADS && block.z <= 64) return true;
  log_line("launch of %s: a grid of %u x %u x %u blocks of %u x %u x %u threads", name, grid.x, grid.y, grid.z, block.x,
      block.y,       block.z);
  return false;
}

static CUresult refusal_of(const Kernel &kernel, const Shape &shape) {
  const char *name = kernel.name.c_str();
  if (!fits_any_device(shape, name)) return CUDA_ERROR_INVALID_VALUE;
  if (shape.dynamic_shared <= (size_t)kernel.most_dynamic_shared) return CUDA_SUCCESS;
  log_line("launch of %s: %zu bytes of shared memory, where it may have %d", name, shape.dynamic_shared,
      kernel.most_dynamic_shared);
  return CUDA_ERROR_INVALID_VALUE;
}

static CUresult launch(CUfunction function, const Shape &shape, CUstream handle) {
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  const auto &kernel = *(const Kernel *)function;
  if (CUresult refused = refusal_of(kernel, shape)) return refused;
  Stream *stream = stream_of((cudaStream_t)handle);
  if (!stream || stream->device != current) {
    log_line("launch of %s on a stream of another device than the current one, %d", kernel.name.c_str(), current);
    return CUDA_ERROR_INVALID_HANDLE;
  }
  return (CUresult)may_be_given((cudaStream_t)handle, __func__);  // the work itself the Python side gives
}

// ---- aten's own kernels: what reaches the runtime has no stand-in
static std::unordered_map<const void *, const char *> &kernels_of_libraries() {
  static auto *all = new std::unordered_map<const void *, const char *>;
  return *all;
}

static cudaError_t refuse(const void *kernel, const char *where) {
  Lock lock(books());
  auto found = kernels_of_libraries().find(kernel);
  log_line("nothing stands in for the CUDA kernel %s", found == kernels_of_libraries().end() ? "?" : found->second);
  return fail(cudaErrorInvalidDeviceFunction, where);
}
}  // namespace device

using namespace device;

// ---- the driver: modules and launches
EXPORTED CUresult cuModuleLoadData(CUmodule *out, const void *image) { return load(out, (const char *)image); }
EXPORTED CUresult cuModuleLoad(CUmodule *out, const char *path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  std::string image{std::istreambuf_iterator<char>(file), {}};
  return load(out, image.c_str());
}
EXPORTED CUresult cuModuleGetFunction(CUfunction *out, CUmodule handle, const char *name) {
  return give<CUresult>(out, &((Module *)handle)->emplace(name, Kernel{name}).first->second);
}
EXPORTED CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction) {
  bool threads = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, registers = which == CU_FUNC_ATTRIBUTE_NUM_REGS;
  return give<CUresult>(value, threads ? MOST_THREADS : registers ? 32 : 0);
}
EXPORTED CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  if (which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  auto &kernel = *(Kernel *)function;
  if (value > model().shared_per_block) {
    log_line("%s requests %d bytes of shared memory, of %d", kernel.name.c_str(), value, model().shared_per_block);
    return CUDA_ERROR_INVALID_VALUE;
  }
  kernel.most_dynamic_shared = value;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORTED CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                 unsigned bz, unsigned shared, CUstream stream, void **, void **) {
  return launch(function, {{gx, gy, gz}, {bx, by, bz}, shared}, stream);
}
EXPORTED CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **, void **) {
  Shape shape{{c->gridDimX, c->gridDimY, c->gridDimZ}, {c->blockDimX, c->blockDimY, c->blockDimZ}, c->sharedMemBytes};
  return launch(function, shape, c->hStream);
}
// ---- the runtime: kernels that libraries register when they are loaded
EXPORTED void **__cudaRegisterFatBinary(void *) {
  static void *handle[1];
  return handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void **) {}
EXPORTED void __cudaUnregisterFatBinary(void **) {}
EXPORTED char __cudaInitModule(void **) { return 1; }
EXPORTED void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
EXPORTED void __cudaRegisterFunction(void **, const char *kernel, char *, const char *name, int, void *, void *, void *,
                                     void *, int *) {
  Lock lock(books());
  kernels_of_libraries()[kernel] = name;
}
EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *kernel) { return give(out, kernel); }
EXPORTED unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream_st *) { return 0; }
EXPORTED cudaError_t __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *) { return cudaSuccess; }
EXPORTED cudaError_t cudaLaunchKernel(const void *kernel, dim3, dim3, void **, size_t, cudaStream_t) {
  return refuse(kernel, __func__);
}
EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **, size_t, cudaStream_t) {
  return refuse((const void *)kernel, __func__);
}
EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *kernel, void **) {
  return refuse(kernel, __func__);
}

// ---- finding the driver's calls by name
EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult *status) {
  *out = dlsym(RTLD_DEFAULT, name);
  if (!*out) *out = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (status) *status = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
EXPORTED CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t,
                                      CUdriverProcAddressQueryResult *status) {
  cudaGetDriverEntryPointByVersion(name, out, version, 0, nullptr);
  if (status) *status = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
