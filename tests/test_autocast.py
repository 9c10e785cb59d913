"""CUDA's float32 rule on CPU, against two outside sources: torch's own autocast test lists, and
CUDA's dispatch, which fake tensors go through on any machine (dtypes only)."""

import re
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastTestLists

from nan_lab.autocast import FP32_OPS, cuda_autocast_policy

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")  # old names are on the lists too
HALF = torch.float16, torch.bfloat16


@contextmanager
def cpu_autocast(dtype=torch.float16):
    with cuda_autocast_policy(), torch.autocast("cpu", dtype=dtype):
        yield


@contextmanager
def cuda_autocast(dtype=torch.float16):
    """What `torch.autocast("cuda")` switches on; without a GPU that one only warns."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def on_cpu_list(name):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")


def cast(value, dtype):
    if isinstance(value, (tuple, list)):
        return type(value)(cast(item, dtype) for item in value)
    half = isinstance(value, torch.Tensor) and value.dtype in HALF
    return value.to(dtype) if half else value


def dtypes(result):
    results = result if isinstance(result, (tuple, list)) else [result]
    return [r.dtype if isinstance(r, torch.Tensor) else type(r) for r in results]


def outcome(function, args, kwargs):
    try:
        return dtypes(function(*args, **kwargs))
    except RuntimeError as error:  # an operation that CPUs do not have, cudnn_convolution say
        return type(error)


# The first source: torch's test lists, name, arguments, and keywords of every operation.


def entries(lists, *names):
    """(list's name, operation's name, function, args, kwargs) of torch's lists `names`."""
    spaces = {"torch": torch, "nn": torch._C._nn, "linalg": torch._C._linalg, "methods": None}
    found = []
    for attribute in names:
        space = spaces[attribute.partition("_")[0]] or torch.Tensor
        for name, args, *rest in getattr(lists, attribute):
            if not isinstance(args, tuple) or not hasattr(space, name):
                continue  # einsum's entry is written for another caller; __div__ is Python 2's
            kwargs = next((item for item in rest if isinstance(item, dict)), {})
            found.append((attribute, name, getattr(space, name), args, kwargs))
    return found


FLOAT32 = ["torch_fp32", "nn_fp32", "methods_fp32"]
OTHERS = ["torch_fp16", "nn_fp16", "linalg_fp16", "methods_fp16", "torch_need_autocast_promote"]
OTHERS += ["torch_expect_builtin_promote", "methods_expect_builtin_promote"]
torch.manual_seed(0)
LISTS = AutocastTestLists("cpu")
LISTED = entries(LISTS, *FLOAT32)
NOT_LISTED = entries(LISTS, *OTHERS)


def ids(found):
    return [f"{number}-{name}" for number, (_, name, *_) in enumerate(found)]


@pytest.mark.parametrize("entry", LISTED, ids=ids(LISTED))
def test_torchs_float32_list_runs_in_float32(entry):
    _, name, function, args, kwargs = entry
    reference = function(*cast(args, torch.float32), **kwargs)
    with cpu_autocast():
        result = function(*args, **kwargs)
        method = getattr(torch.Tensor, name, None)
        from_method = method(*args, **kwargs) if method else result
    for answer in (result, from_method):
        assert answer.dtype == torch.float32
        torch.testing.assert_close(answer, reference, rtol=0, atol=0, equal_nan=True)


def test_many_of_them_are_half_on_cpu_without_the_policy():
    with torch.autocast("cpu", dtype=torch.float16):
        results = [(name, outcome(f, args, kwargs)) for _, name, f, args, kwargs in LISTED]
    half = [name for name, result in results if result == [torch.float16]]
    assert len(half) > 25 and {"softmax", "log", "pow", "__pow__", "layer_norm"} <= set(half)


@pytest.mark.parametrize("entry", NOT_LISTED, ids=ids(NOT_LISTED))
def test_all_else_runs_as_cpu_autocast_has_it(entry):
    _, _, function, args, kwargs = entry
    with torch.autocast("cpu", dtype=torch.float16):
        native = outcome(function, args, kwargs)
        with cuda_autocast_policy():
            assert outcome(function, args, kwargs) == native


