"""Trains a small denoiser on captioned noise; counts by steps, as train_text_to_image.py does."""

import argparse
import json
import os
import shutil

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.nn import functional

logger = get_logger(__name__, log_level="INFO")


class Denoiser(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.config = {"width": width}
        self.down = nn.Conv2d(3, width, 3, padding=1)
        self.mid = nn.Linear(4, width)
        self.up = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, noisy, caption):
        hidden = functional.silu(self.down(noisy)) + self.mid(caption)[:, :, None, None]
        return self.up(hidden)

    def save_pretrained(self, folder):
        os.makedirs(folder, exist_ok=True)
        torch.save({"config": self.config, "weights": self.state_dict()}, f"{folder}/model.pt")

    @classmethod
    def from_pretrained(cls, folder):
        saved = torch.load(f"{folder}/model.pt")
        model = cls(**saved["config"])
        model.load_state_dict(saved["weights"])
        return model


class Average:
    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay

    @torch.no_grad()
    def step(self, parameters):
        for mean, new in zip(self.model.parameters(), parameters, strict=True):
            mean.lerp_(new, 1 - self.decay)


def parse_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_train_steps", type=int, required=True)
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--checkpointing_steps", type=int, default=2)
    parser.add_argument("--checkpoints_total_limit", type=int, default=1)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        project_config=ProjectConfiguration(project_dir=args.output_dir),
    )
    set_seed(0)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    unet = Denoiser()
    ema = Average(Denoiser())
    ema.model.load_state_dict(unet.state_dict())

    def save_model_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            ema.model.save_pretrained(os.path.join(output_dir, "unet_ema"))
            for model in models:
                model.save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()

    def load_model_hook(models, input_dir):
        ema.model.load_state_dict(
            Denoiser.from_pretrained(os.path.join(input_dir, "unet_ema")).state_dict()
        )
        for _ in range(len(models)):
            model = models.pop()
            saved = Denoiser.from_pretrained(os.path.join(input_dir, "unet"))
            model.load_state_dict(saved.state_dict())

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)

    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-2)
    images = torch.randn(24, 3, 6, 6)
    captions = torch.randn(24, 4)
    train_dataloader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images, captions), shuffle=True, batch_size=2
    )
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, optimizer, train_dataloader, lr_scheduler
    )
    steps_an_epoch = -(-len(train_dataloader) // args.gradient_accumulation_steps)

    global_step = first_epoch = 0
    if args.resume_from_checkpoint == "latest":
        dirs = [d for d in os.listdir(args.output_dir) if d.startswith("checkpoint")]
        path = sorted(dirs, key=lambda name: int(name.split("-")[1]))[-1]
        accelerator.print(f"Resuming from checkpoint {path}")
        accelerator.load_state(os.path.join(args.output_dir, path))
        global_step = int(path.split("-")[1])
        first_epoch = global_step // steps_an_epoch

    losses = {}
    for _ in range(first_epoch, 10):
        train_loss = 0.0
        for pixels, caption in train_dataloader:
            with accelerator.accumulate(unet):
                generator = torch.Generator().manual_seed(global_step)
                noise = torch.randn(pixels.shape, generator=generator)
                predicted = unet(pixels + noise, caption)
                loss = functional.mse_loss(predicted.float(), noise.float())
                gathered = accelerator.gather(loss.repeat(len(pixels))).mean()
                train_loss += gathered.item() / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            if accelerator.sync_gradients:
                ema.step(unet.parameters())
                global_step += 1
                losses[global_step] = train_loss
                train_loss = 0.0

                if global_step % args.checkpointing_steps == 0:
                    if accelerator.is_main_process:
                        # Before the next one there are at most `checkpoints_total_limit - 1`.
                        found = [
                            d for d in os.listdir(args.output_dir) if d.startswith("checkpoint")
                        ]
                        found.sort(key=lambda name: int(name.split("-")[1]))
                        num_to_remove = len(found) - args.checkpoints_total_limit + 1
                        for name in found[: max(0, num_to_remove)]:
                            shutil.rmtree(os.path.join(args.output_dir, name))
                        save_path = os.path.join(args.output_dir, f"checkpoint-{global_step}")
                        accelerator.save_state(save_path)
                        logger.info(f"Saved state to {save_path}")

            if global_step >= args.max_train_steps:
                break
        if global_step >= args.max_train_steps:
            break

    accelerator.wait_for_everyone()
    average = sum(weight.sum().item() for weight in ema.model.parameters())
    result = {"losses": losses, "average": average}
    with open(f"{args.output_dir}/rank_{accelerator.process_index}.json", "w") as file:
        json.dump(result, file)
    if accelerator.is_main_process:
        accelerator.unwrap_model(unet).save_pretrained(os.path.join(args.output_dir, "unet"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
