// Streams, events and CUDA graphs, and the order in which queued work runs.
//
// SIMULATED_SCHEDULE selects: `eager` runs work immediately. The others queue it per stream, and run it only
// during a wait: `late` runs the default stream first, `early` runs it last, `random:SEED` alternates between streams,
// and sometimes runs work before a wait.
#include "device.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

namespace device {

struct Event {
  unsigned flags;
  int device;
  bool recorded = false;
  std::shared_ptr<Mark> mark;
  unsigned long long capture = 0;  // the one that it was recorded in, 0: none
  std::vector<int> after;          // its place among that capture's nodes
  double when = 0;
};

template <typename T>
static std::set<T *> &living() {
  static auto *all = new std::set<T *>;
  return *all;
}
static Stream *defaults[MOST_DEVICES];
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static std::string fault;  // what work that ran has broken; empty: nothing
static std::atomic<int> queries;  // queries for an end since the last submission of work

std::set<Capture *> &captures() { return living<Capture>(); }
bool is_default(const Stream *stream) { return stream->number < 0; }

static Stream *default_of(int device) {
  if (!defaults[device]) defaults[device] = new Stream{device, 0, -1 - device};
  return defaults[device];
}

Stream *stream_of(cudaStream_t handle) {
  Lock lock(books());
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) return default_of(current);
  return living<Stream>().count((Stream *)handle) ? (Stream *)handle : nullptr;
}

static std::vector<Stream *> all_streams() {
  std::vector<Stream *> all;
  for (Stream *stream : defaults)
    if (stream) all.push_back(stream);
  for (Stream *stream : living<Stream>()) all.push_back(stream);
  std::sort(all.begin(), all.end(), [](Stream *a, Stream *b) { return a->number < b->number; });
  return all;
}

// ---- captures: what they forbid
cudaError_t invalidate(Capture *capture, cudaError_t why, const char *where) {
  if (capture) capture->invalid = true;
  return fail(why, where);
}

cudaError_t forbidden_in_captures(const char *where) {
  Lock lock(books());
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (Capture *capture : captures()) {
    bool others = !pthread_equal(capture->thread, pthread_self());
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    if (others && (capture->mode == cudaStreamCaptureModeThreadLocal ||
        thread_mode == cudaStreamCaptureModeThreadLocal))
      continue;
    log_line("%s while a stream captures", where);
    return invalidate(capture, cudaErrorStreamCaptureUnsupported, where);
  }
  return cudaSuccess;
}

// A capture by a stream that the default stream waits for: nothing may be given to the default stream meanwhile.
static Capture *capture_that_blocks_the_default() {
  for (Capture *capture : captures())
    for (Stream *stream : capture->streams)
      if (!(stream->flags & cudaStreamNonBlocking)) return capture;
  return nullptr;
}

// ---- schedules
enum Schedule { EAGER, LATE, EARLY, RANDOM };
// Of a random order: its numbers, the stream that it goes on with, and which end of a graph's ready nodes.
static std::mt19937 random_order;
static Stream *favoured;
static bool oldest;
static Schedule parse(const char *text) {
  if (!text || !*text || !strcmp(text, "eager")) return EAGER;
  if (!strcmp(text, "late")) return LATE;
  if (!strcmp(text, "early")) return EARLY;
  if (!strncmp(text, "random:", 7)) {
    random_order.seed(atoi(text + 7));
    favoured = nullptr, oldest = true;  // a seed shows again what it has shown
    return RANDOM;
  }
  log_line("unknown schedule %s: known are eager, late, early and random:SEED", text);
  exit(2);
}
static Schedule &schedule() {
  static Schedule chosen = parse(getenv("SIMULATED_SCHEDULE"));
  return chosen;
}
bool scheduled() { return schedule() != EAGER; }

// Take entries without work off a stream's front: records, and waits for what has been reached.
static bool advance(Stream *stream) {
  bool advanced = false;
  while (!stream->busy && !stream->queue.empty()) {
    Item &front = stream->queue.front();
    if (front.kind == RECORD)
      front.mark->reached = true;
    else if (front.kind != WAIT || !front.mark->reached)
      break;
    stream->queue.pop_front();
    advanced = true;
  }
  return advanced;
}

