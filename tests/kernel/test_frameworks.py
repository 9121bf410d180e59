"""Training functions of other frameworks run unchanged, as a world of 2."""

import pytest

from tests.kernel.notebooks import open_notebook


@pytest.fixture(scope="module")
def book():
    """A notebook of somebody who has no network."""
    with open_notebook({"HF_HUB_OFFLINE": "1"}) as notebook:
        notebook.run(_DATA)
        yield notebook


_DATA = """
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from notebook_accel import notebook_launcher

inputs = torch.randn(32, 4)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

def loss_of(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

def weights(model):
    return model.weight.detach().clone()

def made():
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def fit(model, optimizer, loader, backward):
    for steps, batch in enumerate(loader, 1):
        optimizer.zero_grad()
        backward(loss_of(model, batch))
        optimizer.step()
    return steps

def check(run, steps):
    (size, count, first), (_, _, second) = run
    assert (size, count) == (2, steps), (size, count)
    # Ranks that trained on their own would have gone apart.
    assert torch.equal(first, second)
"""


def test_plain_ddp(book):
    book.run("""
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        def train():
            dist.init_process_group("gloo")
            model, optimizer = made()
            model = DistributedDataParallel(model)
            loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
            steps = fit(model, optimizer, loader, torch.Tensor.backward)
            size = dist.get_world_size()
            dist.destroy_process_group()
            return size, steps, weights(model.module)

        check(notebook_launcher(train, num_processes=2), 4)
    """)


def test_hugging_face_accelerate(book):
    book.run("""
        def train():
            from accelerate import Accelerator

            accelerator = Accelerator()
            loader = DataLoader(data, batch_size=4, shuffle=True)
            model, optimizer, loader = accelerator.prepare(*made(), loader)
            steps = fit(model, optimizer, loader, accelerator.backward)
            seen = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index]))
            assert seen.tolist() == [0, 1]
            assert accelerator.device.type == "cpu"
            return accelerator.num_processes, steps, weights(accelerator.unwrap_model(model))

        check(notebook_launcher(train, num_processes=2, devices="cpu"), 4)
    """)


def test_lightning_fabric(book):
    book.run("""
        def train():
            from lightning_fabric import Fabric

            fabric = Fabric(accelerator="cpu", devices=2)
            fabric.launch()
            model, optimizer = fabric.setup(*made())
            loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4))
            steps = fit(model, optimizer, loader, fabric.backward)
            assert fabric.all_gather(torch.tensor(fabric.global_rank)).tolist() == [0, 1]
            return fabric.world_size, steps, weights(model.module)

        check(notebook_launcher(train, num_processes=2, devices="cpu"), 4)
    """)


# Both ranks import transformers: 15 s of two cores, of which a busy machine has few left.
@pytest.mark.timeout(300)
def test_transformers_trainer(book):
    book.run(
        """
        import copy, os, pickle, tempfile
        from accelerate import PartialState
        from transformers import TrainingArguments

        # Both are made in the notebook, which is a world of one.
        folder = tempfile.TemporaryDirectory()
        arguments = TrainingArguments(
            output_dir=folder.name,
            per_device_train_batch_size=4,
            max_steps=3,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        )
        state = PartialState()
        assert state.num_processes == arguments.world_size == 1

        def train():
            from transformers import BertConfig, BertForSequenceClassification, Trainer

            rank = int(os.environ["RANK"])
            pickle.dumps(copy.deepcopy(arguments))
            assert not torch.distributed.is_initialized()
            assert arguments.process_index == state.process_index == rank
            shape = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
            config = BertConfig(vocab_size=50, intermediate_size=16, num_labels=2, **shape)
            model = BertForSequenceClassification(config)
            texts = [
                dict(input_ids=torch.randint(50, (8,)), labels=torch.tensor(number % 2))
                for number in range(24)
            ]
            trainer = Trainer(model=model, args=arguments, train_dataset=texts)
            trainer.train()
            trainer.save_model(folder.name)
            assert arguments.should_save == state.is_main_process == (rank == 0)
            steps = trainer.state.global_step
            return arguments.world_size, steps, weights(model.classifier)

        check(notebook_launcher(train, num_processes=2, devices="cpu"), 3)
        assert os.path.exists(os.path.join(folder.name, "training_args.bin"))
        folder.cleanup()
    """,
        timeout=250,
    )
