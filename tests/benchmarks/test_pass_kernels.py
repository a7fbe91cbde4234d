"""Options, kinds of kernels and page of `benchmarks.pass_kernels`, whose passes need a GPU."""

import pytest

from benchmarks import pass_kernels

FLASH = "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64>>"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (FLASH, "attention, backward"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>", "attention, forward"),
        ("kernel_cutlass_FlashAttentionBackwardSm90_object_at__tensorptr", "attention, backward"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("_linear_kernel", "matrix products"),
        ("_row_kernel", "loss"),
        ("triton_red_fused__log_softmax__to_copy__unsafe_view_tanh_view_38", "loss"),
        ("triton_per_fused_embedding_dense_backward_mul_nll_loss_forward_sigmoid", "embeddings, both passes"),
        ("triton_per_fused__fused_rms_norm_add_mul_1", "fused element-wise work and sums"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", "fused element-wise work and sums"),
        ("Memset (Device)", "copies"),
        ("void at::native::tensor_kernel_scan_innermost_dim<long, std::plus<long> >", "others"),
    ],
)  # fmt: skip
def test_kernels_are_grouped_by_what_they_do(name: str, kind: str) -> None:
    assert pass_kernels.kind_of(name) == kind


def test_a_variant_changes_the_model_or_the_compiler() -> None:
    words = ["--out", "x", "--only", "quintic", "quintic-both", "--variant", "both", "attention=fa4", "fp8=auto"]
    options = pass_kernels.parse([*words, "max_pointwise_cat_inputs=1", "shape_padding=False"])
    compiler = {"max_pointwise_cat_inputs": 1, "shape_padding": False}
    assert pass_kernels.variant(options, "quintic-both") == ({"attention": "fa4", "fp8": "auto"}, compiler)
    assert pass_kernels.variant(options, "quintic") == ({}, {})


@pytest.mark.parametrize(
    ("words", "mistake"),
    [(["--only", "nanochat"], "nanochat needs --peers"), (["--only", "quintic-x"], "--only quintic-x: choose from")],
)
def test_mistakes_in_options_are_named(words: list[str], mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pass_kernels.parse(["--out", "x", *words])
    assert mistake in capsys.readouterr().err


def test_the_page_adds_up_each_kind() -> None:
    kernels = [{"name": FLASH, "count": 12.0, "ms": 4.0}, {"name": "_linear_kernel", "count": 24.0, "ms": 3.5}]
    kernels.append({"name": "nvjet_sm90", "count": 1.0, "ms": 1.5})
    row = {"contestant": "quintic", "ms": {"median": 10.0}, "flops": 4e12, "kernels": kernels}
    assert pass_kernels.lines([row]) == [
        ["quintic", "a pass; 400 TFLOP/s", "37", "10.0", "90 % in kernels"],
        ["quintic", "matrix products", "25", "5.00", "55.6 %"],
        ["quintic", "attention, backward", "12", "4.00", "44.4 %"],
    ]
    shared = {"machine": "NVIDIA H200", "command": "python -m x", "commit": "abc", "versions": {"torch": "2.11"}}
    text = pass_kernels.page({**shared, "depth": 12, "tokens": 65_536, "rows": [row]})
    assert "65,536 random tokens at depth 12" in text
    assert f"| `{FLASH[:100]}` | 12 | 4.000 |" in text
