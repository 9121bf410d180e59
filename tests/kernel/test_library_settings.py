"""What cells did to libraries, ranks have as well, or it is named: in a real kernel."""

import pytest

from notebook_accel.launch.text.used_names import names_of
from tests.kernel.notebooks import open_notebook

# Settings of first cells: what a rank is asked, and what a cell has done for it.
_SETTINGS = """
ImageFile.LOAD_TRUNCATED_IMAGES             <- ImageFile.LOAD_TRUNCATED_IMAGES = True
Image.MAX_IMAGE_PIXELS                      <- Image.MAX_IMAGE_PIXELS = None
torch.load("no file")                       <- original = torch.load; torch.load = patched
nn.Linear(2, 3).num_params()                <- nn.Module.num_params = num_params
torch.ones(1).twice().item()                <- setattr(torch.Tensor, "twice", lambda self: self * 2)
torch.ones(1).thrice()                      <- @patch ^ def thrice(self: torch.Tensor): return 3
nn.Linear(2, 3).half() <- @patch ^ def half(self: A | B): return self._orig_half().bias.dim()
torch.ones(2).size_of()                     <- @patch_to(torch.Tensor) ^ def size_of(self): return 2
json.JSONEncoder.default.__name__           <- json.JSONEncoder.default = default
csv.QUOTE_MINE                              <- csv.QUOTE_MINE = 7
torch._dynamo.config.suppress_errors        <- torch._dynamo.config.suppress_errors = True
torch._dynamo.config.cache_size_limit       <- torch._dynamo.config.cache_size_limit += 3
textwrap.TextWrapper.x                      <- if torch: textwrap.TextWrapper.x = "x"
mimetypes.types_map[".mine"]                <- mimetypes.types_map[".mine"] = "text/mine"
mimetypes.types_map[".ours"]                <- mimetypes.types_map.update({".ours": "text/ours"})
tqdm.tqdm.monitor_interval                  <- tqdm.tqdm.monitor_interval = 0
string.Template.delimiter                   <- string.Template.delimiter = "%"
plt.rcParams["figure.dpi"]                  <- plt.rcParams["figure.dpi"] = 77
plt.rcParams["figure.figsize"]              <- plt.rcParams.update({"figure.figsize": (3, 2)})
plt.rcParams["axes.grid"]                   <- plt.style.use("ggplot")
plt.rcParams["lines.linewidth"]             <- matplotlib.rc("lines", linewidth=4.5)
pd.get_option("display.max_rows")           <- pd.set_option("display.max_rows", 123)
pd.get_option("display.max_columns")        <-
pd.options.display.precision                <- pd.options.display.precision = 3
np.get_printoptions()["precision"]          <- np.set_printoptions(precision=3, suppress=True)
np.geterr()["divide"]                       <- np.seterr(divide="raise")
sklearn.get_config()["transform_output"]    <- sklearn.set_config(transform_output="pandas")
transformers.logging.get_verbosity()        <- transformers.logging.set_verbosity_error()
is_progress_bar_enabled()                   <- disable_progress_bar()
type(AutoConfig.for_model("mine")).__name__ <- AutoConfig.register("mine", MyConfig)
type(AutoModel.from_config(MyConfig())).__name__ <- AutoModel.register(MyConfig, MyModel)
sys.getrecursionlimit()                     <- sys.setrecursionlimit(4321)
decimal.getcontext().prec                   <- decimal.getcontext().prec = 9
gc.get_threshold()[0]                       <- gc.set_threshold(1234)
socket.getdefaulttimeout()                  <- socket.setdefaulttimeout(12.5)
locale.setlocale(locale.LC_NUMERIC)         <- locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")
[f[0] for f in warnings.filters if f[2] is ConvergenceWarning] <- ignore("ignore", "mine", CONVERGE)
logging.getLogger("httpx").level            <- logging.getLogger("httpx").setLevel(logging.ERROR)
torch.get_num_threads()                     <- torch.set_num_threads(3)
torch.multiprocessing.get_sharing_strategy() <- set_sharing_strategy("file_system")
torch.is_deterministic_algorithms_warn_only_enabled() <- set_deterministic(True, warn_only=True)
torch.is_anomaly_check_nan_enabled()        <- set_detect_anomaly(True, check_nan=False)
torch.get_float32_matmul_precision()        <- torch.set_float32_matmul_precision("high")
torch.is_grad_enabled()                     <- torch.set_grad_enabled(False)
torch.backends.cudnn.benchmark              <- torch.backends.cudnn.benchmark = True
str(torch.tensor(1 / 3))                    <- torch.set_printoptions(precision=2)
torch.hub.get_dir()                         <- torch.hub.set_dir("/tmp/hub")
MyConfig in get_safe_globals()               <- add_safe_globals([MyConfig])
pd.Series([1, 2]).progress_apply(len_of).sum() <- tqdm.tqdm.pandas()
str(pd.DataFrame({"a": [1 / 3]}))           <- pd.options.display.float_format = "{:.2f}".format
plt.rcParams["legend.fontsize"]             <- plt.rc("legend", fontsize=8)
plt.rcParams["font.size"]                   <- matplotlib.rcParams["font.size"] = 13
sys.argv                                    <- sys.argv = ["train.py", "--epochs", "2"]
"../input/models" in sys.path               <- sys.path.append("../input/models")
os.environ["TOKENIZERS_PARALLELISM"]        <- os.environ["TOKENIZERS_PARALLELISM"] = "false"
logging.root.level                          <- logging.basicConfig(level=20, stream=sys.stdout)
(random.random(), np.random.rand())         <- seed_everything(CFG.seed)
(torch.rand(1).item(), torch.backends.cudnn.deterministic) <-
"""
_PAIRS = [line.split("<-") for line in _SETTINGS.strip().splitlines()]
_QUESTIONS = [question.strip() for question, _ in _PAIRS]

