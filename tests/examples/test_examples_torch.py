"""The example of torch.compile runs, and says that the graph gives the eager bytes."""

from __future__ import annotations

from tests.helpers import examples


def test_a_layer_inside_torch_compile():
    assert examples.output("torch_compile.py", CUDA_VISIBLE_DEVICES="").splitlines() == [
        f"{tokens} tokens: torch.bfloat16[{tokens}, 512], as eager: True" for tokens in (4, 7, 64)
    ]
