"""Small functions under Accelerate's names do what they do there."""

from __future__ import annotations

import inspect
import json
import os
import socket
import sys
import warnings
from collections import namedtuple
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import accelerate
import accelerate.utils as peer
import pytest
import torch
from accelerate.utils import ao as peer_ao
from accelerate.utils import environment as peer_environment
from accelerate.utils import memory as peer_memory
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import notebook_accel
from notebook_accel import ConfigError, utils
from notebook_accel.training import constants, rich_tracebacks
from notebook_accel.training.data import DataLoaderShard, active_loaders
from notebook_accel.training.data.samplers import BatchSamplerShard
from notebook_accel.training.optimizer import AcceleratedOptimizer
from notebook_accel.training.scheduler import AcceleratedScheduler
from tests.training.single import fresh_rank  # noqa: F401

if TYPE_CHECKING:
    from pathlib import Path

Pair = namedtuple("Pair", "left right")  # noqa: PYI024
PROBES = [
    "is_amdsmi_available",
    "is_habana_gaudi1",
    "is_import_timer_available",
    "is_mps_available",
    "is_torchdata_stateful_dataloader_available",
    "is_transformer_engine_mxfp8_available",
    "is_weights_only_available",
    "is_xccl_available",
]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.last = nn.Linear(2, 1)


@pytest.mark.parametrize("name", PROBES)
def test_probes_agree_with_accelerates(name: str) -> None:
    assert getattr(utils, name)() == bool(getattr(peer, name)())


@pytest.mark.parametrize(
    "name",
    ["DDPCommunicationHookType", "DynamoBackend", "LoggerType", "PrecisionType", "RNGType"],
)
def test_texts_are_asked_for_as_in_accelerate(name: str) -> None:
    ours, theirs = getattr(utils, name), getattr(peer, name)
    assert ours.list() == theirs.list()
    for text in ("fp16", "cuda", "wandb", "EAGER", "nothing", ours.list()[0]):
        assert (text in ours) == (text in theirs), text
    assert all(member in ours for member in ours)
    assert 3 not in ours


def test_constants_are_accelerates() -> None:
    elsewhere = ("STR_OPERATION_TO_FUNC", "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING")
    for name in (*constants.__all__, *elsewhere):
        ours, theirs = getattr(utils.constants, name), getattr(peer.constants, name)
        if isinstance(theirs, (dict, str)):
            assert ours == theirs, name
        else:
            assert set(ours) == set(theirs), name


def test_versions_of_what_is_probed() -> None:
    assert utils.is_bnb_available("0.1") == peer.is_bnb_available("0.1")
    assert not utils.is_bnb_available("999")
    assert utils.imports.is_numpy_available() is peer.imports.is_numpy_available() is True
    assert not utils.imports.is_numpy_available("999")
    for name in ("is_tqdm_available", "is_torch_distributed_available"):
        assert getattr(utils.imports, name)() is getattr(peer.imports, name)() is True
    assert not utils.is_mps_available("999")


def test_modules_and_attributes_by_path() -> None:
    model = Nested()
    for ours, theirs in zip(
        utils.get_module_children_bottom_up(model, return_fqns=True),
        peer.get_module_children_bottom_up(model, return_fqns=True),
        strict=True,
    ):
        assert ours[0] == theirs[0]
        assert ours[1] is theirs[1]
    assert utils.get_module_children_bottom_up(model)[-1] is model
    assert utils.recursive_getattr(model, "first.0.weight") is model.first[0].weight
    for thing in (Nested, model, len, 3):
        assert utils.get_pretty_name(thing) == peer.get_pretty_name(thing)
    assert not utils.model_has_dtensor(model)
    assert not utils.is_peft_model(model)
    divided: Any = SimpleNamespace(config=SimpleNamespace(distributed_config={"tp_size": 4}))
    assert utils.get_model_tp_size(divided) == 4
    assert utils.get_model_tp_size(model) is None
    for name in ("Nested", "ReLU", "Conv1d"):
        found = utils.dataclasses.get_module_class_from_name(model, name)
        assert found is peer.dataclasses.get_module_class_from_name(model, name)


