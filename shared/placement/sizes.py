"""What the parts of a model take of the device's memory and of RAM, in bytes: from its header alone."""

from dataclasses import dataclass
from functools import cached_property

from shared.gguf.model import GGUFModel
from shared.kv_format import KvFormat
from shared.model_config import Qwen4ExpConfig
from shared.tensor_catalog import ExpectedTensor, TensorClass, block_of, expected_tensors
from shared.window import WINDOW_TOKENS

FLOAT_BYTES = 4
_MIB, _GIB = 1 << 20, 1 << 30
PART_ALIGNMENT = 64
"""Of the matrices in a slot: a cache line of the CPU, and more than any load of a CUDA device wants."""
SLOT_ALIGNMENT = 256
"""Of slots: what copies to a device want, CUDA's own allocations have, and the original engine's value."""
# As the torch device keeps matrices: these types as they are, the others as float16.
_MATRIX_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_DECODED_BYTES = 2
_EXPERTS = (TensorClass.EXPERTS_GATE_UP, TensorClass.EXPERTS_DOWN)
# Computed, or read, by other processes.
_NOT_DENSE = (*_EXPERTS, TensorClass.NGRAM_TABLE)


@dataclass(frozen=True)
class ExpertSizes:
    """The experts of a model: `slot_bytes` of a slot of the device by layer, how many experts a layer has,
    and how many of them a token uses."""

    slot_bytes: tuple[int, ...]
    num_experts: int
    num_used: int

    @property
    def num_layers(self) -> int:
        """Layers, each with experts of its own."""
        return len(self.slot_bytes)

    @property
    def num_pairs(self) -> int:
        """Experts of all layers."""
        return self.num_layers * self.num_experts

    @cached_property
    def round_bytes(self) -> int:
        """One slot of every layer."""
        return sum(self.slot_bytes)

    @property
    def num_bytes(self) -> int:
        """All experts."""
        return self.num_experts * self.round_bytes

    @property
    def mean_slot_bytes(self) -> float:
        """Of a slot of any layer."""
        return self.round_bytes / self.num_layers


def expert_sizes(model: GGUFModel, config: Qwen4ExpConfig) -> ExpertSizes:
    """Those of a model's trunk: the prediction block's get no slots. A slot has gate, up and down side by
    side, each from a multiple of 64 bytes on, and is a multiple of 256."""
    layers = [0] * config.num_layers
    for tensor in expected_tensors(config, model):
        if tensor.tensor_class in _EXPERTS and block_of(tensor.name) < config.num_layers:
            of_one = model.info(tensor.name).num_bytes // config.num_experts
            layers[block_of(tensor.name)] += rounded_up(of_one, PART_ALIGNMENT)
    slots = tuple(rounded_up(num_bytes, SLOT_ALIGNMENT) for num_bytes in layers)
    return ExpertSizes(slots, config.num_experts, config.num_experts_used)


def prediction_expert_bytes(model: GGUFModel, config: Qwen4ExpConfig) -> int:
    """The experts of the prediction block, as the file has them; 0 without one."""
    return sum(
        model.info(tensor.name).num_bytes
        for tensor in expected_tensors(config, model)
        if tensor.tensor_class in _EXPERTS and block_of(tensor.name) >= config.num_layers
    )


def context_bytes(config: Qwen4ExpConfig, num_tokens: int, kv_format: KvFormat) -> int:
    """Keys and values of so many positions, and the indexer's key of each complete block, float32."""
    of_position = kv_format.position_bytes(config.num_kv_heads, config.head_dim)
    num_bytes = 0
    for layer, is_recurrent in enumerate(config.is_recurrent):
        if not is_recurrent:
            ratio = config.compress_ratios[layer]
            num_blocks = num_tokens // ratio if ratio else 0
            num_bytes += num_tokens * of_position + FLOAT_BYTES * num_blocks * config.indexer.head_dim
    return num_bytes


