"""A stand-in for another machine's arithmetic: one ulp of noise on every result of a reduction.

A GPU, another CPU or another thread count adds up in another order, so the last bit of a matmul,
convolution or sum differs. `UlpNoise` adds -1, 0 or +1 ulp to each of these; what a notebook states
must survive it. Results that are exact in any order (small integers, say) are left alone.
"""

from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

REDUCTIONS = {
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot",
    "convolution", "convolution_backward", "sum", "mean", "linalg_vector_norm",
}  # fmt: skip
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class UlpNoise(TorchDispatchMode):
    """Adds -1, 0 or +1 ulp to every inexact result of a reduction; `seed` makes it repeatable."""

    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if function.overloadpacket.__name__ not in REDUCTIONS or "out" in kwargs:
            return out
        try:
            exact = function(*_double(args), **{k: _double(v) for k, v in kwargs.items()})
        except (RuntimeError, NotImplementedError):
            return out  # fake or meta tensors, integer results
        if isinstance(out, (tuple, list)):
            pairs = zip(out, exact, strict=True)
            return type(out)(self._noisy(value, reference) for value, reference in pairs)
        return self._noisy(out, exact)

    def _noisy(self, value, exact):
        if type(value) is not torch.Tensor or not value.is_floating_point() or value.is_meta:
            return value
        shape = value.shape
        ulp = torch.randint(-1, 2, shape, generator=self.generator).to(value.device)
        bits = value.contiguous().view(INTEGER[value.element_size()])
        noisy = (bits + ulp.to(bits.dtype)).view(value.dtype)
        moves = (value != exact) & (value != 0) & value.isfinite() & noisy.isfinite()
        return torch.where(moves, noisy, value)


def _double(value):
    if isinstance(value, (tuple, list)):
        return type(value)(_double(item) for item in value)
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return torch.float64 if isinstance(value, torch.dtype) else value


def write_ipython_profile(folder, seed):
    """Write an IPython profile whose kernels run with this noise, for IPYTHONDIR=folder."""
    startup = Path(folder, "profile_default", "startup")
    startup.mkdir(parents=True)
    lines = ["from tools.noise import UlpNoise", f"UlpNoise({seed}).__enter__()", "del UlpNoise"]
    (startup / "noise.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
