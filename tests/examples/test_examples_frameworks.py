"""The examples of a layer in each framework: short, and what they print is right."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.vllm_engine import OURS_IN_LOG, entry_point
from tests.helpers import examples

SHORT = (
    "cuda_graph.py", "cupy_arrays.py", "jax_arrays.py", "numpy_arrays.py", "torch_compile.py",
    "torch_layer.py", "vllm_offline.py",
)  # fmt: skip
MOST_LINES = 40
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("name", SHORT)
def test_an_example_is_short(name):
    assert examples.lines_of_code((examples.EXAMPLES / name).read_text()) <= MOST_LINES


def test_lines_of_code_are_those_that_do_something():
    assert examples.lines_of_code('"""A\nB\n"""\n\n# c\na = 1  # d\nb = """\nx"""\n') == 3


def test_every_example_is_named_in_the_readme():
    readme = (examples.ROOT / "README.md").read_text()
    for path in examples.EXAMPLES.iterdir():
        if not path.name.startswith(("_", ".")):
            assert f"(examples/{path.name})" in readme, path.name


def test_numpy():
    printed = examples.output("numpy_arrays.py")
    line = re.fullmatch(r"bfloat16\[8, 512\], float8_e4m3fn within ([0-9.]+)\n", printed)
    assert line, printed
    assert 0 < float(line[1]) < 1 / 16


def require_layer(printed: str, device: str) -> None:
    assert printed.splitlines() == [
        f"torch.bfloat16[8, 512] on {device}, same bytes: True",
        "the output given is returned: True",
    ]


def test_torch():
    require_layer(examples.output("torch_layer.py", **NO_GPU), "cpu")


@pytest.mark.gpu
def test_torch_on_a_gpu():
    require_layer(examples.output("torch_layer.py"), "cuda")


@pytest.mark.gpu
def test_torch_compile_on_a_gpu():
    lines = examples.output("torch_compile.py").splitlines()
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["True"] * 3


@pytest.mark.gpu
def test_cupy():
    printed = examples.output("cupy_arrays.py")
    assert printed == "bfloat16[8, 512] on <CUDA Device 0>, finite: True\n"


@pytest.mark.gpu
def test_cuda_graph():
    lines = examples.output("cuda_graph.py").splitlines()
    assert lines == [f"step {i}, as eager: True" for i in range(3)]


@pytest.mark.parametrize("name", ["cupy_arrays.py", "cuda_graph.py"])
def test_without_a_gpu_an_example_says_so(name):
    done = examples.start(name, **NO_GPU)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("no GPU: ")


STUB = """\
import json, pathlib
class SamplingParams:
    def __init__(self, **how): self.count = how["max_tokens"]
class LLM:
    def __init__(self, model, **options):
        config = json.loads(pathlib.Path(model, "config.json").read_text())
        assert config["quantization_config"]["weight_block_size"] == [128, 128]
        assert options["load_format"] == "dummy"
    def generate(self, prompts, how, use_tqdm):
        for p in prompts:
            ids = [p["prompt_token_ids"][0]] * how.count
            yield type("Result", (), {"outputs": [type("Output", (), {"token_ids": ids})]})
"""


def require_tokens(printed: str) -> None:
    lines = [line.split()[1:] for line in printed.splitlines() if line.startswith("tokens: ")]
    assert [len(tokens) for tokens in lines] == [16] * 3


def test_vllm_that_is_made_up(tmp_path):
    (tmp_path / "vllm.py").write_text(STUB)
    require_tokens(examples.output("vllm_offline.py", tmp_path))


def vllm_with_plugin(tmp_path: Path, **env: str) -> tuple[str, str]:
    """What the example prints, and vLLM's log."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    done = examples.start("vllm_offline.py", entry_point(tmp_path), warnings="ignore", **env)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("is_on", [True, False])
def test_vllm_on_a_gpu(tmp_path, is_on):
    printed, log = vllm_with_plugin(tmp_path, CUMOE_VLLM=str(int(is_on)))
    require_tokens(printed)
    assert (OURS_IN_LOG in log) == is_on
