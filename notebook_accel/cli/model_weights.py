"""Commands about weights: ``merge-weights``, and ``estimate-memory``, which runs Accelerate's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from notebook_accel.errors import ConfigError


def merge_weights(arguments: Sequence[str]) -> int:
    """``notebook-accel merge-weights CHECKPOINT FOLDER``: merge FSDP's shards into one file."""
    parser = ArgumentParser(
        prog="notebook-accel merge-weights",
        description="Write the sharded weights of a checkpoint of FSDP into one file.",
    )
    parser.add_argument("checkpoint_dir", help="the checkpoint, or pytorch_model_fsdp_0 in it")
    parser.add_argument("output_path", help="folder for model.safetensors")
    parser.add_argument(
        "--unsafe_serialization", "--unsafe-serialization", action="store_true", help="pickled"
    )
    parser.add_argument(
        "--remove_checkpoint_dir", "--remove-checkpoint-dir", action="store_true", help="afterwards"
    )
    typed = parser.parse_args(arguments)
    from notebook_accel.training.fsdp_functions import merge_fsdp_weights

    try:
        merge_fsdp_weights(
            typed.checkpoint_dir,
            typed.output_path,
            safe_serialization=not typed.unsafe_serialization,
            remove_checkpoint_dir=typed.remove_checkpoint_dir,
        )
    except OSError as error:
        raise ConfigError(str(error)) from None
    print(f"written to {typed.output_path}")
    return 0


def estimate_memory(arguments: Sequence[str]) -> int:
    """``notebook-accel estimate-memory MODEL``: run Accelerate's command, if that is installed."""
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            "Accelerate does it, and is not installed: pip install 'notebook-accel[accelerate]'"
        )
    for one in arguments:
        # Accelerate would raise an error of its library for the names of the Hub.
        if not one.startswith("-") and (".." in one or one.count("/") > 1 or one[:1] in "./"):
            raise ConfigError(
                f"{one[:100]!r} is no model of the Hugging Face Hub: expected a name such as "
                "bert-base-cased or google/vit-base-patch16-224"
            )
    module = "accelerate.commands.accelerate_cli"
    command = [sys.executable, "-m", module, "estimate-memory", *arguments]
    return subprocess.run(command, check=False).returncode
