"""What only a GPU can show: graphed steps equal eager ones, without a wait, beside a pinning loader."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import nets
from ridgeline import cudagraph
from ridgeline.ema import Ema
from ridgeline.errors import VerificationFailed
from ridgeline.loss_scale import ScaleRule
from ridgeline.step_recipe import StepRecipe
from ridgeline.step_verifier import StepLimits
from ridgeline.train_step import compile_step
from steps import OPTIMIZERS, assert_close, batches, loss, net, stepped

pytestmark = pytest.mark.gpu

STEPS = 200


@pytest.fixture(autouse=True)
def repeatable():
    """Algorithms that give the same bits every time, so that a graph can be told from the loop it was made of."""
    flags = torch.backends.cudnn
    before = flags.deterministic, flags.benchmark, flags.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    flags.deterministic, flags.benchmark, flags.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = True, *[False] * 3
    yield
    flags.deterministic, flags.benchmark, flags.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def both(make, data, **options):
    """The same training eagerly and captured; dropout's random numbers are the same too."""
    runs = []
    for capture in (None, cudagraph.capture):
        model = net().cuda()
        optimizer = make(model)
        schedule = CosineAnnealingLR(optimizer, len(data))
        torch.cuda.manual_seed(7)
        runs.append(stepped(model, optimizer, data, ema_decay=0.99, schedule=schedule, capture=capture, **options))
    (eager, _), (graphed, step) = runs
    assert step.report.replays == len(data)
    assert graphed.model.norm.num_batches_tracked == len(data) * options.get("accumulate", 1)
    return graphed, eager


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_schedules_and_averages_are_followed(name):
    assert_close(*both(OPTIMIZERS[name], batches(50, rows=16, device="cuda"), clip=0.5), rtol=1e-3, atol=1e-5)


ROUNDING = {"fp32": torch.finfo(torch.float32).eps}  # without TF32, see `repeatable`


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("sgd nesterov", {}, id="SGD"),
        pytest.param("adamw", {}, id="AdamW"),
        pytest.param("adamw", {"optimizer_kernel": "never"}, id="AdamW of PyTorch"),
        # overflows at once and again, so that steps are skipped in between
        pytest.param("adamw", {"dtype": "fp16", "scale": ScaleRule(2.0**18, interval=20)}, id="fp16 scaling"),
        pytest.param("adamw", {"dtype": "bf16", "channels_last": True}, id="bf16"),
        pytest.param("adamw", {"accumulate": 4}, id="accumulation"),
    ],
)
def test_two_hundred_graphed_steps_are_a_plain_loops(name, options):
    """Weights, buffers of BatchNorm, dropout, averages, moments and losses."""
    step, model = verified_step(OPTIMIZERS[name], **options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    limits = StepLimits(rounding=ROUNDING.get(options.get("dtype", "fp32")))
    agreement = step.verify(batches(STEPS, rows=16, device="cuda"), limits=limits)
    assert (agreement.steps, agreement.replayed) == (STEPS, STEPS)
    assert agreement.loss_allowed < (1e-3 if options.get("dtype", "fp32") == "fp32" else 0.1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    one_pass = name == "adamw" and options.get("optimizer_kernel") != "never"
    assert step.report.optimizer.endswith("are one pass") == one_pass


def test_two_hundred_graphed_steps_of_a_net_with_many_norms():
    """BatchNorm after every convolution, SGD, channels-last: statistics and counts too."""

    class Norms(nn.Sequential):
        def __init__(self):
            blocks = [(3, 16), (16, 16), (16, 32)]
            layers = [(nn.Conv2d(i, o, 3, bias=False), nn.BatchNorm2d(o), nn.SiLU()) for i, o in blocks]
            super().__init__(*[part for block in layers for part in block], nn.Flatten(), nn.LazyLinear(5))

        def forward(self, x):
            return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))

    torch.manual_seed(0)
    model = Norms().cuda()
    data = batches(STEPS, rows=16, device="cuda")
    model(data[0]["image"])
    recipe = StepRecipe(dtype="fp32", compile="none", channels_last=True, require=True)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    step = compile_step(model, loss, optimizer, data[0], ema=Ema(model, 0.99), recipe=recipe)
    agreement = step.verify(data, limits=StepLimits(rounding=ROUNDING["fp32"]))
    assert agreement.replayed == STEPS
    assert model[1].num_batches_tracked == 1


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_wrong_rate_of_graphed_steps_is_found(factor):
    step, _ = verified_step(OPTIMIZERS["adamw"])
    program, refresh = step._program, step._program.refresh

    def wrong():
        refresh()
        for (rate, _), group in zip(program._update.scalars(), program.parts.optimizer.param_groups, strict=True):
            rate.fill_(factor * group["lr"])

    program.refresh = wrong
    with pytest.raises(VerificationFailed, match="losses after 200 steps"):
        step.verify(batches(STEPS, rows=16, device="cuda"), limits=StepLimits(rounding=ROUNDING["fp32"]))


