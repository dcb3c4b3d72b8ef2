"""Op: a kernel with its meaning and its cost, registered with PyTorch in one call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline import tuned
from ridgeline.cost import Cost, register_cost
from ridgeline.errors import UsageError
from ridgeline.sass import KernelSource, shared_limit_bytes

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
_DESCRIPTORS = (TensorDescriptor, GluonDescriptor)
# arguments that change neither the work nor which config suits it
_NO_PROBLEM = frozenset({"bias", "out", "pdl", "inverse", "x_row", "weight_row", "dy_row"})
# left out of keys, so that those of convolutions without a stride of their own are the same
_UNSAID = (("stride", 1),)

Config = TypeVar("Config")
RIVAL, MATMUL = "torch", "torch matmul"  # under which a tuned row has the times of PyTorch's own kernels
INTERPRETED: bool = vars(triton)["knobs"].runtime.interpret  # kernels run on the CPU, slowly: what tests use


@dataclass(frozen=True)
class Sample:
    """One set of arguments and the reason it is there.

    `arguments(dtype, device)` builds the op's keyword arguments; on the "meta" device it must not need data.
    `real_size` marks shapes of real networks: too slow for the interpreter, what benchmarks time and `sass` compiles.
    """

    why: str
    arguments: Callable[[torch.dtype, str], dict[str, Any]]
    real_size: bool = False


@dataclass(frozen=True)
class Target:
    """What a config depends on besides the problem."""

    arch: str  # "sm_90"
    sm_count: int
    shared_bytes: int  # largest a block may opt in to


# Streaming multiprocessors assumed where no GPU is asked: A100, A10, L4, H100/H200 SXM, RTX 5090.
_SM_COUNT = {"sm_80": 108, "sm_86": 72, "sm_89": 58, "sm_90": 132, "sm_120": 170}


@dataclass(frozen=True)
class Launch:
    """One kernel launch: run it here, or hand its source to `sass` for any architecture."""

    kernel: Any
    grid: tuple[int, ...]
    # run-time parameters; None is compiled in, as the launcher does
    arguments: Mapping[str, Tensor | TensorDescriptor | GluonDescriptor | int | None]
    constants: Mapping[str, int | float | bool | str]
    num_warps: int
    num_stages: int
    output: Tensor  # one of the arguments
    pdl: bool = False  # programmatic dependent launch: the kernel waits for its predecessor itself; sm_90 and later

    @property
    def parts(self) -> tuple[Launch, ...]:
        """Every kernel launch that this stands for, in order."""
        return (self,)

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options; contracting a * b + c is Triton's default until 3.10, so it is said."""
        pdl = {"launch_pdl": True} if self.pdl else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True, **pdl}

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.constants, **self.options)

    def source(self, arch: str) -> KernelSource:
        """The same specialisation that the launcher would choose: alignment to 16, and None or 1 compiled in."""
        compiled_in = {name: v for name, v in self.arguments.items() if v is None or (isinstance(v, int) and v == 1)}
        passed = {name: v for name, v in self.arguments.items() if name not in compiled_in}
        return KernelSource(
            kernel=self.kernel,
            signature={name: _triton_type(v) for name, v in passed.items()},
            constants={**self.constants, **compiled_in},
            arch=arch,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            aligned=tuple(name for name, v in passed.items() if _aligned(v)),
        )


@dataclass(frozen=True)
class LastLaunch(Launch):
    """The last of several launches, run in order."""

    before: tuple[Launch, ...] = ()

    @property
    def parts(self) -> tuple[Launch, ...]:
        return (*self.before, self)

    def run(self) -> None:
        for launch in self.before:
            launch.run()
        super().run()


@dataclass(frozen=True)
class Launcher:
    """How an op becomes a launch; both functions also take the op's own arguments by name and run nothing."""

    plan: Callable[..., Launch]  # plan(config=None, target=None, **arguments)
    # candidates(target=None, **arguments): configs, the default first, then the likeliest: `tune` may stop early
    candidates: Callable[..., tuple[Any, ...]]
    # typical(**arguments): the same call on data like a network's; None where time does not depend on values
    typical: Callable[..., dict[str, Any]] | None = None
    # rival(**arguments): a call of PyTorch's own kernel, which `tune` times beside the candidates, see `RIVAL`
    rival: Callable[..., Callable[[], Tensor]] | None = None
    matmul: Callable[..., Callable[[], Tensor] | None] | None = None  # likewise of its product of two, where it is one


