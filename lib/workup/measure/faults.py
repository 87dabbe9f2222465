"""What an exception in a training step means: memory, a limit of the kernel launch, a dead device, or a plain error."""

import re
import traceback
from pathlib import Path

import torch

#: kind -> patterns of ``Type: message``, read from the top: the first that matches decides.
#: ``dead``: the device's context is lost, only a new process helps. ``launch``: too many blocks
#: or indices for one kernel, whatever memory there is. ``ambiguous``: libraries that report a
#: failed workspace allocation and a real fault alike; a smaller size that runs confirms memory.
FAULTS = (
    ("dead", r"device-side assert"),
    ("dead", r"illegal memory access|cudaErrorIllegalAddress|misaligned address"),
    ("dead", r"unspecified launch failure|uncorrectable (NVLink|ECC) error|illegal instruction"),
    ("memory", r"CUDA(?: error:|:)? ?out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"),
    ("memory", r"HIP(?: error:|:)? ?out of memory|hipErrorOutOfMemory"),
    ("memory", r"XPU(?: error:|:)? ?out of memory|UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST|RESOURCES)"),
    ("memory", r"MPS backend out of memory|kIOGPUCommandBufferCallbackErrorOutOfMemory"),
    ("memory", r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"),
    ("memory", r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|NCCL)_STATUS_ALLOC_FAILED"),
    ("memory", r"(?:^|\W)(?:MemoryError|OutOfMemoryError|std::bad_alloc)|Cannot allocate memory|can't allocate memory"),
    ("memory", r"NVML_SUCCESS == r INTERNAL ASSERT FAILED"),  # the CUDA allocator, short of memory, failing to report
    ("launch", r"invalid configuration argument|cudaErrorInvalidConfiguration|CUDA error: invalid argument"),
    ("launch", r"canUse32BitIndexMath|integer out of range|too many resources requested for launch"),
    ("ambiguous", r"CUDNN_STATUS_(?:NOT_SUPPORTED|INTERNAL_ERROR|EXECUTION_FAILED|NOT_INITIALIZED)"),
    ("ambiguous", r"[Uu]nable to find a valid (?:cuDNN|convolution) algorithm|FIND was unable to find an engine"),
    ("ambiguous", r"CUBLAS_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)"),
    ("ambiguous", r"miopenStatus(?:UnknownError|InternalError)|could not (?:create|execute) a primitive"),
    ("ambiguous", r"the child process died|DataLoader worker \(pid.*killed by signal: (?:Killed|Bus error)"),
)
#: Where no line is the user's own.
OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


def classify(error: BaseException) -> str:
    """The kind of fault: ``memory``, ``ambiguous``, ``launch``, ``dead`` or ``other``.

    By type where torch has one, then by message.

    >>> classify(MemoryError())
    'memory'
    >>> classify(ValueError("the word memory proves nothing"))
    'other'
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "memory"
    if not isinstance(error, (RuntimeError, OSError)):
        return "other"
    return kind(f"{type(error).__name__}: {error}")


def kind(text: str) -> str:
    """As :func:`classify`, of an exception already turned to ``Type: message``.

    >>> kind("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    'ambiguous'
    """
    return next((name for name, pattern in FAULTS if re.search(pattern, text)), "other")


def sentence(error: BaseException) -> str:
    """``Type: message (file:line)``, its first line only, at the user's own innermost line.

    Also of an exception in a loader's worker, which torch raises again with the worker's traceback for a message.
    """
    text, said = str(error).strip(), type(error).__name__
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if re.match(r"Caught \w+ in DataLoader worker process", text) and '  File "' in text:
        places = re.findall(r'File "(.+)", line (\d+)', text)
        after = text[text.rindex('  File "') :].splitlines()[1:]
        said = next((line for line in after if not line.startswith(" ")), said)
    elif text:
        said = f"{said}: {text.splitlines()[0]}"
    own = [f"{Path(file).name}:{line}" for file, line in places if not file.startswith(OUTSIDE)]
    return f"{said} ({own[-1]})" if own else said
