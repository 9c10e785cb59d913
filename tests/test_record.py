"""What the recorder sees of a loop, from outside, and what it leaves alone."""

import inspect
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nan_lab import loops, record, triggers

BIG = 512  # a batch size with three steps an epoch


def short(loop, trigger=None, **options):
    options = {"epochs": 2, "batch_size": BIG, "device": "cpu"} | options
    return record.run(loop, trigger, **options)


def plain(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """A float32 loop without autocast, scaler or clipping."""
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss


def test_the_default_values_are_the_contract():
    parameters = inspect.signature(record.run).parameters
    assert {name: p.default for name, p in list(parameters.items())[1:]} == {
        "trigger": None, "model": None, "optimizer": None, "lr": 0.03, "momentum": 0.9,
        "epochs": 4, "batch_size": 32, "seed": 0, "dtype": torch.float16, "device": None,
        "policy": "cuda", "init_scale": 65536.0, "growth_interval": 2000,
    }  # fmt: skip


def test_one_entry_a_step_and_one_accuracy_an_epoch():
    history = short(loops.fixed)
    lists = (history.loss, history.grad_norm, history.applied_norm, history.scale, history.skipped)
    assert [len(values) for values in lists] == [6] * 5
    assert len(history.accuracy) == 2 and history.steps_per_epoch == 3
    assert history.verdict() == "The loss is finite in all 6 steps; the weights are finite."


def test_the_norms_are_those_of_backward_and_of_the_optimizer():
    seen = []

    def measured(model, loader, optimizer, scaler, device_type, dtype):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast(device_type, dtype=dtype):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            before = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.125).item()
            seen.append(before)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()  # a loop may do so before the yield
            yield loss

    history = short(measured)
    assert history.grad_norm == pytest.approx(seen, rel=1e-4)
    assert history.applied_norm == pytest.approx([0.125] * 6, rel=1e-4)


def test_a_norm_that_overflows_float32_is_still_a_number():
    def huge(model, loader, optimizer, scaler, device_type, dtype):
        for _ in loader:
            optimizer.zero_grad()
            loss = sum((p * 3e38).sum() for p in model.parameters())
            loss.backward()
            yield loss.new_zeros(())

    history = short(huge, dtype=torch.float32)
    assert 1e39 < history.grad_norm[0] < math.inf and history.first_bad_grad_step is None


@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0])
def test_the_recorded_norm_does_not_depend_on_the_loss_scale(scale):
    history = short(loops.without_guard, init_scale=scale)
    reference = short(loops.without_guard, dtype=torch.float32)
    assert history.scale == [scale] * 6
    assert history.grad_norm == pytest.approx(reference.grad_norm, rel=0.02)


def test_a_loop_that_ignores_the_scaler_has_scale_one():
    history = short(plain)
    assert history.scale == [1.0] * 6
    assert history.grad_norm == pytest.approx(history.applied_norm)


def test_skipped_means_that_the_optimizer_did_not_step():
    def skipping(model, loader, optimizer, scaler, device_type, dtype):
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if step % 2:
                optimizer.step()
            yield loss

    history = short(skipping)
    assert history.skipped == [True, False] * 3
    assert [norm > 0 for norm in history.applied_norm] == [False, True] * 3
    # At scale 0 the scale falls no more, but the steps are skipped all the same.
    always_nan = triggers.Trigger("NaN", 0, None, lambda x, y: (x * math.nan, y))
    frozen = short(loops.broken, always_nan, init_scale=1e-45)
    assert frozen.scale[3:] == [0.0] * 3
    assert frozen.skipped == [True] * 6


def test_a_step_without_a_yield_counts_and_has_no_loss():
    def quiet(model, loader, optimizer, scaler, device_type, dtype):
        for step, (x, y) in enumerate(loader):
            if step == 2:
                continue
            yield from plain(model, [(x, y)], optimizer, scaler)

    history = short(quiet)
    assert [math.isnan(loss) for loss in history.loss] == [False, False, True] + [False] * 3
    assert history.first_bad_step is None and history.skipped[2] and not history.skipped[3]


def test_a_loop_that_raises_ends_the_run_and_loses_nothing():
    history = short(loops.fixed, triggers.nan_pixel(4))
    assert (history.stopped_at, type(history.error)) == (4, AssertionError)
    assert len(history.loss) == len(history.grad_norm) == len(history.skipped) == 5
    assert history.first_bad_step is None and history.first_bad_grad_step is None
    assert history.scale == [65536.0] * 5 and len(history.accuracy) == 1
    assert history.verdict() == (
        "Stopped at step 4 by AssertionError: step 4: the batch has a NaN or inf; "
        "the weights are finite."
    )


def test_the_accuracy_after_the_last_epoch_is_that_of_the_final_weights():
    history = short(plain, dtype=torch.float32)
    x, y = record.data.digits()
    right = (history.model(x).argmax(-1) == y).float().mean().item()
    assert history.accuracy[-1] == right


def test_float32_has_no_autocast_and_no_warning():
    seen = set()

    def watched(model, loader, optimizer, scaler, device_type, dtype):
        model[0].register_forward_hook(lambda module, args, out: seen.add(out.dtype))
        yield from loops.fixed(model, loader, optimizer, scaler, device_type, dtype)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = short(watched, dtype=torch.float32)
    assert seen == {torch.float32} and history.error is None and history.scale == [1.0] * 6


def test_the_policy_decides_where_softmax_runs():
    seen = []

    def watched(model, loader, optimizer, scaler, device_type, dtype):
        with torch.autocast(device_type, dtype=dtype):
            seen.append(torch.softmax(model(next(loader)[0]), -1).dtype)
        yield torch.zeros(())

    for policy in ("cuda", "native"):
        short(watched, policy=policy)
    assert seen == [torch.float32, torch.float16]


