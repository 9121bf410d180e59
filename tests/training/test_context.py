"""Ranks that divide each sequence; that they train as one process does, ``test_matrix`` shows.

On the CPU, keys and values are gathered; torch's ring, which accelerators use, is marked gpu.
"""

import pytest
import torch
from torch import nn

from notebook_accel import (
    Accelerator,
    ConfigError,
    FullyShardedDataParallelPlugin,
    notebook_launcher,
)
from notebook_accel.training.settings.parallelism import (
    ParallelismConfig,
    TorchContextParallelConfig,
)
from tests.training.harness import on_ranks


@on_ranks(2)
def test_sequences_of_one_length_after_the_other():
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    torch.manual_seed(3)
    for length in (8, 8, 16, 8, 4):
        whole = torch.randn(3, 1, 2, length, 4)
        expected = nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
        part = whole.clone()
        with accelerator.maybe_context_parallel(
            buffers=[part, expected], buffer_seq_dims=[3, 2], no_restore_buffers={expected}
        ):
            out = nn.functional.scaled_dot_product_attention(*part, is_causal=True)
            assert (out - expected).abs().max() < 1e-6


def test_elsewhere_the_block_changes_nothing():
    accelerator = Accelerator(cpu=True)
    tokens = torch.arange(6).reshape(2, 3)
    with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
        assert tokens.shape == (2, 3)


@pytest.mark.parametrize(
    ("length", "given", "message"),
    [
        (6, {"buffer_seq_dims": [1]}, r"of shape \(2, 6\) along dimension 1 into 4 pieces"),
        (8, {"buffers": None}, "got 0 buffers and 0 buffer_seq_dims"),
        (8, {"buffer_seq_dims": [1]}, "got a mask: expected is_causal=True"),
    ],
    ids=["length", "nothing", "mask"],
)
@on_ranks(2)
def test_what_cannot_be_divided_is_refused(length, given, message):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    heads = torch.zeros(1, 1, 4, 2)
    given = {"buffers": [torch.zeros(2, length)], **given}
    with pytest.raises(ConfigError, match=message), accelerator.maybe_context_parallel(**given):
        nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=heads)


def test_settings(monkeypatch):
    assert ParallelismConfig(cp_size=2).cp_handler.cp_comm_strategy == "allgather"
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    assert TorchContextParallelConfig().cp_comm_strategy == "alltoall"
    with pytest.raises(ConfigError, match="expected one of 'allgather', 'alltoall'"):
        TorchContextParallelConfig("ring")
    with pytest.raises(ConfigError, match="is a dict: expected a TorchContextParallelConfig"):
        ParallelismConfig(cp_size=2, cp_handler={})
    with pytest.raises(ConfigError, match="belong to DeepSpeed"):
        ParallelismConfig(sp_size=2)


def ring():
    """The largest difference of torch's ring to whole attention, with its gradients."""
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(cp_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    torch.manual_seed(3)
    shape = (3, 1, 2, 2 * 128, 16)
    whole = torch.randn(shape, device=accelerator.device, dtype=torch.bfloat16)
    part = whole.clone()
    with accelerator.maybe_context_parallel(buffers=[part], buffer_seq_dims=[3]):
        part = part.detach().clone().requires_grad_()
        out = nn.functional.scaled_dot_product_attention(*part, is_causal=True)
        out.sum().backward()
        seen = torch.stack([out.detach(), *part.grad])
    expected = whole.requires_grad_()
    rows = nn.functional.scaled_dot_product_attention(*expected, is_causal=True)
    rows.sum().backward()
    pieces = torch.stack([rows.detach(), *expected.grad]).chunk(4, dim=3)
    own = accelerator.context_parallel_rank
    mine = torch.cat([pieces[own], pieces[3 - own]], dim=3)
    return float((seen - mine).abs().max())


@pytest.mark.gpu
def test_the_ring_on_accelerators():
    """By ranks of a launch, which meet over NCCL: gloo gathers nothing that lies on a GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for distance in notebook_launcher(ring, num_processes=2, view="none"):
        assert distance < 0.1
