"""Plans by measurement: chosen once, remembered, and never a matter of bits."""

import json

import pytest
import torch

from carbon_compile.bits import assert_bitwise
from carbon_compile.templates import launch, tuning

WIDE = tuning.Product(512, 768, 1024, 16, 1)
DEEP = tuning.Product(64, 768, 4096, 24, 1)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pinned():
    """What a test pinned is released."""
    yield
    for product in (WIDE, DEEP):
        launch.override(product.m, product.n, product.k, product.window, product.batch, None)


def timed(times, asked):
    """A measurement that gives these times to the plans of each product, and notes what it was asked for."""

    def measure(device, products):
        asked.extend(products)
        plan = launch.Plan(32, 32, 64, 4, 1)
        return [[(time, launch.split(launch.replace(plan, group=group), product.k, product.window, 1)) for group, time in times] for product in products]

    return measure


def chosen(product):
    return launch.gemm_plan(*product[:5], launch.hardware(CPU))


def test_the_fastest_plan_is_pinned_and_remembered(tmp_path):
    asked = []
    measure = timed([(4, 9.0), (2, 3.0), (8, 5.0)], asked)
    assert tuning.tune([WIDE, DEEP, WIDE], CPU, tmp_path, measure) == 2
    assert (asked, chosen(WIDE).group, chosen(DEEP).group) == ([WIDE, DEEP], 2, 2)
    assert tuning.tune([WIDE, DEEP], CPU, tmp_path, measure) == 0 and len(asked) == 2


def test_another_process_recalls_the_plans(tmp_path):
    tuning.tune([WIDE], CPU, tmp_path, timed([(2, 3.0)], []))
    plan = chosen(WIDE)
    launch.override(WIDE.m, WIDE.n, WIDE.k, WIDE.window, WIDE.batch, None)
    assert chosen(WIDE) != plan
    assert tuning.recall(CPU, tmp_path) == 1
    assert chosen(WIDE) == plan


@pytest.mark.parametrize("content", ["", "{", "[{}]", '[{"product": [1], "plan": {}}]', json.dumps([{"product": list(WIDE), "plan": {"tile": 1}}])])
def test_a_spoilt_file_costs_a_measurement_only(tmp_path, content):
    tuning._file(CPU, tmp_path).write_text(content)
    assert tuning.tune([WIDE], CPU, tmp_path, timed([(2, 3.0)], [])) == 1
    assert tuning.recall(CPU, tmp_path) == 1


def test_plans_that_nothing_fits_leave_the_model_in_charge(tmp_path):
    before = chosen(WIDE)
    assert tuning.tune([WIDE], CPU, tmp_path, lambda device, products: [[] for _ in products]) == 1
    assert chosen(WIDE) == before


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    assert tuning.tune([WIDE], CPU, tmp_path / "file", timed([(2, 3.0)], [])) == 1
    assert chosen(WIDE).group == 2


def test_candidates_on_hopper_hold_the_models_choice():
    hopper = launch.Hardware((9, 0), 132)
    for product in (WIDE, DEEP):
        plans = tuning.candidates(product, hopper)
        assert plans[0] == launch.gemm_plan(*product[:5], hopper)
        assert 4 <= len(plans) <= tuning.CANDIDATES + 1


def test_the_option_is_checked():
    with pytest.raises(Exception, match="takes one of off, on"):
        torch.compile(lambda x: x + 1, backend="carbon", options={"tune": True})(torch.ones(2))


@pytest.mark.gpu
def test_gpu_tuned_products_have_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr("carbon_compile.precompile._plans", lambda: tmp_path)
    x, w = torch.randn(512, 768, device="cuda"), torch.randn(768, 1024, device="cuda", requires_grad=True)

    def gradient(**options):
        torch.compiler.reset()
        (found,) = torch.autograd.grad(torch.compile(lambda x, w: torch.relu(x @ w).sum(), backend="carbon", options=options)(x, w), w)
        return found

    expected = gradient()
    try:
        assert_bitwise(gradient(tune="on"), expected)
    finally:
        launch._overrides.clear()
        launch.gemm_plan.cache_clear()
    rows = json.loads(tuning._file(x.device, tmp_path).read_text())
    assert len(rows) == 2


def test_a_plan_is_timed_again_where_the_gpu_waited_for_the_host(monkeypatch):
    """Longer asleep each time; where even the longest sleep is over too early, what was measured counts."""

    class Event:
        def __init__(self, enable_timing):
            self.late = False

        def record(self):
            self.late = asleep[-1] < enough

        def query(self):
            return self.late

        def elapsed_time(self, end):
            return 1.0 if self.late else 0.5

    trial = tuning._Trial.__new__(tuning._Trial)
    trial.product, trial.out, trial.operands = tuning.Product(4, 4, 64, 24, 1), torch.float32, []
    trial.recipe = type("Recipe", (), {"run": lambda self, buffers: None, "scratch": lambda self, device: [torch.empty(8, dtype=torch.uint8), None]})()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: asleep.append(cycles))
    for enough, late in ((0, 0), (4 << 20, 2), (1 << 30, 6)):
        asleep = []
        assert trial.microseconds("cpu") == (1e3 if enough > 1 << 26 else 500.0)
        assert asleep == [1 << (20 + i) for i in range(late)] + [1 << (20 + late)] * tuning._RUNS
