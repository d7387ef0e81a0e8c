"""Writes the logits of every position of a token sequence, computed by the real stack, all processes.

For comparisons with other implementations: `--ids` is a .npy file of token ids [n], `--out` an .npz file that
gets `logits` [n, vocabulary] float32 and `ids` [n]. The stack is started for it and ended with it.
"""

import argparse
import asyncio
from pathlib import Path

import aiohttp
import numpy as np
from numpy.typing import NDArray

from shared.cli.progress import ProgressLine
from shared.cli.stack_arguments import add_stack_arguments, stack_configs
from shared.config import CommonConfig
from shared.errors import ConfigError, StrataError
from shared.logs import set_up_logging
from shared.preflight import check_stack
from shared.process import check_platform
from shared.run_directory import Role
from shared.supervisor import Supervisor

_MAX_TOKEN_ID = 2**31 - 1
"""Whatever the model: its own vocabulary is checked by the stack."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `strata logits`."""
    parser.add_argument("--ids", required=True, metavar="IDS.npy", type=Path, help="token ids, integers [n]")
    parser.add_argument("--out", required=True, metavar="OUT.npz", type=Path, help="file to write")
    add_stack_arguments(parser)


def run(parsed: argparse.Namespace) -> int:
    """Computes and writes."""
    check_platform()
    token_ids = _read_ids(parsed.ids)
    if not parsed.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {parsed.out}: there is no directory {parsed.out.absolute().parent}")
    if parsed.out.is_dir():
        raise ConfigError(f"--out {parsed.out} is a directory; name a file to write")
    del parsed.ids
    out = parsed.__dict__.pop("out")
    configs = stack_configs(parsed, host="127.0.0.1", port="0", logits_endpoint="on", max_body_mib="1024")
    set_up_logging(configs[Role.GATEWAY].log_level, Role.SUPERVISOR, "logits")
    check_stack(configs)
    logits = asyncio.run(_compute(configs, token_ids))
    with out.open("wb") as file:  # Given a name, numpy would add .npz to it.
        np.savez(file, logits=logits, ids=token_ids)
    print(f"{out}: logits {list(logits.shape)}")
    return 0


def _read_ids(path: Path) -> NDArray[np.int64]:
    try:
        token_ids = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"--ids {path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError):
        # Numpy's own message would advise to unpickle it.
        raise ConfigError(f"--ids {path}: not a .npy file of integers; numpy.save writes one") from None
    if not isinstance(token_ids, np.ndarray) or token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        raise ConfigError(f"--ids {path}: expected a one-dimensional array of integers")
    if not len(token_ids):
        raise ConfigError(f"--ids {path}: there are no ids in it")
    for extreme in (token_ids.min(), token_ids.max()):
        if not 0 <= int(extreme) <= _MAX_TOKEN_ID:
            raise ConfigError(f"--ids {path}: {extreme} is no token id; ids are 0 to {_MAX_TOKEN_ID}")
    return token_ids.astype(np.int64)


async def _compute(configs: dict[Role, CommonConfig], token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    progress = ProgressLine()
    async with Supervisor(configs, progress.update) as supervisor:
        try:
            await supervisor.wait_ready()
        finally:
            progress.done()
        watch = asyncio.ensure_future(supervisor.watch())
        answer = asyncio.ensure_future(_ask(supervisor.url or "", token_ids))
        done, pending = await asyncio.wait([watch, answer], return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if watch in done:
            watch.result()
        return answer.result()


async def _ask(url: str, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    no_limit = aiohttp.ClientTimeout(total=None)
    try:
        async with (
            aiohttp.ClientSession(timeout=no_limit) as session,
            session.post(f"{url}/v1/logits", json={"prompt_token_ids": token_ids.tolist()}) as response,
        ):
            if response.status != 200:
                raise StrataError((await response.json())["error"]["message"])
            shape = [int(extent) for extent in response.headers["x-logits-shape"].split(",")]
            return np.frombuffer(await response.read(), "<f4").reshape(shape)
    except aiohttp.ClientError as error:
        raise StrataError(f"the gateway ended while it answered ({error}); try again") from None
