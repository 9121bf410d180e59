"""Loops of transformers' examples without the Trainer."""

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.training.scripts.parts import Sentences, fingerprint, gpt2, seeded, update


def language_model(accelerate: Any, folder: Path) -> dict[str, Any]:
    """run_clm_no_trainer: accumulation, tied weights, two groups of decay, perplexity."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    model = gpt2()
    no_decay = ["bias", "ln"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(d in n for d in no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in named if any(d in n for d in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    train_dataloader = Sentences(20).loader(shuffle=True, generator=seeded(1))
    eval_dataset = Sentences(7)
    eval_dataloader = eval_dataset.loader()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 20))
    model, optimizer, train_dataloader, eval_dataloader, schedule = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, schedule
    )
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / 2)
    completed_steps, total_loss = 0, 0.0
    perplexities = []
    for _ in range(2):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                ids = batch["input_ids"]
                loss = model(input_ids=ids, labels=ids).loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(2)))
        perplexities.append(math.exp(torch.cat(losses)[: len(eval_dataset)].mean().item()))
    unwrapped = accelerator.unwrap_model(model)
    return {
        "steps": [completed_steps, num_update_steps_per_epoch],
        "loss": float(total_loss),
        "perplexities": perplexities,
        "tied": unwrapped.lm_head.weight is unwrapped.transformer.wte.weight,
        "weights": fingerprint(model),
    }


def summarization(accelerate: Any, folder: Path) -> dict[str, Any]:
    """run_summarization_no_trainer: generated texts of other lengths on each rank."""
    accelerator = accelerate.Accelerator()
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_dataloader, eval_dataloader = Sentences(12).loader(), Sentences(9).loader()
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for batch in train_dataloader:
        loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        update(accelerator, optimizer, loss)
    texts: list[str] = []
    shapes = []
    model.eval()
    for batch in eval_dataloader:
        with torch.no_grad():
            generated = accelerator.unwrap_model(model).generate(
                batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=1 + accelerator.process_index,
                do_sample=False,
                pad_token_id=0,
            )
        generated = accelerator.pad_across_processes(generated, dim=1, pad_index=0)
        labels = accelerator.pad_across_processes(batch["input_ids"], dim=1, pad_index=-100)
        generated, labels = accelerator.gather_for_metrics((generated, labels))
        shapes += [list(generated.shape), list(labels.shape)]
        texts += [" ".join(map(str, row)) for row in generated.cpu().tolist()]
    return {"texts": texts, "shapes": shapes}


def tokens_in_the_batch(accelerate: Any, folder: Path) -> dict[str, Any]:
    """The loss of a window divided by its tokens on all ranks, not by its batches."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, Sentences(16).loader())
    iterator = iter(loader)
    # But for the last window, of which Accelerate steps each batch.
    for _ in range(len(loader) // 2 - 1):
        window = [next(iterator) for _ in range(2)]
        local = torch.tensor(sum(int((b["input_ids"] > 0).sum()) for b in window))
        num_items = accelerator.gather(local).sum().item()
        for batch in window:
            with accelerator.accumulate(model):
                logits = model(input_ids=batch["input_ids"]).logits
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1),
                    batch["input_ids"].flatten(),
                    ignore_index=0,
                    reduction="sum",
                )
                loss = loss * accelerator.num_processes * 2 / num_items
                update(accelerator, optimizer, loss)
    return {"weights": fingerprint(model)}


def lora(accelerate: Any, folder: Path) -> dict[str, Any]:
    """A PEFT model: adapters of a frozen decoder trained, checkpointed, saved alone and merged."""
    from peft import LoraConfig, PeftModel, get_peft_model

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    torch.manual_seed(5)
    model = get_peft_model(gpt2(), config)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-1)
    ids = torch.randint(1, 20, (16, 5), generator=seeded())
    loader = DataLoader(ids, batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()).mean()))
        if epoch == 0:
            accelerator.save_state(str(folder / "state"))
            after_one = fingerprint(model)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder / "adapter",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    alone = PeftModel.from_pretrained(gpt2(), folder / "adapter")
    with torch.no_grad():
        logits = alone.merge_and_unload()(ids[:2]).logits
        torch.testing.assert_close(logits, unwrapped(ids[:2]).logits)
    accelerator.load_state(str(folder / "state"))
    return {
        "losses": losses,
        "files": sorted(os.listdir(folder / "adapter")),
        "again": fingerprint(model) == after_one,
        "weights": after_one,
    }


LOOPS = [lora, language_model, summarization, tokens_in_the_batch]