static std::vector<Stream *> streams_with_work() {
  for (bool advanced = true; advanced;) {
    advanced = false;
    for (Stream *stream : all_streams()) advanced = advance(stream) || advanced;
  }
  std::vector<Stream *> ready;
  for (Stream *stream : all_streams())
    if (!stream->busy && !stream->queue.empty() && stream->queue.front().kind != WAIT) ready.push_back(stream);
  return ready;
}

// A random order goes on with one stream for some steps: an even coin brings two streams hardly apart.
constexpr int STEPS_WITH_ONE = 48, STEPS_WITH_ONE_OF_A_GRAPH = 24;

static Stream *choose(const std::vector<Stream *> &ready) {
  if (schedule() == RANDOM) {
    bool there = std::count(ready.begin(), ready.end(), favoured);
    if (!there || random_order() % STEPS_WITH_ONE == 0) favoured = ready[random_order() % ready.size()];
    return favoured;
  }
  for (Stream *stream : ready)
    if (is_default(stream) == (schedule() == LATE)) return stream;
  return ready[0];
}

static int choose_node(const Replay &replay) {
  std::vector<int> ready;
  const auto &nodes = replay.graph->nodes;
  for (size_t node = 0; node < nodes.size(); node++) {
    auto ended = [&](int before) { return replay.ended[before]; };
    if (!replay.started[node] && std::all_of(nodes[node].after.begin(), nodes[node].after.end(), ended))
      ready.push_back(node);
  }
  if (random_order() % STEPS_WITH_ONE_OF_A_GRAPH == 0) oldest = !oldest;
  if (schedule() == RANDOM) return oldest ? ready.front() : ready.back();
  for (int node : ready)
    if ((nodes[node].stream == replay.graph->origin) == (schedule() == LATE)) return node;
  return ready.front();
}

// One launch, copy or node of a graph, of a stream that can go on; false: there is none.
static bool step() {
  Stream *stream;
  std::shared_ptr<Replay> replay;
  std::function<void()> run;
  int node = -1;
  {
    Lock lock(books());
    std::vector<Stream *> ready = streams_with_work();
    if (ready.empty()) return false;
    stream = choose(ready);
    stream->busy = true;
    stream->runner = pthread_self();
    replay = stream->queue.front().replay;
    if (replay) {
      node = choose_node(*replay);
      replay->started[node] = true;
      run = replay->graph->nodes[node].run;
    } else {
      run = std::move(stream->queue.front().run);
      stream->queue.pop_front();
    }
  }
  run();
  Lock lock(books());
  stream->busy = false;
  if (replay) {
    replay->ended[node] = true;
    if (--replay->left == 0) stream->queue.pop_front();
  }
  return true;
}

static bool idle(Stream *stream) {
  if (stream->busy) return false;
  for (const Item &item : stream->queue)
    if (item.kind == RUN || item.kind == REPLAY || !item.mark->reached) return false;
  return true;
}

// Run work until `done`. Work that waits for the stream that it runs in waits for nothing.
static void run_until(const std::function<bool()> &done) {
  for (;;) {
    {
      Lock lock(books());
      if (done()) return;
    }
    if (step()) continue;
    bool others = false;
    {
      Lock lock(books());
      if (done()) return;
      if (!streams_with_work().empty()) continue;  // another thread's work has just come to its end
      for (Stream *stream : all_streams()) {
        if (stream->busy && pthread_equal(stream->runner, pthread_self())) return;
        others = others || stream->busy;
      }
    }
    if (!others) {
      log_line("a stream waits for an event that no stream can reach");
      abort();
    }
    usleep(50);
  }
}

void go_on() {
  if (schedule() != RANDOM) return;
  int steps;
  {
    Lock lock(books());
    steps = random_order() % 4 ? 0 : random_order() % 6;
  }
  while (steps-- > 0 && step()) {
  }
}

// Repeated queries reach the end of work. Occasional queries, as by an allocator for its freed blocks, do not change
// the order.
constexpr int QUERIES_IN_PASSING = 64;

static void end_requested() {
  static thread_local bool stepping = false;  // work that queries an end itself starts no other work
  if (stepping || ++queries < QUERIES_IN_PASSING) return;
  stepping = true;
  step();
  stepping = false;
}