def test_tensors_without_their_values() -> None:
    data = {"a": torch.zeros(2, 3), "b": [torch.ones(1, dtype=torch.int64), "text"]}
    layout = utils.get_data_structure(data)
    assert utils.is_tensor_information(layout["a"])
    assert layout["b"] == [utils.TensorInformation(torch.Size([1]), torch.int64), "text"]
    made = utils.initialize_tensors(layout)
    assert (made["a"].shape, made["b"][0].dtype) == ((2, 3), torch.int64)
    assert utils.is_torch_tensor(made["a"])
    assert utils.operations.get_shape(data["a"]) == peer.operations.get_shape(data["a"]) == [2, 3]
    assert utils.ignorant_find_batch_size(data) == 2
    assert utils.ignorant_find_batch_size("text") is None
    assert utils.honor_type(obj=Pair(1, 2), generator=iter([3, 4])) == Pair(3, 4)
    alone: Any = [{"a": data["a"], "b": ("text", 1)}]
    for module in (utils, peer):
        joined = module.concatenate(alone)
        assert torch.equal(joined["a"], data["a"])
        assert joined["b"] == ("text", 1)
        with pytest.raises(TypeError):
            module.concatenate(["text", "text"])
    assert utils.is_namedtuple(data=Pair(1, 2))


def test_a_function_is_applied_to_the_leaves_that_are_asked_for() -> None:
    def add(value: int, more: int, *, factor: int) -> int:
        return (value + more) * factor

    data: Any = {"a": [1, "text"], "b": Pair((2,), [])}
    for apply in (utils.recursively_apply, peer.recursively_apply):

        def is_number(value: object) -> bool:
            return isinstance(value, int)

        found = apply(add, data, 1, test_type=is_number, factor=10)
        assert found == {"a": [20, "text"], "b": Pair((30,), [])}
        with pytest.raises(TypeError, match="add"):
            apply(add, data, 1, test_type=is_number, error_on_other_type=True, factor=10)


def test_devices_are_told_apart_as_there() -> None:
    devices = [torch.device(name) for name in ("cpu", "cuda", "cuda:0", "cuda:1", "meta")]
    for first in devices:
        for second in devices:
            ours = utils.modeling.check_device_same(first, second)
            assert ours == peer.modeling.check_device_same(first, second), (first, second)


def test_states_for_safetensors_hold_tied_weights_once() -> None:
    weight = torch.ones(2, 2)
    cleaned = utils.clean_state_dict_for_safetensors({"a": weight, "b": weight, "c": weight.T})
    assert sorted(cleaned) == ["a", "c"]
    assert all(value.is_contiguous() for value in cleaned.values())


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("PMI_SIZE", "4")
    theirs = peer.get_cpu_distributed_information()
    ours = utils.get_cpu_distributed_information()
    assert ours._asdict() == vars(theirs)
    given = {"A": "1", "B": "x y", "": "z", "C": "a;b"}
    assert utils.convert_dict_to_env_variables(given) == ["A=1\n"]
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "x")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "True")
    utils.enable_fsdp_ram_efficient_loading()
    assert peer.parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING")
    utils.disable_fsdp_ram_efficient_loading()
    assert not peer.parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING")
    assert utils.get_current_device_type() == peer.get_current_device_type()


def test_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert utils.is_port_in_use(port)
    assert not utils.is_port_in_use(port)
    assert not utils.is_port_in_use(utils.get_free_port())
    from notebook_accel.training import host

    assert utils.check_cuda_p2p_ib_support() is True
    for driver, expected in (("535.10", False), ("560.28", True)):
        answers = {"name": ["NVIDIA GeForce RTX 4090"] * 2, "driver_version": [driver] * 2}
        monkeypatch.setattr(host, "_ask_nvidia", answers.__getitem__)
        assert utils.check_cuda_p2p_ib_support() is expected
    assert utils.get_gpu_info() == (["NVIDIA GeForce RTX 4090"] * 2, 2)
    assert utils.environment.get_driver_version() == "560.28"


def test_weights_are_tied_again_after_they_got_memory() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    model.head.weight = model.embed.weight
    assert utils.ensure_weights_retied(nn.Module.cpu, model, None) is nn.Module.cpu
    model._tied_weights_keys = ["embed.weight", "head.weight"]  # type: ignore[assignment]

    def give_memory(module: nn.Module) -> nn.Module:
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(weight)))
        return module

    initialize = utils.ensure_weights_retied(give_memory, model, None)
    for part in model.children():
        initialize(part)
    assert model.head.weight is model.embed.weight


