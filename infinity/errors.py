"""Every error that infinity raises, as one tree; each class has one exit code and says what to do.

InfinityError
|- ConfigError (ValueError)         2  bad key, bad value, contradiction
|  `- NotOffered (AttributeError)       a name of DeepSpeed's API that infinity does not have
|- DoesNotFit                       3  needed against available per tier, and what would fit
|- PlatformError                    4  native module missing, limits too low
|- StorageError (OSError)           5  operation, path, offset, length, errno
|  |- SwapSpaceError                   needed against free bytes
|  `- SwapCorruptionError          12  what was read is not what was written: file, offset, tile, both checksums
|- OverBudget (MemoryError)         6  tier, asked, used, budget, largest holders
|- CheckpointError                  7
|  |- CheckpointIncomplete
|  `- CheckpointMismatch
|- CommError                        8  ranks that ask for different collectives, or one that is gone: rank, step, both orders
|- ModelError                       9  the model does what a unit must not do
|  |- SideChannelError                 a graph leaves a unit other than by its return value
|  |- InputChangedError                a unit changes its inputs in place
|  `- AbsentParameterError             a parameter is used while its weights are away
|- DataError                       10  no data, too little data
|- Diverged                        11  too many steps in a row have gradients that are not finite
`- IllegalTransition (RuntimeError) 70 a bug in infinity or a misuse of the API
"""

from __future__ import annotations


class InfinityError(Exception):
    """The root: `message` says what, where, got and needed; `remedy` says what to do about it."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}" if self.remedy else self.message


class ConfigError(InfinityError, ValueError):
    """A key or value of the configuration is wrong, or two of them contradict each other."""

    exit_code = 2


class NotOffered(ConfigError, AttributeError):
    """A script asks for a name of DeepSpeed's API that infinity does not have; `hasattr` says so."""


class DoesNotFit(InfinityError):
    """No legal placement fits the memory and disk that were given."""

    exit_code = 3


class PlatformError(InfinityError):
    """The machine lacks something that was asked for; `errno` is the system's number where it refused, otherwise 0."""

    exit_code = 4

    def __init__(self, message: str, *, remedy: str = "", errno: int = 0) -> None:
        super().__init__(message, remedy=remedy)
        self.errno = errno


class StorageError(InfinityError, OSError):
    """An operation on a file failed; `errno` is the system's number, 0 where there is none."""

    exit_code = 5

    def __init__(self, message: str, *, remedy: str = "", errno: int = 0) -> None:
        super().__init__(message, remedy=remedy)
        self.errno = errno


class SwapSpaceError(StorageError):
    """A directory has not enough free space."""


class SwapCorruptionError(StorageError):
    """What was read from a swap file is not what was written there."""

    exit_code = 12


class OverBudget(InfinityError, MemoryError):
    """An allocation would exceed the budget of its tier."""

    exit_code = 6


class CheckpointError(InfinityError):
    """A checkpoint cannot be written or read."""

    exit_code = 7


class CheckpointIncomplete(CheckpointError):
    """A checkpoint has no manifest or misses files that its manifest names."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint belongs to another model, precision or program."""


class CommError(InfinityError):
    """The ranks cannot go on together: one is gone, or they ask for different collectives."""

    exit_code = 8


class ModelError(InfinityError):
    """The model does something that cannot be trained exactly as a chain of units."""

    exit_code = 9


class SideChannelError(ModelError):
    """A tensor with a gradient leaves a unit other than by its return value."""


class InputChangedError(ModelError):
    """A unit changes one of its inputs in place."""


class AbsentParameterError(ModelError):
    """A parameter is used outside its unit, while its weights are away."""


class DataError(InfinityError):
    """The data is missing, empty, or shorter than one sequence."""

    exit_code = 10


class Diverged(InfinityError):
    """Too many steps in a row were skipped, for gradients that are not finite; the state is that before them."""

    exit_code = 11


class IllegalTransition(InfinityError, RuntimeError):
    """A state machine was asked for a move that it does not have."""

    exit_code = 70
