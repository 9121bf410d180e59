"""Words by which people look for a page: entries of the index, which the search finds first."""

WORDS = {
    "first-launch": "install, quickstart, getting started, tutorial",
    "from-accelerate": (
        "Cannot re-initialize CUDA in forked subprocess, migrate from accelerate, "
        "notebook_launcher of Accelerate"
    ),
    "guide/accelerator": (
        "loss different from one GPU, multiple gpus, 8 gpus, effective batch size, global batch "
        "size, gradient accumulation, gradient clipping, learning rate scheduler, scale "
        "learning rate, average metrics over gpus, gather predictions, print only once"
    ),
    "guide/checkpoints": (
        "resume training, save checkpoint, save model, load checkpoint, continue training, spot "
        "instance"
    ),
    "guide/detached": "keep training after closing notebook, close the browser, overnight",
    "guide/ends": (
        "early stopping, stop training, cancel, interrupt, hang, stuck, deadlock, freezes, nccl "
        "timeout, watchdog, segfault, kernel died, debugger, pdb, notification, email when done"
    ),
    "guide/knobs": (
        "change learning rate while training, pause training, slider, free the gpu for a while"
    ),
    "guide/lightning": "pytorch lightning, fastai, lightning trainer",
    "guide/loaders": (
        "shuffle, random seed, iterable dataset, webdataset, num_workers, uneven batches"
    ),
    "guide/machines": (
        "multi node, multi-node, multiple nodes, two machines, cluster, slurm, ray cluster, "
        "rendezvous"
    ),
    "guide/panel": (
        "progress bar, tqdm, plot loss, loss curve, slow training, gpu utilization, dataloader "
        "bottleneck, compare runs"
    ),
    "guide/precision": (
        "T4, V100, P100, nan, loss is nan, inf, overflow, fp16, bf16, half precision, mixed "
        "precision, amp, GradScaler"
    ),
    "guide/runs": "return value, get the trained model, background training, non-blocking",
    "guide/scripts": "torchrun, python script, command line training, export to a script",
    "guide/sessions": "interactive distributed, run a cell on all gpus, ipyparallel",
    "guide/settings": (
        "choose gpu, CUDA_VISIBLE_DEVICES, which gpu, accelerate config, config file, yaml"
    ),
    "guide/sweeps": (
        "hyperparameter search, hyperparameter tuning, grid search, random search, optuna, "
        "pruning, ray tune"
    ),
    "guide/tpus": "TPU, torch_xla",
    "guide/trackers": "wandb, weights and biases, tensorboard, mlflow, experiment tracking",
    "guide/trainer": "huggingface trainer, transformers, TRL, SFTTrainer, fine tuning",
    "guide/what-ranks-have": (
        "pickle error, global variables, imports in cells, name is not defined"
    ),
    "reference/platforms": (
        "kaggle, google colab, colab, vscode, VS Code, windows, mac, WSL, gpu support"
    ),
    "strategies/context": "long context, long sequences, ring attention",
    "strategies/ddp": "find_unused_parameters, DistributedDataParallel, data parallel",
    "strategies/deepspeed": "deepspeed, ZeRO, ZeRO-3, zero offload",
    "strategies/fsdp": "fsdp, shard a model, model too large for one gpu, cpu offload, FSDP2",
    "strategies/pipeline": "pipeline parallel, split layers over gpus",
    "strategies/tensor": "tensor parallel, split a layer over gpus",
    "troubleshooting": "OOM, out of memory, CUDA out of memory, error message",
}
