"""Sweeps of settings, beside Optuna's own loop and Ray Tune.

Each round has a fresh IPython kernel for each contender, in turn. Measured are: 100 trials that
only log one value, on two cores, a trial of ours as a multiple of one launch of the same function;
and 8 settings of a small training of 8 epochs: until all have ended, and, with a median pruner,
until the best is known, ours with and without turns. Optuna (``n_jobs=2``) trains in threads of the
kernel; Ray Tune in its own processes, two at a time, its start counted apart.
"""

from __future__ import annotations

import importlib.util

from timing import Kernel, Measurement, arguments, interleave, median, seconds, table

FUNCTIONS = """
import json, time, torch
from torch import nn

LRS = [3.0, 1e-1, 1e-5, 3e-2, 1e-4, 1e-2, 1e-3, 1.0]

def epochs(lr, num_epochs=8):
    # A small network learns which of two vectors is longer.
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(20_000, 64)
    y = (x[:, :32].norm(dim=1) > x[:, 32:].norm(dim=1)).long()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)
    for _ in range(num_epochs):
        total = 0.0
        for a, b in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            total += loss.item()
        yield total / len(loader)

def tell(**found):
    print("BENCHMARK " + json.dumps(found))
"""
OURS = """
from notebook_accel import Accelerator, notebook_launcher, sweep

def nothing(x):
    Accelerator().log({"loss": float(x)}, step=0)

def train(lr):
    accelerator = Accelerator()
    for epoch, loss in enumerate(epochs(lr)):
        accelerator.log({"loss": loss}, step=epoch)
        if accelerator.should_stop:
            break

def trials(number):
    return sweep(nothing, {"x": list(range(number))}, metric="loss", devices="cpu")

def settings(**asked):
    begin = time.time()
    found = sweep(train, {"lr": LRS}, metric="loss", devices="cpu", concurrent=2, **asked)
    return time.time() - begin, found
"""
OPTUNA = """
import optuna
optuna.logging.set_verbosity(optuna.logging.WARNING)

def study(function, name, values, **asked):
    begin = time.time()
    made = optuna.create_study(sampler=optuna.samplers.GridSampler({name: values}), **asked)
    made.optimize(function, n_trials=len(values), n_jobs=2)
    return time.time() - begin, made

def nothing(trial):
    return float(trial.suggest_categorical("x", range(100)))

def train(trial):
    for epoch, loss in enumerate(epochs(trial.suggest_categorical("lr", LRS))):
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return loss
"""
RAY = """
import logging, ray
from ray import tune
begin = time.time()
ray.init(num_cpus=2, log_to_driver=False, logging_level=logging.ERROR)
start = time.time() - begin

def fit(function, space):
    begin = time.time()
    made = tune.TuneConfig(metric="loss", mode="min")
    found = tune.Tuner(
        function, param_space=space, tune_config=made, run_config=tune.RunConfig(verbose=0)
    ).fit()
    return time.time() - begin, found

def nothing(config):
    tune.report({"loss": float(config["x"])})

def train(config):
    for loss in epochs(config["lr"]):
        tune.report({"loss": loss})
"""


def ours(quick: bool) -> Measurement:
    number = 10 if quick else 100
    with Kernel.open() as kernel:
        kernel.run(FUNCTIONS + OURS)
        launch = 'notebook_launcher(nothing, (1,), num_processes=1, devices="cpu")'
        launches = sorted(kernel.run(launch)["wall"] for _ in range(11))
        found = {"launch": launches[5]}
        found["trial"] = kernel.run(f"trials({number})", limit=300)["wall"] / number
        kernel.run("import optuna; pruner = optuna.pruners.MedianPruner(n_startup_trials=2)")
        for name, asked in {
            "all": "",
            "pruned": "pruner=pruner",
            "turns": "rounds=8",
            "turns, pruned": "rounds=8, pruner=pruner",
        }.items():
            cell = f"spent, s = settings({asked}); tell(spent=spent, best=s.best.state.arguments)"
            reply = kernel.run(cell, limit=300)
            found |= {name: reply["spent"], f"{name}, best": reply["best"]}
    return found


def optuna(_quick: bool) -> Measurement:
    with Kernel.open() as kernel:
        kernel.run(FUNCTIONS + OPTUNA)
        cell = "tell(spent=study(nothing, 'x', range(100))[0])"
        found = {"trial": kernel.run(cell)["spent"] / 100}
        for name, asked in {
            "all": "pruner=optuna.pruners.NopPruner()",
            "pruned": "pruner=optuna.pruners.MedianPruner(n_startup_trials=2)",
        }.items():
            cell = (
                f"spent, s = study(train, 'lr', LRS, {asked}); "
                "tell(spent=spent, best=s.best_params)"
            )
            reply = kernel.run(cell, limit=300)
            found |= {name: reply["spent"], f"{name}, best": str(reply["best"])}
    return found


def ray_tune(quick: bool) -> Measurement:
    number = 5 if quick else 20  # each has a process of its own, which imports torch
    with Kernel.open() as kernel:
        kernel.run(FUNCTIONS + RAY, limit=300)
        found = {"start": kernel.run("tell(start=start)")["start"]}
        cell = f"tell(spent=fit(nothing, {{'x': tune.grid_search(list(range({number})))}})[0])"
        found["trial"] = kernel.run(cell, limit=600)["spent"] / number
        # Not its median rule: that pauses trials, which begin anew unless the function saves and
        # loads checkpoints of its own.
        cell = (
            "spent, s = fit(train, {'lr': tune.grid_search(LRS)}); "
            "tell(spent=spent, best=s.get_best_result().config)"
        )
        reply = kernel.run(cell, limit=300)
        found |= {"all": reply["spent"], "all, best": str(reply["best"])}
    return found


CONTENDERS = {"notebook_accel": ours, "optuna": optuna}
if importlib.util.find_spec("ray") and importlib.util.find_spec("pyarrow"):
    CONTENDERS["ray tune"] = ray_tune
ROWS = {
    "launch": "a launch of a function that logs one value, one rank",
    "start": "its own start, once",
    "trial": "one of 100 trials of that function (of Ray's 20), two at a time",
    "all": "8 settings of 8 epochs, all to their ends",
    "pruned": "with a median pruner",
    "turns": "all to their ends, in turns",
    "turns, pruned": "in turns, with a median pruner",
}


def main() -> None:
    options = arguments(__doc__, repeats=3).parse_args()
    repeats = 1 if options.quick else options.repeats
    found = interleave(
        list(CONTENDERS), repeats, measure=lambda name: CONTENDERS[name](options.quick)
    )
    print(
        table(
            [
                {"what": text, **{n: seconds(median(found[n], key)) for n in CONTENDERS}}
                for key, text in ROWS.items()
            ]
        )
    )
    of_launch = [one["trial"] / one["launch"] for one in found["notebook_accel"]]
    print(f"a trial as a multiple of a launch: {min(of_launch):.2f} to {max(of_launch):.2f}")
    for name, each in found.items():
        best = {value for one in each for key, value in one.items() if key.endswith(", best")}
        print(f"the best of {name}: {', '.join(sorted(best))}")


if __name__ == "__main__":
    main()
