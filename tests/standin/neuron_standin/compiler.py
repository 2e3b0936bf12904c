"""torch.compile(backend="neuron"): AOTAutograd's forward and backward graphs, run operation by operation.

The entry point `torch_dynamo_backends` of the distribution names it, as that of AWS's wheel does.
"""

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device

from neuron_standin import report, rules
from neuron_standin.device import DEVICES, DeviceContext, current_device, exchange_device, set_device
from neuron_standin.device import Event as NeuronEvent
from neuron_standin.device import Stream as NeuronStream


class _NeuronInterface(DeviceInterface):
    """What Dynamo asks a device."""

    device, Event, Stream = DeviceContext, NeuronEvent, NeuronStream
    current_device = staticmethod(current_device)
    set_device = staticmethod(set_device)
    exchange_device = maybe_exchange_device = staticmethod(exchange_device)
    device_count = staticmethod(lambda: DEVICES)
    is_available = staticmethod(lambda: True)
    current_stream = staticmethod(lambda index=None: torch.accelerator.current_stream())
    synchronize = staticmethod(lambda index=None: None)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)


for _name in ("neuron", *(f"neuron:{i}" for i in range(DEVICES))):
    register_interface_for_device(_name, _NeuronInterface)


def neuron(graph: torch.fx.GraphModule, example_inputs: list):
    """What Dynamo calls with each graph."""
    return aot_autograd(fw_compiler=_compile)(graph, example_inputs)


def _compile(graph: torch.fx.GraphModule, example_inputs: list):
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        if any(isinstance(size, torch.SymInt | torch.SymFloat) for size in sizes):
            rules.refuse("dynamic shape", f"torch.compile with {node.name} of {list(sizes)}")
    report.compiled_graphs += 1
    return make_boxed_func(graph.forward)
