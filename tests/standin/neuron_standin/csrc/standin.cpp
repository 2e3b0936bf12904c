// What Python gets: see neuron_standin/device.py, which registers it all.
#include "process_group.h"

using namespace standin;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("init", [](int count, py::object touched, py::object operation, py::object result, py::object collective) {
    device_count = count;
    on_touch = new py::object(touched);  // never freed: operations may run while Python ends
    on_operation = new py::object(operation);
    on_result = new py::object(result);
    on_collective = new py::object(collective);
    c10::SetAllocator(kNeuron, allocator);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  });
  m.def("touch", &touch);
  m.def("was_touched", [] { return owner != 0; });
  m.def("host_alias", &host_alias);
  m.def("default_generator", [](int i) { return default_generator(i); });
  m.def("exchange_device", [](int i) {
    int old = current_device;
    if (i >= 0) current_device = checked(i);
    return old;
  });
  m.def("set_stream", [](int64_t id, int device) { current_stream[device] = id; });
  m.def("wrap_backend", [](c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int64_t> ranks, bool is_default) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<NeuronBackend>(std::move(gloo), ranks, is_default));
  });
}