void set_fault(const char *what) {
  Lock lock(books());
  if (fault.empty()) fault = what;
}

cudaError_t take_fault(const char *where) {
  Lock lock(books());
  if (fault.empty()) return cudaSuccess;
  log_line("%s reports a fault in %s", where, fault.c_str());
  fault.clear();  // a real device would stay broken; here the tests behind this one go on
  return fail(cudaErrorLaunchFailure, where);
}

cudaError_t finish(cudaStream_t handle, const char *where) {
  Stream *stream = stream_of(handle);
  if (scheduled()) run_until([=] { return idle(stream); });
  return take_fault(where);
}

cudaError_t finish_all(const char *where) {
  if (scheduled())
    run_until([] {
      auto all = all_streams();
      return std::all_of(all.begin(), all.end(), idle);
    });
  return take_fault(where);
}

// ---- handing work to a stream: it runs, is queued, or becomes a node of what the stream captures
cudaError_t may_be_given(cudaStream_t handle, const char *where) {
  Lock lock(books());
  Stream *stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle, where);
  if (is_default(stream))
    if (Capture *capture = capture_that_blocks_the_default())
      return invalidate(capture, cudaErrorStreamCaptureImplicit, where);
  if (stream->capture && stream->capture->invalid) return fail(cudaErrorStreamCaptureInvalidated, where);
  return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t handle, const char *what, std::function<void()> run, const char *where) {
  {
    Lock lock(books());
    if (cudaError_t refused = may_be_given(handle, where)) return refused;
    Stream *stream = stream_of(handle);
    if (Capture *capture = stream->capture) {
      capture->graph->nodes.push_back({what, run, stream, stream->after});
      stream->after = {(int)capture->graph->nodes.size() - 1};
      return cudaSuccess;
    }
    queries = 0;
    if (scheduled()) {
      stream->queue.push_back({RUN, what, run});
      return cudaSuccess;
    }
  }
  run();
  return cudaSuccess;
}

cudaError_t enqueue_replay(cudaStream_t handle, std::shared_ptr<Graph> graph, const char *where) {
  {
    Lock lock(books());
    Stream *stream = stream_of(handle);
    if (!stream) return fail(cudaErrorInvalidResourceHandle, where);
    if (stream->capture) return invalidate(stream->capture, cudaErrorStreamCaptureUnsupported, where);
    size_t nodes = graph->nodes.size();
    if (nodes == 0) return cudaSuccess;
    queries = 0;
    if (scheduled()) {
      auto replay = std::make_shared<Replay>(Replay{graph, std::vector<char>(nodes), std::vector<char>(nodes), nodes});
      stream->queue.push_back({REPLAY, "graph", nullptr, nullptr, replay});
      return cudaSuccess;
    }
  }
  for (const Node &node : graph->nodes) node.run();
  return cudaSuccess;
}

static double milliseconds() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

// The capture that an event was recorded in and that still goes on.
static Capture *capture_of(const Event *event) {
  for (Capture *capture : captures())
    if (event->capture == capture->id) return capture;
  return nullptr;
}

static void join_capture(Stream *stream, Capture *capture) {
  stream->capture = capture;
  stream->after.clear();
  capture->streams.insert(stream);
}

// Whether every node of a capture comes before the place that its first stream has come to.
static bool all_joined(const Graph &graph, std::vector<int> places) {
  std::vector<char> met(graph.nodes.size());
  size_t left = met.size();
  while (!places.empty()) {
    int node = places.back();
    places.pop_back();
    if (met[node]) continue;
    met[node] = true;
    left--;
    for (int before : graph.nodes[node].after) places.push_back(before);
  }
  return left == 0;
}
}  // namespace device

using namespace device;

