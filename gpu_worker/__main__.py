"""`python -m gpu_worker`: runs the model."""

import os
from typing import TYPE_CHECKING

from shared.config import GpuWorkerConfig
from shared.process import ProcessContext, load_in_thread, run_process
from shared.run_directory import Role

if TYPE_CHECKING:
    from gpu_worker.worker import GpuWorker


async def _run(context: ProcessContext[GpuWorkerConfig]) -> None:
    # Seconds, or many on a cold disk: the event loop stays free to notice that the process is to stop.
    worker_class = await load_in_thread(_import_worker)
    await worker_class(context).run()


def _import_worker() -> type["GpuWorker"]:
    # torch reads this when it is imported, hence the late import. By default its threads spin at the end of
    # every operation, on cores that the other processes of the stack need: measured on two busy cores, a
    # prompt then took 20 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from gpu_worker.worker import GpuWorker

    return GpuWorker


def main() -> None:
    """Runs the process and exits with its code."""
    run_process(Role.GPU_WORKER, GpuWorkerConfig, __doc__ or "", _run)


if __name__ == "__main__":
    main()
