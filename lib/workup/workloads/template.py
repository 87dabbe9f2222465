"""My workload: what Workup needs to know about a training job. It runs as it is; put your own in its place.

workup check FILE:workload      # in seconds: can it be trained at all?
workup run FILE:workload        # the experiments, and what they say to change
"""

import torch
from torch import nn
from torch.nn import functional as F

from workup import Workload
from workup.workloads import data

# Any torch Datasets will do, map-style or iterable. Evaluation examples must not be in the training data.
train_data, eval_data = data.digits()


# A function that returns a fresh model, so that every trial starts from new weights under the trial's seed.
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


# One loss per example, shape [batch]: reduction="none". What a batch is, your data set and collate_fn decide.
def loss(model: nn.Module, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


# The optimizer you train with today, the learning rate left open.
def optimizer(params, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.01)


# Optional, beside the loss: anything per example, shape [batch].
def accuracy(model: nn.Module, batch):
    images, labels = batch
    return model(images).argmax(dim=-1).eq(labels).float()


workload = Workload(
    name="my-workload",
    model=model,
    train_data=train_data,
    eval_data=eval_data,
    loss=loss,
    optimizer=optimizer,
    batch_size=64,  # where you stand today
    lr=1e-3,
    max_train_steps=2000,
    metrics={"accuracy": accuracy},
    # schedule=lambda fraction: 1 - fraction,  # multiplies lr over the run; constant where left out
    # loader={"num_workers": 4},               # options of your DataLoader
    # precision="bf16",                        # fp32 where left out
)