// ---- streams
EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int) {
  Lock lock(books());
  static int number = 1;
  auto *stream = new Stream{current, flags, number++};
  living<Stream>().insert(stream);
  return give(out, stream);
}
static cudaError_t may_be_waited_for(cudaStream_t handle, const char *where) {
  Lock lock(books());
  Stream *stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle, where);
  if (stream->capture) return invalidate(stream->capture, cudaErrorStreamCaptureUnsupported, where);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (cudaError_t refused = may_be_waited_for(handle, __func__)) return refused;
  return finish(handle, __func__);
}
EXPORTED cudaError_t cudaStreamQuery(cudaStream_t handle) {
  if (cudaError_t refused = may_be_waited_for(handle, __func__)) return refused;
  if (scheduled()) end_requested();
  Lock lock(books());
  return idle(stream_of(handle)) ? cudaSuccess : fail(cudaErrorNotReady, __func__);
}
EXPORTED cudaError_t cudaDeviceSynchronize() {
  UNSAFE_IN_CAPTURES();
  return finish_all(__func__);
}
// ---- events
EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  Lock lock(books());
  auto *event = new Event{flags, current};
  living<Event>().insert(event);
  return give(out, event);
}
EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Lock lock(books());
  living<Event>().erase((Event *)event);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  Lock lock(books());
  auto *event = (Event *)handle;
  Stream *stream = stream_of(stream_handle);
  if (!living<Event>().count(event) || !stream || event->device != stream->device) FAIL(cudaErrorInvalidResourceHandle);
  if (stream->capture && stream->capture->invalid) FAIL(cudaErrorStreamCaptureInvalidated);
  if (is_default(stream))
    if (Capture *capture = capture_that_blocks_the_default())
      return invalidate(capture, cudaErrorStreamCaptureImplicit, __func__);
  event->recorded = true;
  event->capture = stream->capture ? stream->capture->id : 0;
  event->after = stream->after;
  event->when = milliseconds();
  event->mark = std::make_shared<Mark>();
  if (!stream->capture && scheduled() && !idle(stream)) {
    event->mark->reached = false;
    stream->queue.push_back({RECORD, "record", nullptr, event->mark});
  }
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
  Lock lock(books());
  auto *event = (Event *)handle;
  Stream *stream = stream_of(stream_handle);
  if (!living<Event>().count(event) || !stream) FAIL(cudaErrorInvalidResourceHandle);
  if (!event->recorded) return cudaSuccess;
  if (stream->capture && stream->capture->invalid) FAIL(cudaErrorStreamCaptureInvalidated);
  Capture *capture = capture_of(event);
  if (!capture) {
    if (stream->capture) return invalidate(stream->capture, cudaErrorStreamCaptureIsolation, __func__);
    if (!event->mark->reached) stream->queue.push_back({WAIT, "wait", nullptr, event->mark});
    return cudaSuccess;
  }
  if (stream->capture && stream->capture != capture) {
    invalidate(capture, cudaErrorStreamCaptureMerge, __func__);
    return invalidate(stream->capture, cudaErrorStreamCaptureMerge, __func__);
  }
  if (is_default(stream)) return invalidate(capture, cudaErrorStreamCaptureImplicit, __func__);
  if (!stream->capture) join_capture(stream, capture);
  stream->after.insert(stream->after.end(), event->after.begin(), event->after.end());
  return cudaSuccess;
}
static cudaError_t may_be_queried(Event *event, const char *where) {
  if (!living<Event>().count(event)) return fail(cudaErrorInvalidResourceHandle, where);
  if (Capture *capture = capture_of(event)) return invalidate(capture, cudaErrorCapturedEvent, where);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventQuery(cudaEvent_t handle) {
  std::shared_ptr<Mark> mark;
  {
    Lock lock(books());
    if (cudaError_t refused = may_be_queried((Event *)handle, __func__)) return refused;
    UNSAFE_IN_CAPTURES();
    mark = ((Event *)handle)->mark;
  }
  if (mark && !mark->reached) end_requested();
  Lock lock(books());
  streams_with_work();
  return !mark || mark->reached ? cudaSuccess : fail(cudaErrorNotReady, __func__);
}
EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  std::shared_ptr<Mark> mark;
  {
    Lock lock(books());
    if (cudaError_t refused = may_be_queried((Event *)handle, __func__)) return refused;
    mark = ((Event *)handle)->mark;
  }
  if (mark && scheduled())
    run_until([=] {
      streams_with_work();
      return mark->reached;
    });
  return take_fault(__func__);
}
EXPORTED cudaError_t cudaEventElapsedTime(float *out, cudaEvent_t from, cudaEvent_t to) {
  Lock lock(books());
  auto *a = (Event *)from, *b = (Event *)to;
  for (Event *event : {a, b}) {
    if (cudaError_t refused = may_be_queried(event, __func__)) return refused;
    if (!event->recorded || (event->flags & cudaEventDisableTiming)) FAIL(cudaErrorInvalidResourceHandle);
    if (!event->mark->reached) FAIL(cudaErrorNotReady);
  }
  return give(out, std::max(0.001, b->when - a->when));  // the host's time: it means nothing
}

