"""Published training loops run with only the import changed, and give Accelerate's numbers.

Each loop takes the library as ``accelerate`` (that is the only import that a script would change)
and a folder of its own, and returns numbers that the two must share. Two CPU ranks run each with
one library and then with the other; the numbers of rank r must be those of Accelerate's.
"""

import math
import os
import warnings

import accelerate
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import notebook_accel
from tests.training import parts
from tests.training.harness import on_ranks


def train_with_resume(accelerate, folder, resume, stop_at):
    """complete_nlp_example: checkpoints every few steps, and a resume in the middle of an epoch."""
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    accelerator = accelerate.Accelerator(dataloader_config=config)
    accelerate.utils.set_seed(1)
    model = parts.mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(parts.points(20), shuffle=True, batch_size=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    overall_step = starting_epoch = 0
    resume_step = None
    if resume is not None:
        accelerator.print(f"Resumed from checkpoint: {resume}")
        accelerator.load_state(str(folder / resume))
        overall_step = int(resume.replace("step_", ""))
        starting_epoch = overall_step // len(loader)
        resume_step = overall_step - starting_epoch * len(loader)
    losses = []
    for epoch in range(starting_epoch, 3):
        model.train()
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        if resume is not None and epoch == starting_epoch and resume_step is not None:
            active = accelerator.skip_first_batches(loader, resume_step)
        else:
            active = loader
        for inputs, labels in active:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            parts.update(accelerator, optimizer, loss)
            losses.append(float(loss.detach()))
            schedule.step()
            overall_step += 1
            if overall_step % 4 == 0:
                accelerator.save_state(str(folder / f"step_{overall_step}"))
                accelerator.wait_for_everyone()
            if overall_step == stop_at:
                return {}
    return {"losses": losses, "rate": schedule.get_last_lr(), "weights": parts.fingerprint(model)}


def resume_in_mid_epoch(accelerate, folder):
    """Stopped after step 9 and resumed from step 8, in the second of three epochs of 5."""
    whole = train_with_resume(accelerate, folder, None, None)
    train_with_resume(accelerate, folder, None, 9)
    resumed = train_with_resume(accelerate, folder, "step_8", None)
    return {
        "whole": whole,
        "resumed": resumed,
        "exact": resumed["losses"] == whole["losses"][8:],
        "same weights": resumed["weights"] == whole["weights"],
    }


def language_model(accelerate, folder):
    """run_clm_no_trainer: accumulation, tied weights, two groups of decay, perplexity."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    model = parts.gpt2()
    no_decay = ["bias", "ln"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(d in n for d in no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in named if any(d in n for d in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    train_dataloader = parts.Sentences(20).loader(shuffle=True, generator=parts.seeded(1))
    eval_dataset = parts.Sentences(7)
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
        "weights": parts.fingerprint(model),
    }


def summarization(accelerate, folder):
    """run_summarization_no_trainer: generated texts of other lengths on each rank."""
    accelerator = accelerate.Accelerator()
    model = parts.gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_dataloader, eval_dataloader = parts.Sentences(12).loader(), parts.Sentences(9).loader()
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for batch in train_dataloader:
        loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        parts.update(accelerator, optimizer, loss)
    texts, shapes = [], []
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


def cv_example(accelerate, folder):
    """timm-like: a frozen backbone, normalised batches, OneCycleLR, accuracy with gather."""
    config = {"lr": 3e-2, "num_epochs": 2, "seed": 42, "batch_size": 3}
    accelerator = accelerate.Accelerator(mixed_precision="no")
    accelerate.utils.set_seed(config["seed"])
    loader = DataLoader(
        parts.Points(18), shuffle=True, batch_size=config["batch_size"], generator=parts.seeded(4)
    )
    eval_loader = DataLoader(parts.Points(11), shuffle=False, batch_size=config["batch_size"])
    model = nn.Sequential(parts.mlp(4, 8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    for weight in model[0].parameters():
        weight.requires_grad = False
    mean = torch.zeros(1, 4).to(accelerator.device)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer=optimizer, max_lr=config["lr"], epochs=2, steps_per_epoch=len(loader)
    )
    model, optimizer, loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, loader, eval_loader, schedule
    )
    accuracy = []
    for _ in range(config["num_epochs"]):
        model.train()
        for batch in loader:
            inputs, labels = (batch[k].to(accelerator.device) for k in ("pixel_values", "labels"))
            loss = nn.functional.cross_entropy(model(inputs - mean), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        accurate, num_elems = 0, 0
        for batch in eval_loader:
            with torch.no_grad():
                predictions = model(batch["pixel_values"]).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum().item()
        accuracy.append([accurate, num_elems])
    return {
        "accuracy": accuracy,
        "rate": optimizer.param_groups[0]["lr"],
        "weights": parts.fingerprint(model),
    }


def tokens_in_the_batch(accelerate, folder):
    """The loss of a window divided by its tokens on all ranks, not by its batches."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    model = parts.gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, parts.Sentences(16).loader())
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
                parts.update(accelerator, optimizer, loss)
    return {"weights": parts.fingerprint(model)}


def lora(accelerate, folder):
    """A PEFT model: adapters of a frozen decoder trained, checkpointed, saved alone and merged."""
    from peft import LoraConfig, PeftModel, get_peft_model

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    torch.manual_seed(5)
    model = get_peft_model(parts.gpt2(), config)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-1)
    ids = torch.randint(1, 20, (16, 5), generator=parts.seeded())
    loader = DataLoader(ids, batch_size=2)
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
            after_one = parts.fingerprint(model)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder / "adapter",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    alone = PeftModel.from_pretrained(parts.gpt2(), folder / "adapter")
    with torch.no_grad():
        logits = alone.merge_and_unload()(ids[:2]).logits
        torch.testing.assert_close(logits, unwrapped(ids[:2]).logits)
    accelerator.load_state(str(folder / "state"))
    return {
        "losses": losses,
        "files": sorted(os.listdir(folder / "adapter")),
        "again": parts.fingerprint(model) == after_one,
        "weights": after_one,
    }


