"""`python -m cpu_worker`: computes experts in RAM."""

from cpu_worker.worker import CpuWorker
from shared.config import CpuWorkerConfig
from shared.process import run_process
from shared.run_directory import Role


def main() -> None:
    """Runs the process and exits with its code."""
    run_process(Role.CPU_WORKER, CpuWorkerConfig, __doc__ or "", lambda context: CpuWorker(context).run())


if __name__ == "__main__":
    main()