def verified_step(make, *, accumulate=1, **recipe):
    model = net().cuda()
    recipe = StepRecipe(**{"dtype": "fp32", "compile": "none", "require": True, **recipe})
    example = batches(1, rows=16, device="cuda")[0]
    options = {"ema": Ema(model, 0.99), "clip": 0.5, "accumulate": accumulate, "recipe": recipe}
    return compile_step(model, loss, make(model), example, **options), model


def test_compiled_steps_learn_the_same():
    data = batches(50, rows=16, device="cuda")
    losses = []
    for recipe in (
        StepRecipe(dtype="fp32", capture=False),
        StepRecipe(dtype="fp32", require=True),
        StepRecipe(dtype="fp32", compile="model", require=True),
    ):
        model = net(dropout=0.0).cuda()
        step = compile_step(model, loss, AdamW(model.parameters(), lr=1e-3), data[0], recipe=recipe)
        losses.append(torch.stack([step(batch) for batch in data]))
        if recipe.capture:
            step.check_engaged()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(losses[2], losses[0], rtol=1e-2, atol=1e-3)


def compiled_step(weight_copies, model, **options):
    """bf16 without dropout, whose numbers compiled code would draw otherwise."""
    recipe = StepRecipe(channels_last=True, require=True, weight_copies=weight_copies)
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    example = batches(1, rows=16, device="cuda")[0]
    return compile_step(model, loss, optimizer, example, ema=Ema(model, 0.99), clip=0.5, recipe=recipe, **options)


def test_two_hundred_graphed_steps_with_copies_of_weights_are_a_plain_loops():
    model = net(dropout=0.0).cuda()
    step = compiled_step("always", model)
    assert step.report.optimizer.endswith("are one pass, which keeps bf16 copies of 3 weights")
    agreement = step.verify(batches(STEPS, rows=16, device="cuda"))
    assert (agreement.steps, agreement.replayed) == (STEPS, STEPS)
    assert agreement.loss_allowed < 0.1


def test_copies_of_weights_are_fresh_after_the_weights_were_written():
    seen = []
    for choice in ("always", "never"):
        model = net(dropout=0.0).cuda()
        step = compiled_step(choice, model)
        losses = []
        for n, batch in enumerate(batches(6, rows=16, device="cuda")):
            if n == 2:
                model.load_state_dict({name: 3 * tensor for name, tensor in model.state_dict().items()})
            if n == 4:
                model.head.weight.data = -5 * model.head.weight.data
            losses.append(step(batch))
        assert (step.report.captures, step.report.replays) == (2, 6)
        seen.append(torch.stack(losses))
    torch.testing.assert_close(*seen, rtol=2e-2, atol=2e-3)
    # what copies that are stale would miss
    assert (seen[0].diff()[[1, 3]].abs() > 0.2).all()


def test_copies_of_weights_leave_fewer_kernels():
    counts = []
    for choice in ("always", "never"):
        step, batch = compiled_step(choice, net(dropout=0.0).cuda()), batches(1, rows=16, device="cuda")[0]
        step(batch)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step(batch)
            torch.cuda.synchronize()
        counts.append(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()))
    assert 0 < counts[0] < counts[1]