def gan(accelerate, folder):
    """Two models, two optimizers, two schedules, and a detached half."""
    accelerator = accelerate.Accelerator()
    maker, critic = parts.mlp(4, 8, 4), parts.mlp(4, 8, 1)
    for_maker = torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.5, 0.999))
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.999))
    rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (for_maker, for_critic)]
    maker, critic, for_maker, for_critic, loader, *rates = accelerator.prepare(
        maker, critic, for_maker, for_critic, DataLoader(parts.points(16), batch_size=2), *rates
    )
    judge = nn.BCEWithLogitsLoss()
    noise_of = parts.seeded(accelerator.process_index)
    losses = []
    for real, _ in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        noise = torch.randn(real.shape, generator=noise_of)
        for_critic.zero_grad()
        fake = maker(noise)
        loss = judge(critic(real), ones) + judge(critic(fake.detach()), zeros)
        accelerator.backward(loss)
        for_critic.step()
        for_maker.zero_grad()
        loss_of_maker = judge(critic(fake), ones)
        accelerator.backward(loss_of_maker)
        for_maker.step()
        for rate in rates:
            rate.step()
        losses.append([loss.item(), loss_of_maker.item()])
    return {
        "losses": losses,
        "rates": [rate.get_last_lr()[0] for rate in rates],
        "weights": parts.fingerprint(maker) + parts.fingerprint(critic),
    }


LOOPS = {
    loop.__name__: loop
    for loop in (
        resume_in_mid_epoch,
        language_model,
        summarization,
        cv_example,
        tokens_in_the_batch,
        lora,
        gan,
    )
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LOOPS)
@on_ranks(2, timeout=200, imports=("transformers.models.gpt2.modeling_gpt2", "peft"))
def test_a_script_gives_accelerates_numbers(name, tmp_path):
    warnings.simplefilter("ignore")
    found = []
    for library in (notebook_accel, accelerate):
        # Accelerate's PartialState() alone makes a world of one on a CPU, whatever was launched.
        state = library.Accelerator(cpu=True).state
        folder = tmp_path / library.__name__
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        state.wait_for_everyone()
        found.append(LOOPS[name](library, folder))
        state.wait_for_everyone()
    assert list(differences(*found)) == []


def differences(ours, theirs, path=""):
    """Where two results differ: numbers by more than the order of sums explains."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        for key in theirs:
            yield from differences(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, (list, tuple)) and len(theirs) == len(ours):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif isinstance(theirs, float):
        if not math.isclose(theirs, ours, rel_tol=1e-5, abs_tol=1e-7):
            yield path, ours, theirs
    elif theirs != ours:
        yield path, ours, theirs