def test_fake_cuda_agrees_with_torchs_lists():
    """The second source is trusted below: here it is tried on the first."""
    with FakeTensorMode():
        for _, name, function, args, kwargs in entries(AutocastTestLists("cuda"), *FLOAT32):
            with cuda_autocast():
                assert dtypes(function(*args, **kwargs)) == [torch.float32], name


# The second source: the same expression on a fake CUDA tensor. x is (4, 8).

EXPRESSIONS = """
torch.softmax(x, -1) | x.softmax(-1) | F.softmax(x, -1) | F.log_softmax(x, -1) | x.log_softmax(-1)
torch.log(x) | x.log() | x.log2() | x.log10() | x.log1p() | x.exp() | x.expm1() | x.tan()
x.acos() | x.asin() | x.sinh() | x.cosh() | x.erfinv() | x.rsqrt() | x.reciprocal()
x ** 2 | x ** 0.5 | x ** x | 2 ** x | 1 / x | pow(x, 2) | x.pow(2) | torch.pow(x, x)
torch.pow(2, x) | x.square() | torch.float_power(x, 2)
torch.linalg.norm(x) | torch.linalg.norm(x, "fro") | torch.linalg.norm(x, "nuc")
torch.linalg.norm(x, 2) | torch.linalg.norm(x, dim=0) | torch.linalg.matrix_norm(x)
torch.linalg.matrix_norm(x, 1) | torch.linalg.matrix_norm(x, "nuc")
torch.linalg.vector_norm(x) | torch.linalg.vector_norm(x, 1, dim=0)
x.norm() | x.norm(1) | x.norm(dim=0) | x.norm(2, dim=0) | torch.norm(x) | torch.norm(x, dim=0)
torch.frobenius_norm(x, (0, 1)) | torch.nuclear_norm(x) | torch.nuclear_norm(x, (0, 1))
F.normalize(x) | torch.dist(x, x) | torch.cdist(x, x) | F.pdist(x) | x.renorm(2, 0, 1.0)
x.sum() | x.sum(0) | torch.sum(x, (0, 1)) | x.prod() | x.prod(0) | x.cumsum(0) | x.cumprod(0)
torch.logsumexp(x, -1) | x.logsumexp(0)
F.layer_norm(x, (8,)) | torch.native_layer_norm(x, (8,), None, None, 1e-5)
F.rms_norm(x, (8,)) | F.group_norm(x, 2) | F.softplus(x) | F.cosine_similarity(x, x)
F.cross_entropy(x, labels) | F.cross_entropy(x, x) | F.nll_loss(x, labels)
F.mse_loss(x, x) | F.l1_loss(x, x) | F.smooth_l1_loss(x, x) | F.huber_loss(x, x)
F.kl_div(x, x, reduction="sum") | F.binary_cross_entropy_with_logits(x, x)
F.soft_margin_loss(x, x) | F.poisson_nll_loss(x, x)
F.triplet_margin_loss(x, x, x) | F.multi_margin_loss(x, labels)
F.interpolate(x.reshape(1, 4, 8), scale_factor=2)
F.interpolate(x.reshape(1, 1, 4, 8), scale_factor=2)
F.interpolate(x.reshape(1, 4, 8), scale_factor=2, mode="linear")
F.interpolate(x.reshape(1, 4, 8), scale_factor=2, mode="nearest-exact")
F.interpolate(x.reshape(1, 1, 4, 8), scale_factor=2, mode="nearest-exact")
F.interpolate(x.reshape(1, 1, 4, 8), scale_factor=2, mode="bilinear")
F.interpolate(x.reshape(1, 1, 4, 8), scale_factor=2, mode="bicubic")
F.interpolate(x.reshape(1, 1, 1, 4, 8), scale_factor=2)
F.interpolate(x.reshape(1, 1, 1, 4, 8), scale_factor=2, mode="nearest-exact")
F.interpolate(x.reshape(1, 1, 1, 4, 8), scale_factor=2, mode="trilinear")
x + x | x - 1 | x * x | x / x | x * 2 | -x | x.sqrt() | x.abs() | x.clamp(0.2)
x.mean() | x.mean(0)
x.std() | x.var() | x.sigmoid() | x.tanh() | x.erf() | x.sin() | F.relu(x) | F.gelu(x) | F.silu(x)
F.logsigmoid(x) | x.logit() | torch.logaddexp(x, x) | torch.special.entr(x) | x.max() | x.amax(0)
torch.where(x > 0.5, x, 0) | x @ x.T | F.linear(x, x) | F.dropout(x, 0.5) | x.T
F.batch_norm(x, None, None, training=True)
x.softmax(-1, dtype=torch.float16) | F.log_softmax(x, -1, dtype=torch.float16)
x.softmax(-1, dtype=torch.float64) | x.sum(dtype=torch.float16) | x.sum(0, dtype=torch.bfloat16)
x.cumsum(0, dtype=torch.float16) | torch.linalg.vector_norm(x, dtype=torch.float64)
x.exp_() | x.pow_(2) | x.softmax(-1).log() | (x * x).sum() | x.long().sum()
"""
# Autocast only asks these for a float32 result, and they refuse a half argument.
REFUSED = {'torch.linalg.norm(x, "nuc")', "torch.linalg.norm(x, 2)"}
REFUSED |= {'torch.linalg.matrix_norm(x, "nuc")'}
EXPRESSIONS = [text.strip() for text in re.split(r"\||\n", EXPRESSIONS) if text.strip()]


