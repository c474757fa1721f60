"""Whole models: a forward pass, forward and backward, and an AdamW step, in float32 and bfloat16 autocast.

Forward runs without gradients and is checked against the CPU's definition on the start of the batch's
first item: what comes later, and beside, must not matter. For training, two runs must give equal losses
and gradients, with CUDA graphs too, and on a CPU those of the definition.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import carbon_compile
from bench.bits import assert_equal, twice
from bench.contenders import Engine, engines
from bench.registry import Case, Contender, Cost, Prepared, Work

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}
FORWARD = ("eager", "inductor", "carbon")
TRAINING = ("eager", "eager deterministic", "inductor", "inductor deterministic", "carbon", "carbon+graphs", "carbon+optimizer")
_TOKENS = 16  # of the part that is checked


@dataclass(frozen=True)
class Model:
    """A model of transformers and its batches, at full size or tiny.

    `build(tiny)` makes it on the CPU; `batch(tiny, generator)` draws one batch there; `loss(model,
    batch)` is a scalar, `outputs(model, batch)` the logits. `tokens(tiny)` is the positions in a batch.
    """

    build: Callable
    batch: Callable
    loss: Callable
    outputs: Callable
    shape: Callable
    tokens: Callable


def gpt2(tiny: bool = False, layers: int = 12) -> torch.nn.Module:
    """GPT-2 of 124M parameters without dropout; tiny: two layers of 64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0} if tiny else {"n_layer": layers}
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa", **size)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # unset, the library logs a warning, which breaks the graph
    return model


def llama(tiny: bool = False) -> torch.nn.Module:
    """A Llama of 341M parameters, embeddings tied; tiny: two layers of 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000}
    if tiny:
        size = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(use_cache=False, tie_word_embeddings=True, attn_implementation="sdpa", **size))


def vit(tiny: bool = False) -> torch.nn.Module:
    """ViT-B/16 of 86M parameters; tiny: two layers of 48."""
    from transformers import ViTConfig, ViTForImageClassification

    size = {"num_labels": 1000}
    if tiny:
        size = {"image_size": 16, "patch_size": 4, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "num_labels": 10}
    return ViTForImageClassification(ViTConfig(attn_implementation="sdpa", **size))


def _language(build, vocabulary):
    size = lambda tiny: (2, 32) if tiny else (8, 512)  # noqa: E731
    return Model(
        build=build,
        batch=lambda tiny, generator: (torch.randint(0, 256 if tiny else vocabulary, size(tiny), generator=generator),),
        loss=lambda model, batch: model(batch[0], labels=batch[0]).loss,
        outputs=lambda model, batch: model(batch[0]).logits,
        shape=lambda tiny: "x".join(map(str, size(tiny))),
        tokens=lambda tiny: size(tiny)[0] * size(tiny)[1],
    )


def _images(build):
    size = lambda tiny: (2, 3, 16, 16) if tiny else (32, 3, 224, 224)  # noqa: E731
    return Model(
        build=build,
        batch=lambda tiny, generator: (torch.randn(size(tiny), generator=generator), torch.randint(0, 10 if tiny else 1000, size(tiny)[:1], generator=generator)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]).logits, batch[1]),
        outputs=lambda model, batch: model(batch[0]).logits,
        shape=lambda tiny: "x".join(map(str, size(tiny))),
        tokens=lambda tiny: size(tiny)[0] * (17 if tiny else 197),
    )


MODELS = {"gpt2-124m": _language(gpt2, 50257), "llama-350m": _language(llama, 32000), "vit-b": _images(vit)}


class Training:
    """A model with its optimizer, whose losses run under one engine.

    The optimizer is PyTorch's fused AdamW for everybody; an engine with `optimizer` compiles the
    for-loop's one instead, which is what carbon's promise covers.
    """

    def __init__(self, engine: Engine, autocast: torch.dtype | None, device: str, model: torch.nn.Module, loss: Callable):
        self.model = copy.deepcopy(model).to(device).train()
        self.engine, self.autocast, self.device = engine, autocast, device
        self.loss = engine.compiled(lambda batch: loss(self.model, batch))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=not engine.optimizer)
        self.update = engine.compiled(self.optimizer.step) if engine.optimizer else self.optimizer.step

    def backward(self, batch) -> torch.Tensor:
        """The loss of a batch, whose gradients are added to the parameters'."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast is not None):
            loss = self.loss(batch)
        loss.backward()
        return loss

    def gradients(self, batch) -> torch.Tensor:
        """The loss of a batch; its gradients are computed and dropped."""
        loss = self.backward(batch)
        self.optimizer.zero_grad()
        return loss

    def step(self, batch) -> torch.Tensor:
        """The loss of a batch, after which the weights have moved."""
        loss = self.backward(batch)
        self.update()
        self.optimizer.zero_grad()
        return loss

    def bits(self, batch) -> list[torch.Tensor]:
        """Copies of loss and gradients; the weights stay."""
        loss = self.backward(batch).detach().clone()
        found = [loss, *(p.grad.clone() for p in self.model.parameters() if p.grad is not None)]
        self.optimizer.zero_grad()
        return found


