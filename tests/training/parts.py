"""Models and data of the loops: tiny, and alike in every process."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(count: int, width: int = 4, classes: int = 3) -> TensorDataset:
    generator = seeded(count)
    inputs = torch.randn(count, width, generator=generator)
    return TensorDataset(inputs, torch.randint(classes, (count,), generator=generator))


class Points(Dataset):
    """Points as dictionaries, as many dataset classes give them."""

    def __init__(self, count: int, width: int = 4) -> None:
        self.data = points(count, width)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, label = self.data[index]
        return {"pixel_values": inputs, "labels": label, "index": index}


class Sentences(Dataset):
    """Token ids of different lengths, with a label each."""

    def __init__(self, count: int, longest: int = 7, vocabulary: int = 20) -> None:
        generator = seeded(count)
        lengths = torch.randint(3, longest + 1, (count,), generator=generator).tolist()
        self.ids = [torch.randint(1, vocabulary, (n,), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "label": int(self.ids[index][0]) % 2}

    @staticmethod
    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True)
        labels = torch.tensor([s["label"] for s in samples])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

    def loader(self, size: int = 2, **options: Any) -> DataLoader[Any]:
        return DataLoader(self, batch_size=size, collate_fn=self.collate, **options)


def mlp(width: int = 4, hidden: int = 8, classes: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def update(accelerator: Any, optimizer: Any, loss: torch.Tensor) -> None:
    """The three lines with which nearly every loop ends a step."""
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(3)
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 16}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **no_dropout))


def gpt2(n_layer: int = 1, vocab_size: int = 20) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes = {"vocab_size": vocab_size, "n_positions": 16, "n_embd": 8, "n_head": 2}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, n_layer=n_layer))


def fingerprint(model: nn.Module) -> list[float]:
    """Sums that two trainings share if their weights are the same."""
    return [float(weight.detach().double().abs().sum()) for weight in model.parameters()]
