"""The GPU table: physics of every row, exact name matching, and refusals of wrong TOML files."""

from dataclasses import replace
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.cost import PIPES
from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.roofline import ridge
from ridgeline.specs import ACCUMULATE, choose_spec, find_spec, load_specs, spec_from_toml

SPECS = load_specs()
BY_NAME = {spec.name: spec for spec in SPECS}

# Dense FLOP per SM per clock by architecture, tensor pipes at full rate (GeForce halves what accumulates in fp32).
FLOP_PER_SM_CLOCK = {
    "sm_75": {"cuda_fp32": 128, "tensor_fp16": 1024, "tensor_int8": 2048},
    "sm_80": {"cuda_fp32": 128, "tensor_tf32": 1024, "tensor_fp16": 2048, "tensor_int8": 4096},
    "sm_86": {"cuda_fp32": 256, "tensor_tf32": 512, "tensor_fp16": 1024, "tensor_int8": 2048},
    "sm_87": {"cuda_fp32": 256, "tensor_tf32": 1024, "tensor_fp16": 2048, "tensor_int8": 4096},
    "sm_89": {"cuda_fp32": 256, "tensor_tf32": 512, "tensor_fp16": 1024, "tensor_fp8": 2048, "tensor_int8": 2048},
    "sm_90": {"cuda_fp32": 256, "tensor_tf32": 2048, "tensor_fp16": 4096, "tensor_fp8": 8192, "tensor_int8": 8192},
    "sm_100": {"cuda_fp32": 256, "tensor_tf32": 4096, "tensor_fp16": 8192, "tensor_fp8": 16384, "tensor_int8": 16384},
    "sm_120": {"cuda_fp32": 256, "tensor_tf32": 512, "tensor_fp16": 1024, "tensor_fp8": 2048, "tensor_int8": 2048},
}
# Memory bus: width in bits, rate of one pin in bit/s. Left out: H200 and B200, whose sheets round to 4.8 and 8 TB/s.
BUS = {
    "NVIDIA T4": (256, 10e9),
    "NVIDIA A10": (384, 12.5e9),
    "NVIDIA A100 40GB": (5120, 2.43e9),
    "NVIDIA A100 80GB PCIe": (5120, 3.024e9),
    "NVIDIA A100 80GB SXM": (5120, 3.186e9),
    "NVIDIA L4": (192, 12.5e9),
    "NVIDIA L40S": (384, 18e9),
    "NVIDIA GeForce RTX 3090": (384, 19.5e9),
    "NVIDIA GeForce RTX 4070": (192, 21e9),
    "NVIDIA GeForce RTX 4080": (256, 22.4e9),
    "NVIDIA GeForce RTX 4090": (384, 21e9),
    "NVIDIA GeForce RTX 5070": (192, 28e9),
    "NVIDIA GeForce RTX 5080": (256, 30e9),
    "NVIDIA GeForce RTX 5090": (512, 28e9),
    "NVIDIA H100 PCIe": (5120, 3.186e9),
    "NVIDIA H100 SXM": (5120, 5.238e9),
    "NVIDIA Jetson AGX Orin 64GB": (256, 6.4e9),
}


def formula_rate(spec, pipe):
    """SM x clock x FLOP per SM and clock: the one place where a row's peak is derived."""
    base = {"tensor_bf16": "tensor_fp16", "tensor_fp16_acc16": "tensor_fp16"}.get(pipe, pipe)
    per_clock = FLOP_PER_SM_CLOCK[spec.architecture][base]
    if "GeForce" in spec.name and pipe.startswith("tensor") and ACCUMULATE[pipe] == "fp32":
        per_clock /= 2
    clock_hz = spec.boost_hz if pipe == "cuda_fp32" else spec.tensor_hz
    return spec.sm_count * clock_hz * per_clock


def test_the_table_has_all_nineteen_gpus():
    assert len(SPECS) == 19
    assert len(BY_NAME) == 19


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_row_obeys_sm_times_clock_times_rate(spec):
    for pipe, peak in spec.peaks.items():
        assert peak.rate == pytest.approx(formula_rate(spec, pipe), rel=0.02), pipe


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_row_has_every_pipe_of_its_architecture(spec):
    expected = set(FLOP_PER_SM_CLOCK[spec.architecture]) | {"tensor_fp16_acc16"}
    if spec.architecture != "sm_75":
        expected.add("tensor_bf16")
    assert set(spec.peaks) == expected


@pytest.mark.parametrize("name", BUS)
def test_bandwidth_is_bus_width_times_pin_rate(name):
    width_bits, pin_rate = BUS[name]
    assert BY_NAME[name].bandwidth == pytest.approx(width_bits * pin_rate / 8, rel=0.02)


