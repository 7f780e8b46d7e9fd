// A process group with NCCL's rules. A collective runs on a stream of its communicator, after what was launched on the
// current stream; waiting for it makes the current stream wait, not the host; its tensors live until then and no longer.
// Communicators are made as ProcessGroupNCCL makes them: with a bound device one for the group, in which everything
// runs in the order of issue; otherwise at first use, for the group or for a pair of ranks, where the hosts must meet.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>

#include "bindings.h"
#include "streams.h"

namespace emulated {
namespace {

using at::Tensor;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<Tensor>;

class LaunchedWork : public Work {
 public:
  LaunchedWork(std::shared_ptr<Mark> mark, Tensors kept) : mark_(std::move(mark)), kept_(std::move(kept)) {}
  bool isCompleted() override { return mark_->done(); }
  bool isSuccess() const override { return mark_->done(); }
  void synchronize() override {
    current_queue(-1).await(mark_);
    kept_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  Tensors result() override { return kept_; }

 private:
  std::shared_ptr<Mark> mark_;
  Tensors kept_;
};

// What one collective does, as the Python function that carries it out is told.
struct Move {
  std::string kind;
  Tensors outputs, inputs;
  std::vector<int64_t> numbers, more_numbers;
};

struct EmulatedOptions : c10d::Backend::Options {
  EmulatedOptions() : Options("emulated") {}
};

class EmulatedBackend : public c10d::Backend {
 public:
  // `exchange.carry_out(moves)` exchanges host tensors; `exchange.meet(name, ranks)` returns when all these ranks have
  // called it; `exchange.split(store, rank, size)` is that of a part of the group.
  EmulatedBackend(int rank, int size, py::object exchange) : Backend(rank, size), exchange_(std::move(exchange)) {}
  ~EmulatedBackend() override { exchange_.release(); }  // the interpreter may be gone