def captured_step(**options):
    model = net().cuda()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    recipe = StepRecipe(compile="none", require=True, **options)
    example = batches(1, rows=16, device="cuda")[0]
    step = compile_step(model, loss, optimizer, example, ema=Ema(model), clip=1.0, recipe=recipe)
    return model, optimizer, step


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_no_step_waits_for_the_device(dtype):
    _, optimizer, step = captured_step(dtype=dtype)
    schedule = CosineAnnealingLR(optimizer, 20)
    data = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches(8, rows=16)]
    total = torch.zeros((), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in data:
            total += step(batch)
            schedule.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert total.isfinite()
    assert step.report.replays == 8


def test_one_graph_launch_a_step():
    _, _, step = captured_step()
    batch = batches(1, rows=16, device="cuda")[0]
    step(batch)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(5):
            step(batch)
        torch.cuda.synchronize()
    calls = [event.name for event in profile.events()]
    assert calls.count("cudaGraphLaunch") == 5
    # beside it: two inputs in, loss and norm out, and PyTorch's seed and offset of the random numbers
    assert sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync")) for name in calls) <= 5 * 6
    assert calls.count("cudaStreamSynchronize") == 0


def test_trap_19_capture_leaves_no_trace():
    model = net().cuda()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = copy.deepcopy(model.state_dict())
    torch.cuda.manual_seed(3)
    random = torch.cuda.get_rng_state()
    compile_step(model, loss, optimizer, batches(1, device="cuda")[0], recipe=StepRecipe(require=True))
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(not tensor.any() for state in optimizer.state.values() for tensor in state.values())


def test_trap_20_capture_beside_a_pinning_loader():
    images, labels = torch.randn(512, 3, 6, 6), torch.randint(5, (512,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=16, num_workers=4, pin_memory=True)
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    for _ in range(100):
        image, label = next(endless)
        model = net().cuda()
        recipe = StepRecipe(compile="none", require=True)
        step = compile_step(model, loss, AdamW(model.parameters()), {"image": image, "label": label}, recipe=recipe)
        for image, label in itertools.islice(endless, 3):
            step({"image": image, "label": label})
        assert step.report.replays == 3


def test_trap_23_replaced_weights_are_followed_on_the_device():
    model, _, step = captured_step()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    before = model.conv.weight.detach().clone()
    batch = batches(1, rows=16, device="cuda")[0]
    step(batch)
    step(batch)
    assert not torch.equal(model.conv.weight, before)
    assert step.report.captures == 2


def test_a_host_random_number_is_refused():
    def noisy(model, batch):
        return loss(model, batch) * (1 + torch.rand(()).item() * 0)

    model = net().cuda()
    with pytest.warns(RuntimeWarning, match="torch's CPU generator"):
        compile_step(model, noisy, AdamW(model.parameters()), batches(1, device="cuda")[0])


def test_a_generator_of_the_losses_own_advances_with_every_replay():
    noise, twin = (torch.Generator("cuda").manual_seed(3) for _ in range(2))

    def noisy(model, batch):
        return loss(model, batch) + torch.rand((), device="cuda", generator=noise)

    model, batch = net(dropout=0.0).cuda(), batches(1, device="cuda")[0]
    optimizer = SGD(model.parameters(), lr=0.0)
    recipe = StepRecipe(dtype="fp32", compile="none", require=True, generators=(noise,))
    step = compile_step(model, noisy, optimizer, batch, recipe=recipe)
    seen = torch.stack([step(batch) for _ in range(4)])
    drawn = torch.stack([torch.rand((), device="cuda", generator=twin) for _ in range(4)])
    torch.testing.assert_close(seen - seen[0], drawn - drawn[0])
    assert step.verify([batch] * 5).replayed == 5
    assert torch.equal(noise.get_state(), twin.get_state())


def test_a_resnet():
    model, _ = nets.resnet50()
    model = model.cuda().train().requires_grad_(True)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    x, y = torch.randn(32, 3, 64, 64, device="cuda"), torch.randint(10, (32,), device="cuda")
    recipe = StepRecipe(channels_last=True, require=True)

    def classify(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    step = compile_step(model, classify, optimizer, (x, y), recipe=recipe)
    losses = [step((x, y)) for _ in range(20)]
    assert losses[-1] < losses[0]
    step.check_engaged()
