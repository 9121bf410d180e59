"""Loops as articles about Accelerate write them, with nothing changed but the import.

Each function below is the loop of one article, on tiny models with the interface that it expects.
"""

import os
import warnings

import pytest
import torch
from notebook_accel.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate
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


def a_full_training():
    """A schedule counted with the prepared loader, made after ``prepare`` and stepped bare."""
    from transformers import get_scheduler

    train_dataloader = DataLoader(sentences(8), shuffle=True, batch_size=2)
    eval_dataloader = DataLoader(sentences(7), batch_size=2)
    accelerator = Accelerator()
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


def regression():
    inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    return nn.Linear(3, 1), TensorDataset(inputs, inputs.sum(1, keepdim=True))


def notes_on_the_library(folder, precision):
    """Gathering with padding, saving and loading, clipping, autocast, guarded schedules."""
    my_model, data = regression()
    my_optimizer = torch.optim.SGD(my_model.parameters(), lr=0.1)
    my_training_dataloader = DataLoader(data, batch_size=2)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(my_optimizer, 1, gamma=0.9)
    accelerator = Accelerator(split_batches=True, mixed_precision=precision)
    my_model, my_optimizer, my_training_dataloader = accelerator.prepare(
        my_model, my_optimizer, my_training_dataloader
    )
    assert len(my_training_dataloader) == 8
    steps = skipped = 0
    for batch in my_training_dataloader:
        my_optimizer.zero_grad()
        inputs, targets = batch
        outputs = my_model(inputs)
        with accelerator.autocast():
            loss = nn.functional.mse_loss(outputs, targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(my_model.parameters(), 1.0)
        accelerator.clip_grad_value_(my_model.parameters(), 0.5)
        my_optimizer.step()
        if not accelerator.optimizer_step_was_skipped:
            lr_scheduler.step()
            steps += 1
        skipped += accelerator.optimizer_step_was_skipped
    assert steps > 0
    assert steps + skipped == 8
    progress_bar = tqdm(range(3), disable=not accelerator.is_local_main_process)
    progress_bar.update(3)
    width = accelerator.process_index + 1
    predictions = torch.ones(2, width)
    predictions = accelerator.pad_across_processes(predictions, dim=1, pad_index=-100)
    ranks = accelerator.num_processes
    for gathered in accelerator.gather((predictions, predictions)):
        assert gathered.shape == (2 * ranks, ranks)
    accelerator.wait_for_everyone()
    filename = f"{folder}/weights"
    unwrapped_model = accelerator.unwrap_model(my_model)
    accelerator.save(unwrapped_model.state_dict(), filename)
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(my_model)
    unwrapped_model.load_state_dict(torch.load(filename))
    accelerator.register_for_checkpointing(lr_scheduler)
    accelerator.save_state(f"{folder}/state")
    accelerator.load_state(f"{folder}/state")
    accelerator.wait_for_everyone()  # a rank that came late to the save adds its files itself
    if accelerator.is_main_process:
        accelerator.print("Test!")
    files = ["custom_checkpoint_0.pkl", "loader.bin", "model.safetensors", "optimizer.bin"]
    files += [f"random_states_{rank}.pkl" for rank in range(ranks)]
    files += ["scaler.pt"] * (precision == "fp16")
    assert sorted(os.listdir(f"{folder}/state")) == files


def train_all(folder, precision):
    a_full_training()
    notes_on_the_library(folder, precision)


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_the_loops_of_the_articles_run(ranks, tmp_path):
    os.environ["ACCELERATE_USE_CPU"] = "true"
    warnings.simplefilter("error", UserWarning)
    train_all(str(tmp_path), "fp16")