def test_only_back_solved_rows_have_a_tensor_clock_of_their_own():
    assert {s.name for s in SPECS if s.tensor_hz != s.boost_hz} == {
        "NVIDIA H100 PCIe",
        "NVIDIA H100 SXM",
        "NVIDIA H200",
        "NVIDIA B200",
    }
    for table in (files("ridgeline") / "gpus").iterdir():
        text = table.read_text(encoding="utf-8")
        assert ("tensor_hz =" in text) == ("back-solved" in text), table.name


def test_every_row_states_its_source():
    assert all(len(spec.source) > 10 for spec in SPECS)


@pytest.mark.parametrize(
    ("name", "pipe", "flop_per_byte"),
    [
        ("NVIDIA T4", "tensor_fp16", 203),
        ("NVIDIA A10", "tensor_bf16", 208),
        ("NVIDIA A100 40GB", "tensor_bf16", 201),
        ("NVIDIA A100 80GB PCIe", "tensor_bf16", 161),
        ("NVIDIA A100 80GB SXM", "tensor_bf16", 153),
        ("NVIDIA L4", "tensor_bf16", 403),
        ("NVIDIA L40S", "tensor_bf16", 419),
        ("NVIDIA GeForce RTX 3090", "tensor_bf16", 76),
        ("NVIDIA GeForce RTX 4090", "tensor_bf16", 164),
        ("NVIDIA GeForce RTX 5090", "tensor_bf16", 117),
        ("NVIDIA H100 PCIe", "tensor_bf16", 371),
        ("NVIDIA H100 SXM", "tensor_bf16", 295),
        ("NVIDIA H200", "tensor_bf16", 206),
        ("NVIDIA B200", "tensor_bf16", 281),
        ("NVIDIA Jetson AGX Orin 64GB", "tensor_bf16", 208),
    ],
)
def test_ridge_points(name, pipe, flop_per_byte):
    assert ridge(BY_NAME[name], pipe) == pytest.approx(flop_per_byte, abs=0.6)


def test_public_mistakes_are_not_repeated():
    assert find_spec("NVIDIA GeForce RTX 4090").rate("tensor_bf16") == 165.2e12  # 330 accumulates in fp16
    assert find_spec("NVIDIA H100 80GB HBM3").rate("tensor_bf16") == 989.4e12  # 1979 is sparse
    assert find_spec("NVIDIA L40S").rate("tensor_fp8") == 733e12  # 1466 is sparse
    assert find_spec("NVIDIA L4").bandwidth == 300e9


def test_accumulation_is_named_for_every_pipe():
    assert set(PIPES) <= set(ACCUMULATE)
    spec = find_spec("RTX 4090")
    assert spec.peaks["tensor_fp16"].accumulate == "fp32"
    assert spec.peaks["tensor_fp16_acc16"].accumulate == "fp16"
    assert spec.peaks["tensor_int8"].accumulate == "int32"


# --- names -------------------------------------------------------------------------------------------------------

