"""What transformers, TRL, Lightning, fastai and a SummaryWriter log are metrics of the run.

They are saved, paused and stopped at a step as well. The functions are as public examples have
them. What is not installed is skipped: `make test-libraries` installs all.
"""

import csv
import importlib.util
import re
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import RunStopped, notebook_launcher
from notebook_accel.launch.worker.library_metrics import lightning_callbacks
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)


def needs(*libraries):
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {missing}: make test-libraries")


class Slow:
    """Data of a validation that takes 15 s on one rank, and says that it has begun."""

    def __init__(self, data, folder):
        self.data, self.begun = data, Path(folder) / "validates"

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.begun.touch()
        time.sleep(15 / len(self.data))
        return self.data[index]


def logged(run):
    return [(row["rank"], row["step"], row["name"], row["value"]) for row in run.metrics]


def fine_tune(folder, epochs=2, slow=False):
    from torch.utils.tensorboard import SummaryWriter
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=50, intermediate_size=16, num_labels=2, **shape)
    texts = [{"input_ids": torch.randint(50, (8,)), "labels": number % 2} for number in range(24)]
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2 if slow else 8,
        num_train_epochs=epochs,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="tensorboard",
        use_cpu=True,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=texts,
        eval_dataset=Slow(texts, folder) if slow else texts,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        with SummaryWriter(folder) as writer:
            for step in (7, 8):
                writer.add_scalar("mine", torch.tensor(step / 2, requires_grad=True), step)
                writer.add_scalars("both", {"a": 1, "b": 2}, step)
    return trainer.state.log_history


@needs("transformers", "tensorboard")
def test_a_trainer_and_a_summary_writer(tmp_path):
    run = notebook_launcher(fine_tune, args=(str(tmp_path),), num_processes=2, devices="cpu")
    own = [(0, 7, "mine", 3.5), (0, 7, "both/a", 1), (0, 7, "both/b", 2)]
    own += [(0, 8, "mine", 4), (0, 8, "both/a", 1), (0, 8, "both/b", 2)]
    # In its history each entry has the epoch; what was reported for a step is not reported again.
    expected = dict.fromkeys(
        (0, entry["step"], name, value)
        for entry in run[0]
        for name, value in entry.items()
        if name != "step"
    )
    assert [row for row in logged(run) if row in own] == own
    assert "requires_grad" not in run.logs()
    assert sorted(row for row in logged(run) if row not in own) == sorted(expected)
    assert {"loss", "eval_loss", "learning_rate"} <= {row["name"] for row in run.metrics}
    # One bar of the training, by rank 0, beside those of the evaluations.
    assert [(bar.rank, bar.total) for bar in run.progress] == [(0, 6), (0, 2), (0, 2)]
    # Their own tracker has its names.
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("events.*"))
    assert b"train/loss" in written
    assert b"eval/loss" in written


def fit(folder, has_logger, epochs=2, slow=False):
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger

    class Regression(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, _):
            loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, _):
            loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
            self.log("val_loss", loss, sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    inputs = torch.randn(32, 4)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=epochs,
        min_epochs=epochs,
        log_every_n_steps=1,
        default_root_dir=folder,
        logger=CSVLogger(folder) if has_logger else False,
        enable_model_summary=False,
        num_sanity_val_steps=0 if slow else 2,
    )
    validated = DataLoader(Slow(data, folder) if slow else data, batch_size=4)
    trainer.fit(Regression(), DataLoader(data, batch_size=4), validated)
    drawn = trainer.progress_bar_callback.get_metrics(trainer, trainer.lightning_module)
    return (
        str(trainer.checkpoint_callback.dirpath),
        [type(trainer.logger).__name__, str(drawn.get("v_num"))],
        trainer.world_size,
    )


@pytest.mark.long
@needs("lightning")
def test_a_lightning_trainer(tmp_path):
    arguments = {"num_processes": 2, "devices": "cpu"}
    run = notebook_launcher(fit, args=(str(tmp_path), True), **arguments)
    folder = tmp_path / "lightning_logs" / "version_0"
    assert run[0] == (str(folder / "checkpoints"), ["CSVLogger", "0"], 2)
    with (folder / "metrics.csv").open() as file:
        written = {
            (name, int(row["step"])): float(value)
            for row in csv.DictReader(file)
            for name, value in row.items()
            if name != "step" and value
        }
    found = {(row["name"], row["step"]): row["value"] for row in run.metrics}
    assert found == pytest.approx(written)
    assert len(found) == len(run.metrics)
    assert {"train_loss_step", "train_loss_epoch", "val_loss"} <= {name for name, _ in found}

    # Where rich is installed, too, Lightning draws bars that the notebook shows.
    bars = [(bar.rank, bar.name, bar.n, bar.total) for bar in run.progress]
    assert [bar for bar in bars if bar[1].startswith("Epoch")] == [(0, "Epoch 1", 4, 4)]

    without = notebook_launcher(fit, args=(str(tmp_path / "none"), False), **arguments)
    assert without[0] == (str(tmp_path / "none" / "checkpoints"), ["NoneType", "None"], 2)
    reported = {(row["name"], row["step"]) for row in without.metrics}
    assert reported == {key for key in found if key[0] != "epoch"}


