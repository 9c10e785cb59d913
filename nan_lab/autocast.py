"""CUDA autocast's "runs in float32" rule on a CPU, so that a laptop shows what a GPU does.

torch.autocast picks a dtype for each operation from a list, and the lists differ: CUDA runs
softmax, log, exp, pow, sum and the norms in float32; CPU leaves them in the half dtype.
"""

import contextlib

import torch

# ATen's names of what CUDA autocast runs in float32 (PyTorch, aten/src/ATen/autocast_mode.h:
# AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE).
FP32_OPS = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
norm.Scalar norm.ScalarOpt_dim
""".split()

_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _is_half(value):
    # A CUDA tensor gets here beside a CPU scalar; as in torch, CPU autocast leaves it alone.
    half = torch.float16, torch.bfloat16
    return isinstance(value, torch.Tensor) and value.is_cpu and value.dtype in half


def _to_float32(value):
    if isinstance(value, (list, tuple)):
        return type(value)(_to_float32(item) for item in value)
    return value.float() if _is_half(value) else value


def _in_float32(name):
    """The kernel for one operation: half tensors in as float32, then the operation itself."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    takes_dtype = any(argument.name == "dtype" for argument in op._schema.arguments)

    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
            if not takes_dtype:
                return op(*_to_float32(args), **{k: _to_float32(v) for k, v in kwargs.items()})
            # As on CUDA: where one can ask for a dtype, autocast asks, unless the caller did.
            asked = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
            if _is_half(args[0]) and not asked:
                kwargs = {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel


def _registered(name, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


@contextlib.contextmanager
def cuda_autocast_policy():
    """Run, inside CPU autocast, in float32 what CUDA autocast runs in float32.

    It adds kernels at the place where torch itself keeps autocast's, so it holds for functions,
    methods and operators alike, acts only where CPU autocast is on (a half tensor outside it, or
    in an `enabled=False` island, stays half), and does nothing to CUDA tensors. Operations that
    CPU autocast has a rule for keep that rule. Source: PyTorch, "Autocast Op Reference".
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in FP32_OPS:
            # The first test drops what this torch's CUDA does not list; the second, losses and
            # prod, which CPU autocast runs in float32 anyway, and all of it when nested.
            if _registered(name, "AutocastCUDA") and not _registered(name, "AutocastCPU"):
                library.impl(name, _in_float32(name), "AutocastCPU")
        yield
    finally:
        library._destroy()
