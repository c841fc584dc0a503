// The simulated CUDA device: what its parts share. Device memory is host memory; a stream runs its work when it is
// given, or keeps it for an order that the schedule chooses; kernels are the Python side's to run.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace device {

// One lock for all books. It is never held while work runs: work may be Python's, which waits for the interpreter.
using Lock = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex &books();

// ---- device.cpp: which device it is, and errors
struct Model {
  const char *key, *name;
  int major, minor, processors;
  int shared_per_processor, shared_per_block;  // bytes; a block's with the opt-in
  int threads_per_processor;
  int l2_bytes, clock_khz, memory_clock_khz, memory_bits;
  size_t memory;
};
const Model &model();
int attribute(int which);  // of cudaDeviceAttr, whose numbers are CUdevice_attribute's
constexpr int SHARED_WITHOUT_OPT_IN = 49152, REGISTERS = 65536, MOST_THREADS = 1024, MOST_BLOCKS_YZ = 65535;
constexpr int MOST_DEVICES = 16;
extern thread_local int current;  // the device that this thread has set

void log_line(const char *format, ...);                      // one line on stderr: why something was refused
cudaError_t fail(cudaError_t error, const char *where);  // the thread's last error from now on
template <typename Error = cudaError_t, typename To, typename Value>
Error give(To *to, Value value) {
  *to = (To)value;
  return (Error)cudaSuccess;
}

// ---- memory.cpp
enum Kind { DEVICE = 1, REGISTERED = 2, PINNED = 3 };
struct Range {
  size_t size;
  Kind kind;
  int device;
  void *mapping;  // of what was allocated here, with a page before and behind that is no one's
  size_t mapping_size;
};
// The range that `pointer` lies in, and its first address; nullptr: host memory that CUDA has not heard of.
const Range *range_of(const void *pointer, uintptr_t *start = nullptr);

// ---- streams.cpp
struct Stream;
struct Node {
  std::string what;
  std::function<void()> run;
  Stream *stream;
  std::vector<int> after;
};
struct Graph {
  std::vector<Node> nodes;
  Stream *origin;
};
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  pthread_t thread;
  Graph *graph;
  std::set<Stream *> streams;
  bool invalid = false;
};
struct Mark {  // where a stream had come to when an event was recorded
  bool reached = true;
};
struct Replay {
  std::shared_ptr<Graph> graph;
  std::vector<char> started, ended;
  size_t left;
};
enum ItemKind { RUN, RECORD, WAIT, REPLAY };
struct Item {
  ItemKind kind;
  std::string what;
  std::function<void()> run;
  std::shared_ptr<Mark> mark;
  std::shared_ptr<Replay> replay;
};
struct Stream {
  int device;
  unsigned flags;
  int number;
  std::deque<Item> queue;
  bool busy = false;
  pthread_t runner;           // while busy: whose step it is
  Capture *capture = nullptr;
  std::vector<int> after;     // while capturing: the nodes that the next one comes behind
};

Stream *stream_of(cudaStream_t handle);  // nullptr: no stream that lives
bool is_default(const Stream *stream);
std::set<Capture *> &captures();
// Whether a call that CUDA calls unsafe may be made now: not by a thread that a capture forbids it. It ends a capture.
cudaError_t forbidden_in_captures(const char *where);
cudaError_t invalidate(Capture *capture, cudaError_t why, const char *where);
bool scheduled();  // work is kept for later
cudaError_t may_be_given(cudaStream_t stream, const char *where);  // work, now
cudaError_t enqueue(cudaStream_t stream, const char *what, std::function<void()> run, const char *where);
cudaError_t enqueue_replay(cudaStream_t stream, std::shared_ptr<Graph> graph, const char *where);
cudaError_t finish(cudaStream_t stream, const char *where);  // until the stream has nothing left
cudaError_t finish_all(const char *where);
void go_on();                                 // the device's own progress, where the schedule is random
void set_fault(const char *text);             // work that ran has broken something
cudaError_t take_fault(const char *where);    // the error of work that ran, reported once
}  // namespace device

#define UNSAFE_IN_CAPTURES()                                                              \
  do {                                                                                    \
    if (cudaError_t refused = device::forbidden_in_captures(__func__)) return refused;    \
  } while (0)
#define FAIL(error) return device::fail(error, __func__)
