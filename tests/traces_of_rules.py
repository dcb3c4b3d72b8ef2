"""One trace that each rule must speak about and a twin that it must not, for rules that no committed real trace fires.

As a profiler writes them: a rule is judged with the reader and the attribution before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import traces_made as made

CONV = "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64"
WGRAD = CONV.replace("fprop", "wgrad")
LAYOUT = "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16>(int)"
COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)"
RELU = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::launch_clamp_scalar(at::TensorIteratorBase&)>(int)"
)
NORM = "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float>(int)"
LAYER_NORM = "void at::native::vectorized_layer_norm_kernel<float, float>(int)"
ADAM = "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>(float)"
HALF = "c10::BFloat16"
N, C, H = 8, 64, 32
MAP, FILTER = (N, C, H, H), (C, C, 3, 3)
NHWC, FILTER_NHWC = [C * H * H, 1, H * C, C], [C * 9, 1, 3 * C, C]
PLAIN = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]  # a convolution's arguments
SCALARS = (((), "Scalar"),) * 7
PINNED, PAGEABLE = "Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"


@dataclass
class Loop:
    """A step as it comes: what is launched next, each kernel as soon as the GPU is free, the host ahead of it."""

    events: list[made.Event] = field(default_factory=list)
    host_us: float = 100.0
    gpu_us: float = 150.0
    number: int = 0

    def run(self, name: str, us: float, op: str = "aten::thing", *, pause_us: float = 1.0, **details: object) -> Loop:
        """A kernel launched by `op`; `details` are those of `traces_made.op` and, under "kernel", of its kernel."""
        kernel, strides = details.pop("kernel", {}), details.pop("strides", None)
        number, launched_us = self._call(op, strides=strides, **details)
        self.gpu_us = max(self.gpu_us + pause_us, launched_us)
        self.events.append(made.kernel(name, self.gpu_us, us, correlation=number, external_id=number, **kernel))
        self.gpu_us += us
        return self

    def also(self, name: str, us: float) -> Loop:
        """One more kernel of the operator that was called last."""
        number = self.number
        self.number += 1
        call = self.number
        self.events.append(made.launch(self.host_us - 3, 2, correlation=10_000 + call, external_id=number))
        self.events.append(made.kernel(name, self.gpu_us + 1, us, correlation=10_000 + call, external_id=number))
        self.gpu_us += 1 + us
        return self

    def upload(self, name: str, us: float, size_bytes: int, *, beside: bool = False, **details: object) -> Loop:
        """A copy to the GPU; `beside` the kernel before it, on a stream of its own."""
        number, launched_us = self._call("aten::copy_", call="cudaMemcpyAsync", **details)
        start_us = self.gpu_us - us - 1 if beside else max(self.gpu_us + 1, launched_us)
        self.events.append(
            made.memcpy(
                name, start_us, us, size_bytes=size_bytes, correlation=number, external_id=number,
                stream=13 if beside else 7,
            )
        )  # fmt: skip
        self.gpu_us = max(self.gpu_us, start_us + us)
        return self

    def stand(self, us: float, call: str) -> Loop:
        """The host is in this call of the driver until `us` after the GPU has run dry."""
        self.number += 1
        end_us = self.gpu_us + us
        self.events.append(made.launch(self.host_us, end_us - self.host_us, correlation=self.number, name=call))
        self.host_us = end_us
        return self

    def read(self, us: float) -> Loop:
        """`.item()`: the host waits for the GPU, then does `us` of its own."""
        self.number += 1
        number, begun_us = self.number, self.host_us
        copied_us = max(self.gpu_us + 1, begun_us + 10)
        end_us = copied_us + 6
        self.events += [
            made.op("aten::item", begun_us, end_us - begun_us + 2, external_id=number),
            made.launch(begun_us + 1, 4, correlation=number, external_id=number, name="cudaMemcpyAsync"),
            made.memcpy(
                "Memcpy DtoH (Device -> Pinned)", copied_us, 2, size_bytes=4, correlation=number, external_id=number
            ),
            made.launch(
                begun_us + 6, end_us - begun_us - 6, correlation=20_000 + number, external_id=number,
                name="cudaStreamSynchronize",
            ),
        ]  # fmt: skip
        self.host_us, self.gpu_us = end_us + us, copied_us + 2
        return self

    def within(self, name: str, build: Callable[[Loop], object]) -> Loop:
        """What `build` launches, in a range of that name."""
        begun_us = self.host_us
        build(self)
        self.events.append(made.annotation(name, begun_us, self.host_us - begun_us))
        return self

    def _call(
        self,
        op: str,
        *,
        call: str = "cudaLaunchKernel",
        strides: Sequence[Sequence[int]] | None = None,
        **details: object,
    ) -> tuple[int, float]:
        self.number += 1
        number, begun_us = self.number, self.host_us
        extra = dict(details.pop("extra", {}))
        if strides is not None:
            extra["Input Strides"] = [list(each) for each in strides]
        self.events += [
            made.op(op, begun_us, 9, external_id=number, extra=extra, **details),
            made.launch(begun_us + 2, 5, correlation=number, external_id=number, name=call),
        ]
        self.host_us += 10
        return number, begun_us + 8


def begun() -> Loop:
    """A step that has begun: it lasts from its first kernel."""
    return Loop().run(RELU, 5)


def conv(
    loop: Loop,
    us: float,
    *,
    x: made.Dims = MAP,
    strides: Sequence[Sequence[int]] = (NHWC, FILTER_NHWC),
    **kernel: object,
) -> Loop:
    inputs = ((x, HALF), (FILTER, HALF), *SCALARS)
    places = [*strides, *[[]] * len(SCALARS)]
    return loop.run(
        CONV, us, "aten::convolution", inputs=inputs, strides=places, extra={"Concrete Inputs": PLAIN}, kernel=kernel
    )


def transposed(loop: Loop, us: float, filters: made.Dims, *, groups: int = 1, x: made.Dims = MAP) -> Loop:
    """A transposed convolution, whose weight is [in, out / groups, R, S]."""
    inputs = ((x, HALF), (filters, HALF), *SCALARS)
    concrete = [*PLAIN[:6], "True", "[0, 0]", str(groups)]
    return loop.run(CONV, us, "aten::convolution", inputs=inputs, extra={"Concrete Inputs": concrete})


def pooled(loop: Loop, us: float) -> Loop:
    inputs = ((MAP, "float"), *[((), "ScalarList")] * 4, ((), "Scalar"))
    concrete = ["", "[2, 2]", "[2, 2]", "[0, 0]", "[1, 1]", "False"]
    name = "void at::native::max_pool_forward_nchw<float, float>(int)"
    return loop.run(name, us, "aten::max_pool2d_with_indices", inputs=inputs, extra={"Concrete Inputs": concrete})


def wgrad(loop: Loop, us: float) -> Loop:
    inputs = ((MAP, HALF), (MAP, HALF), (FILTER, HALF), *SCALARS, ((), "ScalarList"))
    concrete = ["", "", "", "", *PLAIN[3:], "[False, True, False]"]
    return loop.run(WGRAD, us, "aten::convolution_backward", inputs=inputs, extra={"Concrete Inputs": concrete})


def copied(loop: Loop, us: float, target: str, source: str, strides: Sequence[Sequence[int]]) -> Loop:
    return loop.run(COPY, us, "aten::copy_", inputs=((MAP, target), (MAP, source)), strides=strides)


def trained(loop: Loop) -> Loop:
    """An optimizer steps."""
    return loop.within("Optimizer.step#AdamW.step", lambda own: own.run(ADAM, 20, "aten::_fused_adamw_"))


def images(loop: Loop, us: float, dtype: str, item_bytes: int, **choices: object) -> Loop:
    dims = (128, 3, 64, 64)
    inputs = ((dims, dtype), (dims, dtype))
    return loop.upload(PINNED, us, 128 * 3 * 64 * 64 * item_bytes, inputs=inputs, **choices)


def scaled(*, checked: bool) -> Loop:
    loop = Loop().run(RELU, 900)
    if checked:
        loop.run(RELU, 5, "aten::_amp_foreach_non_finite_check_and_unscale_")
    loop.read(60)
    return loop.run(RELU, 5, "aten::_amp_update_scale_").run(RELU, 900)


def cleared(count: int) -> Loop:
    loop = trained(Loop().run(RELU, 200))

    def fills(own: Loop) -> None:
        for _ in range(count):
            own.run(FILL, 3, "aten::zero_")

    return loop.within("Optimizer.zero_grad#AdamW.zero_grad", fills)


def tiles(slow_us: float) -> Loop:
    loop = Loop()
    for _ in range(4):
        conv(loop, 40)
    return conv(loop, slow_us, x=(N, C, H, H // 2), strides=([C * H * H // 2, 1, H * C // 2, C], FILTER_NHWC))


def paired(*, back: bool) -> Loop:
    nchw = [C * H * H, H * H, H, 1]
    loop = conv(Loop(), 100)
    copied(loop, 30, HALF, HALF, (nchw, NHWC))
    loop.run(RELU, 30, "aten::flip", inputs=((MAP, HALF),))
    if back:
        copied(loop, 30, HALF, HALF, (NHWC, nchw))
    return conv(loop, 100)


def converting(x: made.Dims, strides: Sequence[int]) -> Loop:
    """Convolutions that convert a map of that size before they begin."""
    loop = Loop()
    for _ in range(3):
        conv(loop, 60, x=x, strides=(strides, FILTER_NHWC)).also(LAYOUT, 20)
    return loop


def widened(source: str) -> Loop:
    plain = [C * H * H, H * H, H, 1]
    loop = Loop()
    copied(loop, 40, "float", source, (plain, plain))
    return loop.run(LAYER_NORM, 60, "aten::native_layer_norm", inputs=((MAP, "float"),)).run(RELU, 100)


def folded(*, training: bool) -> Loop:
    loop = conv(Loop(), 100).run(NORM, 40, "aten::cudnn_batch_norm", inputs=((MAP, HALF),))
    loop.run(RELU, 40, "aten::relu", inputs=((MAP, HALF),))
    return trained(loop) if training else loop


def graphs(count: int) -> Loop:
    loop = trained(Loop())
    for _ in range(count):
        loop.number += 1
        start_us = max(loop.gpu_us + 1, loop.host_us + 10)
        loop.events.append(made.launch(loop.host_us, 8, correlation=loop.number, name="cudaGraphLaunch"))
        loop.events += [made.kernel(RELU, start_us + 21 * k, 20, correlation=loop.number) for k in range(4)]
        loop.host_us, loop.gpu_us = loop.host_us + 10, start_us + 84
    return loop


def uneven() -> Loop:
    """A training step, one of whose launches takes very long."""
    loop = trained(Loop().run(RELU, 900).run(RELU, 300))
    loop.number += 1
    loop.events.append(made.launch(loop.host_us, 200, correlation=loop.number))
    loop.events.append(made.kernel(RELU, max(loop.gpu_us + 1, loop.host_us + 200), 300, correlation=loop.number))
    return loop


@dataclass(frozen=True)
class Pair:
    """The trace and the settings that a rule speaks about, and those of a twin about which it does not."""

    fires: Loop
    silent: Loop
    settings: Mapping[str, str] = field(default_factory=dict)
    silent_settings: Mapping[str, str] = field(default_factory=dict)


def told(settings: Mapping[str, str], silent: Mapping[str, str]) -> Pair:
    """Of a rule about the process: one trace, two processes."""
    return Pair(uneven(), uneven(), settings, silent)


MIB = 2**20
PAIRS = {
    "H2": Pair(
        begun().upload(PAGEABLE, 1000, 4 * MIB).run(RELU, 4000), begun().upload(PINNED, 100, 4 * MIB).run(RELU, 4000)
    ),
    "H3": Pair(
        begun().upload(PINNED, 300, 8 * MIB).run(RELU, 4000),
        Loop().run(RELU, 4000).upload(PINNED, 300, 8 * MIB, beside=True),
    ),
    "H4": Pair(images(begun(), 300, "float", 4).run(RELU, 900), images(begun(), 75, "unsigned char", 1).run(RELU, 900)),
    "H8": Pair(scaled(checked=True), scaled(checked=False)),
    "H10": Pair(
        Loop().run(RELU, 500).run(RELU, 50, pause_us=4).run(RELU, 50, pause_us=4).run(RELU, 50, pause_us=4),
        Loop().run(RELU, 500).run(RELU, 50).run(RELU, 50).run(RELU, 50),
    ),
    "H11": Pair(
        Loop().run(RELU, 500).stand(300, "cudaMalloc").run(RELU, 500),
        Loop().run(RELU, 500).stand(300, "cudaMallocAsync").run(RELU, 500),
    ),
    "H12": Pair(
        Loop().run(RELU, 500).stand(300, "cuModuleLoadData").run(RELU, 500),
        Loop().run(RELU, 500).stand(300, "cuModuleGetFunction").run(RELU, 500),
    ),
    "H13": told(
        {"recompiles": "3", "recompile_s": "12", "steps": "30"}, {"recompiles": "0", "recompile_s": "0", "steps": "30"}
    ),
    "H15": told(
        {"cpus": "4", "threads": "4", "loader_workers": "8"}, {"cpus": "16", "threads": "4", "loader_workers": "8"}
    ),
    "K2": Pair(folded(training=False), folded(training=True)),
    "K11": Pair(cleared(40), cleared(3)),
    "K12": Pair(tiles(slow_us=400), tiles(slow_us=20)),
    "K13": Pair(
        conv(Loop(), 900, grid=(270, 1, 1), extra={"registers per thread": 255}),
        conv(Loop(), 900, grid=(264, 1, 1), extra={"registers per thread": 255}),
    ),
    "K16": Pair(wgrad(conv(Loop(), 40), 200), wgrad(conv(Loop(), 40), 60)),
    "L2": Pair(paired(back=True), paired(back=False)),
    "L4": Pair(converting((N, C, 1, 1), [C, 1, 1, 1]), converting(MAP, NHWC)),
    "L10": Pair(widened(HALF), widened("float")),
    "L13": Pair(
        conv(Loop(), 200), conv(Loop(), 200), {"cudnn.deterministic": "True"}, {"cudnn.deterministic": "False"}
    ),
    "W2": Pair(
        graphs(2),
        graphs(2),
        {"memory_reserved_bytes": "9e9", "memory_allocated_bytes": "2e9"},
        {"memory_reserved_bytes": "3e9", "memory_allocated_bytes": "2e9"},
    ),
    "W3": told(
        {"sm_clock_mhz": "1200", "sm_clock_max_mhz": "1980", "throttle_reasons": "SW power cap"},
        {"sm_clock_mhz": "1980", "sm_clock_max_mhz": "1980", "throttle_reasons": ""},
    ),
    "W4": told(
        {"memory_peak_bytes": "2e10", "memory_total_bytes": "1.5e11"},
        {"memory_peak_bytes": "1e11", "memory_total_bytes": "1.5e11"},
    ),
    "W5": told({"validations": "4", "validation_share": "0.4"}, {"validations": "4", "validation_share": "0.05"}),
}
