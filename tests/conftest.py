"""Tiny targets on disk, built once a session and only if a test asks for them."""

import pytest
import torch
from tiny_target import build_tiny_target


def pytest_configure():
    # How a sum is split over threads depends on shapes, so bit-for-bit claims hold on one thread;
    # the models here are far too small to gain from a second one.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """Untied ends, ChatML without reasoning."""
    return build_tiny_target(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory):
    """Tied ends; the model writes its own think block."""
    return build_tiny_target(tmp_path_factory.mktemp("tiny-qwen3"), "qwen3", tied=True)


@pytest.fixture(scope="session")
def tiny_qwen35_text(tmp_path_factory):
    return build_tiny_target(tmp_path_factory.mktemp("tiny-qwen35-text"), "qwen3_5_text")


@pytest.fixture(scope="session")
def tiny_qwen35(tmp_path_factory):
    """Hybrid layers inside a multimodal wrapper, as Qwen3.6-27B."""
    return build_tiny_target(tmp_path_factory.mktemp("tiny-qwen35"), "qwen3_5_multimodal")


@pytest.fixture(params=["tiny_llama", "tiny_qwen3", "tiny_qwen35_text", "tiny_qwen35"])
def tiny_target(request):
    """Each of the tiny targets in turn."""
    return request.getfixturevalue(request.param)
