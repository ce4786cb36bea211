"""A launcher is made once per function: all that it keeps is the same in every step of it."""

from __future__ import annotations

from cumoe.plan import enumerate as enumeration
from cumoe.plan.device import H200


def test_steps_of_a_function_differ_in_their_grid_only():
    layer = enumeration.Layer(512, 256, 8, 4, 2, ("fp32", "ue8m0"), limit=10.0)
    kept: dict[tuple[str, str], tuple[object, ...]] = {}
    for step in enumeration.all_steps(H200, layer):
        launch = step.launch
        facts = (launch.block, launch.smem_bytes, launch.overlap, step.abi)
        assert kept.setdefault((step.kernel.text, step.entry), facts) == facts
    assert len(kept) > 50
