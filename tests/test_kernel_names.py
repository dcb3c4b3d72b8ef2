"""Kernel names of public traces and what they tell: category, tensor core, dtype, layout, pass."""

from pathlib import Path

import pytest

from ridgeline import kernel_names
from ridgeline.kernel_names import CATEGORIES, classify, own_operator, short_name, some_are_ours

TENSOR_CORE = {"yes": True, "no": False, "unknown": None}
# names as Kineto and Nsight Systems write them, with category, tensor core, dtype, layout, pass
CORPUS = [
    line.split("\t") for line in (Path(__file__).parent / "fixtures/kernel_names.tsv").read_text().splitlines()[1:]
]


@pytest.mark.parametrize("row", CORPUS, ids=[f"{i}-{short_name(row[0], 40)}" for i, row in enumerate(CORPUS)])
def test_names_of_public_traces(row: list[str]) -> None:
    name, category, tensor_core, *others = row
    known = classify(name)
    assert (known.category, known.tensor_core) == (category, TENSOR_CORE[tensor_core])
    assert [known.dtype, known.layout, known.pass_] == others


def test_the_corpus_is_large_and_covers_the_categories() -> None:
    assert len(CORPUS) >= 60
    assert {row[1] for row in CORPUS} == set(CATEGORIES)


@pytest.mark.parametrize("kind", ["memcpy", "memset"])
def test_copies_and_fills_are_known_by_their_kind(kind: str) -> None:
    known = classify("Memcpy HtoD (Pageable -> Device)", kind)
    assert (known.category, known.tensor_core) == (kind, False)


def test_an_unknown_name_is_never_said_to_lack_tensor_cores() -> None:
    assert classify("mystery_kernel_v2").tensor_core is None


def test_every_kernel_of_the_project_is_known_with_its_operator() -> None:
    source = Path(kernel_names.__file__).parent / "kernels"
    texts = {file: file.read_text() for file in source.glob("*.py")}
    launched = {
        line.split("def ")[1].split("(")[0]
        for text in texts.values()
        for jit, line in zip(text.split("\n"), text.split("\n")[1:], strict=False)
        if jit in ("@triton.jit", "@gluon.jit") and "_kernel(" in line
    }
    assert len(launched) > 15
    assert {name for name in launched if not own_operator(name, ours=True)} == set()
    assert own_operator("conv2d_act_kernel") == "ridgeline.conv2d_act"
    assert own_operator("someone_elses_kernel", ours=True) == ""


@pytest.mark.parametrize(
    ("name", "category"),
    [("forward_kernel", "norm"), ("update_kernel", "optimizer"), ("rank_kernel", "sort"), ("apply_kernel", "norm")],
)
def test_a_common_name_is_ours_only_where_something_else_says_so(name: str, category: str) -> None:
    assert (classify(name).category, classify(name).tensor_core) == ("unknown", None)
    assert own_operator(name) == ""
    assert classify(name, ours=True).category == category
    assert own_operator(name, ours=True).startswith("ridgeline.")


@pytest.mark.parametrize(
    ("names", "ours"),
    [
        (["conv2d_act_kernel", "forward_kernel"], True),
        (["forward_kernel", "scalars_kernel", "update_kernel"], True),
        (["update_kernel", "scalars_kernel"], False),
        (["scalars_kernel", "forward_kernel", "update_kernel"], False),
        (["statistics_kernel", "apply_kernel", "backward_kernel"], False),  # anybody's norm in two passes
        ([], False),
    ],
)
def test_what_shows_that_this_project_ran(names: list[str], ours: bool) -> None:
    assert some_are_ours(names) is ours


def test_short_names_keep_what_tells_kernels_apart() -> None:
    long = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array>(int)"
    assert short_name(long) == "at::native::vectorized_elementwise_kernel CUDAFunctor_add"
    assert short_name("nvjet_hsh_128x256") == "nvjet_hsh_128x256"
    assert short_name("x" * 80) == "x" * 59 + "…"
