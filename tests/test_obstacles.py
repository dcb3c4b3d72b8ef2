"""Trap 25: the pre-flight names exactly the lines that would sync or break capture, and no others."""

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, AdamW

from ridgeline.obstacles import preflight
from steps import batches, loss, net

try:
    torch.ops.torchvision.nms.default  # noqa: B018 - looked up, not called
    _LIBRARY = None
except AttributeError:
    # torchvision is not installed: an operator of its name, schema and kind
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    _LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.impl("nms", lambda dets, scores, iou_threshold: scores.argsort()[:1], "CPU")


def marked(findings, kind="BREAKS"):
    """Markers of the lines found, in order; a line without one shows as its code."""
    codes = [finding.code for finding in findings if finding.breaks == (kind == "BREAKS")]
    return [re.sub(rf".*# {kind} ?", "", code) for code in codes]


def bad_step(model, x, label):
    out = model(x)
    mask = out > 0
    out[mask]  # BREAKS mask
    if out.sum() > 0:  # BREAKS if
        out = out * 1
    out.sum().item()  # BREAKS item
    out = out + torch.tensor([0.0] * 5, device=x.device)  # BREAKS tensor
    out = out + x.new_tensor(0.5)  # BREAKS new_tensor
    out = out + torch.zeros(5).to(x.device)  # BREAKS upload
    torch.nonzero(mask)  # BREAKS nonzero
    torch.where(mask)  # BREAKS where
    torch.masked_select(out, mask)  # BREAKS masked_select
    torch.unique(label)  # BREAKS unique
    print(out[0, 0].detach())  # BREAKS print
    f"{label.float().mean():.3f}"  # BREAKS format
    out.tolist()  # BREAKS tolist
    out.detach().numpy()  # BREAKS numpy
    out.cpu()  # BREAKS cpu
    for _ in range(int(label.max())):  # BREAKS range
        pass
    torch.ops.torchvision.nms(torch.rand(3, 4, device=x.device), torch.rand(3, device=x.device), 0.5)  # BREAKS nms
    helper(out)
    return F.cross_entropy(out, label)


def helper(x):
    return float(x.detach().mean())  # BREAKS in a helper


def good_step(model, x, label):
    out = model(x)
    mask = out > 0
    out = torch.where(mask, out, torch.full((), 0.1, device=x.device))
    out = out.masked_fill(mask, 0.5) + torch.zeros(5, device=x.device)
    out[mask] = 0  # one value: becomes a masked fill
    out = out[torch.arange(6, device=x.device)] + torch.randn_like(out)
    assert x.shape[0] == 6
    assert torch.zeros(3).sum().item() == 0  # the host's own numbers may be read
    return F.cross_entropy(out, label)


def test_every_breaking_line_is_named_and_no_other(capsys):
    model, (x, label) = net(), batches(1)[0].values()
    found = preflight(lambda *batch: bad_step(model, *batch).backward(), x, label)
    source = Path(__file__).read_text(encoding="utf-8")
    expected = [m.group(1) for m in re.finditer(r"# BREAKS (\w[\w ]*)$", source, re.MULTILINE)]
    assert len(expected) == 18
    assert marked(found) == expected
    assert {finding.file for finding in found} == {__file__}
    assert all(source.splitlines()[finding.line - 1].strip() == finding.code for finding in found)


def test_a_step_without_such_lines_has_no_findings():
    model, batch = net(), batches(1)[0]
    assert preflight(lambda *batch: good_step(model, *batch).backward(), *batch.values()) == []
    assert preflight(lambda: loss(model, batch).backward()) == []


def test_a_finding_reads_as_one_sentence():
    (finding,) = preflight(lambda x: x.sum().item(), torch.ones(2))
    assert str(finding) == (
        f"{__file__}:{finding.line} `{finding.code}`: item reads a tensor on the host; keep the value on the "
        f"device, or read it after the step"
    )


def test_constants_are_told_apart_from_uploads():
    (finding,) = preflight(lambda x: x * torch.tensor(2.0), torch.ones(2))
    assert not finding.breaks
    assert "keeps as it was at capture" in finding.why