def cases(device: str) -> list[Case]:
    """Forward and training of each model in each precision."""
    found = []
    for name, model in MODELS.items():
        for precision in PRECISIONS:
            for work, prepare in (("forward", _prepare_forward), ("training", _prepare_training)):
                ready = functools.partial(prepare, model, precision, device)
                found.append(Case("e2e", f"{name}-{work}", model.shape(device == "cpu"), precision, ready))
    return found


def _batch(model, device):
    batch = model.batch(device == "cpu", torch.Generator().manual_seed(1))
    return tuple(t.to(device) for t in batch)


def _flop(model, module, device, passes):
    """Two operations a parameter and position for each pass, of which backward is two: the usual estimate."""
    return 2 * passes * sum(p.numel() for p in module.parameters()) * model.tokens(device == "cpu")


# --- forward


def _prepare_forward(model, precision, device):
    batch, autocast = _batch(model, device), PRECISIONS[precision]
    torch.manual_seed(0)
    twin = model.build(device == "cpu").eval()
    module = copy.deepcopy(twin).to(device)
    contenders = {}
    for name in FORWARD:
        function = engines()[name].compiled(lambda batch: model.outputs(module, batch))
        call = functools.partial(_forward, function, batch, autocast, device)
        contenders[name] = Contender(name, lambda call=call: call)
    cost = Cost(_flop(model, module, device, 1), "FLOP")
    check = functools.partial(_check_forward, model, twin, batch, autocast, contenders["carbon"])
    return Prepared((Work("", tuple(contenders.values()), cost),), check)


def _forward(function, batch, autocast, device):
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast is not None):
        return function(batch)


def _check_forward(model, twin, batch, autocast, carbon, names):
    got = twice(carbon)[:1]
    start = tuple(t[:1].cpu() for t in batch)
    part = "1 image"
    if got.dim() == 3:
        start, got, part = tuple(t[:, :_TOKENS] for t in start), got[:, :_TOKENS], f"{_TOKENS} tokens"
    with carbon_compile.enable(seed=None):
        reference = _forward(lambda batch: model.outputs(twin, batch), start, autocast, "cpu")
    assert_equal(got, reference, "device and CPU definition")
    return f"{part} as the CPU's definition, two runs alike"


# --- training


def _prepare_training(model, precision, device):
    batch, autocast, tiny = _batch(model, device), PRECISIONS[precision], device == "cpu"
    torch.manual_seed(0)
    start = model.build(tiny)
    names = [name for name in TRAINING if not tiny or "graphs" not in name]
    made = {name: functools.cache(functools.partial(Training, engines()[name], autocast, device, start, model.loss)) for name in names}
    steps = {name: Contender(name, functools.partial(_running, make, "step", batch)) for name, make in made.items()}
    backwards = [Contender(name, functools.partial(_running, make, "gradients", batch)) for name, make in made.items() if name != "carbon+optimizer"]
    cost = Cost(_flop(model, start, device, 3), "FLOP")
    # The step compiles what forward and backward runs.
    works = Work("step", tuple(steps.values()), cost), Work("forward+backward", tuple(backwards), cost, compiles=False)
    return Prepared(works, functools.partial(_check_training, model, made, steps, batch, start if tiny else None))


def _running(make, method, batch):
    training = make()
    return training.engine.running(lambda: getattr(training, method)(batch))


def _check_training(model, made, steps, batch, twin, names):
    steps["carbon"]()  # compiles, with the clock running
    training = made["carbon"]()
    got = twice(functools.partial(training.bits, batch))
    compared = "two runs alike"
    if "carbon+graphs" in names and _ready(steps["carbon+graphs"]):
        graphs = made["carbon+graphs"]()
        graphs.model.load_state_dict(training.model.state_dict())
        for _ in range(2):  # recorded and replayed
            assert_equal(got, graphs.bits(batch), "with and without CUDA graphs")
        compared += ", CUDA graphs too"
    if twin is not None:
        twin.load_state_dict(training.model.state_dict())
        with carbon_compile.enable(seed=None):
            assert_equal(got, Training(Engine(), training.autocast, "cpu", twin, model.loss).bits(batch), "compiled and definition")
        compared = f"loss and gradients as the CPU's definition, {compared}"
    return compared


def _ready(contender):
    """Whether it runs at all. Why it doesn't is told where it is measured, and no matter of bits."""
    try:
        contender()
    except Exception:
        return False
    return True
