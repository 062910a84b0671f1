"""Run as a program: open the CPU's Adam kernel as training would."""

from __future__ import annotations

from infinity.doctor.answers import KernelAnswer
from infinity.doctor.trials import give_answer
from infinity.optim.kernel import kernel_names, open_kernel


def open_as_training_does() -> KernelAnswer:
    """Return what the kernel says. Raises PlatformError and ConfigError as `open_kernel` does."""
    kernel = open_kernel()
    return KernelAnswer(kernel_names(), kernel.name, kernel.num_threads)


if __name__ == "__main__":
    give_answer(open_as_training_does)
