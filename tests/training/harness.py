"""Runs tests on real ranks: a whole test by ``@on_ranks(2)``, a function by ``run_ranks``.

One helper process imports torch and each test module once, and forks the ranks of every call; they
meet over gloo through a file, so that no port is taken. A call has a deadline, after which every
process of it is dead; the helper ends with the tests.
"""

import ast
import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib.util
import os
import pickle
import pkgutil
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion.rewrite import rewrite_asserts

from notebook_accel import ConfigError, training
from notebook_accel.config.checks import too_old_torch
from notebook_accel.system.processes import die_with_parent

_ROOT = Path(__file__).parents[2]
_LENGTH = struct.Struct("!Q")
_SETTLE_SECONDS = 1.0
_IS_RANK = "NOTEBOOK_ACCEL_TESTS_RANK"
_OF_RANKS = (
    "pytest",
    "torch._dynamo",  # by the first optimizer
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "torchdata.stateful_dataloader",
)

# What the user is told of a pipeline; "" where the installed torch has what it takes.
_REFUSED = (told := too_old_torch((2, 11))) and f"pipelines: {told}"
_OF_PIPELINES = re.compile("1F1B|GPipe|pipeline")


def runs_here(name: object) -> bool:
    """Whether the case of this name runs on the installed torch: pipelines do not on an old one."""
    return not (_REFUSED and _OF_PIPELINES.search(str(name)))


def skip_unless_it_runs(name: object) -> None:
    if not runs_here(name):
        pytest.skip(_REFUSED)


class RankError(AssertionError):
    """A rank raised, died or did not end in time; the text has the tracebacks of all."""


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout: float = 60,
    imports: Sequence[str] = (),
) -> list[Any]:
    """What ``function``, of a test file's module, returns on each of the ranks, in their order.

    ``torch.distributed`` is initialised (not for one rank). Ranks find ``imports`` imported; after
    ``timeout`` seconds all are killed.
    """
    # A test module that runs ranks when it is imported is imported by its ranks too, and so on
    # until the machine has no memory left.
    assert _IS_RANK not in os.environ, "ranks cannot be started in a rank"
    replies = _helper().ask((imports, num_ranks, timeout, *_place_of(function), args), timeout)
    failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(replies) if not ok]
    if _REFUSED and any(_REFUSED in text for text in failed):
        pytest.skip(_REFUSED)
    if failed:
        raise RankError("\n".join(failed))
    return [value for _, value in replies]