def test_weights_of_an_offload_store_are_put_into_a_model(tmp_path: Path) -> None:
    wanted = nn.Linear(2, 2)
    utils.offload_state_dict(tmp_path, wanted.state_dict())
    index = json.loads((tmp_path / "index.json").read_text())
    for load in (peer.load_offloaded_weights, utils.load_offloaded_weights):
        model = nn.Linear(2, 2, device="meta")
        load(model, index, tmp_path)
        load(model, None, tmp_path)
        assert torch.equal(model.weight, wanted.weight)


def test_names_without_what_wraps_them() -> None:
    named = {"a._checkpoint_wrapped_module.w": 1, "_orig_mod.b._orig_mod.c": 2, "my_orig_mod": 3}
    assert utils.fsdp2_canonicalize_names(named) == peer.fsdp2_canonicalize_names(named)


def test_what_deepspeed_needs() -> None:
    @utils.deepspeed_required
    def asked(value: int) -> int:
        return value

    assert asked(1) == 1, "nobody has said how to train yet"
    accelerator = notebook_accel.Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="there is no DeepSpeedPlugin"):
        asked(1)
    weight = nn.Parameter(torch.ones(2))
    with utils.GatheredParameters(weight, 0), utils.GatheredParameters([weight], enabled=False):
        assert weight.numel() == 2
    loader = DataLoader(range(4))  # type: ignore[arg-type]
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, None) is loader
    assert utils.get_fsdp2_grad_scaler(init_scale=4.0).get_scale() == 4.0


def test_what_is_not_supported_says_so() -> None:
    with pytest.raises(ConfigError, match=r"ParallelismConfig\(tp_size=2\)"):
        utils.TorchTensorParallelPlugin(tp_size=2)
    with pytest.raises(ConfigError, match="enable_async_tp"):
        utils.TorchTensorParallelConfig(enable_async_tp=True)
    assert utils.TorchTensorParallelPlugin().tp_size == 1
    assert utils.SageMakerDistributedType("NO") == peer.SageMakerDistributedType("NO")


def test_classes_are_made_by_hand_as_there() -> None:
    from notebook_accel.data_loader import DataLoaderStateMixin, get_sampler
    from notebook_accel.state import do_nothing, is_initialized

    assert not is_initialized()
    notebook_accel.GradientState(notebook_accel.GradientAccumulationPlugin(num_steps=2))
    assert notebook_accel.GradientState().num_steps == 2
    nothing_said: Any = None
    assert notebook_accel.GradientAccumulationPlugin(nothing_said).num_steps == 1
    plain = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    optimizer = AcceleratedOptimizer(plain, True, torch.amp.GradScaler("cpu", init_scale=4.0))
    half = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 0.5**step)
    scheduler = AcceleratedScheduler(half, optimizer, split_batches=True)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch asks for get_last_lr() instead
        assert scheduler.get_lr() == half.get_lr()  # type: ignore[no-untyped-call]
    accelerator = notebook_accel.Accelerator(cpu=True)
    assert is_initialized()
    assert do_nothing(1, a=2) is None  # type: ignore[func-returns-value]
    loader = DataLoader(range(4), batch_size=2)  # type: ignore[arg-type]
    assert isinstance(get_sampler(loader), SequentialSampler)
    whole: Any = DataLoader(
        range(4),  # type: ignore[arg-type]
        sampler=BatchSampler(SequentialSampler(range(4)), 2, False),
        batch_size=None,
    )
    assert isinstance(get_sampler(whole), SequentialSampler)
    assert isinstance(accelerator.prepare(loader), DataLoaderStateMixin)


class Fused(torch.optim.SGD):
    """Steps within its backward, as LOMO does."""

    def fused_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.param_groups[0]["lr"] = learning_rate
        self.step()
        self.zero_grad()


def test_methods_for_lomo_and_device_maps() -> None:
    accelerator = notebook_accel.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    assert not accelerator.verify_device_map(model)
    model.hf_device_map = {"a": 0, "b": "cpu"}  # type: ignore[assignment]
    assert accelerator.verify_device_map(nn.Sequential(model))
    before = model.weight.item()
    with pytest.raises(ConfigError, match="lomo_optim"):
        accelerator.lomo_backward(model(torch.ones(1)).sum(), 0.5)
    assert not accelerator.has_lomo_optimizer
    accelerator.prepare(Fused(model.parameters(), lr=1.0))
    assert accelerator.has_lomo_optimizer
    accelerator.lomo_backward(model(torch.ones(1)).sum(), 0.5)
    assert model.weight.item() == pytest.approx(before - 0.5)
    accelerator.backward(model(torch.ones(1)).sum(), learning_rate=0.5)
    assert model.weight.item() == pytest.approx(before - 0.75)