DRIVER_NAMES = {
    "Tesla T4": "NVIDIA T4",
    "NVIDIA A10": "NVIDIA A10",
    "NVIDIA A100-SXM4-40GB": "NVIDIA A100 40GB",
    "A100-SXM4-40GB": "NVIDIA A100 40GB",
    "NVIDIA A100-PCIE-40GB": "NVIDIA A100 40GB",
    "NVIDIA A100-SXM4-80GB": "NVIDIA A100 80GB SXM",
    "A100-SXM-80GB": "NVIDIA A100 80GB SXM",
    "NVIDIA A100 80GB PCIe": "NVIDIA A100 80GB PCIe",
    "NVIDIA L4": "NVIDIA L4",
    "NVIDIA L40S": "NVIDIA L40S",
    "NVIDIA GeForce RTX 3090": "NVIDIA GeForce RTX 3090",
    "GeForce RTX 3090": "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 4070": "NVIDIA GeForce RTX 4070",
    "NVIDIA GeForce RTX 4080": "NVIDIA GeForce RTX 4080",
    "NVIDIA GeForce RTX 4090": "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 5070": "NVIDIA GeForce RTX 5070",
    "NVIDIA GeForce RTX 5080": "NVIDIA GeForce RTX 5080",
    "NVIDIA GeForce RTX 5090": "NVIDIA GeForce RTX 5090",
    "NVIDIA H100 PCIe": "NVIDIA H100 PCIe",
    "NVIDIA H100 80GB HBM3": "NVIDIA H100 SXM",
    "NVIDIA H200": "NVIDIA H200",
    "NVIDIA B200": "NVIDIA B200",
    "Orin": "NVIDIA Jetson AGX Orin 64GB",
    # what people type
    "T4": "NVIDIA T4",
    "NVIDIA T4": "NVIDIA T4",
    "l4": "NVIDIA L4",
    "H200": "NVIDIA H200",
    "RTX 4090": "NVIDIA GeForce RTX 4090",
    "4090": "NVIDIA GeForce RTX 4090",
    "  nvidia   geforce rtx 5090 ": "NVIDIA GeForce RTX 5090",
    "h100 sxm": "NVIDIA H100 SXM",
    "AGX Orin": "NVIDIA Jetson AGX Orin 64GB",
}
# Driver names of other chips, with a word that the refusal must contain.
REFUSED = {
    "NVIDIA T400": "closest",
    "NVIDIA T400 4GB": "doctor",
    "NVIDIA A10G": "'NVIDIA A10'",
    "NVIDIA A30": "doctor",
    "NVIDIA A100-SXM-64GB": "closest",
    "NVIDIA A800-SXM4-80GB": "closest",
    "NVIDIA L40": "'NVIDIA L40S'",
    "NVIDIA L20": "doctor",
    "NVIDIA H100 NVL": "closest",
    "NVIDIA H100 80GB HBM2e": "closest",
    "NVIDIA H800": "closest",
    "NVIDIA H20": "closest",
    "NVIDIA H200 NVL": "closest",
    "NVIDIA GH200 480GB": "doctor",
    "NVIDIA GB200": "closest",
    "NVIDIA GeForce RTX 3090 Ti": "closest",
    "NVIDIA GeForce RTX 4070 SUPER": "'NVIDIA GeForce RTX 4070'",
    "NVIDIA GeForce RTX 4070 Ti": "closest",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "closest",
    "NVIDIA GeForce RTX 4080 SUPER": "closest",
    "NVIDIA GeForce RTX 4090 D": "closest",
    "NVIDIA GeForce RTX 5070 Ti": "closest",
    "NVIDIA GeForce RTX 5090 D": "closest",
    "NVIDIA RTX 6000 Ada Generation": "doctor",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "doctor",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "laptop part",
    "NVIDIA GeForce RTX 5090 Laptop GPU": "laptop part",
    "GeForce RTX 2080 with Max-Q Design": "laptop part",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": "MIG slice",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb": "MIG slice",
    "NVIDIA H200 MIG 1g.18gb": "MIG slice",
    "GRID T4-16Q": "vGPU",
    "GRID A100-40C": "vGPU",
    "NVIDIA L4-24Q": "vGPU",
    "NVIDIA A10-8Q": "vGPU",
    "NVIDIA A100-1-5C": "vGPU",
    "Orin Nano": "doctor",
    "A100": "'A100",  # 40 or 80 GB, PCIe or SXM
    "H100": "'H100 SXM",
    "GTX 1080": "doctor",
    "": "doctor",
}


@pytest.mark.parametrize(("driver_name", "spec_name"), DRIVER_NAMES.items())
def test_driver_name_finds_its_row(driver_name, spec_name):
    assert find_spec(driver_name).name == spec_name


@pytest.mark.parametrize(("driver_name", "words"), REFUSED.items())
def test_other_chip_is_refused_with_the_way_out(driver_name, words):
    with pytest.raises(UsageError) as refusal:
        find_spec(driver_name)
    message = str(refusal.value)
    assert repr(driver_name) in message
    assert words in message
    assert "--gpu FILE.toml" in message
    assert "\n" not in message


def test_no_two_rows_share_a_spelling():
    spellings = [" ".join(s.split()).casefold() for spec in SPECS for s in {spec.name, *spec.names, *spec.aliases}]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_spelling_leads_home(spec):
    assert {find_spec(s) for s in (spec.name, *spec.names, *spec.aliases)} == {spec}


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_string_is_found_or_refused(name):
    known = {" ".join(s.split()).casefold() for spec in SPECS for s in (spec.name, *spec.names, *spec.aliases)}
    if " ".join(name.split()).casefold() in known:
        assert find_spec(name) in SPECS
    else:
        with pytest.raises(UsageError):
            find_spec(name)


def test_sm_count_tells_parts_of_one_name_apart():
    assert find_spec("Orin", sm_count=16).name == "NVIDIA Jetson AGX Orin 64GB"
    with pytest.raises(UsageError, match="reports 8 SMs here"):
        find_spec("Orin", sm_count=8)


# --- a user's own file -------------------------------------------------------------------------------------------

GOOD = (files("ridgeline") / "gpus" / "l4.toml").read_text(encoding="utf-8")