def on_ranks(num_ranks: int | str, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Let each of so many ranks run this test, which is given what pytest gives it.

    A text is the name of the argument that says how many.
    What a rank asserts shows its values where it fails, as in any test. ``options`` are those of
    ``run_ranks``.
    """

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def on_each(*args: Any, **given: Any) -> None:
            if _IS_RANK in os.environ:
                test(*args)
            else:
                count = given[num_ranks] if isinstance(num_ranks, str) else num_ranks
                run_ranks(on_each, count, *given.values(), **options)

        return on_each

    return decorate


@contextlib.contextmanager
def warnings_about(text: str = "") -> Iterator[list[str]]:
    """Give the warnings of the block that have this text; none of them is shown."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [told for told in (str(one.message) for one in caught) if text in told]


def refusal_of(call: Callable[[], object]) -> str:
    """What a ``ConfigError`` of the call says; "accepted" where there is none."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "accepted"


def _place_of(function: Callable[..., Any]) -> tuple[str, str, str]:
    name, module = getattr(function, "__qualname__", "?"), sys.modules[function.__module__]
    if not callable(getattr(module, name, None)) or module.__file__ is None:
        raise TypeError(
            f"run_ranks got {function!r}, and there is no {name} in {module.__name__}, where ranks "
            "look for it: expected a function defined at the top of a test module; a decorator "
            "needs functools.wraps"
        )
    return module.__file__, module.__name__, name


class _Helper:
    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.harness", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            env=environment,
            start_new_session=True,
        )

    def ask(self, request: tuple[Any, ...], timeout: float) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        try:
            _write(self.process.stdin, request)
            # It keeps the deadline itself; this one is for a helper that is gone or stuck.
            ready, _, _ = select.select([self.process.stdout], [], [], timeout + 20)
            answer = _read(self.process.stdout) if ready else None
        except BaseException:
            # The test has reached its limit, say. The next one would read the answer to this call.
            self.close()
            raise
        if answer is None:
            self.close()
            raise RankError(f"the helper gave no answer in {timeout + 20:.0f} s")
        return answer

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


_helpers: list[_Helper] = []


def _helper() -> _Helper:
    if not _helpers or _helpers[0].process.poll() is not None:
        _helpers[:] = [_Helper()]
        atexit.register(_helpers[0].close)
    return _helpers[0]


def _write(stream: Any, value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: Any) -> Any:
    head = stream.read(_LENGTH.size)
    return pickle.loads(stream.read(*_LENGTH.unpack(head))) if head else None


def _serve() -> None:
    # Killed tests read no end of this helper, and it reads none of theirs while it imports.
    die_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of ranks
    os.environ[_IS_RANK] = "1"
    # What ranks import in the middle of a test: once here, not in every rank. Our own modules would
    # take each of them 0.1 s.
    ours = pkgutil.walk_packages(training.__path__, f"{training.__name__}.")
    for name in (*_OF_RANKS, *(module.name for module in ours)):
        importlib.import_module(name)
    while (request := _read(sys.stdin.buffer)) is not None:
        imports, num_ranks, timeout, *call = request
        # One that fails fails again in the ranks, which say so.
        with contextlib.suppress(BaseException):
            for name in imports:
                importlib.import_module(name)
            _load(*call[:2])
        # Each rank would look through all of it again, and copy the pages by that.
        gc.collect()
        gc.freeze()
        with tempfile.TemporaryDirectory() as folder:
            _write(answers, _fork_ranks(call, num_ranks, timeout, Path(folder)))
    os.killpg(0, signal.SIGKILL)


def _fork_ranks(call: list[Any], num_ranks: int, timeout: float, folder: Path) -> list[Any]:
    running: dict[int, int] = {}
    helper = os.getpid()
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            # A helper that is killed with its test must not leave ranks in a collective behind.
            die_with_parent(helper)
            _be_rank(call, rank, num_ranks, timeout, folder)
        running[pid] = rank
    ends = _wait(running, time.monotonic() + timeout)
    return [_reply(folder / str(rank), ends.get(rank)) for rank in range(num_ranks)]


def _wait(running: dict[int, int], deadline: float) -> dict[int, int]:
    """The exit statuses by rank; once a rank has failed the others have a second."""
    ends: dict[int, int] = {}
    while running and time.monotonic() < deadline:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ends[running.pop(pid)] = status
                if status:
                    deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)
        time.sleep(0.002)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return ends


def _reply(path: Path, status: int | None) -> tuple[bool, Any]:
    if path.exists():
        reply: tuple[bool, Any] = pickle.loads(path.read_bytes())
        return reply
    if status is None:
        return False, "did not end in time, or waited for a rank that failed"
    return False, f"ended with status {status}, without a word"


def _be_rank(call: list[Any], rank: int, num_ranks: int, timeout: float, folder: Path) -> None:
    import torch.distributed as dist

    faulthandler.dump_traceback_later(max(timeout - 1, 1))
    numbers = {"RANK": rank, "LOCAL_RANK": rank}
    sizes = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in {**numbers, **sizes}.items()})
    try:
        if num_ranks > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
            )
            # A rank that ended at once would close connections that others are still making.
            dist.barrier()
        file, module, name, args = call
        reply = (True, getattr(_load(file, module), name)(*args))
        data = pickle.dumps(reply)
    except BaseException:
        data = pickle.dumps((False, traceback.format_exc()))
    path = folder / str(rank)
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").rename(path)
    sys.stdout.flush()
    if not pickle.loads(data)[0]:
        os._exit(1)
    # As ranks of ours do: what the others still have to read may be in this one's sockets. Where
    # one of them dies, or takes too long, the helper ends the others.
    others = [folder / str(other) for other in range(num_ranks)]
    while not all(path.exists() for path in others):
        time.sleep(0.002)
    os._exit(0)


def _load(file: str, module: str) -> Any:
    if module in sys.modules:
        return sys.modules[module]
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        source = Path(file).read_bytes()
        tree = ast.parse(source)
        rewrite_asserts(tree, source)
        exec(compile(tree, file, "exec", dont_inherit=True), vars(loaded))
    except BaseException:
        del sys.modules[module]
        raise
    return loaded


if __name__ == "__main__":
    _serve()