_IMPORTS = """
import csv, decimal, gc, json, locale, logging, mimetypes, os, random, socket, string, sys, textwrap
import warnings
import matplotlib, numpy as np, pandas as pd, sklearn, torch, torch._dynamo, tqdm, transformers
import matplotlib.pyplot as plt
from PIL import Image, ImageFile
from sklearn.exceptions import ConvergenceWarning
from torch import nn
from torch.multiprocessing import set_sharing_strategy
from torch.serialization import add_safe_globals, get_safe_globals
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, is_progress_bar_enabled
from notebook_accel import notebook_launcher

class MyConfig(PretrainedConfig):
    model_type = "mine"

class MyModel(PreTrainedModel):
    config_class = MyConfig
    def __init__(self, config):
        super().__init__(config)
        self.post_init()

class CFG:
    seed = 7

def seed_everything(seed):
    random.seed(seed)
    transformers.set_seed(seed)
    np.random.seed(seed + 1)
    torch.backends.cudnn.deterministic = True

CONVERGE = ConvergenceWarning
set_deterministic = torch.use_deterministic_algorithms
set_detect_anomaly = torch.autograd.set_detect_anomaly
ignore = warnings.filterwarnings

def len_of(value):
    return len(str(value))

def default(self, value):
    return str(value)

def patch(f):  # as fastcore has it
    kinds = f.__annotations__["self"]
    for kind in getattr(kinds, "__args__", (kinds,)):
        if hasattr(kind, f.__name__):
            setattr(kind, "_orig_" + f.__name__, getattr(kind, f.__name__))
        setattr(kind, f.__name__, f)

A, B = nn.Linear, nn.Bilinear

def patch_to(kind):
    return lambda f: setattr(kind, f.__name__, f)

def num_params(self):
    return sum(p.numel() for p in self.parameters())

def patched(*args, **kwargs):
    return "patched" if args == ("no file",) else original(*args, **kwargs)
"""
_ASK = """
def ask():
    import torch._dynamo
    found = {}
    for text in questions:
        try:
            found[text] = eval(text, globals())
        except Exception as error:
            found[text] = repr(error)
    return found
"""


@pytest.fixture(scope="module")
def book():
    with open_notebook() as notebook:
        notebook.run(_IMPORTS)
        notebook.run(_ASK)
        yield notebook


