"""Each known form of a memory fault, and each look-alike, as its library words it."""

import re

import pytest
import torch

from workup.measure.faults import FAULTS, classify, kind, sentence

CASES = [
    ("memory", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    ("memory", torch.OutOfMemoryError("Allocation on device ")),
    ("memory", torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later", 2)),
    ("memory", RuntimeError("CUDA error: out of memory")),
    ("memory", RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY")),
    ("memory", RuntimeError("cudaErrorMemoryAllocation")),
    ("memory", RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB")),
    ("memory", RuntimeError("HIP error: hipErrorOutOfMemory")),
    ("memory", RuntimeError("XPU out of memory. Tried to allocate 16.00 GiB")),
    ("memory", RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)")),
    ("memory", RuntimeError("MPS backend out of memory (MPS allocated: 9.06 GB, max: 9.07 GB)")),
    ("memory", RuntimeError("Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)")),
    ("memory", RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")),
    ("memory", RuntimeError("[enforce fail at CPUAllocator.cpp:76] data. DefaultCPUAllocator: not enough memory: 8")),
    ("memory", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    ("memory", RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    ("memory", MemoryError()),
    ("memory", RuntimeError("std::bad_alloc")),
    ("memory", OSError(12, "Cannot allocate memory")),
    ("memory", RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:1131")),
    ("dead", RuntimeError("CUDA error: device-side assert triggered")),
    ("dead", torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)),
    ("dead", RuntimeError("CUDA error: unspecified launch failure")),
    ("dead", RuntimeError("CUDA error: uncorrectable ECC error encountered")),
    ("launch", RuntimeError("CUDA error: invalid configuration argument")),
    ("launch", RuntimeError("Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true")),
    ("launch", RuntimeError("CUDA error: too many resources requested for launch")),
    ("ambiguous", RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. non-contiguous input")),
    ("ambiguous", RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")),
    ("ambiguous", RuntimeError("Unable to find a valid cuDNN algorithm to run convolution")),
    ("ambiguous", RuntimeError("FIND was unable to find an engine")),
    ("ambiguous", RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")),
    ("ambiguous", RuntimeError("miopenStatusUnknownError")),
    ("ambiguous", RuntimeError("could not create a primitive")),
    ("ambiguous", RuntimeError("the child process died (SIGABRT)")),
    ("ambiguous", RuntimeError("DataLoader worker (pid(s) 71) is killed by signal: Bus error. Raise shared memory.")),
    ("other", RuntimeError("the parser ran out of memory words.")),
    ("other", RuntimeError("I am out of memory. Or so says this test.")),
    ("other", RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 5x2)")),
    ("other", ValueError("CUDA out of memory")),
    ("other", KeyError("MemoryError")),
    ("other", FileNotFoundError(2, "No such file or directory")),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "error"), CASES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(CASES)])
def test_each_fault_is_known_for_what_it_is(expected, error):
    assert classify(error) == expected


def test_every_row_of_the_table_has_a_case_that_it_decides():
    texts = [f"{type(error).__name__}: {error}" for _, error in CASES]
    deciding = {next((i for i, (_, p) in enumerate(FAULTS) if re.search(p, text)), None) for text in texts}
    assert set(range(len(FAULTS))) <= deciding


def test_a_lost_context_outranks_the_memory_it_mentions():
    assert kind("RuntimeError: CUDA error: device-side assert triggered; CUDA error: out of memory") == "dead"


def test_a_trial_that_runs_out_of_cpu_memory_is_out_of_memory(make_workload):
    from workup import Trial
    from workup.measure.train import train

    def greedy(model, batch):
        torch.empty(2**50)
        return model(batch[0]).sum(1)

    trace = train(make_workload(loss=greedy), Trial(lr=0.1, steps=2, batch_size=4))
    assert (trace.status, len(trace.steps)) == ("out_of_memory", 0)


class Corrupt(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        raise ValueError("corrupt image")


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_data_set_raises_is_told_with_its_own_line_whichever_process_read_it(make_workload, workers):
    from workup import Trial
    from workup.measure.train import train

    workload = make_workload(train_data=Corrupt(), loader={"num_workers": workers})
    line = Corrupt.__getitem__.__code__.co_firstlineno + 1
    reason = train(workload, Trial(lr=0.1, steps=1, batch_size=4)).reason
    assert reason == f"step 0: ValueError: corrupt image (test_faults.py:{line})"


def test_an_error_without_a_line_of_the_users_is_its_type_and_first_line():
    assert sentence(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert sentence(MemoryError()) == "MemoryError"