def _edited(old, new):
    assert old in GOOD
    return GOOD.replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_edited("bandwidth = 300e9", "bandwidth = 300"), "bandwidth must lie between 20.0 GB/s and 30.0 TB/s"),
        (_edited("bandwidth = 300e9", "bandwidth = 30e9"), "ridge point of tensor_fp16 is 4.03e"),
        (_edited("boost_hz = 2.04e9", "boost_hz = 2040"), "boost_hz must lie between"),
        (_edited("boost_hz = 2.04e9", "boost_hz = nan"), "boost_hz must lie between"),
        (_edited("boost_hz = 2.04e9", 'boost_hz = "2.04e9"'), "got '2.04e9'"),
        (_edited("sm_count = 58", "sm_count = true"), "sm_count must lie between 1.00 SM and"),
        (_edited("sm_count = 58", "sm_count = 58.5"), "sm_count must be a whole number"),
        (_edited("tensor_fp8 = 242e12", "tensor_fp8 = 60e12"), r"tensor_fp8 \(60.0 TFLOP/s\) is below tensor_fp16"),
        (_edited("tensor_bf16 = 121e12", "tensor_bf16 = 121"), "peaks.tensor_bf16 must lie between"),
        (_edited("tensor_bf16", "tensor_bfloat16"), "unknown pipe peaks.tensor_bfloat16"),
        (_edited("cuda_fp32 = 30.3e12", ""), "at least cuda_fp32"),
        (_edited("[peaks]", "[rates]"), "unknown key 'rates'"),
        (_edited("sm_count", "sms"), "unknown key 'sms'"),
        (_edited("sm_count = 58", ""), "sm_count is missing"),
        (_edited('"sm_89"', '"Ada"'), "architecture must look like 'sm_90', got 'Ada'"),
        (_edited('names = ["NVIDIA L4"]', 'names = "NVIDIA L4"'), "names must be a list of strings"),
        (_edited('names = ["NVIDIA L4"]', "names = [4]"), "names must be a non-empty string, got 4"),
        (_edited("NVIDIA L4 data sheet; it prints sparse figures, halved here", " "), "source must be a non-empty"),
        ("name = [", "not a TOML file"),
        ("", "unknown key|is missing"),
    ],
)
def test_wrong_toml_is_refused_in_one_sentence(tmp_path, text, message):
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as refusal:
        spec_from_toml(path)
    assert str(refusal.value).startswith(str(path))


def test_unreadable_toml_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot read the GPU file"):
        spec_from_toml(tmp_path / "absent.toml")
    (tmp_path / "latin1.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(UsageError, match="not a TOML file"):
        spec_from_toml(tmp_path / "latin1.toml")


def test_choose_spec_takes_a_file_a_name_or_the_default(tmp_path, monkeypatch):
    path = tmp_path / "MY.TOML"
    path.write_text(_edited('name = "NVIDIA L4"', 'name = "mine"'), encoding="utf-8")
    assert choose_spec(str(path)).name == "mine"
    assert choose_spec("L4") == find_spec("NVIDIA L4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_spec(None, default="H200").name == "NVIDIA H200"
    with pytest.raises(UsageError, match="name one with --gpu"):
        choose_spec(None)


def test_choose_spec_asks_the_driver(monkeypatch):
    class Properties:
        name = "NVIDIA H200"
        multi_processor_count = 132

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: Properties)
    assert choose_spec(None).name == "NVIDIA H200"


# --- rates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "pipe", "instead"),
    [
        ("T4", "tensor_bf16", "--dtype fp16"),
        ("T4", "tensor_tf32", "--dtype fp32"),
        ("NVIDIA A10", "tensor_fp8", "--dtype bf16"),
        ("T4", "tensor_fp8", "--dtype fp16"),
    ],
)
def test_missing_pipe_names_the_way_out(gpu, pipe, instead):
    with pytest.raises(EnvironmentUnusable, match=f"has no {pipe} unit: use {instead}"):
        find_spec(gpu).rate(pipe)


def test_every_missing_pipe_has_a_way_out():
    bare = replace(find_spec("T4"), peaks={"cuda_fp32": find_spec("T4").peaks["cuda_fp32"]})
    for pipe in ACCUMULATE.keys() - {"cuda_fp32"}:
        with pytest.raises(EnvironmentUnusable, match="use --dtype fp32"):
            bare.rate(pipe)


def test_unknown_pipe_is_a_programming_error():
    with pytest.raises(ValueError, match="got 'tensor_bf61'"):
        find_spec("T4").rate("tensor_bf61")


def test_measured_ceilings_replace_the_sheet():
    sheet = find_spec("H200")
    measured = sheet.with_measured({"tensor_bf16": 673e12, "bandwidth": 4.28e12})
    assert measured.rate("tensor_bf16") == 673e12
    assert measured.bandwidth == 4.28e12
    assert measured.rate("tensor_fp8") == sheet.rate("tensor_fp8")
    assert "measured" in measured.source
    assert sheet.rate("tensor_bf16") == 989.4e12
    with pytest.raises(ValueError, match="'copy'"):
        sheet.with_measured({"copy": 1.0})