def test_as_tensor_of_a_tensor_makes_nothing():
    assert preflight(torch.as_tensor, torch.ones(2)) == []


def test_lines_of_custom_backward_passes_are_found():
    class Peek(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            grad.sum().item()  # PEEK
            return grad

    x = torch.ones(2, requires_grad=True)
    (finding,) = preflight(lambda: Peek.apply(x).sum().backward())
    assert finding.code.endswith("# PEEK")


def test_layers_of_pytorch_are_blamed_on_the_line_that_calls_them():
    class Sparse(nn.Module):
        def forward(self, x):
            return F.one_hot(x)  # CALLS without num_classes it reads the largest index

    (finding,) = preflight(Sparse(), torch.tensor([0, 2]))
    assert "# CALLS" in finding.code


def stepping(make):
    """A step of a linear layer whose optimizer steps in the marked line, and its input."""
    layer = nn.Linear(4, 4)
    optimizer = make(layer.parameters())

    def step(x):
        layer(x).sum().backward()
        optimizer.step()  # STEPS
        optimizer.zero_grad()

    return step, torch.ones(2, 4)


RATE = "Python number as lr"


@pytest.mark.parametrize(
    ("make", "why", "breaks"),
    [
        (lambda p: SGD(p, lr=0.1), RATE, False),
        (lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True), RATE, False),
        (lambda p: Adagrad(p, lr=0.1), RATE, False),  # its counts of steps are the host's, and may be read
        (lambda p: AdamW(p, lr=0.1), "capturable=False", True),
        (lambda p: AdamW(p, lr=torch.tensor(0.1), fused=True), "capturable=False", True),
        (lambda p: SGD(p, lr=torch.tensor(0.1)), "reads a tensor on the host", True),  # unless it is fused
    ],
)
def test_a_rate_of_the_hosts_is_named_with_the_line_that_steps(make, why, breaks):
    step, x = stepping(make)
    for _ in range(2):  # without state and with
        (finding,) = preflight(step, x)
        assert finding.code.endswith("# STEPS")
        assert (finding.breaks, why in finding.why) == (breaks, True)


def test_a_rate_on_the_device_is_no_finding():
    step, x = stepping(lambda p: SGD(p, lr=torch.tensor(0.1), momentum=0.9, fused=True))
    assert preflight(step, x) == []


def test_what_breaks_capture_is_told_before_what_freezes_in_one_line():
    layer = nn.Linear(4, 4)
    optimizer = LBFGS(layer.parameters(), lr=0.1, max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = layer(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    (finding,) = preflight(lambda: optimizer.step(closure))
    assert (finding.what, finding.breaks) == ("item", True)


def test_optimizers_are_left_alone_afterwards():
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    before = dict(hooks)
    with pytest.raises(ZeroDivisionError):
        preflight(lambda: 1 / 0)
    assert hooks == before


def test_a_failing_step_raises_as_it_would():
    with pytest.raises(ZeroDivisionError):
        preflight(lambda: 1 / 0)


@pytest.mark.gpu
def test_copies_between_host_and_device_are_named():
    model = net().cuda()
    x = batches(1)[0]["image"]
    (finding,) = preflight(lambda x: model(x.cuda()).sum().backward(), x, device="cuda")
    assert finding.why == "copies host memory to the device"
    assert "x.cuda()" in finding.code
    (finding,) = preflight(lambda x: x.to("cpu"), x.cuda())
    assert finding.why == "reads a tensor on the host"
    assert preflight(lambda x: torch.ones(3).sum().item() + x, x.cuda()) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("on_device", "names"), [(True, []), (False, ["AdamW"])])
def test_an_optimizer_on_the_device_is_no_finding(on_device, names):
    layer, x = nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda")
    lr = torch.tensor(0.1, device="cuda") if on_device else 0.1
    optimizer = AdamW(layer.parameters(), lr=lr, fused=True, capturable=True)

    def step():
        layer(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        assert [(finding.what, finding.breaks) for finding in preflight(step, device="cuda")] == [
            (what, False) for what in names
        ]
