"""Compile csrc/ into simaccel/_C.so: `python build.py`. Needs gcc, ninja, and torch's headers."""

import os
import shutil
import time
from pathlib import Path

# `import torch` would load what is about to be built.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch
from torch.utils import cpp_extension

if not torch.__version__.startswith("2.13."):
    raise SystemExit(f"simaccel is for torch 2.13, and this is {torch.__version__}")
here = Path(__file__).resolve().parent
began = time.monotonic()
(here / "build").mkdir(exist_ok=True)
cpp_extension.load(
    "_C",
    sorted(map(str, (here / "csrc").glob("*.cpp"))),
    build_directory=str(here / "build"),
    extra_cflags=["-O1", "-std=c++20", "-w"],
    is_python_module=False,
    verbose=True,
)
# Not written over: a process may have the old file open.
fresh = here / "simaccel" / "_C.so.new"
shutil.copy(here / "build" / "_C.so", fresh)
fresh.rename(here / "simaccel" / "_C.so")
print(f"built in {time.monotonic() - began:.0f} s")