@pytest.mark.timeout(240)
def test_forty_settings_of_first_cells_reach_the_ranks(book):
    for _, cell in _PAIRS:
        book.run(cell.strip().replace(" ^ ", "\n"))
    # The globals that the texts use are named in the function, as in one that a person writes.
    names = {name for text in _QUESTIONS for name in names_of(text).used}
    book.run(f"questions = {_QUESTIONS!r}\ndef used(): return {', '.join(sorted(names))}")
    shown = book.run("""
        run = notebook_launcher(lambda: (used(), ask())[1], num_processes=2, view="text")
        here = ask()
        for found in run:
            others = {text: (found[text], here[text]) for text in here}
            print("differs:", {key: two for key, two in others.items() if two[0] != two[1]})
    """)
    assert shown.count("differs: {}") == 2, shown
    assert "not in the ranks" not in shown


def test_what_cells_did_to_objects_of_the_notebooks_own_modules(book, tmp_path):
    (tmp_path / "own_config.py").write_text("""
class Config(dict):
    def __init__(self): self.lr, self.sub, self.names = 1, {"a": 1}, []
    def merge(self, **changes): vars(self).update(changes)
config, steps, also = Config(), [], {}
""")
    (tmp_path / "own_work.py").write_text("""
from own_config import also, config, steps
def work(): return config.lr, config.sub, config.names, dict(config), steps, also, config.late
""")
    book.run(f"import sys\nsys.path.append({str(tmp_path)!r})\nimport own_config, own_work")
    book.run("from own_config import config as cfg\ncfg.lr = 5\ncfg.sub['a'] = 6")
    book.run("cfg.names.append('n')\ncfg.update(warm=3)\nown_config.also.setdefault('x', [])")
    book.run("cfg.merge(late=9)\nfor i in range(2): own_config.steps.append(i)")
    shown = book.run("""
        run = notebook_launcher(lambda: own_work.work(), num_processes=2, view="text")
        print(run[1] == own_work.work() == (5, {"a": 6}, ["n"], {"warm": 3}, [0, 1], {"x": []}, 9))
    """)
    assert shown.rstrip().endswith("True"), shown
    assert "not in the ranks" not in shown


def test_a_setter_that_nobody_knows_and_what_does_not_pickle_are_named_once(book):
    book.run("import textwrap, threading\ntextwrap.enable_mine = lambda: None")
    book.run("textwrap.enable_mine()\ntextwrap.lock = threading.Lock()")
    launch = "run = notebook_launcher(lambda: 5, num_processes=1, view='text')\nprint(run[0])"
    shown = book.run(launch)
    for words in ("`textwrap.enable_mine()`", "`textwrap.lock = threading.Lock()`", "%%everywhere"):
        assert words in shown
    assert shown.rstrip().endswith("5")
    assert "enable_mine" not in book.run(f"del textwrap.lock\n{launch}")


def test_a_cell_for_everywhere_runs_in_the_notebook_and_in_ranks(book):
    book.run("%load_ext notebook_accel")
    shown = book.run("%%everywhere\nimport textwrap\nprint('once')\ntextwrap.shown = [3]\n!true")
    assert shown.strip() == "once"
    shown = book.run("""
        def look():
            import textwrap
            return textwrap.shown
        run = notebook_launcher(look, num_processes=2, view="text")
        print(run.results, "once" in run.logs())
    """)
    assert "[[3], [3]] False" in shown
    assert "textwrap.shown = [3]" in book.run("%everywhere --list")
    book.run("%%everywhere\nimport os\nif 'RANK' in os.environ: raise ValueError('in ranks only')")
    error = book.fails("notebook_launcher(look, num_processes=1, view='text')")
    assert "in ranks only" in error
    assert "Cell In[" in error
    assert "no %%everywhere cell" in book.run("%everywhere --clear")


def test_a_session_gets_what_cells_set_meanwhile(book):
    book.run("import mimetypes, torch\nmimetypes.types_map['.late'] = 'one'")
    asked = "found = mimetypes.types_map['.late'], torch.ones(1).dtype.itemsize"

    def in_session():
        book.run(f"%%accelerate -n 1\nimport mimetypes, torch\n{asked}")
        return book.run("%accelerate pull found\nprint(found)").strip()

    assert in_session() == "('one', 4)"
    book.run("mimetypes.types_map['.late'] = 'two'\ntorch.set_default_dtype(torch.float64)")
    assert in_session() == "('two', 8)"
    # What the session changed itself stays, until the notebook changes it anew.
    book.run("%%accelerate\nmimetypes.types_map['.late'] = 'mine'")
    assert in_session() == "('mine', 8)"
    book.run("%accelerate stop\ntorch.set_default_dtype(torch.float32)")
