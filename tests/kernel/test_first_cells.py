"""First cells as public notebooks have them: a rank finds what the notebook finds.

Each is written anew. What is not installed is skipped: `make test-libraries` installs all. What a
line sets in libraries that are always there is in ``test_library_settings``, all in one kernel.
"""

import importlib.util
import textwrap

import pytest

from tests.kernel.notebooks import open_notebook

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

# By name: the libraries that must be there, the cell, and what the function returns on each rank.
_CELLS = {
    "adapters": (
        "peft transformers",
        """
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel
        LoraConfig.used_in_notebook = True
        tiny = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)
        """,
        (
            "LoraConfig.used_in_notebook, get_peft_model(GPT2LMHeadModel(tiny), LoraConfig(r=2))"
            ".get_nb_trainable_parameters()"
        ),
    ),
    "a tracking server": (
        "mlflow",
        "import mlflow\nmlflow.set_tracking_uri('sqlite:////tmp/notebook-first-cells.db')",
        "mlflow.get_tracking_uri()",
    ),
    "on Colab or not": (
        "torch",
        """
        try:
            from google.colab import drive
            drive.mount("/content/drive")
            IN_COLAB = True
        except ImportError:
            IN_COLAB = False
        !echo ready
        import torch
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(11)
        """,
        "IN_COLAB, device, torch.rand(1).item()",
    ),
    "datasets without bars and caches": (
        "datasets",
        """
        import datasets
        datasets.logging.set_verbosity_error()
        datasets.disable_progress_bars()
        datasets.disable_caching()
        """,
        (
            "datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled(),"
            " datasets.is_caching_enabled()"
        ),
    ),
    "quiet diffusers": (
        "diffusers",
        "import diffusers\ndiffusers.utils.logging.set_verbosity_error()",
        "diffusers.utils.logging.get_verbosity()",
    ),
    "timm": (
        "timm",
        "import timm\nimport torch\ntimm.layers.set_exportable(True)\ntorch.manual_seed(5)",
        "timm.layers.is_exportable(), timm.create_model('resnet10t').num_classes",
    ),
    "fastai's distributed learner": (
        "fastai",
        "from fastai.vision.all import *\nfrom fastai.distributed import *",
        "hasattr(Learner, 'distrib_ctx'), hasattr(Learner, 'to_distributed')",
    ),
    "Lightning": (
        "lightning",
        "import lightning as L\nimport torch\nL.seed_everything(9)",
        "torch.rand(1).item(), L.__name__",
    ),
}


@pytest.mark.parametrize("name", _CELLS)
def test_a_rank_has_what_the_first_cell_did(name):
    libraries, cell, value = _CELLS[name]
    for library in libraries.split():
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}: make test-libraries")
    with open_notebook() as notebook:
        notebook.run(textwrap.dedent(cell))
        notebook.run("from notebook_accel import notebook_launcher")
        notebook.run(f"def look():\n    return str(({value},))")
        shown = notebook.run("""
            run = notebook_launcher(look, num_processes=2, view="text")
            here = look()
            print("differs:", [found for found in run if found != here] and [*run, here])
        """)
        assert "differs: []" in shown, shown
        assert "not in the ranks" not in shown
