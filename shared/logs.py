"""Log lines of all processes: one form, with role and incarnation, on standard error."""

import logging
import sys

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(role)s.%(incarnation)s %(name)s: %(message)s"


_SHOWN_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029) if code != ord("\t")
}


def set_up_logging(level: str, role: str, incarnation: str) -> None:
    """Routes every log record of this process to standard error."""

    class Stamp(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            record.role, record.incarnation = role, incarnation
            # Clients choose part of what is logged: it shall not make lines, or colours, of its own.
            record.msg, record.args = record.getMessage().translate(_SHOWN_CONTROLS), ()
            return True

    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Stamp())
    handler.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # One line per request is ours to write; the server's own access lines would repeat it.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    for noisy in ("numba", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