@dataclass(frozen=True)
class Op:
    """A kernel with meaning and cost. Calling it runs the registered operator, visible to export and autograd."""

    name: str
    call: Callable[..., Any]
    reference: Callable[..., Tensor]  # the same in plain PyTorch, in any floating dtype
    cost: Callable[..., Cost]
    launcher: Launcher
    samples: tuple[Sample, ...]
    dtypes: tuple[torch.dtype, ...]
    error_factor: float  # see numerics; above 2 only with the reason in the kernel's file
    into: torch._ops.OpOverload | None  # the same with a first argument `out` that it writes, where the kernel can
    eps: Callable[..., float] | None = None  # of a call's arithmetic, where it is not that of the result's dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @property
    def overload(self) -> torch._ops.OpOverload:
        """What a graph's nodes name as their target."""
        return getattr(torch.ops.ridgeline, self.name).default

    @property
    def source_hash(self) -> str:
        """Which version of its kernels tuned rows must belong to."""
        return tuned.source_hash(Path(inspect.getfile(self.launcher.plan)))

    def key(self, **arguments: Any) -> str:
        """What tuned configs are filed under: the shapes and choices of a call, in the order of their names."""
        parameters = inspect.signature(self.reference)
        bound = parameters.bind(**{name: value for name, value in arguments.items() if name in parameters.parameters})
        bound.apply_defaults()
        said = sorted(one for one in bound.arguments.items() if one[0] not in _NO_PROBLEM and one not in _UNSAID)
        parts = (f"{name} {_spelled(value)}" for name, value in said)
        return ", ".join(part for part in parts if not part.endswith(" "))

    def source(self, *, arch: str, dtype: str = "fp16", sample: str | None = None, config: Any = None) -> KernelSource:
        """The kernel's source for the first sample whose `why` contains `sample`; None: the first of real size."""
        if dtype not in DTYPES or DTYPES[dtype] not in self.dtypes:
            known = ", ".join(name for name, value in DTYPES.items() if value in self.dtypes)
            raise UsageError(f"{self.name}: dtype must be one of {known}, got {dtype!r}")
        chosen = [s for s in self.samples if (s.real_size if sample is None else sample in s.why)]
        if not chosen:
            raise UsageError(
                f"{self.name}: no sample's reason contains {sample!r}: {'; '.join(s.why for s in self.samples)}"
            )
        arguments = chosen[0].arguments(DTYPES[dtype], "meta")
        return self.launcher.plan(config=config, target=typical_target(arch), **arguments).source(arch)


@dataclass(frozen=True)
class Autograd:
    """The two functions of `torch.library.register_autograd`."""

    setup: Callable[..., None]
    backward: Callable[..., Any]


def define(
    call: Callable[..., Tensor],
    *,
    reference: Callable[..., Tensor],
    cost: Callable[..., Cost],
    launcher: Launcher,
    samples: tuple[Sample, ...],
    dtypes: tuple[torch.dtype, ...],
    error_factor: float = 2.0,
    eps: Callable[..., float] | None = None,
    autograd: Autograd | None = None,
    stores_into: bool = False,
    interpretable: bool = True,
) -> Op:
    """Register `call` as `ridgeline::<its name>` and return its Op.

    The fake kernel is the reference on fake tensors, restrided to channels-last, so meaning and shape cannot disagree.
    The operator keeps its name through export and compile, and its inputs keep their strides. CPU tensors go to the
    reference, unless Triton's interpreter runs the kernel. `stores_into` also registers `ridgeline::<name>_into`, whose
    first argument `out` is handed to `plan`. `interpretable` is false for kernels in Gluon, which has no interpreter.
    """

    def fake(*args: Any, **kwargs: Any) -> Tensor:
        y = reference(*args, **kwargs)
        return torch.empty_like(y, memory_format=torch.channels_last if y.dim() == 4 else torch.contiguous_format)

    def on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        y = reference(*args, **kwargs)
        return y.contiguous(memory_format=torch.channels_last) if y.dim() == 4 else y.contiguous()

    name = call.__name__
    op = register(call, fake=fake, on_cpu=on_cpu, cost=cost, interpretable=interpretable)
    if autograd is not None:
        op.register_autograd(autograd.backward, setup_context=autograd.setup)
    into = _define_into(call, op, cost, launcher) if stores_into else None
    return Op(name, op, reference, cost, launcher, samples, dtypes, error_factor, into, eps)


