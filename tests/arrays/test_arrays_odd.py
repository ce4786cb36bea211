"""Arrays that are not what they look like are refused by name, with a typed error."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cumoe.arrays import exchange
from cumoe.arrays.exchange import to_numpy, view
from cumoe.errors import ArgumentError, CumoeError, DTypeError


def fake_tensor() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch calls its nested tensors a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def csr() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # and its CSR support a beta
        return torch.eye(3).to_sparse_csr()


NOT_DENSE = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": csr,
    "mkldnn": lambda: torch.eye(3).to_mkldnn(),
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "fake": fake_tensor,
}


@pytest.mark.parametrize("kind", NOT_DENSE)
def test_a_tensor_without_memory_of_its_own_is_refused(kind):
    with pytest.raises(DTypeError, match=r"^x: want .*memory of its own, got .*; (pass|convert)"):
        view(NOT_DENSE[kind](), "x")


def under_grad(f):
    return torch.func.grad(lambda x: f(x).sum())


@pytest.mark.parametrize("transform", [torch.vmap, under_grad, torch.func.functionalize])
def test_a_tensor_inside_a_transform_is_refused(transform):
    def refused(x):
        with pytest.raises(DTypeError, match=r"^x: want .* outside of torch\.func transforms"):
            view(x, "x")
        return x

    transform(refused)(torch.ones(2, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch._neg_view(torch.ones(3)),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    ],
)
def test_a_pending_negation_or_conjugation_is_refused(make):
    with pytest.raises(DTypeError, match=r"^x: want .* bit set; pass \.resolve_neg\(\)"):
        view(make(), "x")
    resolved = make().resolve_neg().resolve_conj()
    assert view(resolved, "x").ptr == resolved.data_ptr()


@pytest.mark.parametrize(
    ("strides", "dtype", "is_asked"),
    [
        ((3, 1), torch.float32, False),
        ((6, 2), torch.float32, True),
        ((3, 1), torch.complex64, True),
    ],
)
def test_a_tensor_on_a_gpu_is_asked_where_it_may_be_negated(strides, dtype, is_asked):
    cuda = torch.device("cuda", 0)
    assert exchange._torch_facts(torch.Size((2, 3)), strides, dtype, cuda)[1] is is_asked


@pytest.mark.parametrize("shape", [(1, 1), (1,), (1, 1, 1), ()])
def test_a_part_of_one_complex_number_on_a_gpu_is_asked(shape):
    """It is contiguous, though each of its strides is 2."""
    imag = torch.zeros(shape, dtype=torch.complex64).conj().imag
    assert imag.is_neg()
    assert imag.is_contiguous()
    made, is_asked = exchange._torch_facts(
        imag.shape, imag.stride(), imag.dtype, torch.device("cuda", 0)
    )
    assert made.is_contiguous
    assert is_asked


def test_an_empty_tensor_has_no_memory_and_is_welcome():
    assert view(torch.empty(0, 4), "x").ptr == 0


@pytest.mark.parametrize(
    ("a", "cls"),
    [
        (np.ma.masked_array([1.0, 2.0], [True, False]), "numpy.ma.*MaskedArray"),
        (np.zeros((1, 2)).view(np.matrix), "numpy.*matrix"),
        (np.zeros(2, [("b", "f4")]).view(np.recarray), "numpy.*recarray"),
    ],
)
def test_a_subclass_of_ndarray_is_refused(a, cls):
    with pytest.raises(DTypeError, match=rf"^x: want a plain NumPy array, got {cls}; convert it"):
        view(a, "x")


def test_a_memmap_is_an_array_and_may_be_read_only(tmp_path):
    np.arange(4, dtype=np.float32).tofile(tmp_path / "a")
    for mode, writeable in (("r", False), ("r+", True)):
        v = view(np.memmap(tmp_path / "a", np.float32, mode), "x")
        assert (v.facts.dtype, v.facts.writeable) == ("fp32", writeable)
        assert to_numpy(v).tolist() == [0, 1, 2, 3]


def test_elements_without_bytes_are_refused():
    with pytest.raises(DTypeError, match=r"^x: want elements of at least a byte, got \|V0"):
        view(np.zeros(3, "V0"), "x")


@pytest.mark.parametrize(("dtype", "native"), [(">f4", "float32"), (">i8", "int64")])
def test_foreign_byte_order_is_refused(dtype, native):
    foreign = np.ones(3, dtype)
    with pytest.raises(DTypeError, match=rf"^x: want the byte order .* \.astype\('{native}'\)"):
        view(foreign, "x")
    assert view(foreign.astype(native), "x").facts.is_contiguous


def test_a_field_of_records_is_no_strided_array():
    records = np.zeros(3, [("a", "i1"), ("b", "f4")])
    with pytest.raises(
        ArgumentError, match=r"^x: want strides of whole elements .* got \[5\] bytes"
    ):
        view(records["b"], "x")
    assert view(records["b"].copy(), "x").facts.is_contiguous
    assert view(records["a"], "x").facts.strides == (5,)
    assert view(records["b"][:1], "x").facts.is_contiguous


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_narrow_types_are_native(dtype):
    assert view(np.zeros(2, dtype), "x").facts.is_contiguous


def test_a_refusal_is_not_remembered_for_another_name():
    for name in ("x", "out", "x"):
        with pytest.raises(CumoeError, match=f"^{name}: want"):
            view(np.zeros(3, ">f4"), name)
