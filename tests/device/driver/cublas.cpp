// cuBLAS: its handles can be made and set up, as torch does before its first product. Products are aten_on_cpu.cpp's;
// every other function of cuBLAS that torch links is refused by name, in a file that build.py writes from torch's
// libraries.
#include "device.h"

constexpr int SUCCESS = 0, NOT_SUPPORTED = 15;

extern "C" int simulated_cublas_refusal(const char *name) {
  device::log_line("nothing stands in for %s", name);
  return NOT_SUPPORTED;
}

static int handle(void **out) {
  static int place;
  *out = &place;
  return SUCCESS;
}

EXPORTED int cublasCreate_v2(void **out) { return handle(out); }
EXPORTED int cublasDestroy_v2(void *) { return SUCCESS; }
EXPORTED int cublasLtCreate(void **out) { return handle(out); }
EXPORTED int cublasGetVersion_v2(void *, int *version) {
  *version = 130100;
  return SUCCESS;
}
EXPORTED size_t cublasLtGetVersion() { return 130100; }
EXPORTED int cublasSetStream_v2(void *, void *) { return SUCCESS; }
EXPORTED int cublasSetWorkspace_v2(void *, void *, size_t) { return SUCCESS; }
EXPORTED int cublasSetMathMode(void *, int) { return SUCCESS; }
EXPORTED int cublasGetMathMode(void *, int *mode) {
  *mode = 0;
  return SUCCESS;
}
EXPORTED int cublasSetPointerMode_v2(void *, int) { return SUCCESS; }
EXPORTED int cublasGetPointerMode_v2(void *, int *mode) {
  *mode = 0;
  return SUCCESS;
}