def test_lightning_gets_nothing_outside_of_ranks():
    assert lightning_callbacks() == []


def new_learner(folder, slow=False):
    from fastai.basics import DataLoaders, Learner, accuracy
    from fastai.callback import progress, schedule  # noqa: F401  as fastai.vision.all does
    from fastai.losses import CrossEntropyLossFlat

    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    validated = Slow(data, folder) if slow else data
    loaders = DataLoaders(DataLoader(data, batch_size=8), DataLoader(validated, batch_size=8))
    model = torch.nn.Linear(4, 2)
    return Learner(loaders, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, path=folder)


def learn(folder, epochs=2, slow=False):
    learner = new_learner(folder, slow)
    before = learner.validate()
    learner.fit(epochs, lr=0.1)
    learner.fit(1, lr=0.01)
    values = list(learner.recorder.values)
    assert len(before) == len(learner.validate()) == 2
    return values


@pytest.mark.long
@needs("fastai")
def test_a_fastai_learner(tmp_path):
    run = notebook_launcher(learn, args=(str(tmp_path),), num_processes=1, devices="cpu")
    steps = {
        name: [row["step"] for row in run.metrics if row["name"] == name]
        for name in ("train_loss", "valid_loss", "accuracy")
    }
    each = [8, 16, 24]
    assert steps == {"train_loss": list(range(1, 25)), "valid_loss": each, "accuracy": each}
    bars = [(bar.name, bar.n, bar.total) for bar in run.progress]
    assert bars == [("epoch 0", 8, 8), ("epoch 1", 8, 8), ("epoch 0", 8, 8)]
    last = {row["name"]: row["value"] for row in run.metrics}
    train_loss, valid_loss, accuracy = run[0][-1]
    assert last["accuracy"] == pytest.approx(accuracy)
    assert last["valid_loss"] == pytest.approx(valid_loss)
    assert last["train_loss"] == pytest.approx(train_loss)


def align(folder):
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *"abcde"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>"
    )
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=len(words)))
    arguments = SFTConfig(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"text": ["a b c", "b c d", "c d e", "a e b"] * 4}),
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer.state.log_history


@pytest.mark.long
@needs("trl", "datasets", "tokenizers")
def test_a_trainer_of_trl(tmp_path):
    run = notebook_launcher(align, args=(str(tmp_path),), num_processes=2, devices="cpu")
    losses = [(entry["step"], entry["loss"]) for entry in run[0] if "loss" in entry]
    found = [(row["step"], row["value"]) for row in run.metrics if row["name"] == "loss"]
    assert found == losses
    assert len(losses) == 2
    assert "mean_token_accuracy" in {row["name"] for row in run.metrics}


@pytest.mark.parametrize(
    ("function", "args", "num_ranks", "saved"),
    [
        pytest.param(fine_tune, (), 2, "checkpoint-*", marks=needs("transformers", "tensorboard")),
        pytest.param(
            fit, (False,), 2, "checkpoints/step=*", marks=[needs("lightning"), pytest.mark.long]
        ),
        pytest.param(learn, (), 1, "", marks=[needs("fastai"), pytest.mark.long]),
    ],
)
def test_a_training_is_saved_paused_and_stopped_at_a_step(
    function, args, num_ranks, saved, tmp_path
):
    run = notebook_launcher(
        function,
        (str(tmp_path), *args),
        kwargs={"epochs": 100_000},
        num_processes=num_ranks,
        devices="cpu",
        block=False,
    )
    eventually(lambda: bool(run.metrics), within=100, what="it trains")
    run.save()
    run.pause()
    assert run.status == "paused"
    run.go_on()
    run.stop()
    # What comes after the training runs as well, and its value is there.
    assert None not in run.wait(60).results
    assert run.status == "stopped"
    paused, goes_on = re.findall(r"(?:paused|goes on) \(step ([\d,]+)\)", run.logs(0))
    assert paused == goes_on != "0"
    assert not saved or len([*tmp_path.glob(saved)]) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "args", "num_ranks"),
    [
        pytest.param(fine_tune, (), 2, marks=needs("transformers", "tensorboard")),
        pytest.param(fit, (False,), 2, marks=needs("lightning")),
        pytest.param(learn, (), 1, marks=needs("fastai")),
    ],
)
def test_a_stop_waits_for_the_end_of_a_validation(function, args, num_ranks, tmp_path):
    run = notebook_launcher(
        function,
        (str(tmp_path), *args),
        kwargs={"epochs": 100_000, "slow": True},
        num_processes=num_ranks,
        devices="cpu",
        block=False,
        grace=1,
    )
    validates = lambda: run.metrics and (tmp_path / "validates").exists()  # noqa: E731
    eventually(validates, within=100, what="it has trained, and validates")
    run.stop()
    assert None not in run.wait(100).results
    assert run.status == "stopped"


@pytest.mark.long
@needs("fastai")
def test_a_stop_within_a_search_for_a_learning_rate_fails_nothing(tmp_path):
    def search(folder):
        new_learner(folder).lr_find(num_it=10**6, stop_div=False, show_plot=False)

    run = notebook_launcher(search, (str(tmp_path),), num_processes=1, block=False)
    eventually(lambda: run.state.ranks[0].steps > 20, what="it searches")
    run.stop()
    with pytest.raises(RunStopped):
        run.wait(60)
