"""`python -m gateway`: the HTTP side of a stack."""

from gateway.server import Gateway
from shared.config import GatewayConfig
from shared.process import run_process
from shared.run_directory import Role


def main() -> None:
    """Runs the process and exits with its code."""
    run_process(Role.GATEWAY, GatewayConfig, __doc__ or "", lambda context: Gateway(context).run())


if __name__ == "__main__":
    main()
