// aten on the simulated device: every op with a CUDA kernel runs its CPU kernel, on the same memory, at the place in
// the current stream where CUDA would launch its own.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <dlfcn.h>

#include <functional>
#include <unordered_set>

using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;
using Names = std::unordered_set<std::string>;

namespace {

// ---- the driver's side
struct Driver {
  int (*is_capturing)(void *);
  int (*is_scheduled)();
  int (*enqueue)(void *, const char *, void (*)(void *), void *);
  void (*fault)(const char *);
};
const Driver &driver() {
  static const Driver found = [] {
    auto find = [](const char *name) {
      void *symbol = dlsym(RTLD_DEFAULT, name);
      TORCH_CHECK(symbol, "the simulated driver is not loaded: start with tests/device/run.py");
      return symbol;
    };
    return Driver{(decltype(Driver::is_capturing))find("simulated_is_capturing"),
                  (decltype(Driver::is_scheduled))find("simulated_is_scheduled"),
                  (decltype(Driver::enqueue))find("simulated_enqueue"),
                  (decltype(Driver::fault))find("simulated_fault")};
  }();
  return found;
}
void *current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }
bool capturing() { return driver().is_capturing(current_stream()); }
bool deferred() { return capturing() || driver().is_scheduled(); }

// Work of the current stream: run now, kept, or a node of a graph, which runs as often as the graph does.
struct Work {
  std::string what;
  std::function<void()> run;
  bool once;
};
void run_work(void *given) {
  auto *work = (Work *)given;
  // Whatever the thread that happens to wait is tracing, vmapping or recording is not meant for this.
  c10::impl::ExcludeDispatchKeyGuard none(c10::DispatchKeySet(
      {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
       DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode,
           DispatchKey::Functionalize}));
  at::NoGradGuard no_grad;
  try {
    work->run();
  } catch (const std::exception &error) {  // the next wait for the device reports it
    driver().fault((work->what + ": " + error.what()).c_str());
  }
  if (work->once) delete work;
}
void enqueue(const std::string &what, std::function<void()> run) {
  auto *work = new Work{what, std::move(run), !capturing()};
  int error = driver().enqueue(current_stream(), what.c_str(), run_work, work);
  TORCH_CHECK(error == 0, "CUDA error ", error, " at ", what);
}

// ---- tensors: the device's, seen by the CPU
at::Tensor alias_of(const at::Tensor &tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto &storage = tensor.storage();
  void *data = storage.nbytes() ? storage.mutable_data() : nullptr;
  c10::Storage ours(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    c10::DataPtr(data, c10::Device(at::kCPU)), nullptr, false);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(ours), c10::DispatchKeySet(DispatchKey::CPU),
      tensor.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) out._set_conj(true);
  if (tensor.is_neg()) out._set_neg(true);
  return out;
}

at::Tensor empty_like_on(const at::Tensor &tensor, c10::Device device) {
  c10::OptionalDeviceGuard guard;
  if (device.is_cuda()) guard.reset_device(device);
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
}

// What is written and has no elements may be an `out` that is to be resized, which an alias cannot be.
at::Tensor writable_alias_of(const at::Tensor &tensor) {
  bool resizable = tensor.defined() && tensor.is_cuda() && tensor.numel() == 0;
  return resizable ? empty_like_on(tensor, at::kCPU) : alias_of(tensor);
}

