"""Trains a small denoiser by epochs and skips batches, as train_unconditional.py does."""

import argparse
import json
import os
import shutil
from contextlib import suppress

import accelerate
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.nn import functional


def parse_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--stop_after", type=int, default=100)
    parser.add_argument("--resume_from_checkpoint")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    accelerator = Accelerator(
        cpu=True,
        log_with=None,
        project_config=ProjectConfiguration(project_dir=args.output_dir, logging_dir="logs"),
        kwargs_handlers=[InitProcessGroupKwargs()],
    )
    set_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1))
    average = torch.optim.swa_utils.AveragedModel(model)
    if hasattr(accelerate, "Accelerator"):

        def save_model_hook(models, weights, output_dir):
            if accelerator.is_main_process:
                torch.save(average.state_dict(), os.path.join(output_dir, "ema.pt"))

        def load_model_hook(models, input_dir):
            average.load_state_dict(torch.load(os.path.join(input_dir, "ema.pt")))

        accelerator.register_save_state_pre_hook(save_model_hook)
        accelerator.register_load_state_pre_hook(load_model_hook)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(torch.randn(24, 1, 6, 6), batch_size=2, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if accelerator.is_main_process:
        accelerator.init_trackers("train_unconditional")

    global_step = first_epoch = resume_step = 0
    if args.resume_from_checkpoint == "latest":
        dirs = [d for d in os.listdir(args.output_dir) if d.startswith("checkpoint")]
        path = max(dirs, key=lambda name: int(name.split("-")[1]))
        accelerator.load_state(os.path.join(args.output_dir, path))
        global_step = int(path.split("-")[1])
        first_epoch, resume_step = divmod(global_step, len(loader))

    losses = {}
    with suppress(StopIteration):
        for epoch in range(first_epoch, args.num_epochs):
            model.train()
            resumed = epoch == first_epoch and resume_step
            active = accelerator.skip_first_batches(loader, resume_step) if resumed else loader
            for clean in active:
                noise = torch.randn(
                    clean.shape, generator=torch.Generator().manual_seed(global_step)
                )
                with accelerator.accumulate(model):
                    loss = functional.mse_loss(model(clean + noise), noise)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    average.update_parameters(accelerator.unwrap_model(model))
                    global_step += 1
                    if accelerator.is_main_process and global_step % 4 == 0:
                        kept = [
                            d for d in os.listdir(args.output_dir) if d.startswith("checkpoint")
                        ]
                        kept.sort(key=lambda name: int(name.split("-")[1]))
                        for name in kept[:-1]:
                            shutil.rmtree(os.path.join(args.output_dir, name))
                        accelerator.save_state(
                            os.path.join(args.output_dir, f"checkpoint-{global_step}")
                        )
                losses[global_step] = loss.detach().item()
                accelerator.log({"loss": losses[global_step]}, step=global_step)
                if global_step == args.stop_after:
                    raise StopIteration
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                unwrapped = accelerator.unwrap_model(model)
                torch.save(unwrapped.state_dict(), os.path.join(args.output_dir, "model.pt"))
    mean = sum(value.float().sum().item() for value in average.state_dict().values())
    with open(f"{args.output_dir}/rank_{accelerator.process_index}.json", "w") as file:
        json.dump({"losses": losses, "average": mean}, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
