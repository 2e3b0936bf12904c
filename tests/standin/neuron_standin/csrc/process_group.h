// The process group: Gloo over CPU aliases. An output is never touched after wait(), because some of Gloo's works copy
// their result out again at every wait().
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include "fallback.h"

namespace standin {
using namespace c10d;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<Work>;

// Called before a collective with (name, ranks of the group, is it the default group, tensors of this rank, name of the
// reduction or "", whether its splits are uneven): rules.py.
py::object* on_collective = nullptr;

Tensors alias(const Tensors& tensors) {
  Tensors aliases;
  for (auto& t : tensors) aliases.push_back(host_alias(t));
  return aliases;
}
TensorLists alias(const TensorLists& lists) {
  TensorLists aliases;
  for (auto& tensors : lists) aliases.push_back(alias(tensors));
  return aliases;
}
Tensors flatten(const TensorLists& lists) {
  Tensors flat;
  for (auto& tensors : lists) flat.insert(flat.end(), tensors.begin(), tensors.end());
  return flat;
}
Tensors operator+(Tensors a, const Tensors& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
const char* name_of(const ReduceOp& op) {
  constexpr const char* names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return int(op.op_) < 9 ? names[int(op.op_)] : "UNUSED";
}
bool are_uneven(const std::vector<int64_t>& splits) {
  return std::any_of(splits.begin(), splits.end(), [&](int64_t size) { return size != splits[0]; });
}

struct NeuronBackend final : Backend {
  c10::intrusive_ptr<Backend> gloo;
  std::vector<int64_t> ranks;
  bool is_default;

  NeuronBackend(c10::intrusive_ptr<Backend> backend, std::vector<int64_t> global_ranks, bool default_group)
      : Backend(backend->getRank(), backend->getSize()),
        gloo(std::move(backend)),
        ranks(std::move(global_ranks)),
        is_default(default_group) {}

  void tell(const char* name, const Tensors& tensors, const char* reduction = "", bool uneven = false) {
    touch();
    py::gil_scoped_acquire gil;
    (*on_collective)(name, ranks, is_default, tensors, reduction, uneven);
  }

  const std::string getBackendName() const override { return "neuron"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }

  WorkPtr broadcast(Tensors& t, const BroadcastOptions& options) override {
    tell("broadcast", t);
    auto a = alias(t);
    return gloo->broadcast(a, options);
  }
  WorkPtr allreduce(Tensors& t, const AllreduceOptions& options) override {
    tell("all_reduce", t, name_of(options.reduceOp));
    auto a = alias(t);
    return gloo->allreduce(a, options);
  }
  WorkPtr allreduce_coalesced(Tensors& t, const AllreduceCoalescedOptions& options) override {
    tell("all_reduce_coalesced", t, name_of(options.reduceOp));
    auto a = alias(t);
    return gloo->allreduce_coalesced(a, options);
  }
  WorkPtr reduce(Tensors& t, const ReduceOptions& options) override {
    tell("reduce", t, name_of(options.reduceOp));
    auto a = alias(t);
    return gloo->reduce(a, options);
  }
  WorkPtr allgather(TensorLists& out, Tensors& in, const AllgatherOptions& options) override {
    tell("all_gather", in + flatten(out));
    auto a = alias(out);
    auto b = alias(in);
    return gloo->allgather(a, b, options);
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const AllgatherOptions& options) override {
    tell("all_gather_into_tensor", {in, out});
    auto a = host_alias(out), b = host_alias(in);
    return gloo->_allgather_base(a, b, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const AllgatherOptions& options) override {
    tell("all_gather_into_tensor_coalesced", in + out);
    auto a = alias(out), b = alias(in);
    return gloo->allgather_into_tensor_coalesced(a, b, options);
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const GatherOptions& options) override {
    tell("gather", in + flatten(out));
    auto a = alias(out);
    auto b = alias(in);
    return gloo->gather(a, b, options);
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const ScatterOptions& options) override {
    tell("scatter", out + flatten(in));
    auto a = alias(out);
    auto b = alias(in);
    return gloo->scatter(a, b, options);
  }
  WorkPtr reduce_scatter(Tensors& out, TensorLists& in, const ReduceScatterOptions& options) override {
    tell("reduce_scatter", out + flatten(in), name_of(options.reduceOp));
    auto a = alias(out);
    auto b = alias(in);
    return gloo->reduce_scatter(a, b, options);
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const ReduceScatterOptions& options) override {
    tell("reduce_scatter_tensor", {in, out}, name_of(options.reduceOp));
    auto a = host_alias(out), b = host_alias(in);
    return gloo->_reduce_scatter_base(a, b, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const ReduceScatterOptions& options) override {
    tell("reduce_scatter_tensor_coalesced", in + out, name_of(options.reduceOp));
    auto a = alias(out), b = alias(in);
    return gloo->reduce_scatter_tensor_coalesced(a, b, options);
  }
  WorkPtr alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
      const AllToAllOptions& options) override {
    tell("all_to_all_single", {in, out}, "", are_uneven(out_splits) || are_uneven(in_splits));
    auto a = host_alias(out), b = host_alias(in);
    return gloo->alltoall_base(a, b, out_splits, in_splits, options);
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const AllToAllOptions& options) override {
    auto differs = [&](const Tensor& t) { return t.sizes() != in[0].sizes() || t.dtype() != in[0].dtype(); };
    tell("all_to_all", in + out, "", std::any_of(in.begin(), in.end(), differs));
    auto a = alias(out), b = alias(in);
    return gloo->alltoall(a, b, options);
  }
  WorkPtr send(Tensors& t, int to, int tag) override {
    tell("send", t);
    auto a = alias(t);
    return gloo->send(a, to, tag);
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    tell("recv", t);
    auto a = alias(t);
    return gloo->recv(a, from, tag);
  }
  WorkPtr barrier(const BarrierOptions& options) override {
    tell("barrier", {});
    auto on_host = options;
    on_host.device_ids.clear();
    on_host.device.reset();
    return gloo->barrier(on_host);
  }
};
}  // namespace standin