def outcomes(device, dtype):
    """What every expression returns: {expression: dtypes, or the type of the error}."""
    x = torch.linspace(0.1, 0.9, 32, device=device).reshape(4, 8).to(dtype)
    labels = torch.tensor([0, 1, 2, 3], device=device)
    names = {"torch": torch, "F": F, "labels": labels}
    return {e: outcome(eval, (e, {**names, "x": x.clone()}), {}) for e in EXPRESSIONS}


@pytest.mark.parametrize("autocast_dtype", HALF)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
def test_the_dtype_is_that_of_cudas_dispatch(dtype, autocast_dtype):
    with FakeTensorMode(), cuda_autocast(autocast_dtype):
        expected = outcomes("cuda", dtype)
    with cpu_autocast(autocast_dtype):
        assert outcomes("cpu", dtype) == expected
    raising = {e for e, result in expected.items() if not isinstance(result, list)}
    assert raising == (REFUSED if dtype in HALF else set())


def test_these_expressions_tell_the_policies_apart():
    """Else the test above would say nothing."""
    with torch.autocast("cpu", dtype=torch.float16):
        native = outcomes("cpu", torch.float16)
    with cpu_autocast():
        cuda = outcomes("cpu", torch.float16)
    changed = {e for e in EXPRESSIONS if native[e] != cuda[e]}
    assert len(changed) > 60
    assert {"x ** 2", "2 ** x", "1 / x", "x.log()", "torch.linalg.norm(x)"} <= changed
    assert not {"x * x", "x / x", "x.mean()", "x.sigmoid()", "x.exp_()"} & changed


def test_the_list_is_that_of_torchs_header():
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this torch does not ship autocast_mode.h")
    text = header.read_text(encoding="utf-8")
    listed = set(re.findall(r'^ +"(norm\.\w+)",', text, re.MULTILINE))
    for macro in ("AT_FORALL_FP32", "AT_FORALL_FP32_SET_OPT_DTYPE"):
        block = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", text)[1]
        pairs = re.findall(r"_\((\w+)(?:, (\w+))?\)", block)
        listed |= {f"{name}.{overload}" if overload else name for name, overload in pairs}
    # torch 2.6 also lists what takes named dimensions.
    listed = {name for name in listed if not re.search("imname|names_", name)}
    assert len(listed) > 70
    assert listed - set(FP32_OPS) == set()
    # What another torch's list lacks must not be on any of its CUDA lists: it is then left alone.
    for name in set(FP32_OPS) - listed:
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")