def register(
    call: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    on_cpu: Callable[..., Any],
    cost: Callable[..., Cost],
    interpretable: bool = True,
) -> Any:
    """The operator `ridgeline::<name of call>` with its fake and CPU kernels and its cost: `define` less gradients.

    `on_cpu` runs where Triton's interpreter does not run the kernel.
    """
    name = call.__name__
    # needs_exact_strides: Inductor would otherwise hand over whatever layout its neighbours prefer
    op = torch.library.custom_op(f"ridgeline::{name}", call, mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
    op.register_fake(fake)
    if not (INTERPRETED and interpretable):
        op.register_kernel("cpu")(on_cpu)
    packet = getattr(torch.ops.ridgeline, name)

    @register_flop_formula(packet, get_raw=True)
    def _(*args: Any, out_val: Any = None, **kwargs: Any) -> int:  # noqa: ARG001
        return cost(*args, **kwargs).flops

    register_cost(packet, cost, kind=name)
    return op


def _define_into(
    call: Callable[..., Tensor], op: Callable[..., Tensor], cost: Callable[..., Cost], launcher: Launcher
) -> torch._ops.OpOverload:
    """Register the operator that writes its result into `out` and returns nothing."""
    name = f"{call.__name__}_into"
    schema = torch.library.infer_schema(call, mutates_args=())
    schema = schema.replace("(", "(Tensor(a!) out, ", 1).replace(" -> Tensor", " -> ()")
    parameters = inspect.signature(call)

    def store(out: Tensor, *args: Any, **kwargs: Any) -> None:
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        if out.is_cuda or INTERPRETED:
            if out.numel():
                launcher.plan(**arguments, out=out).run()
        else:
            out.copy_(op(**arguments))

    into = torch.library.custom_op(
        f"ridgeline::{name}", store, mutates_args=("out",), schema=schema, tags=(torch.Tag.needs_exact_strides,)
    )
    into.register_fake(lambda *_args, **_kwargs: None)
    packet = getattr(torch.ops.ridgeline, name)
    register_cost(packet, lambda _out, *args, **kwargs: cost(*args, **kwargs), kind=call.__name__)
    return packet.default


def tuned_config(op: Op, kind: type[Config], is_valid: Callable[[Config], bool], **arguments: Any) -> Config | None:
    """The config that the tables hold for this call on this GPU; None without a valid one, or off a GPU."""
    row = tuned_row(op, **arguments)
    config = None if row is None else tuned.build(kind, row.config)
    return config if config is not None and is_valid(config) else None


def tuned_row(op: Op, **arguments: Any) -> tuned.Row | None:
    """What the tables hold for a call of `op` on the GPU of its tensors, which may be fake; None off a GPU."""
    x = computed_in(arguments)
    if not x.is_cuda:
        return None
    table = tuned.load(op.name, torch.cuda.get_device_name(x.device), op.source_hash)
    return table.row(dtype_name(x.dtype), op.key(**arguments))


def dtype_name(dtype: torch.dtype) -> str:
    """As tables spell it: "fp16"."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def nearest_first(default: Config, configs: Iterable[Config]) -> tuple[Config, ...]:
    """The default, then the others in the order of how many halvings and doublings of a field lie between.

    On the problems of YOLO26n that were tuned on an H200 the best of some 40 configs was mostly among the first 12.
    """

    def steps(config: Config) -> float:
        pairs = [(getattr(config, f.name), getattr(default, f.name)) for f in fields(default)]  # pyright: ignore
        return sum(a != b if isinstance(a, bool) else abs(math.log2(a / b)) for a, b in pairs)

    return tuple(dict.fromkeys((default, *sorted(configs, key=steps))))


def computed_in(arguments: Mapping[str, Any]) -> Tensor:
    """The first floating-point tensor among a call's arguments: its dtype and device are the call's."""
    lists = (value if isinstance(value, (list, tuple)) else (value,) for value in arguments.values())
    return next(t for values in lists for t in values if isinstance(t, Tensor) and t.is_floating_point())


def typical_target(arch: str) -> Target:
    """A common GPU of an architecture. Raises UsageError for one that `sass` does not know."""
    shared_bytes = shared_limit_bytes(arch)
    return Target(arch, _SM_COUNT[arch], shared_bytes)


def target_of(x: Tensor) -> Target:
    """The GPU that holds `x`; an H100/H200 for a tensor on no GPU."""
    return _cuda_target(x.device.index or 0) if x.is_cuda else typical_target("sm_90")


def execute(op: str, launch: Launch, x: Tensor) -> Tensor:
    """Run a launch, unless its output is empty, on the device of `x`; returns the output."""
    if launch.output.numel():
        check_launchable(op, launch.kernel, x)
        launch.run()
    return launch.output


def check_launchable(op: str, kernel: Any, x: Tensor) -> None:
    """Refuse a tensor that this process cannot run kernels on."""
    if not x.is_cuda and isinstance(kernel, triton.runtime.JITFunction):
        raise ValueError(
            f"{op}: x must be on a CUDA device, got {x.device}: "
            f"move it, or set TRITON_INTERPRET=1 before Triton is imported"
        )


@lru_cache
def _cuda_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    return Target(
        f"sm_{properties.major}{properties.minor}",
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )


def _spelled(value: Any) -> str:
    """A shape, a number or a choice as text; "" for an argument left out."""
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape))
    if isinstance(value, (list, tuple)):
        return " ".join(map(_spelled, value))
    return "" if value is None else str(value)


def _triton_type(value: Tensor | TensorDescriptor | GluonDescriptor | int | None) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, _DESCRIPTORS):
        layout = f",{value.layout!r}" if isinstance(value, GluonDescriptor) else ""
        return f"tensordesc<{_POINTERS[value.base.dtype].removeprefix('*')}{list(value.block_shape)}{layout}>"
    assert value is not None
    return "i32" if abs(value) < 2**31 else "i64"


def _aligned(value: Tensor | TensorDescriptor | GluonDescriptor | int | None) -> bool:
    if isinstance(value, Tensor):
        # allocations are aligned to more than 16 bytes, so only a view's offset can break it
        return value.storage_offset() * value.element_size() % 16 == 0
    return isinstance(value, int) and value % 16 == 0
