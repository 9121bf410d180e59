"""A loop as articles about Accelerate write it, with nothing changed but the import."""

import os
import warnings

import pytest
import torch
from notebook_accel.utils import send_to_device
from torch.utils.data import DataLoader, default_collate
from tqdm.auto import tqdm

from notebook_accel import Accelerator
from tests.training.harness import on_ranks
from tests.training.parts import bert


def sentences(count):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 20, (count, 6), generator=generator)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2}
        for row in ids
    ]


def loss_on(model, **batch):
    """The loss on one batch that all ranks have: that it falls is no chance of their last one."""
    model.eval()
    with torch.no_grad():
        return float(model(**batch).loss)


def a_full_training(folder, precision):
    """A schedule counted with the prepared loader, made after ``prepare`` and stepped bare."""
    from transformers import get_scheduler

    train_dataloader = DataLoader(sentences(8), shuffle=True, batch_size=2)
    eval_dataloader = DataLoader(sentences(7), batch_size=2)
    accelerator = Accelerator(mixed_precision=precision)
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_dl, eval_dl, model, optimizer = accelerator.prepare(
        train_dataloader, eval_dataloader, model, optimizer
    )
    num_epochs = 3
    num_training_steps = num_epochs * len(train_dl)
    lr_scheduler = get_scheduler(
        "linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=num_training_steps
    )
    progress_bar = tqdm(range(num_training_steps))
    everything = send_to_device(default_collate(sentences(8)), accelerator.device)
    before = loss_on(model, **everything)
    model.train()
    for _ in range(num_epochs):
        for batch in train_dl:
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            progress_bar.update(1)
    assert loss_on(model, **everything) < before
    assert progress_bar.n == 12 // accelerator.num_processes
    assert lr_scheduler.get_last_lr() == [0.0]
    seen = 0
    for batch in eval_dl:
        with torch.no_grad():
            outputs = model(**batch)
        predictions = torch.argmax(outputs.logits, dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        assert predictions.shape == references.shape
        seen += len(predictions)
    assert seen == 7
    predictions = torch.ones(2, accelerator.process_index + 1)
    predictions = accelerator.pad_across_processes(predictions, dim=1, pad_index=-100)
    ranks = accelerator.num_processes
    for gathered in accelerator.gather((predictions, predictions)):
        assert gathered.shape == (2 * ranks, ranks)
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    accelerator.save(unwrapped_model.state_dict(), f"{folder}/weights")
    accelerator.wait_for_everyone()
    unwrapped_model.load_state_dict(torch.load(f"{folder}/weights"))
    accelerator.register_for_checkpointing(lr_scheduler)
    accelerator.save_state(f"{folder}/state")
    accelerator.load_state(f"{folder}/state")


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_the_loop_of_the_articles_runs(ranks, tmp_path):
    os.environ["ACCELERATE_USE_CPU"] = "true"
    warnings.simplefilter("error", UserWarning)
    a_full_training(tmp_path, "bf16")