def test_factories_and_a_learning_rate_by_step():
    rates = []

    def watched(model, loader, optimizer, scaler, device_type, dtype):
        assert isinstance(optimizer, torch.optim.Adam) and len(model) == 1
        for loss in plain(model, loader, optimizer, scaler):
            rates.append(optimizer.param_groups[0]["lr"])
            yield loss

    history = short(
        watched,
        model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 10)),
        optimizer=torch.optim.Adam,
        lr=lambda step: 0.5**step,
    )
    assert history.error is None and rates == [0.5**step for step in range(6)]


def test_the_same_seed_gives_the_same_run_and_the_caller_keeps_its_random_state():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = short(loops.fixed)
    assert torch.equal(torch.rand(3), expected)
    assert first.loss == short(loops.fixed).loss != short(loops.fixed, seed=1).loss


class CountReads(TorchDispatchMode):
    """Counts how often a tensor's value is read into Python one by one: item, bool, float."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_the_recorder_adds_one_host_read_a_step(monkeypatch):
    lists, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: lists.append(1) or tolist(t))
    counts = []
    for epochs in (1, 2):
        lists.clear()
        with CountReads() as reads:
            short(loops.without_guard, epochs=epochs)
        counts.append((reads.count, len(lists)))
    assert counts[1][1] - counts[0][1] == 3  # an epoch of three steps more
    # The rest is the scaler's own read of found_inf a step, an epoch's accuracy, and two by
    # one_hot, which never leave the CPU.
    assert counts[1][0] - counts[0][0] == 3 + 1 + 2


def test_no_hook_stays_behind():
    history = short(loops.fixed)
    assert not any(p._post_accumulate_grad_hooks for p in history.model.parameters())


def not_a_generator(model, loader, optimizer, scaler, device_type, dtype):
    for x, _ in loader:
        model(x)


def yields_a_float(model, loader, optimizer, scaler, device_type, dtype):
    for _ in loader:
        yield 0.5


def yields_a_vector(model, loader, optimizer, scaler, device_type, dtype):
    for _ in loader:
        yield torch.zeros(3)


class BadShape:
    cause_step = 0

    def apply(self, step, x, y):
        return x.reshape(-1, 8, 8), y


@pytest.mark.parametrize(
    ("error", "message", "loop", "options"),
    [
        (ValueError, "dtype must be float16, bfloat16 or float32, got torch.float64",
         loops.fixed, {"dtype": torch.float64}),
        (ValueError, "device must be cpu or cuda, got 'meta'", loops.fixed, {"device": "meta"}),
        (ValueError, 'policy must be "cuda" or "native", got \'gpu\'',
         loops.fixed, {"policy": "gpu"}),
        (ValueError, "epochs must be an integer of 1 or more, got 0", loops.fixed, {"epochs": 0}),
        (ValueError, "batch_size must be an integer from 1 to 1797, got 2000",
         loops.fixed, {"batch_size": 2000}),
        (TypeError, "loop must be a generator function, got None", None, {}),
        (TypeError, "use `yield loss`.*not_a_generator is not", not_a_generator, {}),
        (TypeError, "must yield a loss tensor with one element, got 0.5", yields_a_float, {}),
        (TypeError, r"must yield a loss tensor with one element, got shape \(3,\)",
         yields_a_vector, {}),
        (ValueError, r"a batch must have the shapes \(512, 64\) and \(512, 10\), "
         r"got \(512, 8, 8\) and \(512, 10\)", loops.fixed, {"trigger": BadShape()}),
        (TypeError, "trigger must have `cause_step` and `apply", loops.fixed, {"trigger": 112}),
    ],
)  # fmt: skip
def test_bad_input_says_what_was_given_and_what_was_expected(error, message, loop, options):
    trained = []

    def model():
        trained.append(record.classifier())
        return trained[-1]

    before = torch.random.get_rng_state()
    with pytest.raises(error, match=message):
        short(loop, model=model, **options)
    assert torch.equal(torch.random.get_rng_state(), before)
    for net in trained:
        assert all(p.grad is None for p in net.parameters())  # nothing is half run


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        short(loops.fixed, device="cuda")


@pytest.mark.parametrize(("wish", "there", "device"), [
    ("auto", False, "cpu"), ("auto", True, "cuda"), ("cpu", True, "cpu"), ("cuda", True, "cuda"),
])  # fmt: skip
def test_the_environment_chooses_the_device(monkeypatch, wish, there, device):
    monkeypatch.setenv("NAN_LAB_DEVICE", wish)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert record.default_device().type == device


def test_a_wrong_wish_lists_the_three(monkeypatch):
    monkeypatch.setenv("NAN_LAB_DEVICE", "gpu")
    with pytest.raises(ValueError, match="NAN_LAB_DEVICE must be auto, cpu or cuda, got 'gpu'"):
        record.default_device()


@pytest.mark.parametrize(("values", "sentence"), [
    ([1.0, math.nan, math.nan], "The loss is NaN from step 1 to the end; every step is skipped"),
    ([1.0, math.inf, math.inf], "The loss is inf from step 1 to the end; every step is skipped"),
    ([1.0, math.nan, 1.0], "The loss is NaN at step 1, later finite again"),
    ([math.nan, 1.0, math.nan], "The loss is NaN at step 0, later not finite at the end"),
])  # fmt: skip
def test_the_verdicts(values, sentence):
    history = record.History("loop", torch.float16, None, 3)
    history.loss, history.yielded, history.skipped = values, [True] * 3, [True] * 3
    assert history.verdict() == f"{sentence}; the weights are finite."
