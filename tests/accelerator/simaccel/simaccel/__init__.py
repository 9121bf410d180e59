"""A simulated accelerator for torch, "sim", and its collectives, "simccl": for tests without a GPU.

``import torch`` loads it by the entry point ``torch.backends``; ``import simaccel`` does as well.
What it imitates, and what it cannot show, is in README.md. Settings are environment variables:

    SIM_DEVICES          number of devices (2)
    SIM_VISIBLE_DEVICES  those of them that this process sees; else CUDA_VISIBLE_DEVICES does
    SIM_READS_CUDA_VISIBLE  0: CUDA_VISIBLE_DEVICES hides no device, as for XPUs and others
    SIM_MEMORY_MB        memory of each device, for each process (1024)
    SIM_LAUNCH_BLOCKING  1: the host waits for each kernel
    SIM_SPIN             1: the host's waits for a device use all of a CPU core, as CUDA's do
    SIM_WATCHDOG         0: a collective may take longer than the group's timeout
    SIM_CCL_NAME         name of the collectives' backend ("simccl"); "simnccl" has NCCL's in it
    SIM_CONTEXT_LOG      file to which each process adds a line for each device that it uses
"""

__all__ = ["autoload"]


def autoload() -> None:
    """Register the device and its collectives with torch, once."""
    import torch

    if hasattr(torch, "sim"):
        return
    from simaccel import ccl, device

    device.register()
    ccl.register()


autoload()