def state_bytes(config: Qwen4ExpConfig) -> int:
    """What one sequence keeps however long it is: matrices and convolution inputs of the delta nets, raw keys
    of the indexer, and the n-gram convolution's inputs, with those of the tokens of a window; all float32."""
    heads, dim = config.num_delta_value_heads, config.delta_head_dim
    of_delta_net = (
        heads * dim**2
        + WINDOW_TOKENS * heads * (2 * dim + 1)
        + (WINDOW_TOKENS + config.conv_kernel - 1) * config.delta_channels
    )
    num_floats = sum(
        of_delta_net if is_recurrent else ring_rows(config.compress_ratios[layer]) * config.indexer.head_dim
        for layer, is_recurrent in enumerate(config.is_recurrent)
    )
    if config.ngram is not None:
        num_floats += (WINDOW_TOKENS + config.ngram.history_length) * config.stream_width
    return FLOAT_BYTES * num_floats


def ring_rows(ratio: int) -> int:
    """Raw keys that the indexer of a layer keeps, in a ring: whole blocks, which reach from the last token of
    a window back to the begin of the block that was open before it. `ratio` is the layer's, 0 for none."""
    return rounded_up(WINDOW_TOKENS + ratio, ratio) if ratio else 0


def dense_file_bytes(model: GGUFModel, config: Qwen4ExpConfig) -> int:
    """Weights that every token needs, as the file has them; the embedding, which is read by rows, only where
    it is the output matrix too."""
    return sum(
        model.info(tensor.name).num_bytes
        for tensor in _dense_tensors(model, config)
        if _is_multiplied(model, tensor)
    )


def dense_device_bytes(model: GGUFModel, config: Qwen4ExpConfig) -> int:
    """The same weights and the embedding on a torch device: matrices as float16 unless the file has floats,
    vectors and kernels of convolutions as float32."""
    return sum(
        _num_weights(model, tensor)
        * (
            _MATRIX_BYTES.get(model.info(tensor.name).type.name, _DECODED_BYTES)
            if _is_matrix(tensor)
            else FLOAT_BYTES
        )
        for tensor in _dense_tensors(model, config)
    )


def widest_matrix_bytes(model: GGUFModel, config: Qwen4ExpConfig) -> int:
    """The largest matrix but the embedding as float32: what a torch device makes of it for a product."""
    return FLOAT_BYTES * max(
        _num_weights(model, tensor)
        for tensor in _dense_tensors(model, config)
        if _is_matrix(tensor) and _is_multiplied(model, tensor)
    )


def active_weights(model: GGUFModel, config: Qwen4ExpConfig) -> int:
    """Weights that one token of a prompt is multiplied with, by the prediction block too. The output
    matrix is left out: only the last token needs it."""
    dense = sum(
        _num_weights(model, tensor)
        for tensor in _dense_tensors(model, config)
        if tensor.tensor_class not in (TensorClass.EMBEDDING, TensorClass.HEAD)
    )
    routed = sum(
        _num_weights(model, tensor)
        for tensor in expected_tensors(config, model)
        if tensor.tensor_class in _EXPERTS
    )
    return dense + routed * config.num_experts_used // config.num_experts


def size_text(num_bytes: float) -> str:
    """In GiB with two digits, below that in MiB, below a tenth of one in KiB."""
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    if num_bytes >= _MIB / 10:
        return f"{num_bytes / _MIB:.{0 if num_bytes >= 10 * _MIB else 1}f} MiB"
    return f"{num_bytes / 1024:.0f} KiB"


def _dense_tensors(model: GGUFModel, config: Qwen4ExpConfig) -> list[ExpectedTensor]:
    """What the gpu_worker loads."""
    return [
        tensor
        for tensor in expected_tensors(config, model)
        if tensor.tensor_class not in _NOT_DENSE and tensor.name in model
    ]


def _is_matrix(tensor: ExpectedTensor) -> bool:
    return len(tensor.shape) == 2 and "conv1d" not in tensor.name


def _is_multiplied(model: GGUFModel, tensor: ExpectedTensor) -> bool:
    return tensor.tensor_class is not TensorClass.EMBEDDING or "output.weight" not in model


def _num_weights(model: GGUFModel, tensor: ExpectedTensor) -> int:
    count = 1
    for extent in model.info(tensor.name).shape:
        count *= extent
    return count


def rounded_up(num_bytes: int, alignment: int) -> int:
    """To the next multiple."""
    return -(-num_bytes // alignment) * alignment