  const std::string getBackendName() const override { return "emulated"; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<EmulatedOptions>(); }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>&) override {
    auto place = std::find(ranks.begin(), ranks.end(), getRank());
    if (place == ranks.end()) return nullptr;
    int rank = static_cast<int>(place - ranks.begin()), size = static_cast<int>(ranks.size());
    py::gil_scoped_acquire locked;
    return c10::make_intrusive<EmulatedBackend>(rank, size, exchange_.attr("split")(store, rank, size));
  }
  void eagerConnectSingleDevice(at::Device) override {
    eager_ = true;
    connect("group", everyone());
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  void startCoalescing() override { batching_ = true; }
  WorkPtr endCoalescing() override {
    batching_ = false;
    std::vector<Move> batch;
    batch.swap(batch_);
    return issue("group", everyone(), std::move(batch));
  }

  WorkPtr allreduce(Tensors& xs, const c10d::AllreduceOptions& options) override {
    return collective({"all_reduce", xs, xs, {static_cast<int64_t>(static_cast<c10d::ReduceOp::RedOpType>(options.reduceOp))}});
  }
  WorkPtr broadcast(Tensors& xs, const c10d::BroadcastOptions& options) override {
    return collective({"broadcast", xs, xs, {options.rootRank}});
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return collective({"all_gather", outputs[0], inputs});
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return collective({"gather", outputs.empty() ? Tensors() : outputs[0], inputs, {int64_t(options.rootRank)}});
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return collective({"scatter", outputs, inputs.empty() ? Tensors() : inputs[0], {int64_t(options.rootRank)}});
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return collective({"all_gather_into_tensor", {output}, {input}});
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions&) override {
    return collective({"reduce_scatter_tensor", {output}, {input}});
  }
  WorkPtr allreduce_coalesced(Tensors& xs, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(xs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return each("all_gather_into_tensor", outputs, inputs);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions&) override {
    return each("reduce_scatter_tensor", outputs, inputs);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& receives, std::vector<int64_t>& sends,
                        const c10d::AllToAllOptions&) override {
    return collective({"all_to_all_single", {output}, {input}, receives, sends});
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    auto work = collective({"barrier"});
    work->wait();
    current_queue(-1).synchronize();  // ProcessGroupNCCL's barrier makes the host wait
    return work;
  }
  WorkPtr send(Tensors& xs, int to, int) override { return transfer({"send", {}, xs, {to}}, to); }
  WorkPtr recv(Tensors& xs, int from, int) override { return transfer({"recv", xs, {}, {from}}, from); }

 private:
  std::vector<int> everyone() const {
    std::vector<int> all(getSize());
    for (int i = 0; i < getSize(); i++) all[i] = i;
    return all;
  }

  WorkPtr collective(Move move) { return issue("group", everyone(), {std::move(move)}); }

  WorkPtr each(const std::string& kind, const Tensors& outputs, const Tensors& inputs) {
    std::vector<Move> moves;
    for (size_t i = 0; i < outputs.size(); i++) moves.push_back({kind, {outputs[i]}, {inputs[i]}});
    return issue("group", everyone(), std::move(moves));
  }

  WorkPtr transfer(Move move, int peer) {
    if (batching_) {
      batch_.push_back(std::move(move));
      return c10::make_intrusive<LaunchedWork>(current_queue(-1).mark(), Tensors());
    }
    if (eager_) return issue("group", everyone(), {std::move(move)});
    int low = std::min(peer, getRank()), high = std::max(peer, getRank());
    return issue(std::to_string(low) + ":" + std::to_string(high), {low, high}, {std::move(move)});
  }

  // The queue of a communicator. The first use makes it, for which all its hosts must arrive.
  Queue& connect(const std::string& name, const std::vector<int>& ranks) {
    auto found = communicators_.find(name);
    if (found == communicators_.end()) {
      {
        py::gil_scoped_acquire locked;
        exchange_.attr("meet")(name, ranks);
      }
      found = communicators_.emplace(name, &queue_of(new_stream(-1))).first;
    }
    return *found->second;
  }

  WorkPtr issue(const std::string& communicator, const std::vector<int>& ranks, std::vector<Move> moves) {
    auto& queue = connect(communicator, ranks);
    Tensors kept;
    py::object task;
    {
      py::gil_scoped_acquire locked;
      py::list told;
      for (auto& move : moves) {
        py::list outputs, inputs;
        for (auto& x : move.outputs) outputs.append(host_view(x));
        for (auto& x : move.inputs) inputs.append(host_view(x));
        told.append(py::make_tuple(move.kind, outputs, inputs, move.numbers, move.more_numbers));
        kept.insert(kept.end(), move.outputs.begin(), move.outputs.end());
        kept.insert(kept.end(), move.inputs.begin(), move.inputs.end());
      }
      task = py::cpp_function([exchange = exchange_, told] { exchange.attr("carry_out")(told); });
    }
    queue.await(current_queue(-1).mark());
    launch_python(queue, std::move(task));
    return c10::make_intrusive<LaunchedWork>(queue.mark(), std::move(kept));
  }

  py::object exchange_;
  std::map<std::string, Queue*> communicators_;
  std::vector<Move> batch_;
  bool eager_ = false, batching_ = false;
};

}  // namespace

void define_process_group(py::module_& m) {
  py::class_<EmulatedOptions, c10::intrusive_ptr<EmulatedOptions>, c10d::Backend::Options>(m, "Options")
      .def("__deepcopy__", [](const EmulatedOptions& x, py::dict) { return c10::make_intrusive<EmulatedOptions>(x); });
  py::class_<EmulatedBackend, c10::intrusive_ptr<EmulatedBackend>, c10d::Backend>(m, "Backend")
      .def(py::init([](int rank, int size, py::object exchange) {
        return c10::make_intrusive<EmulatedBackend>(rank, size, std::move(exchange));
      }))
      // NCCL's split needs the ranks that are not in the new group, too; an exchange does not
      .def("perform_nocolor_split", [](EmulatedBackend&, at::Device) {})
      .def_property_readonly("options", [](EmulatedBackend&) { return c10::make_intrusive<EmulatedOptions>(); });
}

}  // namespace emulated