def test_memory_is_given_back_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[None] = []
    monkeypatch.setattr("gc.collect", lambda: collected.append(None))
    for clear in (utils.clear_device_cache, peer_memory.clear_device_cache):
        clear()
        assert not collected
        clear(garbage_collection=True)
        assert collected.pop() is None
    for error, expected in (
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("CUDA out of memory."), False),
    ):
        assert peer_memory.should_reduce_batch_size(error) is expected
        assert utils.should_reduce_batch_size(exception=error) is expected


def test_which_layers_and_devices_multiply_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(16, 32), (32, 32), (32, 8), (16, 16)]
    model = nn.Sequential(nn.ReLU(), *(nn.Linear(*each) for each in sizes))
    for root in (model, *model):
        for name, part in model.named_modules():
            expected = peer.filter_first_and_last_linear_layers(part, name)
            assert utils.filter_first_and_last_linear_layers(part, name) == expected
            expected = peer.filter_first_and_last_linear_layers(root, name)
            assert utils.filter_first_and_last_linear_layers(root, name) == expected
            expected = peer_ao.filter_linear_layers(part, name, ["1", "4"])
            assert utils.ao.filter_linear_layers(part, name, ["1", "4"]) == expected
        expected = peer_ao.find_first_last_linear_layers(root)
        assert utils.ao.find_first_last_linear_layers(root) == expected
    assert not utils.check_cuda_fp8_capability() or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peer_environment, "_nvidia_smi", lambda: "no-such-program")
    for capability in ((8, 6), (8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        theirs = peer_environment.check_cuda_fp8_capability.__wrapped__()
        assert utils.check_cuda_fp8_capability() is theirs is (capability >= (8, 9))


def test_optimizers_are_mapped_to_those_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (("adam", "Adam"), ("adagrad", "Adagrad"), ("lion", "Lion")):
        stand_in: Any = ModuleType(module)

        def make(groups: Any, name: str = name, **settings: Any) -> tuple[str, dict[str, Any]]:
            return name, settings

        setattr(stand_in, f"DeepSpeedCPU{name}", make)
        monkeypatch.setitem(sys.modules, f"deepspeed.ops.{module}", stand_in)
    for path in ("deepspeed", "deepspeed.ops"):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    monkeypatch.setattr("accelerate.utils.deepspeed.compare_versions", lambda *_: True)
    monkeypatch.setattr("accelerate.utils.deepspeed.is_bnb_available", lambda *_, **__: False)
    weights = [nn.Parameter(torch.ones(1))]
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        optimizer = kind(weights, lr=0.5, weight_decay=0.25)
        mapped: Any = utils.map_pytorch_optim_to_deepspeed(optimizer)
        assert mapped == peer.deepspeed.map_pytorch_optim_to_deepspeed(optimizer)
        assert mapped[1]["lr"] == 0.5
    name, settings = utils.map_pytorch_optim_to_deepspeed(torch.optim.Adagrad(weights, lr=0.5))
    assert (name, settings) == ("Adagrad", {"lr": 0.5, "weight_decay": 0})

    class Lion32bit(torch.optim.SGD):
        """As bitsandbytes has it."""

    lion: Any = Lion32bit(weights, lr=0.5)
    for bits, expected in ((32, "Lion"), (8, "Adam")):
        lion.args = SimpleNamespace(optim_bits=bits)
        assert utils.map_pytorch_optim_to_deepspeed(lion)[0] == expected


def test_states_have_the_small_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    state, gradients = notebook_accel.PartialState(), notebook_accel.GradientState()
    theirs = accelerate.PartialState.default_device.fget(None)
    assert state.default_device.type == theirs.type
    device = state.device
    state.set_device()
    assert state.device == device
    assert state.initialized
    assert gradients.initialized
    assert not state.fork_launched
    monkeypatch.setenv("FORK_LAUNCHED", "1")
    assert state.fork_launched
    assert not gradients.is_xla_gradients_synced
    gradients.is_xla_gradients_synced = True
    assert notebook_accel.GradientState().is_xla_gradients_synced
    gradients._reset_state()
    assert not gradients.is_xla_gradients_synced
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert gradients.is_xla_gradients_synced
    moved = notebook_accel.optimizer.move_to_device({"a": [torch.ones(1)], "b": 2}, "meta")
    assert moved["a"][0].is_meta
    assert moved["b"] == 2


def mark_by_hand(loader: Any, state: Any) -> list[Any]:
    """What a loader and the state of gradients say of a pass that is marked by hand."""
    seen: list[Any] = [len(state.dataloader_references)]
    loader.begin()
    seen += [each is loader for each in state.dataloader_references]
    seen += [state.in_dataloader, state.active_dataloader is loader, state.end_of_dataloader]
    loader.end_of_dataloader, loader.remainder = True, 3
    seen += [state.end_of_dataloader, state.remainder]
    loader.end()
    seen += [state.in_dataloader, state.end_of_dataloader, loader.end_of_dataloader]
    loader.reset()
    seen += [loader.end_of_dataloader, loader.remainder]
    order = [4, 2, 0, 1, 3]
    loader.set_sampler(order)
    assert loader.get_sampler() is order
    return [*seen, *(batch.tolist() for batch in loader), state.in_dataloader]


class Own(DataLoader[int]):
    """A loader of the user's with a method of the same name."""

    def reset(self) -> str:
        return "own"


def test_passes_are_marked_and_samplers_set_by_hand() -> None:
    from notebook_accel.data_loader import DataLoaderShard, SkipBatchSampler, prepare_data_loader

    ours = DataLoaderShard(range(5), batch_size=2)
    theirs = accelerate.data_loader.DataLoaderShard(range(5), batch_size=2)
    assert mark_by_hand(ours, notebook_accel.GradientState()) == mark_by_hand(
        theirs, accelerate.state.GradientState()
    )
    state = ours.state_dict()
    assert (state["iteration"], state["given"]) == (1, 0)
    for number, index in ((1, 0), (2, 0), (2, 1)):
        batches = []
        for prepare in (prepare_data_loader, accelerate.data_loader.prepare_data_loader):
            inner = BatchSampler(SequentialSampler(range(5)), 2, False)
            grouped = SkipBatchSampler(inner, 1) if number == 1 else inner
            loader: Any = prepare(
                DataLoader(range(5), batch_sampler=grouped),  # type: ignore[arg-type]
                num_processes=number,
                process_index=index,
            )
            loader.set_sampler([4, 2, 0, 1, 3])
            batches.append([batch.tolist() for batch in loader])
        assert batches[0] == batches[1]
    accelerator = notebook_accel.Accelerator(cpu=True)
    assert accelerator.prepare(Own(range(2))).reset() == "own"  # type: ignore[arg-type]
    whole: Any = accelerator.prepare(DataLoader(range(2), batch_size=None))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"set_sampler\(\) needs .* has NoneType"):
        whole.set_sampler([1, 0])
    own: Any = DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]])  # type: ignore[arg-type]
    shared = prepare_data_loader(
        notebook_accel.skip_first_batches(own, 1), num_processes=2, process_index=0
    )
    with pytest.raises(ConfigError, match=r"set_sampler\(\) needs .* has list"):
        shared.set_sampler([1, 0])


