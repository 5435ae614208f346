"""Whatever writes or reads a checkpoint keeps every weight of a model, changed by `use_fastkron` or not."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor, nn

from fastkron_py.integrations.transformers import use_fastkron

pytest.importorskip("transformers", reason="the extra llm is not installed")
transformers: Any = importlib.import_module("transformers")

SIZES: dict[str, Any] = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "tie_word_embeddings": False},
}


def tiny(seed: int, changed: bool) -> Any:
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    if changed:
        use_fastkron(model)
    return model


class Format(NamedTuple):
    """A way to write a model's weights, and the way to read them into another."""

    write: Callable[[Any, Path], None]
    read: Callable[[Any, Path], None]


def _load_file(model: nn.Module, path: Path) -> None:
    from safetensors.torch import load_file

    model.load_state_dict(load_file(path))


def _save_file(model: nn.Module, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(model.state_dict(), path)


def _distributed_save(model: nn.Module, path: Path) -> None:
    torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=path)


def _distributed_load(model: nn.Module, path: Path) -> None:
    """In place, over the tensors of the state."""
    torch.distributed.checkpoint.load({"model": model.state_dict()}, checkpoint_id=path)


def _sharded(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.arange(2, 10)[None])
    model.reshard()
    return model


def _whole_state() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True)


def _sharded_save(model: Any, path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    torch.save(get_model_state_dict(_sharded(model), options=_whole_state()), path)


def _sharded_load(model: Any, path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(_sharded(model), torch.load(path, weights_only=True), options=_whole_state())


def _train(model: Any, path: Path, steps: int = 1, **options: Any) -> Any:
    ids = torch.arange(2, 10)
    arguments = transformers.TrainingArguments(
        output_dir=str(path), max_steps=steps, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 8)
    trainer.train(**options)
    return trainer


def _resume(model: Any, path: Path) -> None:
    """Of a run that has ended: what is read is not trained further."""
    _train(model, path, resume_from_checkpoint=str(path / "checkpoint-1"))


FORMATS: dict[str, Format] = {
    "torch.save": Format(
        lambda model, path: torch.save(model.state_dict(), path),
        lambda model, path: model.load_state_dict(torch.load(path, weights_only=True)),
    ),
    "safetensors": Format(_save_file, _load_file),
    "torch.distributed.checkpoint": Format(_distributed_save, _distributed_load),
    "fully_shard": Format(_sharded_save, _sharded_load),
    "Trainer": Format(_train, _resume),
}


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, t in model.state_dict().items():
        t = t.full_tensor() if hasattr(t, "full_tensor") else t
        found[name] = t.detach().clone()
    return found


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # of the libraries themselves
@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_arrives(name: str, one_rank: None, tmp_path: Path) -> None:
    """Written by a stock model or by a changed one, read by both, bit for bit."""
    if name == "Trainer":
        pytest.importorskip("accelerate", reason="accelerate is not installed")
    for changed in (False, True):
        path = tmp_path / f"saved {changed}"
        model = tiny(0, changed)
        FORMATS[name].write(model, path)
        expected = state_of(model)
        for reader_changed in (False, True):
            reader = tiny(1, reader_changed)
            assert not torch.equal(state_of(reader)["model.layers.1.mlp.up_proj.weight"], expected["model.layers.1.mlp.up_proj.weight"])
            FORMATS[name].read(reader, path)
            found = state_of(reader)
            assert list(found) == list(expected)
            assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_no_two_parameters_share_memory() -> None:
    model = tiny(0, changed=True)
    storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(storages)) == len(storages)