def test_every_operation_on_the_list_gets_a_kernel_and_loses_it():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    on_cuda = [has_kernel(f"aten::{name}", "AutocastCUDA") for name in FP32_OPS]
    assert sum(on_cuda) > 70  # all of them on a recent torch
    before = [on_cpu_list(name) for name in FP32_OPS]
    with cuda_autocast_policy():
        assert [on_cpu_list(name) for name in FP32_OPS] == on_cuda
    assert [on_cpu_list(name) for name in FP32_OPS] == before
    assert not on_cpu_list("log") and on_cpu_list("mse_loss")


# Where it acts, and where it does not.

X = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).half() + 0.1


def is_float32():
    results = [X.softmax(-1), torch.log(X), X**2, 2**X, 1 / X, torch.linalg.norm(X)]
    (dtype,) = {result.dtype for result in results}
    return dtype == torch.float32


def test_half_tensors_stay_half_outside_autocast_and_in_islands():
    with cuda_autocast_policy():
        assert not is_float32()
        with torch.autocast("cpu", dtype=torch.float16):
            assert is_float32()
            with torch.autocast("cpu", enabled=False):
                assert not is_float32()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    assert is_float32()
                assert not is_float32()
            assert is_float32()
        assert not is_float32()


def test_it_nests_and_ends_with_the_outermost():
    with torch.autocast("cpu", dtype=torch.float16):
        assert not is_float32()
        with cuda_autocast_policy():
            with cuda_autocast_policy():
                assert is_float32()
            assert is_float32()
        assert not is_float32()
        with cuda_autocast_policy():
            assert is_float32()
        assert not is_float32()


@pytest.mark.parametrize("outer", [nullcontext, cuda_autocast_policy])
def test_an_exception_ends_it_too(outer):
    with torch.autocast("cpu", dtype=torch.float16), outer():
        before = is_float32()
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"), cuda_autocast_policy():
                raise KeyError("mine")
            assert is_float32() == before


def test_an_error_inside_an_operation_leaves_autocast_on():
    with cpu_autocast():
        with pytest.raises((IndexError, RuntimeError)):
            X.softmax(7)
        assert is_float32()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("expression", ["x.softmax(-1).log().sum()", "(x ** 2).sum()", "x.norm()"])
def test_gradients_keep_the_tensors_dtype_and_have_the_value_of_float32(expression, dtype):
    leaf = X.to(dtype, copy=True).requires_grad_()
    with cpu_autocast():
        loss = eval(expression, {"x": leaf})
    loss.backward()
    reference = X.float().requires_grad_()
    eval(expression, {"x": reference}).backward()
    assert leaf.grad.dtype == dtype
    assert torch.equal(leaf.grad, reference.grad.to(dtype))


def test_it_computes_in_float32_and_does_not_only_say_so():
    logits = torch.tensor([20.0, 0.0], dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.softmax(logits, -1)[1] == 0
        with cuda_autocast_policy():
            assert torch.softmax(logits, -1)[1] > 0
            assert (torch.tensor(300.0).half() ** 2).isfinite()


def test_a_dtype_that_was_asked_for_is_respected():
    with cpu_autocast():
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            assert X.softmax(-1, dtype=dtype).dtype == dtype
            assert X.sum(dtype=dtype).dtype == dtype
        assert torch.linalg.vector_norm(X, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("cuda_too", [False, True])
def test_cuda_tensors_do_not_notice(cuda_too):
    autocast = cuda_autocast() if cuda_too else nullcontext()
    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.float16), autocast:
        native = outcomes("cuda", torch.float16)
        with cuda_autocast_policy():
            assert outcomes("cuda", torch.float16) == native


def test_a_cuda_tensor_stays_half_beside_a_cpu_scalar():
    """Mixed operations reach the CPU kernel; CUDA tensors must go through it untouched."""
    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.float16):
        x = torch.ones(4, dtype=torch.float16, device="cuda")
        exponent = torch.tensor(2.0, dtype=torch.float16)
        with cuda_autocast_policy():
            assert torch.pow(x, exponent).dtype == (x**exponent).dtype == torch.float16
