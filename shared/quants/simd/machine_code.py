"""From written code to an address: compiled for one target, kept in the cache."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llvmlite import binding, ir

from shared.quants.compile_cache import cache_folder
from shared.quants.simd.instruction_set import InstructionSet, Target

# One shuffle with a constant from memory rather than two without: every CPU with AVX2 is quick at them. Sums
# of products of words in one instruction rather than two, which would be ready sooner: many are under way.
_TUNING = ("fast-variable-crosslane-shuffle", "fast-variable-perlane-shuffle", "fast-dpwssd")

_log = logging.getLogger(__name__)
_lock = threading.Lock()
# Engines own their code: it is freed with them.
_engines: list[Any] = []


@dataclass(frozen=True, slots=True)
class Module:
    """A module to be compiled: `write` fills it, and it is kept under its name, the same for every process.

    `is_scheduled`: whether LLVM may put instructions in another order than they were written in. Where many
    loads could be moved up it does, and runs out of registers: tiles are decoded up to a third faster without
    (measured on Zen 4), rows are not.
    """

    name: str
    write: Callable[[ir.Module], None]
    is_scheduled: bool = True


def compile_function(name: str, target: Target, *modules: Module) -> int:
    """The address of the function `name` of modules that may call each other's functions; each is compiled,
    or comes from the cache."""
    with _lock:
        machine = _target_machine(target.instructions)
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        for module in modules:
            folder = cache_folder()
            path = folder / f"{module.name}.{target.name}.o" if folder is not None else None
            object_code = _read(path)
            if object_code is None:
                object_code = _compile(module, machine)
                _keep(path, object_code)
            engine.add_object_file(binding.ObjectFileRef.from_data(object_code))
        engine.finalize_object()
        _engines.append(engine)
        return int(engine.get_function_address(name))


def _target_machine(instructions: InstructionSet) -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    features = ",".join(f"+{feature}" for feature in (*instructions.features, *_TUNING))
    # A generic CPU with these features: tuning for one model was no gain, and the object then serves all.
    return target.create_target_machine(
        cpu="x86-64", features=features, opt=3, codemodel="jitdefault", jit=True
    )


def _optimised(module: Module, machine: Any) -> Any:
    written = ir.Module(module.name)
    written.triple = binding.get_default_triple()
    written.data_layout = str(machine.target_data)
    module.write(written)
    parsed = binding.parse_assembly(str(written))
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_unrolling = False
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return parsed


def _compile(module: Module, machine: Any) -> bytes:
    with _scheduling(module.is_scheduled):
        return bytes(machine.emit_object(_optimised(module, machine)))


@contextmanager
def _scheduling(is_on: bool) -> Iterator[None]:
    """An option of the whole process, and put back: numba compiles with the same LLVM."""
    if is_on:
        yield
        return
    binding.set_option("strata", "-enable-misched=false")
    try:
        yield
    finally:
        binding.set_option("strata", "-enable-misched=true")


# An object file is kept after a digest of its bytes, so that a torn one is noticed.


def _read(path: Path | None) -> bytes | None:
    if path is None or not path.exists():
        return None
    try:
        stored = path.read_bytes()
    except OSError as error:
        _log.warning("kernel cache %s cannot be read: %s", path, error)
        return None
    digest, object_code = stored[:32], stored[32:]
    if hashlib.sha256(object_code).digest() != digest:
        _log.warning("kernel cache %s is not usable: it is damaged, and made anew", path)
        return None
    return object_code


def _keep(path: Path | None, object_code: bytes) -> None:
    if path is None:
        return
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_bytes(hashlib.sha256(object_code).digest() + object_code)
        temporary.replace(path)
    except OSError as error:
        _log.warning("kernel cache %s cannot be written: %s", path, error)
