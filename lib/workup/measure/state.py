"""Leave the process as it was found: whatever is measured inside changes nothing outside."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from workup.measure import devices


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restore global state on leaving, also after an exception or an interrupt.

    Restored: the random states of python, numpy, torch and every accelerator; the
    default dtype; cudnn's switches; deterministic mode; matmul precision; grad mode.
    """
    cudnn = torch.backends.cudnn
    kept_python, kept_numpy, kept_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    restore_accelerators = devices.random_streams()
    kept_dtype, kept_grad = torch.get_default_dtype(), torch.is_grad_enabled()
    kept_cudnn = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic)
    kept_exact = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    kept_matmul = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        random.setstate(kept_python)
        np.random.set_state(kept_numpy)
        torch.set_rng_state(kept_torch)
        restore_accelerators()
        torch.set_default_dtype(kept_dtype)
        torch.set_grad_enabled(kept_grad)
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = kept_cudnn
        torch.use_deterministic_algorithms(kept_exact[0], warn_only=kept_exact[1])
        torch.set_float32_matmul_precision(kept_matmul)


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def evaluating(model: nn.Module, device: str) -> Iterator[None]:
    """Evaluation mode without gradients and with fixed randomness.

    Each module's own training flag comes back as it was (a frozen batch norm stays in
    evaluation mode), and so does the random stream that training draws from: a trial trains
    the same whether or not it is evaluated on the way.
    """
    flags = [(module, module.training) for module in model.modules()]
    with devices.forked_random(device, seed=0), torch.no_grad():
        for module, _ in flags:
            module.training = False
        try:
            yield
        finally:
            for module, training in flags:
                module.training = training