class ByHand(DataLoaderShard):
    """A loader whose passes are marked by itself, as of one derived from Accelerate's."""

    def __iter__(self) -> Any:
        self.begin()
        batches = [*DataLoader.__iter__(self)]
        yield from batches[:-1]
        self.end_of_dataloader = True
        yield batches[-1]
        self.iteration += 1
        self.end()


def test_passes_that_are_marked_by_hand_know_what_their_last_round_lacks() -> None:
    def make(*, even_batches: bool) -> Any:
        batches = BatchSampler(SequentialSampler(range(5)), 2, False)
        own = BatchSamplerShard(batches, 2, 1, even_batches=even_batches)
        return ByHand(range(5), batch_sampler=own)

    loader = make(even_batches=True)
    active = active_loaders()
    seen = [(batch.tolist(), active.position.short_round) for batch in loader]  # type: ignore[union-attr]
    assert seen == [([2, 3], None), ([1, 2], (1, 2, 0))]
    assert loader.iteration == 1
    uneven = make(even_batches=False)
    uneven.begin()
    assert active.position is not None
    assert active.position.is_uneven
    uneven.end()
    assert not active.in_dataloader


def test_loaders_are_made_by_accelerates_arguments() -> None:
    seen = []
    for module in (notebook_accel.data_loader, accelerate.data_loader):
        plain = (False, False, False)  # no torchdata, no dropping, no copies in the background
        shard = module.DataLoaderShard(range(7), None, None, None, 1, *plain, None, 2, batch_size=2)
        # Divided batches, the first one left out, by no function and over no mesh, in epoch 2.
        settings = (True, 1, *plain, None, None, 2)
        dispatcher = module.DataLoaderDispatcher(range(7), *settings, batch_size=2)
        for loader in (shard, dispatcher):
            begin = loader.iteration
            ends = [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
            seen.append((begin, ends, loader.iteration))
        generator = torch.Generator()
        loader = module.DataLoaderShard(range(2), synchronized_generator=generator)
        assert loader.synchronized_generator is generator
    assert seen[:2] == seen[2:]


def test_a_spawned_process_is_told_its_number(tmp_path: Path) -> None:
    seen: list[Any] = []

    def note(*words: str) -> None:
        seen.append((*words, *(os.environ[name] for name in ("LOCAL_RANK", "RANK"))))

    nothing = {"local_rank": "", "rank": "", "fork_launched": ""}  # and nothing is left behind
    for kind in (utils.PrepareForLaunch, peer.PrepareForLaunch):
        for asked in ("NO", "MULTI_CPU", "MULTI_GPU"):
            with utils.patch_environment(nproc=4, node_rank=2, **nothing):
                kind(note, asked)(1, "a")
                assert os.environ["FORK_LAUNCHED"] == "1"
    assert seen[:3] == seen[3:] == [("a", "", ""), ("a", "1", "9"), ("a", "1", "9")]
    meet = utils.PrepareForLaunch(lambda: seen.append(torch.distributed.get_rank()), debug=True)
    with pytest.raises(ConfigError, match="WORLD_SIZE and ACCELERATE_DEBUG_RDV_FILE is not set"):
        meet(0)
    here = {"world_size": 1, "gloo_socket_ifname": "lo"}
    file = tmp_path / "meeting"
    with utils.patch_environment(accelerate_debug_rdv_file=file, **here, **nothing):
        meet(0)
    torch.distributed.destroy_process_group()
    assert seen[-1] == 0
    with utils.patch_environment(some_paths="a::b"):
        for module in (utils, peer):
            assert module.launch.env_var_path_add("SOME_PATHS", "c") == "a:b:c"


def test_layers_of_transformer_engine_are_known_without_it() -> None:
    theirs = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.module"})
    assert utils.has_transformer_engine_layers(nn.Sequential(theirs(1, 1)))
    assert not utils.has_transformer_engine_layers(nn.Sequential(nn.Linear(1, 1)))


def test_a_state_without_an_accelerator_has_no_plugins() -> None:
    kinds: Any = (notebook_accel.AcceleratorState, accelerate.state.AcceleratorState)
    for name in ("fsdp_plugin", "deepspeed_plugin", "parallelism_config", "dynamo_plugin"):
        for kind in kinds:
            with pytest.raises(ValueError, match=r"Accelerator\("):
                kind(cpu=True, **{name: object()})
            kind._reset_state()


def test_tensors_of_the_nested_layout_are_left_unpadded() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the layout is a prototype
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.warns(utils.CannotPadNestedTensorWarning, match="to_padded_tensor"):
        left = utils.pad_across_processes({"a": nested, "b": torch.ones(1)})
    assert left["a"] is nested
    assert issubclass(utils.CannotPadNestedTensorWarning, UserWarning)


def test_the_door_of_the_accelerator_has_the_classes_that_are_imported_there() -> None:
    ours, theirs = notebook_accel.accelerator, vars(accelerate.accelerator)
    classes = {name for name, value in theirs.items() if inspect.isclass(value)}
    wanted = {name for name in classes if theirs[name].__module__.startswith("accelerate.")}
    assert {"GradientAccumulationPlugin", "DataLoaderConfiguration"} <= wanted
    assert {name for name in wanted if not hasattr(ours, name)} == set()
    assert ours.DistributedType is notebook_accel.DistributedType


def test_rich_shows_tracebacks_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    installed: list[Any] = []
    monkeypatch.setattr("rich.traceback.install", lambda **options: installed.append(options))
    notebook_accel.Accelerator(cpu=True)
    assert installed == []
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "1")
    for _ in range(2):
        notebook_accel.Accelerator(cpu=True)
    rich_tracebacks._install.cache_clear()
    assert installed == [{"show_locals": False}]
