"""`python -m stager`: reads what the others need from the model files before they need it."""

from shared.config import StagerConfig
from shared.process import run_process
from shared.run_directory import Role
from stager.worker import Stager


def main() -> None:
    """Runs the process and exits with its code."""
    run_process(Role.STAGER, StagerConfig, __doc__ or "", lambda context: Stager(context).run())


if __name__ == "__main__":
    main()