// `value` with every tensor in it replaced.
template <typename Replace>
IValue with_tensors(const IValue &value, Replace replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (at::Tensor tensor : value.toTensorList()) list.push_back(replace(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional(replace(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}
template <typename Visit>
void each_tensor(const IValue &value, Visit visit) {
  with_tensors(value, [&](const at::Tensor &tensor) {
    visit(tensor);
    return tensor;
  });
}

bool is_written(const c10::Argument &argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// ---- a call
// Ops that read their result, or an index's size, on the host: on CUDA they stop it.
const Names STOP_THE_HOST = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive",
                             "aten::bincount", "aten::equal", "aten::repeat_interleave"};
// Ops that take tensors of the host beside the device's.
const Names MIX_DEVICES = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_foreach_copy_"};
const Names INDEX = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

struct Call {
  c10::OperatorHandle op;
  const c10::FunctionSchema &schema;
  Stack given;
  std::optional<c10::Device> device;

  Call(const c10::OperatorHandle &handle, const Stack &stack)
      : op(handle), schema(handle.schema()), given(stack.end() - handle.schema().arguments().size(), stack.end()) {
    find_device();
  }

  const std::string &name() const { return schema.name(); }
  const c10::Argument &argument(size_t place) const { return schema.arguments()[place]; }

  // One device for all, but for numbers, which may be the host's.
  void find_device() {
    bool of_the_host = false;
    for (const IValue &value : given) {
      if (value.isDevice() && value.toDevice().is_cuda() && !device) device = value.toDevice();
      each_tensor(value, [&](const at::Tensor &tensor) {
        if (!tensor.defined()) return;
        if (tensor.device().is_cpu()) of_the_host = of_the_host || (tensor.dim() > 0 && tensor.numel() > 0);
        if (!tensor.is_cuda()) return;
        TORCH_CHECK(!device || *device == tensor.device() || tensor.dim() == 0,
                    "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                    tensor.device(), "! (", name(), ")");
        if (!device) device = tensor.device();
      });
    }
    if (!device) device = c10::Device(at::kCUDA, c10::cuda::current_device());
    TORCH_CHECK(!of_the_host || MIX_DEVICES.count(name()),
                "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                    " and cpu! (",
                name(), ")");
  }

  bool stops_the_host() const {
    bool by_mask = false;
    if (INDEX.count(name()))
      each_tensor(given[1], [&](const at::Tensor &index) {
        by_mask = by_mask || index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
      });
    return by_mask || STOP_THE_HOST.count(name());
  }

  // Random numbers are the CPU generator's, from the seed and the offset of CUDA's: others than CUDA would draw.
  static at::Generator cpu_generator(const at::Generator &generator) {
    auto *cuda = at::check_generator<at::CUDAGeneratorImpl>(generator);
    uint64_t offset = capturing() ? 0 : cuda->get_offset();
    if (!capturing()) cuda->set_offset(offset + 4);
    return at::detail::createCPUGenerator(cuda->current_seed() * 1000003 + offset);
  }

  // The arguments for the CPU's kernel, with every tensor replaced.
  template <typename Replace>
  Stack arguments(bool draws, Replace replace) const {
    Stack out;
    for (size_t place = 0; place < given.size(); place++) {
      const IValue &value = given[place];
      bool default_generator = value.isNone() && argument(place).name() == "generator";
      if (value.isDevice() && value.toDevice().is_cuda())
        out.emplace_back(c10::Device(at::kCPU));
      else if (default_generator || (value.isGenerator() && value.toGenerator().device().is_cuda()))
        out.emplace_back(!draws              ? at::detail::createCPUGenerator(0)
                         : default_generator ? cpu_generator(at::cuda::detail::getDefaultCUDAGenerator(device->index()))
                                             : cpu_generator(value.toGenerator()));
      else
        out.push_back(with_tensors(value, [&](const at::Tensor &t) {
          return replace(t, is_written(argument(place)));
        }));
    }
    return out;
  }

  // The same memory. What is computed later keeps the values that the host has now.
  Stack on_cpu() const {
    return arguments(true, [](const at::Tensor &tensor, bool written) {
      if (tensor.defined() && tensor.device().is_cpu() && deferred()) return tensor.clone();
      return written ? writable_alias_of(tensor) : alias_of(tensor);
    });
  }

  // An `out` that the CPU's kernel has resized: the device's is resized, too, and gets what was written.
  void resize_outs(const Stack &called, bool with_values) const {
    for (size_t place = 0; place < given.size(); place++) {
      if (!is_written(argument(place)) || !given[place].isTensor()) continue;
      at::Tensor theirs = given[place].toTensor(), ours = called[place].toTensor();
      if (!theirs.defined() || !theirs.is_cuda()) continue;
      bool moved = theirs.numel() == 0 && ours.numel() > 0;
      if (theirs.sizes() == ours.sizes() && !moved) continue;
      theirs.resize_(ours.sizes());
      if (with_values) alias_of(theirs).copy_(ours);
    }
  }

  // What the op returns of `returned`, as its kernel gave it: what it has written, or what `place_of` makes of it.
  template <typename Place>
  Stack results(const Stack &returned, Place place_of) const {
    Stack out;
    for (size_t place = 0; place < returned.size(); place++) {
      const auto *alias = schema.returns()[place].alias_info();
      if (!alias || !alias->isWrite()) {
        out.push_back(with_tensors(returned[place], place_of));
        continue;
      }
      for (size_t of = 0; of < given.size(); of++)
        if (argument(of).alias_info() && *argument(of).alias_info() == *alias) {
          out.push_back(given[of]);
          break;
        }
    }
    return out;
  }

  Stack run_now() const {
    Stack inputs = on_cpu(), returned = inputs;
    op.callBoxed(&returned);
    resize_outs(inputs, true);
    return results(returned, [&](const at::Tensor &result) -> at::Tensor {
      if (!result.defined() || !result.device().is_cpu()) return result;
      at::Tensor view;
      for (const IValue &value : given)
        each_tensor(value, [&](const at::Tensor &tensor) {
          if (view.defined() || !tensor.defined() || !tensor.is_cuda() || !tensor.storage().nbytes()) return;
          if (result.storage().nbytes() && tensor.storage().data() == result.storage().data())
            view = tensor.as_strided(result.sizes(), result.strides(), result.storage_offset());
        });
      if (view.defined()) return view;
      at::Tensor out = empty_like_on(result, *device);
      alias_of(out).copy_(result);
      return out;
    });
  }

  // For its shapes alone the op runs on ones and zeros (an index of zero is always one), since its inputs are not there
  // yet; with its inputs it runs where the stream comes to it.
  Stack run_later() const {
    std::vector<std::pair<const void *, at::Tensor>> stood_in;
    bool divides = name().find("div") != std::string::npos || name().find("rem") != std::string::npos ||
                   name().find("mod") != std::string::npos;
    Stack shaped = arguments(false, [&](const at::Tensor &tensor, bool) {
      if (!tensor.defined() || !tensor.is_cuda()) return tensor;
      at::Tensor plain = empty_like_on(tensor, at::kCPU);
      if (plain.numel()) plain.fill_(divides || plain.is_floating_point() ? 1 : 0);
      if (plain.numel()) stood_in.emplace_back(plain.storage().data(), tensor);
      return plain;
    });
    Stack returned = shaped;
    op.callBoxed(&returned);
    resize_outs(shaped, false);
    Stack inputs = on_cpu();

    std::vector<at::Tensor> outputs;
    Stack out = results(returned, [&](const at::Tensor &result) -> at::Tensor {
      if (!result.defined() || !result.device().is_cpu()) return result;
      for (const auto &[data, tensor] : stood_in)
        if (result.storage().nbytes() && result.storage().data() == data)
          return tensor.as_strided(result.sizes(), result.strides(), result.storage_offset() + tensor.storage_offset());
      return empty_like_on(result, *device);
    });
    for (size_t place = 0; place < out.size(); place++) {
      const auto *alias = schema.returns()[place].alias_info();
      bool written = alias && alias->isWrite();
      each_tensor(out[place], [&](const at::Tensor &t) { outputs.push_back(written ? at::Tensor() : alias_of(t)); });
    }
    enqueue(name(), [op = op, inputs, outputs] {
      Stack stack = inputs;
      op.callBoxed(&stack);
      size_t place = 0;
      for (const IValue &value : stack)
        each_tensor(value, [&](const at::Tensor &result) {
          const at::Tensor &output = outputs[place++];
          if (output.defined() && result.defined() && output.data_ptr() != result.data_ptr()) output.copy_(result);
        });
    });
    return out;
  }
};

void run_on_cpu(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
  Call call(op, *stack);
  Stack results;
  if (call.stops_the_host()) {
    c10::cuda::warn_or_error_on_sync();
    TORCH_CHECK(!capturing(), call.name(), " reads on the host: operation not permitted when stream is capturing");
    c10::cuda::getCurrentCUDAStream().synchronize();
    results = call.run_now();
  } else {
    results = deferred() ? call.run_later() : call.run_now();
  }
  stack->erase(stack->end() - call.given.size(), stack->end());
  stack->insert(stack->end(), results.begin(), results.end());
}

// ---- ops that need a word of their own
at::Tensor &copy(at::Tensor &self, const at::Tensor &source, bool non_blocking) {
  if (!self.is_cuda() || !source.is_cuda()) return at::native::copy_(self, source, non_blocking);
  at::Tensor to = alias_of(self), from = alias_of(source);
  if (deferred())
    enqueue("aten::copy_", [to, from]() mutable { to.copy_(from); });
  else
    to.copy_(from);
  return self;
}

// Attention: what CUDA's kernel returns, by the CPU's plain formula.
void attend(const at::Tensor &out, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
            const std::optional<at::Tensor> &bias, bool causal, std::optional<double> scale) {
  at::Tensor to = alias_of(out), query = alias_of(q), key = alias_of(k), value = alias_of(v);
  std::optional<at::Tensor> added = bias ? std::optional(alias_of(*bias)) : std::nullopt;
  bool grouped = q.size(1) != k.size(1);
  auto run = [=] {
    to.copy_(std::get<0>(
        at::_scaled_dot_product_attention_math(query, key, value, added, 0.0, causal, {}, scale, grouped)));
  };
  if (deferred())
    enqueue("attention", run);
  else
    run();
}
at::Tensor no_seed() { return at::scalar_tensor(0, at::TensorOptions(at::kLong)); }

// As its kernel lays its output out: tokens before heads.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_attention(
    const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const std::optional<at::Tensor> &bias,
    bool with_sums, double, bool causal, std::optional<double> scale) {
  at::Tensor out = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
  int64_t padded = with_sums ? (q.size(2) + 31) / 32 * 32 : 0;
  at::Tensor sums = at::empty({q.size(0), q.size(1), padded}, q.options().dtype(at::kFloat));
  attend(out, q, k, v, bias, causal, scale);
  return {out, sums, no_seed(), no_seed()};
}
// Ops whose CUDA code does no arithmetic: memory, views, and reading one number.
const Names KEPT = {"aten::empty.memory_format", "aten::empty_strided", "aten::as_strided", "aten::view",
                    "aten::_reshape_alias", "aten::alias", "aten::resize_", "aten::unfold", "aten::set_.source_Storage",
                    "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::set_",
                    "aten::record_stream", "aten::_local_scalar_dense", "aten::_pin_memory", "aten::is_pinned",
                    "aten::view_as_real", "aten::view_as_complex", "aten::_efficientzerotensor", "aten::is_set_to",
                    "aten::_fused_sdp_choice", "aten::_resize_output_", "aten::copy_",
                    "aten::_scaled_dot_product_efficient_attention"};

bool has_cpu_kernel(const c10::OperatorHandle &op) {
  return op.hasKernelForDispatchKey(DispatchKey::CPU) ||
      op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

// Put the CPU's kernels in CUDA's place. An op without one keeps its own, whose launch the driver refuses by name.
void install() {
  static auto *library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  static auto *handles = new std::vector<c10::RegistrationHandleRAII>;
  driver();
  auto &dispatcher = c10::Dispatcher::singleton();
  for (const auto &name : dispatcher.getRegistrationsForDispatchKey(DispatchKey::CUDA)) {
    auto op = dispatcher.findOp(name);
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (name.getNamespace() != "aten" || !op || KEPT.count(full) || !has_cpu_kernel(*op)) continue;
    handles->push_back(dispatcher.registerImpl(name, DispatchKey::CUDA,
                                               c10::KernelFunction::makeFromBoxedFunction<&run_on_cpu>(), std::nullopt,
                                               nullptr, "the simulated device"));
  }
  library->impl("copy_", copy);
  library->impl("_scaled_dot_product_efficient_attention", efficient_attention);
}
}  // namespace

extern "C" __attribute__((visibility("default"))) int simulated_install_aten() {
  try {
    install();
  } catch (const std::exception &error) {
    fprintf(stderr, "simulated device: %s\n", error.what());
    return 1;
  }
  return 0;
}
