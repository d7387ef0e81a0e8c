"""From written code to an address: compiled for one instruction set, kept in the cache."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import binding, ir

from shared.quants.compile_cache import cache_folder
from shared.quants.simd.instruction_set import InstructionSet

# One shuffle with a constant from memory rather than two without: every CPU with AVX2 is quick at them.
_TUNING = ("fast-variable-crosslane-shuffle", "fast-variable-perlane-shuffle")

_log = logging.getLogger(__name__)
_lock = threading.Lock()
# Engines own their code: it is freed with them.
_engines: list[Any] = []


def compile_module(name: str, instructions: InstructionSet, write: Callable[[ir.Module], None]) -> int:
    """The address of the function `name` of the module that `write` fills, compiled or from the cache."""
    with _lock:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        machine = _target_machine(instructions)
        folder = cache_folder()
        path = folder / f"{name}.{instructions.name}.o" if folder is not None else None
        object_code = _read(path)
        if object_code is None:
            object_code = _compile(name, machine, write)
            _keep(path, object_code)
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        engine.add_object_file(binding.ObjectFileRef.from_data(object_code))
        engine.finalize_object()
        _engines.append(engine)
        return int(engine.get_function_address(name))


def assembly(name: str, instructions: InstructionSet, write: Callable[[ir.Module], None]) -> str:
    """What the compiler makes of it, to read."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = _target_machine(instructions)
    return str(machine.emit_assembly(_optimised(name, machine, write)))


def _target_machine(instructions: InstructionSet) -> Any:
    target = binding.Target.from_default_triple()
    features = ",".join(f"+{feature}" for feature in (*instructions.features, *_TUNING))
    # A generic CPU with these features: tuning for one model was no gain, and the object then serves all.
    return target.create_target_machine(
        cpu="x86-64", features=features, opt=3, codemodel="jitdefault", jit=True
    )


def _optimised(name: str, machine: Any, write: Callable[[ir.Module], None]) -> Any:
    module = ir.Module(name)
    module.triple = binding.get_default_triple()
    module.data_layout = str(machine.target_data)
    write(module)
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_unrolling = False
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return parsed


def _compile(name: str, machine: Any, write: Callable[[ir.Module], None]) -> bytes:
    return bytes(machine.emit_object(_optimised(name, machine, write)))


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
