"""`python -m gpu_worker`: runs the model."""

import os

from shared.config import GpuWorkerConfig
from shared.process import ProcessContext, run_process
from shared.run_directory import Role


async def _run(context: ProcessContext[GpuWorkerConfig]) -> None:
    # torch reads this when it is imported, hence the late import. By default its threads spin at the end of
    # every operation, on cores that the other processes of the stack need: measured on two busy cores, a
    # prompt then took 20 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from gpu_worker.worker import GpuWorker

    await GpuWorker(context).run()


def main() -> None:
    """Runs the process and exits with its code."""
    run_process(Role.GPU_WORKER, GpuWorkerConfig, __doc__ or "", _run)


if __name__ == "__main__":
    main()
