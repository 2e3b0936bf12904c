"""A stand-in for AWS's device `neuron`, for tests only: the memory and arithmetic of the CPU, the rules of the device.

    python tests/standin/neuron_standin/build.py                         # once: g++ and ninja, a minute
    PYTHONPATH=.:tests/standin python train.py --steps 3                 # `import torch` loads it

It takes PyTorch's path for accelerators that are not built in (PrivateUse1): device, memory, random numbers, streams,
process group, torch.compile backend. Strict (the default), it refuses what AWS's documents say that the device does not
have: rules.py. It says nothing about speed, memory limits, numerics, or what the compiler takes.

NEURON_STANDIN_DEVICES   number of devices, 8
NEURON_STANDIN_STRICT    1: raise where a rule is broken; 0: only report it
NEURON_STANDIN_REPORT    a folder into which each process writes rank_R.json when it ends: report.py
"""