// ---- captures and graphs
EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(thread_mode, *mode);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Lock lock(books());
  static unsigned long long id = 1;
  Stream *stream = stream_of(handle);
  if (!stream) FAIL(cudaErrorInvalidResourceHandle);
  if (is_default(stream)) FAIL(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) FAIL(cudaErrorIllegalState);
  auto *capture = new Capture{id++, mode, pthread_self(), new Graph{{}, stream}};
  captures().insert(capture);
  join_capture(stream, capture);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *out) {
  Lock lock(books());
  *out = nullptr;
  Stream *stream = stream_of(handle);
  if (!stream || !stream->capture) FAIL(cudaErrorIllegalState);
  Capture *capture = stream->capture;
  if (capture->graph->origin != stream) FAIL(cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(capture->thread, pthread_self()))
    return invalidate(capture, cudaErrorStreamCaptureWrongThread, __func__);
  bool joined = all_joined(*capture->graph, stream->after);
  for (Stream *of : capture->streams) {
    of->capture = nullptr;
    of->after.clear();
  }
  captures().erase(capture);
  if (capture->invalid) FAIL(cudaErrorStreamCaptureInvalidated);
  if (!joined) FAIL(cudaErrorStreamCaptureUnjoined);
  return give(out, capture->graph);
}
EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
  Lock lock(books());
  Stream *stream = stream_of(handle);
  if (!stream) FAIL(cudaErrorInvalidResourceHandle);
  if (is_default(stream) && capture_that_blocks_the_default()) FAIL(cudaErrorStreamCaptureImplicit);
  return give(status, !stream->capture           ? cudaStreamCaptureStatusNone
                      : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                                 : cudaStreamCaptureStatusActive);
}
EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus *status,
                                              unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **after,
                                              const cudaGraphEdgeData **edges, size_t *count) {
  Lock lock(books());
  if (cudaError_t refused = cudaStreamIsCapturing(handle, status)) return refused;
  Capture *capture = stream_of(handle)->capture;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? (cudaGraph_t)capture->graph : nullptr;
  if (after) *after = nullptr;  // nodes have no handles of their own
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count) {
  return give(count, ((Graph *)graph)->nodes.size());
}
EXPORTED cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long) {
  UNSAFE_IN_CAPTURES();
  return give(out, new std::shared_ptr<Graph>(new Graph(*(Graph *)graph)));
}
EXPORTED cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  cudaError_t error = enqueue_replay(stream, *(std::shared_ptr<Graph> *)executable, __func__);
  if (!error) go_on();
  return error;
}
EXPORTED cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete (Graph *)graph;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {  // replays that are queued keep what they run
  UNSAFE_IN_CAPTURES();
  delete (std::shared_ptr<Graph> *)executable;
  return cudaSuccess;
}

// ---- for the Python side
EXPORTED int simulated_is_capturing(void *handle) {
  Lock lock(books());
  Stream *stream = stream_of((cudaStream_t)handle);
  return stream && stream->capture;
}
EXPORTED int simulated_is_scheduled() { return scheduled(); }
EXPORTED int simulated_schedule(const char *text) {
  cudaError_t failure = finish_all(__func__);
  Lock lock(books());
  schedule() = parse(text);
  return failure;
}
EXPORTED int simulated_enqueue(void *stream, const char *what, void (*run)(void *), void *data) {
  cudaError_t error = enqueue((cudaStream_t)stream, what, [=] { run(data); }, __func__);
  if (!error) go_on();
  return error;
}
// Work has failed: the next wait for it reports the error, as on a device.
EXPORTED void simulated_fault(const char *what) { set_fault(what); }
