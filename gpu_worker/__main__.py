"""`python -m gpu_worker`: runs the model."""

from gpu_worker.worker import GpuWorker
from shared.config import GpuWorkerConfig
from shared.process import run_process
from shared.run_directory import Role


def main() -> None:
    """Runs the process and exits with its code."""
    run_process(Role.GPU_WORKER, GpuWorkerConfig, __doc__ or "", lambda context: GpuWorker(context).run())


if __name__ == "__main__":
    main()
