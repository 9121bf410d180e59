"""First cells as public notebooks have them: a rank finds what the notebook finds.

Each is written anew. What is not installed is skipped: `make test-libraries` installs all. Settings
that a line makes are in ``test_library_settings``, many in one kernel.
"""

import importlib.util
import textwrap

import pytest

from tests.kernel.notebooks import open_notebook

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

# By name: the libraries that must be there, the cell, and what the function returns on each rank.
_CELLS = {
    "table of passengers": (
        "pandas sklearn",
        """
        import os, warnings
        import numpy as np
        import pandas as pd
        from sklearn.model_selection import train_test_split
        warnings.filterwarnings("ignore")
        pd.set_option("display.max_columns", None)
        pd.options.display.float_format = "{:.2f}".format
        np.random.seed(42)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        """,
        (
            "str(pd.DataFrame({'a': [1 / 3]})), os.environ['TOKENIZERS_PARALLELISM'],"
            " np.random.rand(), pd.get_option('display.max_columns'), train_test_split([1, 2, 3])"
        ),
    ),
    "arguments as a script has them": (
        "torch",
        "import sys\nsys.argv = ['train.py', '--epochs', '2']",
        "sys.argv",
    ),
    "settings in a class, everything seeded": (
        "torch",
        """
        import os, random, sys
        import numpy as np
        import torch

        class CFG:
            seed = 7
            model_name = "tiny"
            debug = False

        def seed_everything(seed):
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            torch.backends.cudnn.deterministic = True

        seed_everything(CFG.seed)
        sys.path.append("../input/models")
        """,
        (
            "CFG.model_name, random.random(), np.random.rand(), torch.rand(1).item(),"
            " torch.backends.cudnn.deterministic, sys.path[-1]"
        ),
    ),
    "quiet transformers": (
        "transformers",
        """
        import transformers
        from transformers import GPT2Config, GPT2LMHeadModel, logging, set_seed
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        set_seed(3)
        """,
        (
            "logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled(),"
            " GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9))"
            ".lm_head.weight.sum().item()"
        ),
    ),
    "plots in a style": (
        "matplotlib",
        """
        %matplotlib inline
        %config InlineBackend.figure_format = "retina"
        import matplotlib as mpl
        import matplotlib.pyplot as plt
        plt.style.use("seaborn-v0_8-whitegrid")
        mpl.rcParams["font.size"] = 13
        plt.rc("legend", fontsize=8)
        """,
        "plt.rcParams['font.size'], plt.rcParams['legend.fontsize'], mpl.rcParams['axes.grid']",
    ),
    "plots by seaborn": (
        "seaborn",
        "import seaborn as sns\nsns.set_theme(style='darkgrid', palette='deep')",
        "sns.axes_style()['axes.grid'], sns.axes_style()['axes.facecolor']",
    ),
    "a log": (
        "torch",
        """
        import logging, sys
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stdout)
        logging.getLogger("urllib3").setLevel(logging.WARNING)
        log = logging.getLogger("mine")
        """,
        "logging.root.level, logging.getLogger('urllib3').level, log.isEnabledFor(20)",
    ),
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
def test_a_rank_has_what_the_first_cell_did(name: str) -> None:
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
